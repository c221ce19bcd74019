"""Nanotron's names of the tensors of a decoder, by which figures of layers are reported."""

from __future__ import annotations

from kenotron_dist import Role
from kenotron_models.spec import Architecture

_SHIFTS: frozenset[Role] = frozenset({"bias", "norm_bias"})
_SCALES: frozenset[Role] = frozenset({"norm", "norm_offset"})
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


def components(config: Architecture) -> tuple[str, ...]:
    """Return the components that are also reported over all blocks.

    These are the names of the blocks' parts, in the order of their first use (``attention``,
    ``mlp``), and ``norm``.
    """
    names = (part.name for block in config.decoder.blocks for part in block.parts)
    return (*dict.fromkeys(names), "norm")


def component_of(path: str, role: Role, config: Architecture) -> str | None:
    """Return which of ``components`` a parameter of a block belongs to.

    Args:
        path: its name in the model.
        role: what it is. Biases belong to no component.
        config: the model.

    Returns:
        The part of the block that has it, norms inside the part included; ``norm`` for a norm
        before a part; None for all else.
    """
    blocks = config.decoder.blocks
    folder, number, inner = (*path.split(".", 2), "", "")[:3]
    if (
        folder != "layers"
        or role in _SHIFTS
        or not number.isdecimal()
        or int(number) >= len(blocks)
    ):
        return None
    for part in blocks[int(number)].parts:
        if inner.startswith(f"{part.name}."):
            return part.name
    return "norm" if role in _SCALES else None
