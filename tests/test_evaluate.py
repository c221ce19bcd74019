"""Evaluation on any layout against lm-eval's own class for transformers, on the exported model."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path
from typing import Any

import pytest

from kenotron_config import DEFAULT_CONFIG
from kenotron_convert.cli import main as convert
from kenotron_dist import Mesh, spawn
from kenotron_train.config_file import load_config
from kenotron_train.evaluate.cli import evaluate_main, read_model
from kenotron_train.evaluate.led_passes import LedPasses
from kenotron_train.evaluate.text_tokens import open_text_tokens
from kenotron_train.run.loop import train

PRELOAD = ("kenotron_train.run.loop", "lm_eval.evaluator")
WINDOW = 48
"""Tokens that the model reads; some texts have more."""
STEPS = 60  # enough for texts that can be read
WORDS = "the a of alpha beta gamma delta été naïve question answer one two three".split()
SIZES = {
    "model.model_config.hidden_size": 32,
    "model.model_config.intermediate_size": 48,
    "model.model_config.num_hidden_layers": 2,
    "model.model_config.vocab_size": 300,
    "model.model_config.max_position_embeddings": WINDOW,
    "model.init_method.std": 0.1,
    "tokens.sequence_length": 32,
    "tokens.micro_batch_size": 2,
    "tokens.train_steps": STEPS,
    "tokens.limit_val_batches": 0,
    "optimizer.learning_rate_scheduler.lr_warmup_steps": 1,
    "optimizer.learning_rate_scheduler.learning_rate": 0.01,
}
TASKS = {
    "house_choices": {
        "output_type": "multiple_choice",
        "doc_to_text": "{{question}}",
        "doc_to_choice": "choices",
        "doc_to_target": "answer",
        "num_fewshot": 1,
        "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
    },
    "house_pages": {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{page}}",
        "metric_list": [{"metric": "word_perplexity"}, {"metric": "bits_per_byte"}],
    },
    "house_words": {
        "output_type": "generate_until",
        "doc_to_text": "{{question}}",
        "doc_to_target": "{{word}}",
        "generation_kwargs": {"until": ["a"], "max_gen_toks": 8},
        "metric_list": [{"metric": "exact_match"}, {"metric": "bleu"}],
    },
}
LAYOUTS = [{}, {"tp": 2}, {"pp": 2}, {"dp": 2}, {"pp": 2, "tp": 2}]


def tokenizer(folder: Path) -> Path:
    """A folder of a byte-level BPE of 300 ids with an end of text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator([" ".join(WORDS)] * 20, trainer)
    PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<|end|>").save_pretrained(folder)
    return folder


def task_files(folder: Path) -> Path:
    """Task files with their data, of nine samples each."""
    import yaml

    draw = random.Random(1)
    text = lambda least, most: " ".join(draw.choices(WORDS, k=draw.randint(least, most)))  # noqa: E731
    rows = [
        {
            "question": text(1, 9), "choices": [" " + text(1, 4) for _ in range(3)],
            "answer": draw.randrange(3), "page": text(1, 60), "word": draw.choice(WORDS),
        }
        for _ in range(9)
    ]  # fmt: skip
    folder.mkdir()
    data = folder / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    shared = {
        "dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(data)}},
        "test_split": "test", "fewshot_split": "test",
    }  # fmt: skip
    for name, own in TASKS.items():
        (folder / f"{name}.yaml").write_text(yaml.safe_dump({"task": name, **shared, **own}))
    return folder


def trained(mesh: Mesh, config: Any, cache: str) -> None:
    os.environ["KENOTRON_CACHE"] = cache
    train(mesh, config)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run, the exported model, and task files."""
    folder = tmp_path_factory.mktemp("evaluate")
    corpus = folder / "corpus.txt"
    corpus.write_text("\n\n".join(" ".join(WORDS[i % 7 :]) for i in range(400)))
    values = SIZES | {
        "tokenizer.tokenizer_name_or_path": tokenizer(folder / "tokenizer"),
        "data_stages.0.data.dataset.hf_dataset_or_datasets": corpus,
        "checkpoints.checkpoints_path": folder / "run",
        "parallelism.tp": 1,
    }
    config = load_config(DEFAULT_CONFIG, [f"{key}={value}" for key, value in values.items()])
    spawn(trained, config, str(folder / "cache"), preload=PRELOAD)
    flags = ["--ckpt", str(folder / f"run/{STEPS}"), "--out", str(folder / "hf")]
    assert convert(["kenotron-to-hf", *flags, "--tokenizer", str(folder / "tokenizer")]) == 0
    task_files(folder / "tasks")
    return folder


def requests() -> dict[str, list[tuple[Any, ...]]]:
    """Arguments of requests: texts of any length, the longest beyond the window."""
    draw = random.Random(3)
    text = lambda count: " ".join(draw.choices(WORDS, k=count))  # noqa: E731
    pairs = [(text(count), " " + text(1 + count % 4)) for count in (1, 5, 40, 3, 8, 2, 70)]
    pairs += [("", text(3)), ("alpha ", "beta"), pairs[0], ("the a of alpha", " beta gamma delta")]
    options = {"until": [" of", "é"], "max_gen_toks": 9}
    asked = [(text(count), options) for count in (1, 4, 60, 2, 7)]
    return {
        "loglikelihood": pairs,
        "loglikelihood_rolling": [(text(count),) for count in (1, 90, 20, 200, 5)],
        "generate_until": [*asked, (text(3), {"until": "a", "max_gen_toks": 3})],
    }


def answers(lm: Any) -> dict[str, Any]:
    """What a model of lm-eval answers to all requests."""
    from lm_eval.api.instance import Instance

    return {
        kind: getattr(lm, kind)(
            [Instance(kind, {}, given, place) for place, given in enumerate(asked)]
        )
        for kind, asked in requests().items()
    }


def on_layout(mesh: Mesh, folder: Path) -> tuple[dict[str, Any], str]:
    """Answers of a checkpoint on a mesh, on every rank."""
    from kenotron_train.evaluate.language_model import LayoutLM

    texts = open_text_tokens(str(folder / "tokenizer"), None, 300)
    model, _ = read_model(folder / f"run/{STEPS}", mesh)
    passes = LedPasses(model, texts, window=WINDOW, batch_size=3)
    return passes.lead(lambda: answers(LayoutLM(passes)))


@pytest.fixture(scope="module")
def of_transformers(folder: Path) -> Any:
    """lm-eval's class for transformers with the exported model, in float32."""
    from lm_eval.models.huggingface import HFLM

    return HFLM(pretrained=str(folder / "hf"), dtype="float32", device="cpu", batch_size=4)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_every_layout_answers_as_transformers_does_in_lm_eval(folder, of_transformers, layout):
    wanted = answers(of_transformers)
    assert of_transformers.max_length == WINDOW
    assert {greedy for _, greedy in wanted["loglikelihood"]} == {True, False}
    assert " gamma delta " in wanted["generate_until"], "cut before a string that ends it"
    for found, failure in spawn(on_layout, folder, **layout, preload=PRELOAD):
        assert not failure
        for (ours, greedy), (theirs, their_greedy) in zip(
            found["loglikelihood"], wanted["loglikelihood"], strict=True
        ):
            assert ours == pytest.approx(theirs, abs=1e-4)
            assert greedy == their_greedy
        assert found["loglikelihood_rolling"] == pytest.approx(
            wanted["loglikelihood_rolling"], abs=1e-4, rel=1e-7
        )
        assert found["generate_until"] == wanted["generate_until"]


def test_tasks_have_the_metrics_that_lm_eval_has_of_the_exported_model(folder, of_transformers):
    from lm_eval.evaluator import simple_evaluate
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=str(folder / "tasks"), include_defaults=False)
    wanted = simple_evaluate(
        of_transformers, tasks=list(TASKS), task_manager=manager, bootstrap_iters=0
    )["results"]
    flags = ["--ckpt-path", str(folder / "run"), "--task-folder", str(folder / "tasks")]
    flags.append("--trust-task-files")
    flags += ["--tasks", ",".join(TASKS), "--tp", "2", "--batch-size", "4"]
    assert evaluate_main(flags) == 0
    found = json.loads((folder / f"run/evaluations/{STEPS}.json").read_text())
    assert set(found["tasks"]) == set(TASKS)
    for task, metrics in found["tasks"].items():
        for name, value in metrics.items():
            if "_stderr" not in name:
                assert value == pytest.approx(wanted[task][f"{name},none"], abs=1e-4, rel=1e-6), (
                    task,
                    name,
                )
