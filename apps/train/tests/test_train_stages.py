"""Stages with a sequence length of their own, and workers that prepare batches."""

from __future__ import annotations

import json
import re

import pytest
import runs
from own_runs import LAYOUTS, configure, documents, jsonl, run

from kenotron_config import cautions
from kenotron_cost.cost_plan import cost_plan
from kenotron_cost.stage_sizes import stage_sizes
from kenotron_train.assemble import data_plan
from kenotron_train.run.preview import preview

SHORT, LONG = 16, 48


@pytest.fixture
def texts(tmp_path):
    return jsonl(tmp_path / "a.jsonl", [{"text": text} for text in documents()])


def stages(path, *lengths: int | None, workers: int = 1):
    """Each stage has two steps."""
    listed = [
        {
            "name": f"stage {number}",
            "start_training_step": 1 + 2 * number,
            "sequence_length": length,
            "data": {
                "seed": number,
                "num_loading_workers": workers,
                "dataset": {"hf_dataset_or_datasets": str(path)},
            },
        }
        for number, length in enumerate(lengths)
    ]
    return {"data_stages": json.dumps(listed), "tokens.train_steps": 2 * len(lengths)}


def start(folder, path, *lengths, workers=1, **changes):
    more = stages(path, *lengths, workers=workers) | changes
    config = configure(folder, None, more)
    return config, run(folder, None, more)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_stage_has_its_own_length_on_every_layout(tmp_path, texts, layout):
    _, one = start(tmp_path / "1", texts, SHORT, LONG, None)
    _, many = start(tmp_path / "2", texts, SHORT, LONG, None, **LAYOUTS[layout])
    assert [loss for loss, _ in many] == pytest.approx([loss for loss, _ in one], rel=1e-5)
    assert [norm for _, norm in many] == pytest.approx([norm for _, norm in one], rel=1e-4)
    steps = runs.metrics(tmp_path / "2")
    sizes = [4 * length for length in (SHORT, SHORT, LONG, LONG, 32, 32)]
    assert [step["consumed_tokens"] for step in steps] == [sum(sizes[: n + 1]) for n in range(6)]


def test_a_run_goes_on_in_the_middle_of_a_stage(tmp_path, texts):
    saving = {"checkpoints.checkpoint_interval": 3}
    _, whole = start(tmp_path / "1", texts, SHORT, LONG, **saving)
    resumed = {"checkpoints.resume_checkpoint_path": tmp_path / "1/checkpoints/3"}
    _, rest = start(tmp_path / "2", texts, SHORT, LONG, **resumed)
    assert rest == whole[3:]
    (last,) = runs.metrics(tmp_path / "2")
    assert last["consumed_tokens"] == 4 * 2 * (SHORT + LONG)


def test_a_stage_as_long_as_the_others_changes_nothing(tmp_path, texts):
    assert start(tmp_path / "1", texts, 32)[1] == start(tmp_path / "2", texts, None)[1]


def test_memory_is_that_of_the_longest_stage_and_tokens_those_of_all(tmp_path, texts):
    several = configure(tmp_path, None, stages(texts, SHORT, LONG))
    longest = configure(tmp_path, None, {"tokens.sequence_length": LONG})
    assert stage_sizes(cost_plan(several)) == stage_sizes(cost_plan(longest))
    text = preview(several)
    assert f"{4 * SHORT} or {4 * LONG} tokens" in text
    assert re.search(rf"4 steps, {4 * 2 * (SHORT + LONG)} tokens in all", text)


def test_stages_after_the_end_are_never_read(tmp_path, texts):
    changes = stages(texts, SHORT, LONG) | {"tokens.train_steps": 1}
    config = configure(tmp_path, None, changes)
    assert config.batches.steps == [1, 0]
    assert [data_plan(config).stage_at(step) for step in (1, 2, 3, 9)] == [0, 0, 1, 1]


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_workers_change_no_loss(tmp_path, texts, workers):
    _, one = start(tmp_path / "1", texts, SHORT, LONG, workers=2)
    assert start(tmp_path / "2", texts, SHORT, LONG, workers=workers)[1] == one


def test_a_length_beyond_the_models_positions_is_a_warning(tmp_path, texts):
    config = configure(tmp_path, None, stages(texts, SHORT, 256))
    (line,) = cautions(config)
    assert line.startswith("data_stages.1.sequence_length: 256 was given; that is beyond model.")
    assert f"Warning: {line}" in preview(config)
    assert cautions(configure(tmp_path, None)) == []
    beyond = {"tokens.sequence_length": 129, "tokens.train_steps": 1, "logging.log_level": "info"}
    flags = runs.arguments(tmp_path, **{key.replace(".", "__"): v for key, v in beyond.items()})
    done = runs.train(tmp_path, *flags)
    assert "WARNING" in done.stdout
    assert "tokens.sequence_length: 129 was given; that is beyond" in done.stdout
