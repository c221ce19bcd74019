"""LoRA of stacks of experts and of GPT-2's layers trains as peft does, on every layout."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from adapter_runs import losses, peft_folder, same_tensors, set_up, trained_as_peft
from foreign_models import folder_of
from peft import get_peft_model_state_dict

from kenotron_config import ConfigError

pytestmark = pytest.mark.filterwarnings("ignore")  # of peft
STACKS = ["experts.gate_up_proj", "experts.down_proj"]
MIXED = ["attention", "experts"]
HALF = {"parallelism.dp": 2, "tokens.batch_accumulation_per_replica": 1}
LAYOUTS = {
    "tp2": {"parallelism.tp": 2},
    "ep2 dp2 zero1": HALF | {"parallelism.ep": 2, "optimizer.zero_stage": 1},
    "tp2 ep2 zero3": HALF
    | {"parallelism.tp": 2, "parallelism.ep": 2, "optimizer.zero_stage": 3}
    | {"parallelism.recompute": "full"},
    "pp2": {"parallelism.pp": 2, "parallelism.pp_engine": "zb-h1"},
    "tp2 ep2 sequence": {"parallelism.tp": 2, "parallelism.ep": 2}
    | {"parallelism.tp_mode": "REDUCE_SCATTER"},
}
FAMILIES = {"mixtral": ["q_proj", "k_proj", "v_proj", "o_proj"], "gpt_oss": [], "qwen3_moe": []}


def adapter(family: str, folder: Path, target: Path) -> tuple[Path, list[str]]:
    """Peft's adapter of experts, and of attention for some families; our targets."""
    words = FAMILIES[family]
    made = peft_folder(folder, target, words=words or None, factor=1, target_parameters=STACKS)
    return made, ["attention", "experts"] if words else ["experts"]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("native", [False, True])
def test_experts_train_as_those_of_peft_and_each_reads_the_others_files(family, native, tmp_path):
    folder = folder_of(family, tmp_path / "model", router_aux_loss_coef=0.0)
    first, targets = adapter(family, folder, tmp_path / "first")
    config = set_up(folder, tmp_path / "run", {}, native=native, path=str(first), targets=targets)
    _, theirs = trained_as_peft(config, folder, first, tmp_path)
    ours = same_tensors(tmp_path, theirs, rtol=1e-3, atol=5e-5)
    read = get_peft_model_state_dict(loaded(folder, tmp_path / "ours"))
    assert {*read} == {*ours} and all(torch.equal(read[key], ours[key]) for key in ours)


def loaded(folder: Path, adapter: Path):
    """The model with an adapter, as peft loads it."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return PeftModel.from_pretrained(base, adapter).eval()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("native", [False, True])
def test_every_layout_trains_experts_as_one_process(native, layout, tmp_path, single):
    folder, first, due = single[native]
    how = {"native": native, "targets": MIXED, "path": str(first)}
    many = losses(set_up(folder, tmp_path / "many", LAYOUTS[layout], **how))
    assert many == pytest.approx(due, rel=1e-6)


@pytest.fixture(scope="module")
def single(tmp_path_factory):
    """A model, an adapter of its attention and experts, and its losses in one process."""
    found = {}
    for native in (False, True):
        place = tmp_path_factory.mktemp("single")
        folder = folder_of("mixtral", place / "model")
        first, targets = adapter("mixtral", folder, place / "first")
        assert targets == MIXED
        how = {"native": native, "targets": MIXED, "path": str(first)}
        found[native] = folder, first, losses(set_up(folder, place / "one", {}, **how))
    return found


@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_the_layers_of_gpt2_train_as_those_of_peft(kind, tmp_path):
    folder = folder_of("gpt2", tmp_path / "model")
    words = ["c_attn", "c_fc", "c_proj"]
    first = peft_folder(folder, tmp_path / "first", kind, words, fan_in_fan_out=True)
    how = {"native": False, "kind": kind, "targets": ["all"], "path": str(first)}
    config = set_up(folder, tmp_path / "run", {}, **how)
    due, theirs = trained_as_peft(config, folder, first, tmp_path)
    ids = torch.arange(24)[None]
    ours, trained = loaded(folder, tmp_path / "ours"), theirs.eval()
    torch.testing.assert_close(
        ours(input_ids=ids).logits, trained(input_ids=ids).logits, rtol=1e-4, atol=1e-4
    )
    many = {"parallelism.pp": 2} | HALF | {"optimizer.zero_stage": 3}
    assert losses(set_up(folder, tmp_path / "many", many, **how)) == pytest.approx(due, rel=1e-6)


ROLES = {
    "attention": {"q_proj", "k_proj", "v_proj", "o_proj"},
    "experts": {"gate_up_proj", "down_proj"},
    "mlp": {"gate_proj", "up_proj", "down_proj"},
}


@pytest.mark.parametrize("native", [False, True])
def test_roles_are_the_layers_that_are_meant(native, tmp_path):
    folder = folder_of("qwen3_moe", tmp_path / "model")  # layer 0 is dense
    for role, words in ROLES.items():
        config = set_up(folder, tmp_path / "run", {}, native=native, targets=[role])
        names = {part.name for own in config.adapter.weights.values() for part in own}
        assert {name.removesuffix(".weight").rpartition(".")[2] for name in names} == words
        assert all((".experts." in name) == (role == "experts") for name in names)
    config = set_up(folder, tmp_path / "run", {}, native=native, targets=["down_proj", "all"])
    assert not config.adapter.stacks


REFUSED = {
    "dora": ({"kind": "dora"}, "model.adapter.kind: dora was given; experts.* have no dora"),
    "dropout": ({"dropout": 0.1}, "model.adapter.dropout: 0.1 was given; experts"),
    "role": ({"targets": ["mixer"]}, "'mixer' is the role of no layer of this model: there are at"),
    "near": ({"targets": ["expert"]}, "'expert' is no linear layer: .*; is it experts?"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_stacks_cannot_have_is_refused_by_name(case, tmp_path):
    folder = folder_of("mixtral", tmp_path / "model")
    change, words = REFUSED[case]
    with pytest.raises(ConfigError, match=words):
        set_up(folder, tmp_path / "run", {}, native=False, **{"targets": ["experts"]} | change)
