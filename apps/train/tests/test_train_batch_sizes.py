"""Global batches that grow with the samples, and stages with batches of their own."""

from __future__ import annotations

import json

import pytest
import runs
from own_runs import configure, documents, jsonl, run

from kenotron_config import ConfigError
from kenotron_train.run.preview import preview

RAMP = {
    "tokens.batch_ramp": "{start: 4, increment: 4, samples: 20}",
    "tokens.micro_batch_size": 2,
    "tokens.batch_accumulation_per_replica": 8,
    "tokens.train_steps": 6,
}
"""Batches of 4, 4, 8 (from the 7th sample on), 12 (from the 14th), 16 (from the 20th) samples."""
SIZES = [4, 4, 8, 12, 16, 16]
LAYOUTS = {
    "dp2": {"parallelism.dp": 2, "tokens.batch_accumulation_per_replica": 4},
    "dp2 zero 3": {
        "parallelism.dp": 2,
        "tokens.batch_accumulation_per_replica": 4,
        "optimizer.zero_stage": 3,
    },
    "pp2": {"parallelism.pp": 2, "parallelism.pp_engine": "1f1b"},
    "interleaved": {"parallelism.pp": 2, "parallelism.pp_engine": "interleaved"},
}


@pytest.fixture
def dataset(tmp_path):
    path = jsonl(tmp_path / "a.jsonl", [{"text": text} for text in documents()])
    return {"hf_dataset_or_datasets": str(path)}


def test_a_ramp_is_one_of_samples_on_every_layout(tmp_path, dataset):
    one = run(tmp_path / "1", dataset, RAMP)
    steps = runs.metrics(tmp_path / "1")
    consumed = [sum(SIZES[: n + 1]) for n in range(len(SIZES))]
    assert [step["consumed_samples"] for step in steps] == consumed
    assert [step["consumed_tokens"] for step in steps] == [32 * n for n in consumed]
    for name, layout in LAYOUTS.items():
        many = run(tmp_path / name, dataset, RAMP | layout)
        assert [loss for loss, _ in many] == pytest.approx([loss for loss, _ in one], rel=1e-5)
        assert [norm for _, norm in many] == pytest.approx([norm for _, norm in one], rel=1e-4)
    first = run(tmp_path / "plain", dataset, RAMP | {"tokens.batch_ramp": "null"})
    assert first[0] != one[0]


def test_a_run_resumes_within_its_ramp_on_another_layout(tmp_path, dataset):
    whole = run(tmp_path / "1", dataset, RAMP | {"checkpoints.checkpoint_interval": 3})
    resumed = {"checkpoints.resume_checkpoint_path": tmp_path / "1/checkpoints/3"}
    assert run(tmp_path / "2", dataset, RAMP | resumed) == whole[3:]
    other = run(tmp_path / "3", dataset, RAMP | resumed | LAYOUTS["dp2"])
    assert [loss for loss, _ in other] == pytest.approx([loss for loss, _ in whole[3:]], rel=1e-5)


def test_a_stage_has_a_batch_of_its_own(tmp_path, dataset):
    listed = [
        {"name": name, "start_training_step": step, "data": {"seed": 1, "dataset": dataset}} | more
        for name, step, more in (
            ("short", 1, {"sequence_length": 16, "batch_accumulation_per_replica": 4}),
            ("long", 3, {}),
        )
    ]
    changes = {"data_stages": json.dumps(listed), "tokens.batch_accumulation_per_replica": 2}
    config = configure(tmp_path / "1", None, changes)
    assert "8 or 4 samples" not in preview(config) and "4 or 8 samples, 128 tokens" in preview(
        config
    )
    one = run(tmp_path / "1", None, changes)
    assert [m["consumed_samples"] for m in runs.metrics(tmp_path / "1")] == [8, 16, 20, 24]
    layout = {"parallelism.dp": 2, "tokens.micro_batch_size": 1}
    many = run(tmp_path / "2", None, changes | layout)
    assert [loss for loss, _ in many] == pytest.approx([loss for loss, _ in one], rel=1e-5)


def test_the_preview_counts_the_tokens_of_a_ramp(tmp_path, dataset):
    text = preview(configure(tmp_path, dataset, RAMP))
    assert "from 4 samples on by 4 in 20 samples" in text
    assert f"6 steps, {32 * sum(SIZES) / 1000:.3g}K tokens in all" in text


@pytest.mark.parametrize(
    ("ramp", "message"),
    [
        (
            "{start: 3, increment: 4, samples: 20}",
            "start: 3 was given; it must be a multiple of parallelism.dp x "
            "tokens.micro_batch_size (2 x 2); choose 4",
        ),
        ("{start: 4, increment: 6, samples: 20}", "increment: 6 was given; it must be a multiple"),
        ("{start: 32, increment: 4, samples: 20}", "the whole global batch has 32 samples"),
        ("{start: 4, increment: 4, samples: 0}", "samples: 0 was given; it must be at least 1"),
        ("{start: 4, increment: 4}", "samples"),
    ],
)
def test_a_ramp_that_cannot_be_cut_is_refused(tmp_path, dataset, ramp, message):
    with pytest.raises(ConfigError, match="tokens.batch_ramp") as caught:
        configure(tmp_path, dataset, RAMP | {"parallelism.dp": 2, "tokens.batch_ramp": ramp})
    assert message in str(caught.value)
