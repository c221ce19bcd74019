"""A tp plan for a model that has none, from the names and shapes of its layers.

It is shown and not used: a user gives it as ``model.model_config.tp_plan``, as it is or changed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from inspect import signature

from torch import nn

from kenotron_tp import HEAD_BIASES, features_of, is_linear

MULTI_QUERY = "multi_query_colwise"

ATTENTION = re.compile(r"[qkv]_proj|query|key|value|W[qkv]")
"""Layers of attention whose output features are cut."""
FUSED = re.compile(r"query_key_value|c_attn|Wqkv")
"""One layer of attention that is three."""
MLP = re.compile(r"(gate|up)_proj|fc1|fc_in|c_fc|dense_h_to_4h|wi|w1|w3")
"""Layers of a feed-forward network whose output features are cut."""
ROWS = re.compile(r"(o|out|down|c)_proj|fc2|fc_out|dense_4h_to_h|wo|w2")
"""Layers whose input features are cut."""
DENSE = re.compile(r"dense|" + ROWS.pattern)
"""The same in attention."""
COUNTS = (
    "num_heads", "num_attention_heads", "n_heads", "n_head", "num_key_value_heads", "num_kv_heads",
    "embed_dim", "hidden_size", "split_size", "d_model_size",
)  # fmt: skip
"""Numbers of attention that a rank has a part of, where they are above 1."""


def found_plan(model: nn.Module) -> dict[str, str]:
    """Return styles of `kenotron_tp.parallelize` for attention and feed-forward networks.

    A module counts that has three layers of queries, keys and values, or one that is all three, or
    layers of a feed-forward network, and one layer that takes their features. The names are full,
    with ``*`` for numbers. What is next to a feed-forward network and has as many features as the
    residual stream stays whole. Other neighbours are left to the user: norms of cut features.
    """
    found: dict[str, str] = {}
    for path, module in model.named_modules():
        layers = {name: each for name, each in module.named_children() if is_linear(each)}
        start = re.sub(r"\.\d+(?=\.|$)", ".*", path) + "."
        attention = _attention(module, layers)
        found |= {start + name: style for name, style in attention.items()}
        if attention and HEAD_BIASES & signature(type(module).forward).parameters.keys():
            found[start[:-1]] = "own_heads_of_bias"
        rows = [name for name in layers if ROWS.fullmatch(name)]
        columns = [name for name in layers if MLP.fullmatch(name)]
        if len(rows) != 1 or not columns or any(map(ATTENTION.fullmatch, layers)):
            continue
        inner, width = features_of(layers[rows[0]])
        if any(features_of(layers[name])[0] != width for name in columns):
            continue
        found |= dict.fromkeys([start + name for name in columns], "colwise")
        found[start + rows[0]] = "rowwise"
        for name, child in module.named_children():
            if name not in columns + rows and _sees(child, width, inner):
                found.setdefault(start + name, "replicate")
    return found


def _attention(module: nn.Module, layers: Mapping[str, nn.Module]) -> dict[str, str]:
    """Return styles of attention's layers and numbers; empty where it is none, or not known."""
    heads = [name for name in layers if ATTENTION.fullmatch(name)]
    fused = [name for name in layers if FUSED.fullmatch(name)]
    rows = [name for name in layers if DENSE.fullmatch(name)]
    if len(rows) != 1 or (len(heads), len(fused)) not in ((3, 0), (0, 1)):
        return {}
    width = features_of(layers[rows[0]])[1]
    if any(features_of(layers[name])[0] != width for name in heads + fused):
        return {}
    found = dict.fromkeys(heads, "colwise") | {rows[0]: "rowwise"}
    styles = {name: _fused_style(name, layers[name], module) for name in fused}
    if None in styles.values():
        return {}
    found |= {name: style for name, style in styles.items() if style is not None}
    counts = [name for name in COUNTS if type(n := vars(module).get(name)) is int and n > 1]
    found |= dict.fromkeys(counts, "divide")
    if MULTI_QUERY in found.values():  # one key and one value, for all queries of a rank
        groups = ("kv_dim", "num_key_value_groups")
        found |= {n: s for n, s in zip(groups, ("replicate", "divide"), strict=True)
                  if n in vars(module)}  # fmt: skip
    for name, buffer in module.named_buffers(recurse=False):
        if buffer.ndim > 2 and set(buffer.shape[:-2]) == {1}:  # a mask of all heads
            found[name] = "replicate"
    for name, child in module.named_children():
        shapes = {tuple(parameter.shape) for parameter in child.parameters()}
        if shapes == {(vars(module).get("head_dim"),)}:
            found[name] = "replicated_with_grad_allreduce"
    return found


def _fused_style(name: str, layer: nn.Module, attention: nn.Module) -> str | None:
    """Return how the pieces of a fused layer lie, as names and shapes tell; None: unknown."""
    width, out = features_of(layer)
    if out == width + 2 * getattr(attention, "head_dim", 0):
        return MULTI_QUERY
    if out != 3 * width and not hasattr(attention, "new_decoder_architecture"):  # Falcon's groups
        return None
    by_heads = name == "query_key_value" or isinstance(layer, nn.Linear) and name == "c_attn"
    return "heads_colwise" if by_heads else "qkv_colwise"


def _sees(module: nn.Module, width: int, cut: int) -> bool:
    """Return True for parameters that all fit the residual stream, and none the cut features."""
    shapes = [parameter.shape for parameter in module.parameters()]
    return bool(shapes) and width != cut and all(width in shape for shape in shapes)
