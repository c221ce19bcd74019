"""Layers compiled one by one with ``torch.compile``."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from kenotron_models.transformers_layers import TransformersLayer
from kenotron_tp import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding

_CUT = (ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding)


def compile_layers(layers: Iterable[nn.Module]) -> None:
    """Compile each layer in place; names of parameters stay, hooks on layers are in no program.

    Layers that communicate, those cut over more than one rank, are called by the programs and are
    no part of them: a program cannot wait for a peer. Everything between them is compiled, and what
    it computes again in the backward is the compiler's choice (``recompute`` ``selective`` changes
    nothing more). Of a model of transformers the layers between embedding and head are compiled.
    """
    for layer in layers:
        if isinstance(layer, TransformersLayer):
            layer.compile_block()
            continue
        if isinstance(layer, _CUT):  # a single product, or several ranks
            continue
        for part in layer.modules():
            if isinstance(part, _CUT) and part.axis.size > 1:
                part.forward = torch.compiler.disable(part.forward)
        if type(layer).compile is nn.Module.compile:
            layer.forward = torch.compile(layer.forward, dynamic=False)  # its hooks stay outside
        else:
            layer.compile(dynamic=False)
