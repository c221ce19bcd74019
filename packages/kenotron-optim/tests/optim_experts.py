"""A small model with experts that trains on any mesh, and its values on any rank.

Shapes: N tokens of a rank, D features, F features of an expert, E experts; e of them on a rank.
"""

from __future__ import annotations

import zlib

import torch
from torch import Tensor, nn

from kenotron_dist import Mesh
from kenotron_dist.autograd import (
    all_gather_from,
    copy_to,
    gather_from,
    reduce_scatter_to,
    scatter_to,
)
from kenotron_dist.boxes import gather_into, scatter
from kenotron_dist.placement import Partial, Shard, named_parameters, parameter_layouts

D, F, E, TOKENS = 6, 5, 4, 16


class Layer(nn.Module):
    """A matrix cut over tp, then experts over ep, which see the tokens of all their ep group.

    Tokens are cut over tp between the two, so what stands there is partial over tp.
    """

    def __init__(self, mesh: Mesh) -> None:
        super().__init__()
        t, e = mesh.axis_sizes["tp"], E // mesh.axis_sizes["ep"]
        self.tp, self.ep = mesh["tp"], mesh["ep"]
        self.mix = nn.Parameter(torch.empty(D // t, D))
        self.scale = nn.Parameter(torch.empty(D))
        self.router = nn.Parameter(torch.empty(E, D))
        self.up = nn.Parameter(torch.empty(e, F, D))
        self.bias = nn.Parameter(torch.empty(e, F))
        self.down = nn.Parameter(torch.empty(e, D, F))
        self.placements = {
            "mix": Shard("tp", 0),
            "scale": Partial("tp"),
            "router": Partial("tp"),
            **dict.fromkeys(("up", "bias", "down"), Shard("ep", 0)),
        }

    def forward(self, x: Tensor) -> Tensor:
        """(N, D) -> (N / t, D)."""
        mixed = gather_from(copy_to(x, self.tp) @ self.mix.t(), self.tp)
        own = scatter_to(mixed, self.tp, 0) * self.scale
        scores = (own @ self.router.t()).softmax(-1)
        gates = scores * (scores == scores.amax(-1, keepdim=True))  # the best expert's alone
        tokens, gates = (all_gather_from(each, self.ep) for each in (own, gates))
        return own + reduce_scatter_to(self.experts(tokens, gates), self.ep)

    def experts(self, tokens: Tensor, gates: Tensor) -> Tensor:
        """What this rank's experts add to the tokens of its ep group; those without any do not run.

        A rank whose experts all have none gets no gradient for them.
        """
        out = tokens * 0.0 + gates.sum() * 0.0  # the graph, and so the collectives, of all ranks
        first = self.ep.rank * len(self.up)
        for i in range(len(self.up)):
            gate = gates[:, first + i : first + i + 1]
            if gate.any():
                out = out + gate * (
                    (tokens @ self.up[i].t() + self.bias[i]).tanh() @ self.down[i].t()
                )
        return out


class Net(nn.Sequential):
    """Two such layers; ``loss`` is the mean over the tokens of all ranks."""

    def __init__(self, mesh: Mesh) -> None:
        super().__init__(Layer(mesh), Layer(mesh))
        self.layouts = parameter_layouts(self, mesh.axis_sizes)
        with torch.no_grad():
            for name, parameter in named_parameters(self).items():
                layout = self.layouts[name]
                parameter.copy_(scatter(values(name, layout.shape), layout, mesh.view(layout)))

    def loss(self, x: Tensor, target: Tensor) -> Tensor:
        """This rank's part of the loss of the global batch: rows of both are its data rank's."""
        first, second = self
        y = second(gather_from(first(x), first.tp, 0))
        return (y - scatter_to(target, first.tp, 0)).square().sum() / (TOKENS * D)


def values(name: str, shape: tuple[int, ...]) -> Tensor:
    """The first values of a parameter."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    whole = torch.randn(shape, generator=generator) * 0.5
    if name.endswith("scale"):
        whole.abs_()
    return whole


def batch(step: int, mesh: Mesh) -> tuple[Tensor, Tensor]:
    """This data rank's rows of the tokens and targets of a step: consecutive ones."""
    generator = torch.Generator().manual_seed(step)
    rows = torch.randn(2, TOKENS, D, generator=generator)
    data = mesh["dp", "cp"]
    x, target = rows.chunk(data.size, 1)[data.rank]
    return x, target


def whole_tensors(net: Net, mesh: Mesh, found: dict[str, Tensor]) -> None:
    """Write what this rank has of each parameter into whole tensors."""
    for name, parameter in named_parameters(net).items():
        layout = net.layouts[name]
        whole = found.setdefault(name, torch.full(layout.shape, torch.nan))
        gather_into(whole, parameter.detach(), layout, mesh.view(layout))
