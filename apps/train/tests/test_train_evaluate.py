"""Evaluations during a run: when they happen, what they report, and what they never change."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import runs
from evaluate_cases import job_of, task_file
from own_runs import PRELOAD, documents, jsonl

from kenotron_ckpt import MANIFEST, LocalStore, SaveReport
from kenotron_config import DEFAULT_CONFIG, Config, EvaluateConfig
from kenotron_dist import Mesh, spawn
from kenotron_engine import StepResult
from kenotron_train.assemble import build_training
from kenotron_train.config_file import load_config
from kenotron_train.evaluate.cli import evaluate_main
from kenotron_train.evaluate.evaluation_job import script_of_evaluation
from kenotron_train.evaluate.evaluator import Evaluator, check_evaluate
from kenotron_train.report.cli import report_main
from kenotron_train.run.evaluations import Evaluations, _check_job
from kenotron_train.run.loop import train

LOADED = (*PRELOAD, "lm_eval.evaluator")
DATASET = "data_stages.0.data.dataset.hf_dataset_or_datasets"


def configure(folder: Path, section: dict[str, Any] | None, **changes: object) -> Config:
    """A tiny run in ``folder``, saved every three steps, on two sources."""
    digits = [{"text": f"{i * i} {i * 7}" * 9} for i in range(80)]
    sources = [jsonl(folder / "words.jsonl", [{"text": each} for each in documents()])]
    sources += [jsonl(folder / "digits.jsonl", digits)]
    values = runs.TINY | {
        "checkpoints.checkpoints_path": folder / "run",
        DATASET: json.dumps([str(source) for source in sources]),
        "tokens.val_check_interval": -1,
        "evaluate": json.dumps(section),
    }
    values |= {key.replace("__", "."): value for key, value in changes.items()}
    return load_config(DEFAULT_CONFIG, [f"{key}={value}" for key, value in values.items()])


def trained(mesh: Mesh, config: Config, cache: str) -> list[StepResult]:
    os.environ |= {"KENOTRON_CACHE": cache, "HF_HUB_OFFLINE": "1", "HF_DATASETS_CACHE": cache}
    return train(mesh, config)


def run(folder: Path, config: Config) -> list[tuple[float, float]]:
    """Loss and norm of each step."""
    sizes = config.parallelism
    ranks = spawn(
        trained, config, str(folder / "cache"), pp=sizes.pp, dp=sizes.dp, tp=sizes.tp,
        preload=LOADED,
    )  # fmt: skip
    return [(step.loss, step.grad_norm) for step in ranks[0]]


def evaluations_of(folder: Path) -> dict[int, dict[str, Any]]:
    """What metrics.jsonl has of evaluations, by the step of its line."""
    found = runs.metrics(folder, "run")
    return {step["step"]: step["evaluation"] for step in found if "evaluation" in step}


def section_in(folder: Path, **changes: Any) -> dict[str, Any]:
    folders = [str(task_file(folder / "tasks"))]
    return {
        "tasks": ["house_qa"],
        "task_folders": folders,
        "trust_task_files": True,
        "perplexity": True,
    } | changes


def trusted(folder: Path) -> dict[str, Any]:
    return {"task_folders": (str(folder),), "trust_task_files": True}


DROPOUT = {
    "is_starcoder2_config": True, "vocab_size": 257, "hidden_size": 32, "intermediate_size": 48,
    "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 128,
    "attn_pdrop": 0.1, "embd_pdrop": 0.1, "resid_pdrop": 0.1,
}  # fmt: skip


@pytest.mark.parametrize(
    "layout",
    [
        {"model__model_config": json.dumps(DROPOUT)},
        {"parallelism__dp": 2, "tokens__micro_batch_size": 1, "optimizer__zero_stage": 3},
        {"parallelism__tp": 2, "parallelism__recompute": "selective"},
    ],
    ids=["dropout", "dp2 zero3", "tp2 recompute"],
)
def test_a_run_with_evaluations_has_the_losses_of_one_without(tmp_path, layout):
    section = section_in(tmp_path)
    plain = run(tmp_path / "1", configure(tmp_path / "1", None, **layout))
    assert run(tmp_path / "2", configure(tmp_path / "2", section, **layout)) == plain
    found = evaluations_of(tmp_path / "2")
    assert list(found) == [3, 6]
    for step, each in found.items():
        assert each["evaluated_step"] == step
        assert set(each["tasks"]) == {"house_qa"}
        assert set(each["tasks"]["house_qa"]) == {"acc", "acc_stderr"}
        names = {Path(name).name for name in each["sources"]}
        assert names == {"words.jsonl", "digits.jsonl"}
    last = runs.metrics(tmp_path / "2", "run")[-1]
    assert last["validation_sources"] == last["evaluation"]["sources"]
    log = (tmp_path / "2/run/log.txt").read_text()
    assert f"evaluation: 6 | house_qa: acc {found[6]['tasks']['house_qa']['acc']:.4g} ± " in log


MODE = {
    "general__reproducible": "true",
    "optimizer__optimizer_factory__torch_adam_is_fused": "false",
    "model__dtype": "bfloat16",
}
PAGES = {
    "output_type": "loglikelihood_rolling", "doc_to_text": "", "doc_to_target": "{{question}}",
    "metric_list": [{"metric": "word_perplexity"}, {"metric": "bits_per_byte"}],
}  # fmt: skip


def test_in_the_reproducible_mode_a_run_finds_what_evaluate_finds(tmp_path):
    """On another layout and in other batches: losses of sources and log-probabilities of texts."""
    folders = [str(task_file(tmp_path / "tasks", "house_pages", **PAGES))]
    section = section_in(tmp_path, tasks=["house_pages"], task_folders=folders, batch_size=3)
    layout = {"parallelism__tp": 2, "parallelism__tp_mode": "REDUCE_SCATTER"}
    steps = {"tokens__train_steps": 2, "checkpoints__checkpoint_interval": 2}
    run(tmp_path, configure(tmp_path, section, **MODE, **layout, **steps))
    (found,) = evaluations_of(tmp_path).values()
    out = tmp_path / "found.json"
    asked = ["--ckpt-path", str(tmp_path / "run/2"), "--output", str(out), "--batch-size", "1"]
    with mock.patch.dict(os.environ, {"HF_DATASETS_CACHE": str(tmp_path / "cache")}):
        assert evaluate_main([*asked, "--dp", "2"]) == 0
    again = json.loads(out.read_text())
    assert set(again["tasks"]["house_pages"]) >= {"word_perplexity", "bits_per_byte"}
    assert {name: again[name] for name in ("tasks", "sources")} == {
        name: found[name] for name in ("tasks", "sources")
    }


def test_an_interval_says_when_and_trackers_and_the_report_have_the_results(tmp_path, capsys):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    section = section_in(tmp_path, interval=2, perplexity=False, limit=4)
    changes = {"logging__trackers": "[tensorboard]", "tokens__train_steps": 5}
    run(tmp_path, configure(tmp_path, section, **changes))
    found = evaluations_of(tmp_path)
    assert list(found) == [2, 4, 5]
    events = EventAccumulator(str(tmp_path / "run/tensorboard"))
    events.Reload()
    scalars = events.Scalars("evaluation/tasks/house_qa/acc")
    assert [each.step for each in scalars] == [2, 4, 5]
    assert report_main([str(tmp_path / "run")]) == 0
    assert "house_qa: acc" in capsys.readouterr().out
    page = (tmp_path / "run/report.html").read_text()
    assert "<h2>Evaluations</h2>" in page
    assert "house_qa: acc" in page


def test_a_failing_task_does_not_end_the_training(tmp_path):
    kinds = {"output_type": "generate_until", "generation_kwargs": {"num_beams": 4}}
    task_file(tmp_path / "tasks", **kinds)
    section = {"tasks": ["house_qa"], "task_folders": [str(tmp_path / "tasks")], "interval": 3}
    section["trust_task_files"] = True
    losses = run(tmp_path, configure(tmp_path, section, tokens__train_steps=4))
    assert len(losses) == 4
    log = (tmp_path / "run/log.txt").read_text()
    words = "evaluation at step 3 failed: house_qa: generation_kwargs.num_beams of the task has no"
    assert words in log
    assert "the training continues" in log
    assert "num_beams" in evaluations_of(tmp_path)[3]["failure"]


def test_what_task_files_raise_ends_neither_the_training_nor_their_neighbours(tmp_path):
    folder = task_file(tmp_path / "tasks")
    (folder / "own.py").write_text(
        "def leave(doc):\n    raise SystemExit(3)\n\n\n"
        "def interrupt(doc, results):\n    raise KeyboardInterrupt\n"
    )
    task_file(folder, "house_exit", doc_to_text="HERE")
    task_file(folder, "house_interrupt", process_results="HERE")
    for name, function in (("house_exit", "leave"), ("house_interrupt", "interrupt")):
        file = folder / f"{name}.yaml"
        file.write_text(file.read_text().replace('"HERE"', f"!function own.{function}"))
    task_file(folder, "house_unsafe", unsafe_code=True)
    names = ["house_interrupt", "house_qa", "house_unsafe"]
    section = {"tasks": names, "interval": 3} | trusted(folder)
    losses = run(tmp_path, configure(tmp_path, section, tokens__train_steps=4))
    assert len(losses) == 4
    found = evaluations_of(tmp_path)[3]
    assert "house_interrupt: KeyboardInterrupt: no message" in found["failure"]
    assert "house_unsafe: " in found["failure"]
    assert set(found["tasks"]) == {"house_qa"}
    with pytest.raises(ValueError, match="house_exit was given; its data cannot be read"):
        from kenotron_train.evaluate import harness

        harness.Harness(EvaluateConfig(tasks=("house_exit",), **trusted(folder)))


def test_files_of_tasks_run_only_where_they_are_trusted(tmp_path):
    words = "task_folders: .* was given; task files are code .*: read them, and set trust_task_file"
    with pytest.raises(ValueError, match=words):
        EvaluateConfig(tasks=("house_qa",), task_folders=(str(tmp_path),))


def test_scripts_of_jobs_have_no_value_of_the_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("KENOTRON_SECRET_FOLDER", str(tmp_path / "hidden-place"))
    section = section_in(tmp_path, ranks="job")
    config = configure(
        tmp_path,
        section,
        checkpoints__checkpoints_path="!env KENOTRON_SECRET_FOLDER",
        general__project="https://me:pass@host/x",
        general__run="!env KENOTRON_SECRET_FOLDER",
    )
    folder = Path(config.checkpoints.checkpoints_path) / "3"
    script = script_of_evaluation(job_of(config), folder, tmp_path)
    assert "hidden-place" not in script and "pass" not in script
    assert '--ckpt-path "${KENOTRON_SECRET_FOLDER}"/3' in script
    assert "#SBATCH --output" not in script
    other = configure(tmp_path, section, general__project="p")
    assert "#SBATCH --output" in script_of_evaluation(job_of(other), folder, tmp_path)


def refused(mesh: Mesh, config: Config, words: str) -> None:
    """What building the evaluations of a run says."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    training = build_training(config, mesh)
    with pytest.raises(ValueError, match=words):
        Evaluations(training, Listener(), config.evaluation, own_model=False)


class Listener:
    """A report that keeps what it hears."""

    def __init__(self) -> None:
        self.said: list[tuple[str, str]] = []

    def say(self, text: str, level: str = "info") -> None:
        self.said.append((level, text))


def test_bad_tasks_are_errors_at_the_start_on_every_rank(tmp_path):
    folder = task_file(tmp_path / "tasks")
    task_file(folder, "house_gone", dataset_kwargs={"data_files": {"test": "gone.jsonl"}})
    (folder / "none.jsonl").write_text("")
    given = {"task_folders": [str(folder)], "trust_task_files": True}
    cases = [
        (
            {"tasks": ["house_gone"], **given},
            r"evaluate.tasks: house_gone was given; its data cannot be read \(.*gone.jsonl.*\); "
            r"correct dataset_path and dataset_kwargs in .*house_gone.yaml \(a relative path",
        ),
        (
            given | {"tasks": ["house_qa"], "task_folders": [str(tmp_path / "no")]},
            r"evaluate.task_folders: .*no was given; there is no such folder; correct the path",
        ),
    ]
    for section, words in cases:
        config = configure(tmp_path, section, parallelism__dp=2)
        spawn(refused, config, words, dp=2, preload=LOADED)


def test_an_unknown_task_is_an_error_with_the_nearest_names(tmp_path, monkeypatch):
    from kenotron_train.evaluate import harness

    task_file(tmp_path)
    manager = harness.TaskManager  # without lm-eval's own 10,000 files

    def own(include_path: Any, include_defaults: bool = True) -> Any:
        return manager(include_path=include_path, include_defaults=False)

    monkeypatch.setattr(harness, "TaskManager", own)
    words = (
        r"evaluate.tasks: house_aq was given; neither lm-eval .* nor evaluate.task_folders \(.*\) "
        "has such a task; did you mean house_qa"
    )
    with pytest.raises(ValueError, match=words):
        harness.Harness(EvaluateConfig(tasks=("house_aq",), **trusted(tmp_path)))


def test_a_task_without_samples_is_an_error(tmp_path):
    from kenotron_train.evaluate import harness

    folder = task_file(tmp_path)
    (folder / "empty.jsonl").write_text("")
    data = {"test": str(folder / "empty.jsonl")}
    task_file(folder, "house_none", dataset_kwargs={"data_files": data})
    section = EvaluateConfig(tasks=("house_none",), **trusted(folder))
    with pytest.raises(ValueError, match="house_none was given; its data cannot be read"):
        harness.Harness(section)


def test_lm_eval_that_is_missing_is_an_error_before_there_are_ranks(monkeypatch):
    check_evaluate(EvaluateConfig(tasks=("a",)))
    check_evaluate(None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    words = r"evaluate.tasks: a was given, but lm-eval is not installed: pip install './apps/train"
    with pytest.raises(ValueError, match=words):
        check_evaluate(EvaluateConfig(tasks=("a",)))


def jobs(mesh: Mesh, config: Config, folder: Path) -> tuple[list[tuple[str, str]], list[Any]]:
    """What is said of saves, and what arrives, where evaluations are jobs without Slurm."""
    os.environ["PATH"] = ""
    listener = Listener()
    training = build_training(config, mesh)
    evaluations = Evaluations(training, listener, config.evaluation, own_model=False)
    for step in (2, 4, 5, 6):
        store = LocalStore(folder / f"run/{step}")
        saved = SaveReport(step=step, store=store, blocked=0.0, durable=0.0)
        evaluations.saved(saved)
    arrived = [evaluations.after(5, True, None, lambda: None)]
    for step in (4, 2):
        text = json.dumps({"evaluated_step": step, "tasks": {}})
        (folder / f"run/evaluations/{step}.json").write_text(text)
    (folder / "run/evaluations/1.json").write_text("{")
    evaluations._next_look = 0.0
    arrived += [evaluations.after(6, True, None, lambda: None) for _ in range(3)]
    (folder / "run/4").mkdir()
    (folder / "run/4" / MANIFEST).touch()
    os.utime(folder / "run/evaluations/2.json", (0, 0))  # that of step 4 came after the checkpoint
    for step in (4, 3):
        resumed = Evaluations(training, listener, config.evaluation, own_model=False, step=step)
        arrived.append(resumed.after(5, True, None, lambda: None))
    return listener.said, arrived


def test_jobs_are_written_for_checkpoints_and_their_results_come_later(tmp_path):
    section = section_in(tmp_path, ranks="job", interval=4)
    config = configure(tmp_path, section, checkpoints__checkpoint_interval=2)
    ((said, arrived),) = spawn(jobs, config, tmp_path, preload=LOADED)
    lines = [text for _, text in said]
    assert [line.split(":")[0] for line in lines[:2]] == [
        "evaluation of step 4", "evaluation of step 6",
    ]  # fmt: skip
    assert "sbatch is not there, so run it where you like: " in lines[0]
    sizes = "--pp 1 --dp 1 --cp 1 --tp 1 --ep 1"
    assert lines[0].endswith(f"evaluate --ckpt-path {tmp_path}/run/4 {sizes}")
    assert sorted(path.name for path in (tmp_path / "run/evaluations").glob("*.sbatch")) == [
        "4.sbatch", "6.sbatch",
    ]  # fmt: skip
    assert [each and each["evaluated_step"] for each in arrived] == [None, 2, 4, None, 4, None]


def test_what_a_job_cannot_evaluate_is_an_error(tmp_path):
    config = configure(tmp_path, section_in(tmp_path, ranks="job"))
    assert config.evaluation is not None
    with pytest.raises(ValueError, match="evaluate.ranks: job was given, but the layers of the"):
        _check_job(job_of(config), config.data_stages, own_model=True)
    config = configure(
        tmp_path,
        section_in(tmp_path, ranks="job", tasks=[]),
        data_stages=json.dumps(
            [{"name": "s", "start_training_step": 1, "data": {"dataset": None, "seed": 1}}]
        ),
    )
    assert config.evaluation is not None
    with pytest.raises(ValueError, match="evaluate.perplexity: true was given with evaluate.rank"):
        _check_job(job_of(config), config.data_stages, own_model=False)


@pytest.mark.parametrize(
    ("job", "words"),
    [
        ({"ep": 2}, "evaluate.job: ep = 2 does not divide the dp=1 .* choose a divisor of 1, or"),
        ({"nodes": 2}, "evaluate.job: 1 ranks .* cannot be 0 on each of 2 nodes"),
    ],
)
def test_a_job_whose_ranks_do_not_fit_is_an_error_before_the_first_step(tmp_path, job, words):
    config = configure(tmp_path, section_in(tmp_path, ranks="job", job=job))
    assert config.evaluation is not None
    with pytest.raises(ValueError, match=words):
        _check_job(job_of(config), config.data_stages, own_model=False)


def passes_and_notes(mesh: Mesh, config: Config, cache: str) -> tuple[int, list[str]]:
    """How many passes an evaluation takes, and what it says of keys."""
    os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_CACHE": cache}
    training = build_training(config, mesh)
    assert config.evaluate is not None
    evaluator = Evaluator(training, config.evaluate, (None, None))
    pipeline = training.model.pipeline
    with mock.patch.object(pipeline, "evaluate", wraps=pipeline.evaluate) as passes:
        evaluator.evaluate(1, lambda: None)
    return passes.call_count, evaluator.notes


@pytest.mark.parametrize("size, passes", [(1, 12), (5, 3)])
def test_so_many_texts_are_read_together(size: int, passes: int, tmp_path: Path) -> None:
    section = section_in(tmp_path, batch_size=size, perplexity=False, num_fewshot=2)
    config = configure(tmp_path, section)
    ((count, notes),) = spawn(passes_and_notes, config, str(tmp_path), preload=LOADED)
    assert count == passes  # of six questions with two answers each
    assert notes == [
        "evaluate.num_fewshot: 2 has no effect on house_qa: its file says 0, which lm-eval keeps"
    ]
