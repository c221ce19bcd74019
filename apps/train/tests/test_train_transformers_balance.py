"""The balance loss of transformers' experts is that of plain transformers on every layout."""

from __future__ import annotations

import pytest
import runs
import torch
from foreign_models import ROWS, alone, balance, configure, folder_of, run, sample, whole
from torch.nn.functional import cross_entropy

from kenotron_config import ConfigError
from kenotron_models import layers_on_meta, transformers_names
from kenotron_models.families import TransformersConfig

BALANCED = {"output_router_logits": True, "router_aux_loss_coef": 0.5}
FAMILIES = ("mixtral", "qwen3_moe", "gpt_oss", "minimax_m2")
HALF = {"parallelism.dp": 2, "tokens.batch_accumulation_per_replica": 1}
EP2 = HALF | {"parallelism.ep": 2}
LAYOUTS = {
    "pp2": {"parallelism.pp": 2},
    "tp2": {"parallelism.tp": 2},
    "dp2 zero3": HALF | {"optimizer.zero_stage": 3},
    "dp2 ep2 zero1": EP2 | {"optimizer.zero_stage": 1},
    "cp2": {"parallelism.cp": 2},
    "tp2 pp2 ep2 recompute": {"parallelism.tp": 2, "parallelism.pp": 2, "parallelism.ep": 2}
    | {"parallelism.recompute": "full"},
    "pp2 interleaved": {"parallelism.pp": 2, "parallelism.pp_engine": "interleaved"},
    "pp2 zero bubble": {"parallelism.pp": 2, "parallelism.pp_engine": "zb-h1"},
}
FIVE = {"tokens.train_steps": 5, "optimizer.weight_decay": 0.0}


def keys_of(layout: dict) -> dict[str, str]:
    """Over cp attention is computed here."""
    return {"attn_implementation": "kenotron"} if "parallelism.cp" in layout else {}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.by_turns(2)
def test_loss_and_every_gradient_are_those_of_plain_transformers(family, tmp_path):
    from transformers import AutoModelForCausalLM

    folder = folder_of(family, tmp_path / "model", **BALANCED)
    config = configure(folder, tmp_path / "run")
    loss, found, _ = whole(config)  # micro-batches of one row
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).train()
    ids = torch.tensor([sample(i) for i in range(ROWS)])
    logits = model(input_ids=ids[:, :-1], use_cache=False).logits
    due = cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
    (due + balance(model, ids, calls=ROWS)).backward()
    assert loss == pytest.approx(due.item(), rel=1e-6)
    theirs = {name: p.grad for name, p in model.named_parameters(remove_duplicate=False)}
    names = transformers_names(config.model.model_config.decoder)
    assert {*names} >= {*found} and len(found) > 10
    for name, grad in found.items():
        expected = theirs[names[name][0]]
        apart = (torch.as_tensor(grad) - expected).abs().max()
        assert apart <= 1e-5 * expected.abs().max() + 1e-7, name


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_gradients_of_every_layout_are_those_of_one_process(family, layout, tmp_path):
    folder = folder_of(family, tmp_path / "model", **BALANCED)
    loss, due, _ = whole(configure(folder, tmp_path / "run"))
    changes = LAYOUTS[layout]
    found = whole(configure(folder, tmp_path / "run", changes, **keys_of(changes)))
    assert found[0] == pytest.approx(loss, rel=1e-6)
    assert {*found[1]} == {*due}
    for name, expected in due.items():
        apart = abs(found[1][name] - expected).max()
        assert apart <= 1e-5 * abs(expected).max() + 1e-7, name


@pytest.mark.parametrize("layout", LAYOUTS)
def test_five_steps_are_those_of_plain_transformers_and_the_figure_is_in_the_log(layout, tmp_path):
    from transformers import AutoModelForCausalLM

    folder, changes = folder_of("mixtral", tmp_path / "model", **BALANCED), LAYOUTS[layout]
    config = configure(folder, tmp_path / "run", FIVE | changes, **keys_of(changes))
    found = run(config)
    losses, _ = alone(folder, [rate for _, _, rate in found], config)
    assert [loss for loss, _, _ in found] == pytest.approx(losses, rel=1e-6)
    plain = folder_of("mixtral", tmp_path / "plain")
    other = [x for x, _, _ in run(configure(plain, tmp_path / "other", FIVE))]
    assert other != pytest.approx(losses, rel=1e-5)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).train()
    first = balance(model, torch.tensor([sample(i) for i in range(ROWS)])).item()
    figures = [step["balance_loss"] for step in runs.metrics(tmp_path, "run")]
    assert len(figures) == 5 and figures[0] == pytest.approx(first / 0.5, rel=1e-6)


def test_a_balance_loss_that_is_not_known_is_refused(tmp_path):
    text = '{"model_type": "doge", "is_moe": true, "output_router_logits": true}'
    with pytest.raises(ValueError, match="doge: output_router_logits is true, and its balance los"):
        layers_on_meta(TransformersConfig(config_json=text).decoder)
    folder = folder_of("mixtral", tmp_path / "model", **BALANCED)
    with pytest.raises(ConfigError, match="cuda_graph: true was given; a model of transformers"):
        configure(folder, tmp_path / "run", {"model.cuda_graph": True})
