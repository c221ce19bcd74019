"""A model in pieces, with every kind of placement, whose gradients are known exactly.

Gradients are multiples of 1/8 and small: bfloat16 holds them, and fp32 adds them without rounding,
in any order. Where a rank's pieces lie in the whole is said here by hand, and not asked of the code
under test.

Ranks: ``t`` along tp, 1, 2 or 4 of them.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from kenotron_dist import Mesh
from kenotron_dist.placement import (
    Chunk,
    Partial,
    Shard,
    TensorLayout,
    Tie,
    named_parameters,
    parameter_layouts,
)
from kenotron_optim import GradAccumulator, Reduce, Slices

SHAPES = {
    "embed": (10, 4),
    "mix": (12, 3),
    "norm": (5,),
    "whole": (7, 3),
    "one": (1,),
    "unused": (3,),
}
"""Logical tensors that learn, in the order of a model."""
FIRST_STAGE = ("embed", "mix", "norm")
OWNERS = {"embed": ("embed", "head")} | {name: (name,) for name in SHAPES if name != "embed"}
GARBAGE = 1000.0
"""Gradient of padding: nobody may count it."""
Piece = tuple[slice, slice]
"""(rows of the local tensor, rows of the whole)"""


class Pieces(nn.Module):
    """What one tp rank holds of all stages."""

    def __init__(self, t: int, dtype: torch.dtype) -> None:
        super().__init__()
        for name, shape in SHAPES.items():
            rows = {"embed": -(-10 // t), "mix": 8 // t + 4 // min(t, 2)}.get(name, shape[0])
            self.register_parameter(name, nn.Parameter(torch.ones(rows, *shape[1:], dtype=dtype)))
        self.head = nn.Parameter(self.embed.detach())  # a leaf of its own over one storage
        self.frozen = nn.Parameter(torch.ones(4, dtype=dtype), requires_grad=False)
        vocabulary = Shard("tp", 0, (Chunk(10, pad=-10 % t),))
        self.placements = {
            "embed": (vocabulary, Tie("embed")),
            "head": (vocabulary, Tie("embed")),
            "mix": Shard("tp", 0, (Chunk(8), Chunk(4, parts=2))),
            "norm": Partial("tp"),
        }


@dataclass(frozen=True)
class Held:
    """This rank's parameters and the accumulator that watches them."""

    parameters: dict[str, nn.Parameter]
    grads: GradAccumulator


def pieces(name: str, t: int, r: int) -> list[Piece]:
    """Where the rows of tp rank ``r`` lie; padding is left out."""
    if name == "embed":
        rows = -(-10 // t)
        first, last = r * rows, min((r + 1) * rows, 10)
        return [(slice(0, last - first), slice(first, last))] if first < last else []
    if name == "mix":
        rows, parts = 8 // t, min(t, 2)
        part, shared = r // (t // parts), 4 // parts
        heads = slice(8 + part * shared, 8 + (part + 1) * shared)
        return [(slice(0, rows), slice(r * rows, (r + 1) * rows)), (slice(rows, None), heads)]
    return [(slice(None), slice(None))]


def draw(path: str, dp: int, tp: int) -> Tensor:
    """What the ranks (dp, tp) see of a parameter's gradient: multiples of 1/8, in global shape."""
    name = "embed" if path == "head" else path
    seed = zlib.crc32(f"{path} {dp} {tp}".encode())
    numbers = torch.randint(-40, 41, SHAPES[name], generator=torch.Generator().manual_seed(seed))
    return numbers.float() / 8


def expected(dp: int, t: int) -> dict[str, Tensor]:
    """The gradients of the whole model."""
    found = {}
    for name, shape in SHAPES.items():
        total = torch.zeros(shape)
        for path in OWNERS[name]:
            for d in range(dp if name != "unused" else 0):
                for r in range(t):
                    for _, rows in _own(name, t, r):
                        total[rows] += draw(path, d, _source(name, r))[rows]
        found[name] = total
    return found


def hold(
    mesh: Mesh,
    forget: str = "",
    dtype: torch.dtype = torch.float32,
    reduce: Reduce = "step",
) -> Held:
    """This stage's part, with layouts of the whole; ``forget`` plants a bug in these."""
    model = Pieces(mesh["tp"].size, dtype)
    last = mesh["pp"].size - 1
    layouts = parameter_layouts(model, mesh.sizes, lambda path: 0 if path in FIRST_STAGE else last)
    own = {
        path: p
        for path, p in named_parameters(model).items()
        if last == 0 or (path in FIRST_STAGE) == (mesh["pp"].rank == 0)
    }
    wrong = {path: _without(layout, forget) for path, layout in layouts.items()}
    return Held(own, GradAccumulator(own, wrong, mesh, reduce=reduce))


def backward(
    held: Held, mesh: Mesh, poison: dict[str, float] | None = None, scale: float = 1.0
) -> Slices:
    """One step's gradients; ``poison``: a value for the last element of some, on this rank."""
    t, r, d = mesh["tp"].size, mesh["tp"].rank, mesh["dp"].rank
    held.grads.start(backwards=2)
    for path, parameter in held.parameters.items():
        name = "embed" if path == "head" else path
        if path in ("frozen", "unused"):
            continue
        gradient = torch.full_like(parameter, GARBAGE)
        for local, rows in pieces(name, t, r):
            gradient[local] = draw(path, d, _source(name, r))[rows] * scale
        if poison and path in poison:
            gradient.view(-1)[-1] = poison[path]
        for half in (gradient / 2, gradient / 2):  # two micro-batches
            parameter.backward(half)
    return held.grads.finish()


def whole(ranks: list[dict], dp: int, t: int) -> dict[str, Tensor]:
    """Whole gradients from every rank's slices; replicas must agree bit for bit."""
    local: dict[tuple[str, int, int], dict[int, Tensor]] = {}
    for rank in ranks:
        for name, values in rank["slices"].items():
            place = (name, rank["pp"], rank["tp"])
            local.setdefault(place, {})[rank["dp"]] = torch.tensor(values)
    found = {name: torch.full(shape, torch.nan) for name, shape in SHAPES.items()}
    for (name, _, r), slices in local.items():
        rows = torch.cat([slices[d] for d in range(dp)]).view(-1, *SHAPES[name][1:])
        for own, everywhere in pieces(name, t, r):
            place = found[name][everywhere]
            assert place.isnan().all() or torch.equal(place, rows[own]), f"replicas of {name}"
            place.copy_(rows[own])
    return found


def _own(name: str, t: int, r: int) -> list[Piece]:
    """The pieces whose gradient rank ``r`` adds to the whole: of replicas only the first."""
    if name in ("embed", "mix", "norm") or r == 0:
        return pieces(name, t, r)
    return []


def _source(name: str, r: int) -> int:
    """Ranks that see different things have gradients of their own, replicas the same one."""
    return r if name in ("mix", "norm") else 0


def _without(layout: TensorLayout, forgotten: str) -> TensorLayout:
    if forgotten == "tie" and len(layout.owners) > 1:
        return replace(layout, owners=layout.owners[:1], owner_stages=layout.owner_stages[:1])
    if forgotten == "partial":
        kept = tuple(p for p in layout.placement if not isinstance(p, Partial))
        return replace(layout, placement=kept)
    return layout
