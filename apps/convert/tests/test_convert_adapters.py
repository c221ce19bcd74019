"""Adapters of peft merged into a model: each as peft computes it, or refused by name."""

from __future__ import annotations

import json
import re
from copy import deepcopy
from dataclasses import MISSING, Field, fields
from functools import cache
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, GPT2Config, LlamaConfig

from kenotron_convert.adapters import merge_adapter
from kenotron_models.adapters import targeted

pytestmark = pytest.mark.filterwarnings("ignore")  # of peft
IDS = torch.arange(1, 21)[None]
LLAMA = {
    "vocab_size": 31,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "initializer_range": 0.3,
}
GPT2 = {
    "vocab_size": 31,
    "n_embd": 16,
    "n_layer": 2,
    "n_head": 2,
    "initializer_range": 0.3,
    **dict.fromkeys(("embd_pdrop", "attn_pdrop", "resid_pdrop"), 0.0),
}
GIVEN = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM"}


@pytest.fixture(scope="module")
def bases(tmp_path_factory) -> Path:
    """Tiny models with large weights."""
    folder = tmp_path_factory.mktemp("bases")
    torch.manual_seed(0)
    for name, config in (("llama", LlamaConfig(**LLAMA)), ("gpt2", GPT2Config(**GPT2))):
        AutoModelForCausalLM.from_config(config).save_pretrained(folder / name)
    return folder


def adapter_of(base: Path, folder: Path, **changes: object) -> torch.Tensor:
    """An adapter that peft writes; logits of the model that it loads it into."""
    torch.manual_seed(1)
    model = get_peft_model(deepcopy(loaded(base)), LoraConfig(**(GIVEN | changes)))
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data += 0.3 * torch.randn_like(parameter)
    model.save_pretrained(folder)
    return PeftModel.from_pretrained(deepcopy(loaded(base)), folder).eval()(IDS).logits.detach()


@cache
def loaded(base: Path) -> nn.Module:
    return AutoModelForCausalLM.from_pretrained(base)


def logits(folder: Path) -> torch.Tensor:
    return AutoModelForCausalLM.from_pretrained(folder).eval()(IDS).logits.detach()


MERGED = {
    "rank_pattern": {"rank_pattern": {"q_proj": 2, "layers.1.self_attn.v_proj": 6}},
    "alpha_pattern": {"alpha_pattern": {"q_proj": 3}, "use_rslora": True},
    "orthogonal": {"init_lora_weights": "orthogonal", "use_dora": True},
    "square and wide Conv1D": {"target_modules": ["c_attn", "attn.c_proj"]},
    "Conv1D with norms": {"target_modules": ["c_fc", "c_proj"], "use_dora": True},
}


@pytest.mark.parametrize("case", MERGED)
def test_a_merged_model_is_that_of_peft(case, bases, tmp_path):
    base = bases / ("gpt2" if "Conv1D" in case else "llama")
    due = adapter_of(base, tmp_path / "adapter", **MERGED[case])
    merge_adapter(tmp_path / "adapter", base, tmp_path / "merged")
    torch.testing.assert_close(logits(tmp_path / "merged"), due, rtol=1e-4, atol=1e-4)
    assert (due - logits(base)).abs().max() > 0.1


REFUSED = {
    "modules_to_save is ['norm'], which is not": {"modules_to_save": ["norm"]},
    "lora_bias is True": {"lora_bias": True},
    "init_lora_weights is 'pissa', which changes the": {"init_lora_weights": "pissa"},
    "init_lora_weights is 'olora'": {"init_lora_weights": "olora"},
    "trainable_token_indices is": {"trainable_token_indices": [5, 6]},
    "embed_tokens.base_layer.weight (3 tensors in all) is no": {"target_modules": ["embed_tokens"]},
    "layer_replication is": {"layer_replication": [[0, 2], [1, 2]]},
    "the model has no model.norm.weight, for": None,
    "v_proj.lora_B.weight is missing from": None,
}


@pytest.mark.parametrize("words", REFUSED)
def test_an_adapter_of_another_kind_is_refused_by_name(words, bases, tmp_path):
    base, adapter = bases / "llama", tmp_path / "adapter"
    adapter_of(base, adapter, **(REFUSED[words] or {}))
    if REFUSED[words] is None:
        file = adapter / "adapter_model.safetensors"
        tensors = load_file(file)
        old = next(n for n in tensors if n.endswith("v_proj.lora_B.weight"))
        value = tensors.pop(old)
        if "no model.norm" in words:
            tensors[old] = value
            for kind in "AB":
                name = f"base_model.model.model.norm.lora_{kind}.weight"
                tensors[name] = tensors[old.replace("lora_B", f"lora_{kind}")].clone()
            weights = load_file(base / "model.safetensors")
            base = tmp_path / "base"
            base.mkdir()
            weights.pop("model.norm.weight")
            save_file(weights, base / "model.safetensors", {"format": "pt"})
            (base / "config.json").write_text((bases / "llama/config.json").read_text())
        save_file(tensors, file, {"format": "pt"})
    with pytest.raises(ValueError, match=re.escape(words)):
        merge_adapter(adapter, base, tmp_path / "merged")
    assert not list(tmp_path.glob("*merged*"))


SPECIAL = {
    "bias": ["all", "lora_only"],
    "init_lora_weights": [False, "gaussian", "orthogonal", "pissa", "olora", "mica"],
    "layer_replication": [[[0, 2], [1, 2]]],
    "layers_to_transform": [[1]],
    "modules_to_save": [["norm"], ["lm_head"]],
    "target_modules": ["all-linear", ["down_proj"], ["embed_tokens"]],
    "target_parameters": [["mlp.up_proj.weight"]],
    "trainable_token_indices": [[5, 6]],
}
GUESSES = (True, 1, 0.5, "other", ["q_proj"], {"q_proj": 2})


def others(field: Field) -> list[object]:
    """Values of a field that are not its default."""
    if field.name in SPECIAL:
        return SPECIAL[field.name]
    fresh = field.default if field.default_factory is MISSING else field.default_factory()
    return [
        each for each in GUESSES if (fresh is None or type(each) is type(fresh)) and each != fresh
    ]


def test_every_field_of_peft_is_computed_or_refused_by_name(bases, tmp_path):
    """A changed value of each field leads to the logits of peft, or to an error with its name."""
    base, adapter, merged = bases / "llama", tmp_path / "adapter", tmp_path / "merged"
    computed, refused = set(), set()
    for field in fields(LoraConfig):
        for value in others(field):
            try:
                due = adapter_of(base, adapter, **{field.name: value})
            except Exception:  # peft has no such value
                continue
            try:
                merge_adapter(adapter, base, merged, overwrite=True)
            except ValueError as error:
                assert re.search(rf"\b{field.name}\b|base_layer|saved_", str(error)), error
                refused.add(field.name)
                continue
            computed.add(field.name)
            difference = (logits(merged) - due).abs().max()
            assert difference < 1e-4, f"{field.name} {value!r}: {difference}"
    assert computed >= {"r", "rank_pattern", "use_rslora", "use_dora", "layers_to_transform"}
    assert refused >= {"bias", "lora_bias", "modules_to_save", "init_lora_weights"}


EXPERTS = {
    "mixtral": {"num_local_experts": 3, "num_experts_per_tok": 2},  # a file has each matrix alone
    "gpt_oss": {"num_local_experts": 3, "num_experts_per_tok": 2, "head_dim": 8}
    | {"intermediate_size": 16},  # square, and (E, I, O)
}


@pytest.mark.parametrize("family", EXPERTS)
@pytest.mark.parametrize("stacks", [["experts.gate_up_proj", "experts.down_proj"], ["down_proj"]])
def test_merged_experts_are_those_of_peft(family, stacks, tmp_path):
    base, adapter, merged = tmp_path / "base", tmp_path / "adapter", tmp_path / "merged"
    torch.manual_seed(2)
    config = AutoConfig.for_model(family, **LLAMA | EXPERTS[family])
    AutoModelForCausalLM.from_config(config).save_pretrained(base)
    words = {"target_modules": ["q_proj"], "target_parameters": stacks}
    due = adapter_of(base, adapter, **words)
    merge_adapter(adapter, base, merged)
    torch.testing.assert_close(logits(merged), due, rtol=1e-4, atol=1e-4)
    assert (due - logits(base)).abs().max() > 0.1
    values = json.loads((adapter / "adapter_config.json").read_text())
    for change, error in (
        (
            {"r": 2},
            r"lora_A.weight is \(12, \d+\), and it must be \(6, \d+\) for model.layers",
        ),
        ({"target_parameters": []}, "experts is an adapter of experts that target_parameters does"),
    ):
        (adapter / "adapter_config.json").write_text(json.dumps(values | change))
        with pytest.raises(ValueError, match=error):
            merge_adapter(adapter, base, merged, overwrite=True)


def test_a_model_without_linear_layers_in_blocks_is_said():
    with pytest.raises(ValueError, match="'all' is no linear layer: there are none"):
        targeted({}, ["all"])
