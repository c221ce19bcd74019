"""Mixtures of experts in the program: the example, Nanotron's two kinds, resume, check, verify."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import runs
import yaml

EXAMPLE = runs.APP / "configs/moe.yaml"
LLAMOE = {
    "is_llamoe_config": True, "hidden_size": 32, "num_attention_heads": 4, "vocab_size": 257,
    "num_hidden_layers": 2, "num_key_value_heads": None, "intermediate_size": 24,
    "max_position_embeddings": 64, "hidden_act": "silu", "rope_scaling": None, "use_cache": True,
    "moe_num_experts": 4, "num_experts_per_tok": 2, "moe_capacity_factor": 1,
    "tie_word_embeddings": False, "pad_token_id": None, "pretraining_tp": 1,
}  # fmt: skip


def small(folder: Path, sizes: dict[str, Any] | None = None, **parallelism: int) -> Path:
    """The example with little text and 4 steps, and these ranks or another model."""
    data = yaml.safe_load(EXAMPLE.read_text(encoding="utf-8"))
    data["parallelism"] |= parallelism
    if sizes is not None:
        data["model"]["model_config"] = sizes
    data["tokens"] |= {"train_steps": 4, "sequence_length": 48, "micro_batch_size": 2}
    data["tokens"]["batch_accumulation_per_replica"] = 4 // data["parallelism"]["dp"]
    corpus = runs.write_text(folder)
    data["data_stages"][0]["data"]["dataset"]["hf_dataset_or_datasets"] = str(corpus)
    data["checkpoints"] |= {"checkpoints_path": str(folder / "checkpoints")}
    data["checkpoints"]["checkpoint_interval"] = 2
    (file := folder / "moe.yaml").write_text(yaml.safe_dump(data))
    return file


def curve(folder: Path, file: Path, *flags: str) -> list[dict[str, Any]]:
    """The steps of a run."""
    done = runs.train(folder, "--config-file", str(file), *flags)
    assert done.returncode == 0, done.stderr
    return runs.metrics(folder)


LAYOUTS: list[dict[str, int]] = [
    {"dp": 2, "ep": 2},
    {"dp": 1, "tp": 2, "ep": 2},
]


@pytest.mark.parametrize("sizes", [None, LLAMOE], ids=["moe_config", "llamoe"])
def test_experts_train_as_on_one_process(tmp_path: Path, sizes: dict[str, Any] | None) -> None:
    found = []
    for i, ranks in enumerate([{"dp": 1, "ep": 1}, *LAYOUTS]):
        (folder := tmp_path / str(i)).mkdir()
        found.append(curve(folder, small(folder, sizes, **ranks)))
    for steps in found[1:]:
        for step, one in zip(steps, found[0], strict=True):
            for name in ("lm_loss", "grad_norm"):
                assert step[name] == pytest.approx(one[name], rel=1e-5)
            assert step["experts"].keys() == one["experts"].keys()
            for layer, load in step["experts"].items():
                assert load == pytest.approx(one["experts"][layer], rel=1e-6, abs=1e-9)


def check_shown(folder: Path, steps: list[dict[str, Any]]) -> None:
    """TensorBoard has the loads of each layer, and the report draws them."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "checkpoints/tensorboard"))
    events.Reload()
    for layer, loads in steps[-1]["experts"].items():
        for name in loads:
            shown = [event.value for event in events.Scalars(f"experts/{layer}/{name}")]
            assert shown == pytest.approx([s["experts"][layer][name] for s in steps], rel=1e-6)
    done = runs.train(folder, "report", "checkpoints")
    assert "last expert load max/mean" in done.stdout, done.stderr
    page = (folder / "checkpoints/report.html").read_text(encoding="utf-8")
    assert page.count('aria-label="layer_') == len(steps[-1]["experts"])


ROUTING = {
    "router_aux_loss_type": "micro_batch", "router_jitter_noise": 0.05,
    "expert_capacity_factor": 1.0,
}  # fmt: skip


def test_drops_are_reported_and_the_same_on_every_layout(tmp_path: Path) -> None:
    found = []
    for i, ranks in enumerate([{"dp": 1, "ep": 1}, {"dp": 2, "ep": 2, "ep_chunks": 2}]):
        (folder := tmp_path / str(i)).mkdir()
        flags = [f"--set=model.model_config.moe_config.{key}={v}" for key, v in ROUTING.items()]
        found.append(curve(folder, small(folder, **ranks), *flags))
    for one, step in zip(*found, strict=True):
        assert step["lm_loss"] == pytest.approx(one["lm_loss"], rel=1e-5)
        assert step["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-5)
        for layer, load in step["experts"].items():
            assert 0 < load["drops"] == one["experts"][layer]["drops"]


def test_a_run_continues_with_other_ranks_for_its_experts(tmp_path: Path) -> None:
    (whole := tmp_path / "whole").mkdir()
    (cut := tmp_path / "cut").mkdir()
    one = curve(whole, small(whole, dp=1, ep=1), "--set", "logging.trackers=[tensorboard]")
    check_shown(whole, one)
    curve(cut, small(cut, dp=2, ep=2), "--set", "tokens.train_steps=2")
    file = small(cut, dp=1, tp=2, ep=1)
    steps = curve(cut, file)
    assert [step["step"] for step in steps] == [1, 2, 3, 4]
    for step, wanted in zip(steps, one, strict=True):
        assert step["lm_loss"] == pytest.approx(wanted["lm_loss"], rel=1e-5)
    loads = steps[-1]["experts"]["layer_0"]
    assert loads == pytest.approx(one[-1]["experts"]["layer_0"], rel=1e-6, abs=1e-9)
    assert loads["bias_min"] < 0 < loads["bias_max"]  # the biases were in the checkpoint


def test_a_check_names_the_ranks_of_experts(tmp_path: Path) -> None:
    file = small(tmp_path, dp=2, ep=2)
    done = runs.train(tmp_path, "--check", "--config-file", str(file))
    assert done.returncode == 0
    assert "2 processes = pp 1 x dp 2 x tp 1, ep 2" in done.stdout
    whole = 8 * 4 * 3 * 96 * 128  # experts, layers, matrices of an expert
    assert f"{1_595_296 - whole // 2:,} parameters a rank" in done.stdout


def test_a_layout_with_experts_is_verified(tmp_path: Path) -> None:
    done = runs.train(tmp_path, "verify", "--config-file", str(small(tmp_path, dp=2, ep=2)))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "PASS: pp 1 x dp 2 x tp 1, ep 2 computes what one process computes" in done.stdout
