"""Runs of hybrids, whose layers are text: stages as it says, and resumed on other stages."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import runs

SIZES = {
    "hidden_size": 32, "num_attention_heads": 4, "vocab_size": 257, "head_dim": 8,
    "num_key_value_heads": 2,
}  # fmt: skip
NEMOTRON = {
    **SIZES, "is_nemotron_h_config": True, "intermediate_size": 48, "mamba_num_heads": 4,
    "mamba_head_dim": 8, "ssm_state_size": 8, "n_groups": 2, "chunk_size": 8,
}  # fmt: skip
HYBRIDS = {
    "qwen3-next": {
        **SIZES, "is_qwen3_next_config": True, "num_hidden_layers": 2, "num_experts": 4,
        "num_experts_per_tok": 2, "moe_intermediate_size": 16, "linear_num_key_heads": 2,
        "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
        "shared_expert_intermediate_size": 16, "layers": "L*",
    },
    "jamba": {
        **SIZES, "is_jamba_config": True, "num_hidden_layers": 2, "num_experts": 4,
        "mamba_d_state": 8, "layer_types": ["linear_attention", "full_attention"],
        "intermediate_size": 48,
    },
    "granite": {
        **SIZES, "is_granite_hybrid_config": True, "num_hidden_layers": 2, "mamba_n_heads": 4,
        "num_local_experts": 0, "shared_intermediate_size": 32, "mamba_d_state": 8,
        "mamba_chunk_size": 8, "layers": "M*", "residual_multiplier": 0.5,
    },
}  # fmt: skip


def arguments(folder: Path, config: dict, **changes: object) -> list[str]:
    return runs.arguments(folder, **{"model__model_config": json.dumps(config), **changes})


@pytest.fixture(autouse=True)
def only_this_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sizes of the tiny Llama are no keys of these models."""
    kept = {key: value for key, value in runs.TINY.items() if "model_config" not in key}
    monkeypatch.setattr(runs, "TINY", kept)


@pytest.mark.parametrize("name", HYBRIDS)
def test_a_hybrid_trains_from_its_yaml(name: str, tmp_path: Path) -> None:
    done = runs.train(tmp_path, *arguments(tmp_path, HYBRIDS[name], parallelism__tp=2))
    assert done.returncode == 0, done.stderr
    losses = [step["lm_loss"] for step in runs.metrics(tmp_path)]
    assert len(losses) == 6 and losses[-1] < losses[0]


def test_a_run_resumes_with_other_cuts_as_if_never_stopped(tmp_path: Path) -> None:
    for name in "abc":
        (tmp_path / name).mkdir()
    cut = {**NEMOTRON, "layers": "M|-*M"}
    whole = runs.train(tmp_path / "a", *arguments(tmp_path / "a", cut, parallelism__pp=2))
    assert whole.returncode == 0, whole.stderr
    for name, text, pp in (("b", "M-*M", 1), ("c", "M-*|M", 2)):
        folder, changes = tmp_path / name, {**NEMOTRON, "layers": text}
        source = tmp_path / "a/checkpoints/3"
        again = runs.train(
            folder,
            *arguments(
                folder, changes, parallelism__pp=pp, checkpoints__resume_checkpoint_path=source
            ),
        )
        assert again.returncode == 0, again.stderr
        got, want = runs.metrics(folder), runs.metrics(tmp_path / "a")[3:]
        losses = [[step["lm_loss"] for step in each] for each in (got, want)]
        assert losses[0] == pytest.approx(losses[1], rel=1e-6) and len(losses[0]) == 3


def test_preview_shows_the_stages_of_the_text(tmp_path: Path) -> None:
    cut = {**NEMOTRON, "layers": "M|-*M"}
    done = runs.train(tmp_path, *arguments(tmp_path, cut, parallelism__pp=2), "--check")
    assert done.returncode == 0, done.stderr
    first = next(line for line in done.stdout.splitlines() if "layers.0" in line)
    assert "layers.1" not in first
