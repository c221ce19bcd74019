"""What is accepted and likely wrong is named."""

from pathlib import Path

import numpy as np
import pytest

from kenotron_config import cautions, load_config
from kenotron_data import TokenWriter

PATH = Path(__file__).with_name("tiny_llama.yaml")
SCHEDULE = "optimizer.learning_rate_scheduler"
NO_SCHEDULE = {"lr_warmup_steps": 2, "lr_decay_steps": "null", "lr_decay_starting_step": "null"}


def configure(changes):
    """The file with one stage of data, and some keys changed."""
    values = {f"{SCHEDULE}.{name}": value for name, value in NO_SCHEDULE.items()} | changes
    return load_config(PATH, [f"{key}={value}" for key, value in values.items()])


def folder_of_tokens(folder: Path, tokenizer: str) -> Path:
    """A token file whose metadata name a tokenizer."""
    with TokenWriter(folder / "000.ds", 2, tokenizer) as writer:
        for _ in range(60):
            writer.add([np.arange(1, 200, dtype=np.uint16)])
    return folder


@pytest.mark.parametrize("key", ["tokenizer.tokenizer_name_or_path", "tokenizer_name"])
def test_tokens_of_another_tokenizer_are_named(tmp_path: Path, key: str) -> None:
    data = folder_of_tokens(tmp_path / "tokens", "openai/gpt2")

    def lines(name: str) -> list[str]:
        own = {key: name} if "." in key else {}
        section = f"dataset_folder: {data}" + ("" if own else f", {key}: {name}")
        config = configure({"data_stages.0.data.dataset": f"{{{section}}}"} | own)
        return cautions(config)

    (line,) = lines("meta/llama")
    assert f"{key}: meta/llama was given, but the token files of {data} were made with" in line
    assert "openai/gpt2: where these are different tokenizers, ids have other meanings" in line
    assert lines("openai/gpt2") == lines("gpt2") == lines("/models/gpt2/tokenizer.json") == []


def test_files_that_name_no_tokenizer_are_no_mistake(tmp_path: Path) -> None:
    data = folder_of_tokens(tmp_path / "tokens", "")
    own = {"data_stages.0.data.dataset": f"{{dataset_folder: {data}, tokenizer_name: gpt2}}"}
    assert cautions(configure(own)) == []
    none = {"data_stages.0.data.dataset": "{dataset_folder: none, tokenizer_name: gpt2}"}
    assert cautions(configure(none)) == []


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"lr_warmup_steps": 2000},
            "lr_warmup_steps: 2000 was given, but tokens.train_steps is 6: the learning rate never "
            "reaches learning_rate (0.0003)",
        ),
        (
            {"lr_decay_starting_step": 6},
            "lr_decay_starting_step: 6 was given, but tokens.train_steps is 6: the learning rate "
            "never decays",
        ),
        (
            {"lr_decay_steps": 5},
            "lr_decay_steps: 5 was given: the decay ends at step 7, but tokens.train_steps is 6: "
            "the learning rate never reaches min_decay_lr",
        ),
        ({"lr_decay_steps": 4}, ""),
        ({"lr_warmup_steps": 6}, ""),
    ],
)
def test_a_schedule_beyond_the_run_is_named(changes: dict[str, int], said: str) -> None:
    own = {f"{SCHEDULE}.{name}": value for name, value in changes.items()}
    config = configure({"tokens.train_steps": 6} | own)
    assert cautions(config) == ([f"{SCHEDULE}.{said}"] if said else [])


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"tokens.batch_ramp": "{start: 2, increment: 2, samples: 100}"},
            "tokens.batch_ramp.samples: 100 was given, but the run ends after 6 steps and 12 "
            "samples: the batch never has its full size",
        ),
        (
            {"optimizer.weight_average": "{every: 7}"},
            "optimizer.weight_average.every: 7 was given, but the run ends after 6 steps: nothing",
        ),
        (
            {"optimizer.spikes": "{window: 12}"},
            "optimizer.spikes.window: 12 was given, but the run ends after 6 steps: the first half",
        ),
        ({"optimizer.weight_average": "{every: 6}", "optimizer.spikes": "{window: 11}"}, ""),
    ],
)  # fmt: skip
def test_what_a_run_never_reaches_is_named(changes: dict[str, str], said: str) -> None:
    batch = {"tokens.micro_batch_size": 1, "tokens.batch_accumulation_per_replica": 4}
    lines = cautions(configure({"tokens.train_steps": 6} | batch | changes))
    assert len(lines) == bool(said) and all(line.startswith(said) for line in lines)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_key_of_sharded_gradients_is_named_where_none_are_sharded(stage: int) -> None:
    keys = {"optimizer.zero_stage": stage, "optimizer.reduce": "step"}
    lines = cautions(configure(keys))
    assert len(lines) == (stage < 2)
    assert all(line.startswith("optimizer.reduce: step was given") for line in lines)
