"""Statistics of layers: against torch on one process, and the same on four ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
import runs
import torch

from kenotron_config import DEFAULT_CONFIG, Config
from kenotron_dist import Mesh, Role, spawn
from kenotron_engine import layer_metrics, step
from kenotron_models import component_of, components, reported_name
from kenotron_models.families import Qwen3Config
from kenotron_train.config_file import load_config
from kenotron_train.run import loop

EVERY = 2
STATS = {"mean", "std", "min", "max", "norm_l1", "norm_l2", "zero_frac", "kurtosis"}


def config_of(folder: Path, **changes: object) -> Config:
    section = f"{{log_level: 1, log_detail_interval: {EVERY}}}"
    flags = runs.arguments(folder, metrics_logging=section, tokens__train_steps=5, **changes)
    return load_config(DEFAULT_CONFIG, flags[1::2])


def found_in(folder: Path) -> list[dict]:
    return [line.get("layers", {}) for line in runs.metrics(folder)]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    """What one process reports of each step."""
    folder = tmp_path_factory.mktemp("alone")
    loop.train(Mesh.connect(), config_of(folder))
    return found_in(folder)


def test_only_steps_at_the_interval_are_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked = []
    right = layer_metrics.tensor_moments
    monkeypatch.setattr(
        layer_metrics, "tensor_moments", lambda *a: (looked.append(1), right(*a))[1]
    )
    loop.train(Mesh.connect(), config_of(tmp_path))
    assert [bool(each) for each in found_in(tmp_path)] == [False, True, False, True, False]
    assert len(looked) == 2 * 2  # parameters and gradients, in two steps


def test_every_part_has_nanotrons_names_and_statistics(alone: list[dict]) -> None:
    names = {name.rpartition("/")[0] for name in alone[1]}
    inside = ["attention/qkv_proj", "attention/o_proj", "mlp/gate_up_proj", "mlp/down_proj"]
    inside += ["norm/input_layernorm", "norm/post_attention_layernorm"]
    parts = {f"layer_{i}/{part}" for i in (0, 1) for part in inside}
    parts |= {"token_embedding", "lm_head", "final_layernorm"}
    outputs = {"token_embedding", "layer_0", "layer_1", "final_layernorm"}
    assert names == (
        parts
        | {f"{part}/grad" for part in parts}
        | {f"{name}/activation" for name in outputs}
        | {f"global_{each}" for each in ("attention", "mlp", "norm", "global")}
    )
    assert {name.rpartition("/")[2] for name in alone[1]} == STATS


def test_figures_are_those_of_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parameters before the update, gradients before clipping, outputs of all micro-batches."""
    seen: dict[str, list[torch.Tensor]] = {"norm": [], "weight": [], "grad": []}

    def look(training, batch, number, wait, start, watch, *rest):
        stack = training.model.stack
        hook = stack.norm.register_forward_hook(lambda *a: seen["norm"].append(a[2].detach()))

        def also(slices):
            watch(slices)
            if number == EVERY:
                seen["grad"].append(slices["layers.1.mlp.down.weight"].clone())
                seen["weight"].append(
                    stack.get_submodule("layers.1.mlp.down").weight.detach().clone()
                )

        if number != EVERY:
            hook.remove()
        result = step.training_step(training, batch, number, wait, start, also, *rest)
        hook.remove()
        return result

    monkeypatch.setattr(loop, "training_step", look)
    loop.train(Mesh.connect(), config_of(tmp_path))
    found = found_in(tmp_path)[1]
    names = {
        "norm": "final_layernorm/activation",
        "weight": "layer_1/mlp/down_proj",
        "grad": "layer_1/mlp/down_proj/grad",
    }
    assert len(seen["norm"]) == 2
    for key, name in names.items():
        x = torch.cat(seen[key]).double().flatten()
        std = x.std().item()
        want = {
            "mean": x.mean().item(),
            "std": std,
            "min": x.min().item(),
            "max": x.max().item(),
            "norm_l1": x.abs().sum().item(),
            "norm_l2": x.norm().item(),
            "zero_frac": (x.abs() < 1e-10).double().mean().item(),
            "kurtosis": ((x - x.mean()) / std).pow(4).mean().item() - 3,
        }
        assert {k: found[f"{name}/{k}"] for k in STATS} == pytest.approx(want, rel=1e-9), name


def test_components_are_all_their_weights_together(alone: list[dict]) -> None:
    found = alone[1]
    for key in ("norm_l1", "min"):
        own = [
            found[f"layer_{i}/mlp/{part}/{key}"]
            for i in (0, 1)
            for part in ("gate_up_proj", "down_proj")
        ]
        want = sum(own) if key == "norm_l1" else min(own)
        assert found[f"global_mlp/{key}"] == pytest.approx(want)


@pytest.mark.parametrize(
    "layout",
    [
        {"tp": 2, "pp": 2},
        {"tp": 2, "dp": 2, "mode": "REDUCE_SCATTER"},
        {"dp": 4},
    ],
    ids=str,
)
def test_four_ranks_report_the_same(layout: dict, alone: list[dict], tmp_path: Path) -> None:
    sizes = {name: size for name, size in layout.items() if name != "mode"}
    changes = {f"parallelism__{name}": size for name, size in sizes.items()}
    if "mode" in layout:
        changes["parallelism__tp_mode"] = layout["mode"]
    dp = sizes.get("dp", 1)
    changes["tokens__micro_batch_size"] = 2 // min(dp, 2)
    changes["tokens__batch_accumulation_per_replica"] = 2 // max(1, dp // 2)
    spawn(loop.train, config_of(tmp_path, **changes), **sizes)
    for got, want in zip(found_in(tmp_path), alone, strict=True):
        assert got.keys() == want.keys()
        for name, value in want.items():
            rel = 1e-3 if "kurtosis" in name else 2e-4
            assert got[name] == pytest.approx(value, rel=rel, abs=2e-6), name


@pytest.mark.parametrize(
    ("path", "role", "name", "component"),
    [
        ("layers.12.attention.qkv.weight", "hidden", "layer_12/attention/qkv_proj", "attention"),
        ("layers.12.attention.qkv.bias", "bias", "layer_12/attention/qkv_proj.bias", None),
        ("layers.0.mlp_norm.weight", "norm", "layer_0/norm/post_attention_layernorm", "norm"),
        ("layers.0.mlp_norm.bias", "norm_bias", "layer_0/norm/post_attention_layernorm.bias", None),
        ("layers.3.attention.q_norm.weight", "norm", "layer_3/attention/q_norm", "attention"),
        ("layers.99.mlp.down.weight", "residual", "layer_99/mlp/down_proj", None),
        ("embedding.positions.weight", "embedding", "embedding/positions", None),
        ("norm.weight", "norm", "final_layernorm", None),
        ("norm.bias", "norm_bias", "final_layernorm.bias", None),
        ("head.weight", "output", "lm_head", None),
    ],
)
def test_names(path: str, role: Role, name: str, component: str | None) -> None:
    config = Qwen3Config(hidden_size=64, num_attention_heads=4, num_hidden_layers=13)
    assert reported_name(path) == name
    assert component_of(path, role, config) == component
    assert components(config) == ("attention", "mlp", "norm")
