"""Nanotron's names of the tensors of a model, our names for them, and their shapes.

Both pack them in one order: the rows of the attention's first matrix are all queries, then all
keys, then all values, head by head; those of the feed-forward's first are gate, then up. So values
are taken over as they are. The order of a head's features is ``rope_interleaved``, in both. Tensors
of experts are stacks of matrices here (``expert_names``).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kenotron_nanotron.expert_names import (
    Due,
    has_experts,
    llamoe_tensors,
    qwen2_tensors,
    section_of,
    whole_numbers,
)
from kenotron_nanotron.mamba_names import mamba_config, mamba_layer

EMBEDDING = "model.token_position_embeddings.pp_block.token_embedding.weight"
HEAD = "model.lm_head.pp_block.weight"
_SIZES = ("hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers")
FAMILIES = ("is_llama_config", "is_qwen2_config", "is_llamoe_config", "is_mamba_config")
"""Markers of the configurations whose tensors have known names."""
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
_UNREAD = {"tie_word_embeddings": False, "rope_scaling": None, "moe_capacity_factor": 1}
"""Fields of a LlaMoE that Nanotron does not read, and what it computes."""


def model_tensors(config: Mapping[str, Any], where: str) -> dict[str, Due]:
    """Return the tensors of a Llama, Qwen2, LlaMoE or Mamba by Nanotron's name, in order.

    Args:
        config: the values of ``model_config.json``.
        where: what errors begin with.

    Raises:
        ValueError: it is of another model, or lacks a size.
    """
    if not any(config.get(marker) for marker in FAMILIES):
        markers = sorted(name for name in config if name.startswith("is_") and config[name])
        raise ValueError(
            f"{where}: only the tensors of Llama, Qwen2, LlaMoE and Mamba have known names, not "
            f"those of {', '.join(markers) or 'an unmarked model'}: give rename, a name for every "
            "tensor"
        )
    recurrent = bool(config.get("is_mamba_config"))
    sizes = ("d_model" if recurrent else "hidden_size", "num_hidden_layers", "vocab_size")
    hidden, layers, rows = whole_numbers(config, sizes, where)
    if recurrent:
        blocks = [mamba_layer(config, where)] * layers
    else:
        blocks = _transformer(config, where)
    found = {EMBEDDING: Due("embedding.weight", (rows, hidden))}
    for i, layer in enumerate(blocks):
        for name, due in layer.items():
            found[f"model.decoder.{i}.pp_block.{name}"] = due.within(f"layers.{i}")
    found["model.final_layer_norm.pp_block.weight"] = Due("norm.weight", (hidden,))
    tied = recurrent or (config.get("tie_word_embeddings") and not config.get("is_llamoe_config"))
    if not tied:
        found[HEAD] = Due("head.weight", (rows, hidden))
    return found


def _transformer(config: Mapping[str, Any], where: str) -> list[dict[str, Due]]:
    """Tensors of each layer of a model with attention."""
    hidden, wide, heads, layers = whole_numbers(config, _SIZES, where)
    experts = _experts(config, where)
    dense = {
        "post_attention_layernorm.weight": Due("mlp_norm.weight", (hidden,)),
        "mlp.gate_up_proj.weight": Due("mlp.gate_up.weight", (2 * wide, hidden)),
        "mlp.down_proj.weight": Due("mlp.down.weight", (hidden, wide)),
    }
    return [_attention(config, hidden, heads) | experts.get(i, dense) for i in range(layers)]


def _attention(config: Mapping[str, Any], hidden: int, heads: int) -> dict[str, Due]:
    """Tensors of a layer up to its feed-forward, and their names within a layer here."""
    rows = hidden // heads * (heads + 2 * (config.get("num_key_value_heads") or heads))
    found = {
        "input_layernorm.weight": Due("attention_norm.weight", (hidden,)),
        "attn.qkv_proj.weight": Due("attention.qkv.weight", (rows, hidden)),
        "attn.o_proj.weight": Due("attention.out.weight", (hidden, hidden)),
    }
    if config.get("attention_bias"):
        found["attn.qkv_proj.bias"] = Due("attention.qkv.bias", (rows,))
    return found


def _experts(config: Mapping[str, Any], where: str) -> dict[int, dict[str, Due]]:
    """Tensors of the layers (from 0) that have experts."""
    layers = config["num_hidden_layers"]
    if config.get("is_llamoe_config"):
        return dict.fromkeys(range(layers), llamoe_tensors(config, where))
    if not has_experts(config):
        return {}
    tensors = qwen2_tensors(config, where)
    chosen = section_of(config)["layers"]
    return dict.fromkeys(range(layers) if chosen == [-1] else chosen, tensors)


def model_config(config: Mapping[str, Any], config_text: str) -> dict[str, Any]:
    """Return Nanotron's model configuration as a program compares it with its own, by field.

    Fields that change nothing are left out. One that changes what the model computes, and that a
    plain Llama has not, stays: a program that does not know it refuses the checkpoint by its name.
    A Qwen2 without experts is a Llama, with biases or not.
    """
    if config.get("is_mamba_config"):
        return mamba_config(config)
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
    if config.get("is_llamoe_config"):
        found |= {name: value for name, value in _UNREAD.items() if name in found}
    elif has_experts(config):
        found |= {"is_qwen2_config": True, "moe_config": section_of(config)}
    else:
        found["is_llama_config"] = True
        found.pop("moe_config", None)  # without a layer
    if any(line.strip() == "use_mup: true" for line in config_text.splitlines()):
        found["multipliers"] = _of_mup(config)
    return found


def _of_mup(config: Mapping[str, Any]) -> dict[str, Any]:
    """Multipliers of a run with use_mup: scores were divided by the features of a head."""
    features = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    scores = [1 / features / features**-0.5] * config["num_hidden_layers"]
    return {"embedding": 1.0, "logits": 1.0, "attention": scores, "residual": 1.0}
