"""Nanotron's names of the tensors of a decoder, by which figures of layers are reported."""

from __future__ import annotations

COMPONENTS = ("attention", "mlp", "norm")
"""Parts of a decoder layer that are also reported over all layers."""
_PLACES = {
    "embedding": "token_embedding",
    "norm": "final_layernorm",
    "head": "lm_head",
    "attention.qkv": "attention/qkv_proj",
    "attention.out": "attention/o_proj",
    "mlp.gate_up": "mlp/gate_up_proj",
    "mlp.up": "mlp/up_proj",
    "mlp.down": "mlp/down_proj",
    "attention_norm": "norm/input_layernorm",
    "mlp_norm": "norm/post_attention_layernorm",
}


def reported_name(path: str) -> str:
    """``layers.3.mlp.down.weight`` -> ``layer_3/mlp/down_proj``; a bias keeps its last word."""
    owner, _, leaf = path.rpartition(".")
    layer, inner = "", owner
    if owner.startswith("layers."):
        _, number, inner = owner.split(".", 2)
        layer = f"layer_{number}/"
    place = _PLACES.get(inner, inner.replace(".", "/"))
    return f"{layer}{place}" + ("" if leaf == "weight" else f".{leaf}")


def component_of(path: str) -> str | None:
    """Which of ``COMPONENTS`` a weight of a decoder layer belongs to; None for all else."""
    parts = reported_name(path).split("/")
    inside = path.startswith("layers.") and path.endswith(".weight")
    return parts[1] if inside and parts[1] in COMPONENTS else None
