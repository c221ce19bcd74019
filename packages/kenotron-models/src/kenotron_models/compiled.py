"""Layers compiled one by one with ``torch.compile``."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from kenotron_tp import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding


def compile_layers(layers: Iterable[nn.Module]) -> None:
    """Compile each layer in place; names of parameters stay.

    Layers that communicate, those cut over more than one rank, are called by the programs and are
    no part of them: a program cannot wait for a peer. Everything between them is compiled, and what
    it computes again in the backward is the compiler's choice (``recompute`` ``selective`` changes
    nothing more).
    """
    for layer in layers:
        for part in layer.modules():
            cut = isinstance(
                part, ColumnParallelLinear | RowParallelLinear | VocabParallelEmbedding
            )
            if cut and (part.axis.size > 1 or part is layer):
                part.forward = torch.compiler.disable(part.forward)
        layer.compile(dynamic=False)
