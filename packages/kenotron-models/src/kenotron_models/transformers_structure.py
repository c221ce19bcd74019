"""A tp plan for a model that has none, from the names and shapes of its layers.

It is shown and not used: a user gives it as ``model.model_config.tp_plan``, as it is or changed.
"""

from __future__ import annotations

import re

from torch import nn

ATTENTION = re.compile(r"[qkv]_proj|query|key|value")
"""Layers of attention whose output features are cut."""
MLP = re.compile(r"(gate|up)_proj|fc1|fc_in|c_fc|dense_h_to_4h|wi|w1|w3")
"""Layers of a feed-forward network whose output features are cut."""
ROWS = re.compile(r"(o|out|down|c)_proj|fc2|fc_out|dense_4h_to_h|wo|w2")
"""Layers whose input features are cut."""
COUNTS = ("num_heads", "num_attention_heads", "num_key_value_heads", "embed_dim", "hidden_size")
"""Numbers of attention that a rank has a part of."""


def found_plan(model: nn.Module) -> dict[str, str]:
    """Return styles of `kenotron_tp.parallelize` for attention and feed-forward networks.

    A module counts that has three layers of queries, keys and values, or layers of a feed-forward
    network, and one layer that takes their features. The names are full, with ``*`` for numbers.
    What is next to a feed-forward network and has as many features as the residual stream stays
    whole. Other neighbours are left to the user: norms of heads, and of cut features.
    """
    found: dict[str, str] = {}
    for path, module in model.named_modules():
        layers = {name: each for name, each in module.named_children() if type(each) is nn.Linear}
        rows = [name for name in layers if ROWS.fullmatch(name)]
        heads = [name for name in layers if ATTENTION.fullmatch(name)]
        columns = heads or [name for name in layers if MLP.fullmatch(name)]
        if len(rows) != 1 or not columns or len(heads) not in (0, 3):
            continue
        width = layers[rows[0]].out_features
        if any(layers[name].in_features != width for name in columns):
            continue
        start = re.sub(r"\.\d+(?=\.|$)", ".*", path) + "."
        found |= dict.fromkeys([start + name for name in columns], "colwise")
        found[start + rows[0]] = "rowwise"
        if heads:
            counts = [name for name in COUNTS if type(vars(module).get(name)) is int]
            found |= dict.fromkeys([start + name for name in counts], "divide")
            continue
        for name, child in module.named_children():
            if name not in columns + rows and _sees(child, width, layers[rows[0]].in_features):
                found.setdefault(start + name, "replicate")
    return found


def _sees(module: nn.Module, width: int, cut: int) -> bool:
    """Return True for parameters that all fit the residual stream, and none the cut features."""
    shapes = [parameter.shape for parameter in module.parameters()]
    return bool(shapes) and width != cut and all(width in shape for shape in shapes)
