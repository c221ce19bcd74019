"""What Nanotron calls the tensors of a Llama, what they are called here, and their shapes.

Both pack them in one order: the rows of the attention's first matrix are all queries, then all
keys, then all values, head by head; those of the feed-forward's first are gate, then up. So values
are taken over as they are. The order of a head's features is ``rope_interleaved``, in both.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

EMBEDDING = "model.token_position_embeddings.pp_block.token_embedding.weight"
HEAD = "model.lm_head.pp_block.weight"
_SIZES = ("hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers")
_LAYER = {
    "input_layernorm.weight": "attention_norm.weight",
    "attn.qkv_proj.weight": "attention.qkv.weight",
    "attn.o_proj.weight": "attention.out.weight",
    "post_attention_layernorm.weight": "mlp_norm.weight",
    "mlp.gate_up_proj.weight": "mlp.gate_up.weight",
    "mlp.down_proj.weight": "mlp.down.weight",
}
"""Within a decoder layer."""
FAMILIES = ("is_llama_config", "is_qwen2_config")
"""Markers of the configurations whose plain form is a Llama."""
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "is_qwen2_config": (True,),
    "attention_bias": (False,),
    "moe_config": (None,),
    "no_rope_layer": (None,),
    "rope_seq_len_interpolation_factor": (None,),
    "sliding_window_size": (None,),
    "z_loss_enabled": (False,),
}
"""Fields that only Nanotron has, and values with which the model is a plain Llama."""
_OF_THE_RUN = (
    "z_loss_coefficient", "flex_attention_mask", "log_attn_probs", "ring_attn_heads_k_stride",
    "moe_layer_recompute",
)  # fmt: skip
"""Fields that do not say what the weights mean; so are all that begin with an underscore."""


@dataclass(frozen=True)
class Due:
    """A tensor that a checkpoint must have."""

    name: str
    """Name here."""
    shape: tuple[int, ...]


def llama_tensors(config: Mapping[str, Any], where: str) -> dict[str, Due]:
    """The tensors of a Llama, by Nanotron's name, in the order of the model.

    Arguments: the values of ``model_config.json``; what errors begin with. Raises ValueError when
    it is of no Llama, or lacks a size.
    """
    if not any(config.get(marker) for marker in FAMILIES):
        markers = sorted(name for name in config if name.startswith("is_") and config[name])
        raise ValueError(
            f"{where}: only the tensors of Llama and plain Qwen2 have known names, not those of "
            f"{', '.join(markers) or 'an unmarked model'}: give rename, a name for every tensor"
        )
    missing = [size for size in (*_SIZES, "vocab_size") if type(config.get(size)) is not int]
    if missing:
        raise ValueError(f"{where}: {', '.join(missing)} must be there, as whole numbers")
    hidden, wide, heads, layers = (config[size] for size in _SIZES)
    kv_heads = config.get("num_key_value_heads") or heads
    qkv = hidden // heads * (heads + 2 * kv_heads)
    shapes = {
        "attn.qkv_proj.weight": (qkv, hidden),
        "attn.o_proj.weight": (hidden, hidden),
        "mlp.gate_up_proj.weight": (2 * wide, hidden),
        "mlp.down_proj.weight": (hidden, wide),
    }
    vocabulary = (config["vocab_size"], hidden)
    found = {EMBEDDING: Due("embedding.weight", vocabulary)}
    for i in range(layers):
        for name, own in _LAYER.items():
            due = Due(f"layers.{i}.{own}", shapes.get(name, (hidden,)))
            found[f"model.decoder.{i}.pp_block.{name}"] = due
    found["model.final_layer_norm.pp_block.weight"] = Due("norm.weight", (hidden,))
    if not config.get("tie_word_embeddings"):
        found[HEAD] = Due("head.weight", vocabulary)
    return found


def llama_config(config: Mapping[str, Any], config_text: str) -> dict[str, Any]:
    """Nanotron's model configuration as a program compares it with its own, field by field.

    Fields that change nothing are left out. One that changes what the model computes, and that a
    plain Llama has not, stays: a program that does not know it refuses the checkpoint by its name.
    """
    found = {
        name: value
        for name, value in config.items()
        if not name.startswith("_") and name not in _OF_THE_RUN
        if value not in _NEUTRAL.get(name, ())
    }
    if (found.get("rope_scaling") or {}).get("rope_type", "default") == "default":
        found["rope_scaling"] = None
    if "interleaved_rotary" in found:
        found["rope_interleaved"] = found.pop("interleaved_rotary")
    found["is_llama_config"] = True
    if any(line.strip() == "use_mup: true" for line in config_text.splitlines()):
        found["use_mup"] = True  # attention was scaled by 1/d, not 1/sqrt(d)
    return found
