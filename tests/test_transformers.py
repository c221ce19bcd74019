"""One process against Hugging Face's Llama with the same weights: loss and every gradient."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import parity
import pytest
import torch
import torch.nn.functional as F
from parity import Layout
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from kenotron_dist import spawn
from kenotron_models import RopeScaling

NAMES = {
    "attention_norm.weight": "input_layernorm.weight",
    "attention.out.weight": "self_attn.o_proj.weight",
    "mlp_norm.weight": "post_attention_layernorm.weight",
    "mlp.down.weight": "mlp.down_proj.weight",
}
FUSED = {
    "attention.qkv.weight": ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
    "attention.qkv.bias": ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
    "mlp.gate_up.weight": ["mlp.gate_proj", "mlp.up_proj"],
}
OUTER = {
    "embedding.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "head.weight": "lm_head.weight",
}


def split_fused(name: str, value: np.ndarray, heads: int, kv_heads: int) -> list[np.ndarray]:
    """q, k, v or gate, up."""
    if "qkv" in name:
        unit = len(value) // (heads + 2 * kv_heads)
        return np.split(value, [heads * unit, (heads + kv_heads) * unit])
    return np.split(value, 2)


def to_transformers(ours: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The same tensors under transformers' names."""
    found = {}
    for name, value in ours.items():
        if name in OUTER:
            found[OUTER[name]] = value
            continue
        _, index, inner = name.split(".", 2)
        prefix = f"model.layers.{index}."
        if inner in NAMES:
            found[prefix + NAMES[inner]] = value
        else:
            parts = split_fused(inner, value, heads=8, kv_heads=2)
            for module, part in zip(FUSED[inner], parts, strict=True):
                found[f"{prefix}{module}.{inner.rsplit('.', 1)[1]}"] = part
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("transformers")
    parity.write_text(path)
    return path


LLAMA3 = RopeScaling(factor=8.0, original_max_position_embeddings=16)
LINEAR = RopeScaling(factor=4.0, rope_type="linear")


@pytest.mark.parametrize(
    ("tied", "change"),
    [
        (False, {}),
        (True, {}),
        (True, {"rope_scaling": LLAMA3}),
        (False, {"rope_scaling": LINEAR}),
        (False, {"attention_bias": True}),
    ],
    ids=["untied", "tied", "llama3", "linear", "bias"],
)
def test_loss_and_every_gradient_equal_transformers(
    tied: bool, change: dict[str, Any], folder: Path
) -> None:
    config = parity.configure(Layout(tied=tied), folder)
    config = replace(
        config,
        model=replace(config.model, model_config=replace(config.model.model_config, **change)),
    )
    weights = to_transformers(spawn(parity.parameters, config)[0])
    tokens, labels = map(torch.from_numpy, spawn(parity.rows, config)[0])
    ranks = spawn(parity.gradients, config)
    ours = to_transformers(parity.assemble(ranks))

    llama = config.model.model_config
    rope = {"rope_type": "default"} if llama.rope_scaling is None else asdict(llama.rope_scaling)
    if rope["rope_type"] == "linear":
        rope = {name: rope[name] for name in ("rope_type", "factor")}
    # Qwen2 is a Llama with biases for queries, keys and values.
    kinds = (Qwen2Config, Qwen2ForCausalLM) if llama.attention_bias else ()
    make_config, make_model = kinds or (LlamaConfig, LlamaForCausalLM)
    model = make_model(
        make_config(
            vocab_size=llama.vocab_size,
            hidden_size=llama.hidden_size,
            intermediate_size=llama.intermediate_size,
            num_hidden_layers=llama.num_hidden_layers,
            num_attention_heads=llama.num_attention_heads,
            num_key_value_heads=llama.kv_heads,
            max_position_embeddings=llama.max_position_embeddings,
            rms_norm_eps=llama.rms_norm_eps,
            rope_parameters={**rope, "rope_theta": llama.rope_theta},
            tie_word_embeddings=tied,
        )
    )
    if tied:
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    model.load_state_dict({name: torch.from_numpy(w) for name, w in weights.items()})
    logits = model(tokens).logits
    loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
    loss.backward()
    theirs = {name: p.grad.numpy() for name, p in model.named_parameters() if p.grad is not None}

    assert ranks[0][0] == pytest.approx(loss.item(), rel=1e-6)
    deviations = parity.gradient_deviations(ours, theirs)
    worst = max(deviations, key=lambda name: deviations[name])
    print(f"\n{worst} at {deviations[worst]:.2f} of what is allowed", end="")
    assert deviations[worst] <= 1
