"""Experts of transformers' models over ep train as in plain torch."""

from __future__ import annotations

import json

import pytest
from foreign_models import alone, configure, folder_of, run, whole

from kenotron_config import ConfigError
from kenotron_convert.importing import model_config
from kenotron_models import layers_on_meta
from kenotron_models.families import TransformersConfig
from kenotron_train.run.preview import preview

OURS = ("mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss", "glm4_moe")
FAMILIES = (
    *OURS, "minimax_m2", "llama4_text", "gemma4_text", "qwen3_5_moe_text", "lfm2_moe",
    "ernie4_5_moe",
)  # fmt: skip
EP2 = {"parallelism.ep": 2}
HALF = EP2 | {"parallelism.dp": 2, "tokens.batch_accumulation_per_replica": 1}
GRID = EP2 | {"parallelism.tp": 2, "parallelism.pp": 2}
LAYOUTS = {
    "dp2 zero3": HALF | {"optimizer.zero_stage": 3},
    "dp2 tp2 zero1 recompute chunks": HALF
    | {"parallelism.tp": 2, "parallelism.recompute": "full", "parallelism.ep_chunks": 2},
    "cp2 pp2": EP2 | {"parallelism.cp": 2, "parallelism.pp": 2},
    "tp2 ep4 dp2": HALF | {"parallelism.tp": 2, "parallelism.ep": 4},
}
FIVE = {"tokens.train_steps": 5, "optimizer.weight_decay": 0.0}


def compare(family, layout, tmp_path):
    folder = folder_of(family, tmp_path / "model")
    keys = {"attn_implementation": "kenotron"} if "parallelism.cp" in layout else {}
    config = configure(folder, tmp_path / "run", FIVE | layout, **keys)
    found = run(config)
    losses, _ = alone(folder, [rate for _, _, rate in found], config)
    assert [loss for loss, _, _ in found] == pytest.approx(losses, rel=1e-6)


@pytest.mark.parametrize("family", FAMILIES)
def test_experts_over_ep_tp_and_pp_train_as_plain_transformers(family, tmp_path):
    compare(family, GRID, tmp_path)


@pytest.mark.parametrize("family", OURS)
def test_families_of_our_own_train_as_the_bridge_does(family, tmp_path):
    folder = folder_of(family, tmp_path / "model", pad_token_id=None)  # its row would not learn
    ours = model_config(folder) | {"router_aux_loss_coef": 0.0}
    if family in ("deepseek_v3", "glm4_moe"):
        ours["router_bias_rate"] = 0.0
    changes = FIVE | {"model.model_config": json.dumps(ours)}
    due = run(configure(folder, tmp_path / "ours", changes))
    found = run(configure(folder, tmp_path / "bridge", FIVE | GRID))
    assert [loss for loss, *_ in found] == pytest.approx([loss for loss, *_ in due], rel=1e-6)
    assert [norm for _, norm, _ in found] == pytest.approx([norm for _, norm, _ in due], rel=1e-5)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("family", ["mixtral", "gpt_oss", "llama4_text"])
def test_other_layouts_of_experts_do_too(family, layout, tmp_path):
    compare(family, LAYOUTS[layout], tmp_path)


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_of_experts_over_ep_are_those_of_one_process(family, tmp_path):
    folder = folder_of(family, tmp_path / "model")
    loss, due, weights = whole(configure(folder, tmp_path / "run"))
    layout = HALF | {"parallelism.tp": 2}  # two ranks have each expert
    found = whole(configure(folder, tmp_path / "run", layout))
    assert found[0] == pytest.approx(loss, rel=1e-6)
    assert {*found[1]} == {*due}
    for name, expected in due.items():
        assert (found[2][name] == weights[name]).all(), name
        apart = abs(found[1][name] - expected).max()
        assert apart <= 1e-5 * abs(expected).max() + 1e-7, name


def test_matrices_of_experts_are_orthogonalised_one_by_one(tmp_path):
    folder = folder_of("mixtral", tmp_path / "model")
    muon = {"optimizer.optimizer_factory": "{name: muon}"}
    one = run(configure(folder, tmp_path / "one", muon))
    for layout in (HALF, {"parallelism.tp": 2}):
        many = run(configure(folder, tmp_path / str(len(layout)), muon | layout))
        assert [loss for loss, *_ in many] == pytest.approx([loss for loss, *_ in one], rel=1e-5)


def test_a_checkpoint_of_experts_over_ep_resumes_without_it(tmp_path):
    folder = folder_of("deepseek_v3", tmp_path / "model")
    one = run(configure(folder, tmp_path / "one"))
    run(configure(folder, tmp_path / "many", GRID | {"tokens.train_steps": 2}))
    again = {"checkpoints.resume_checkpoint_path": tmp_path / "many/2", "parallelism.tp": 2}
    resumed = run(configure(folder, tmp_path / "resumed", again))
    assert [loss for loss, *_ in resumed] == pytest.approx([x for x, *_ in one[2:]], rel=1e-5)


def test_the_preview_shows_what_ep_cuts(tmp_path):
    shown = preview(configure(folder_of("mixtral", tmp_path / "model"), tmp_path / "run", GRID))
    assert "block.mlp.experts.down_proj            4 x 32 x 48  residual   ep cuts dim 0" in shown
    assert "pp rank 0: embedding ... layers.1, 23,456 parameters a rank" in shown


def test_experts_that_ep_cannot_cut_are_named(tmp_path):
    def refused(family, words, **sizes):
        folder = folder_of(family, tmp_path / "model", **sizes)
        with pytest.raises(ConfigError, match=words):
            configure(folder, tmp_path / "run", EP2 | {"parallelism.tp": 2})

    refused("qwen3", "parallelism.ep: ep 2 was given, and the model has no experts: set it to 1")
    words = "ep: model.layers.0.mlp.experts: 2 ranks of ep cannot share its 3 experts: .*; ep is 2"
    refused("mixtral", words, num_local_experts=3)
    spec = TransformersConfig(config_json=json.dumps({"model_type": "longcat_flash"})).decoder
    words = "gate_up_proj of a LongcatFlashExperts is no stack of all its experts"
    with pytest.raises(ValueError, match=words):
        layers_on_meta(spec, ep=2)
