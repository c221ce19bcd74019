"""Whole matrices of slices: sent to one owner each, made orthogonal there, and sent back.

Any rank of a pipeline stage may own a matrix, whatever it is cut over: data ranks, tp or ep. Each
knows from layouts alone what all others hold, so that nothing but elements travels, as bfloat16,
in which the iterations are. Owners are chosen by the operations of their matrices.

Matrices are exchanged in rounds, which bounds the memory: while one round is computed the next one
arrives and the last one returns.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice

import torch
from torch import Tensor

from kenotron_dist import GridView, Handle, all_to_all, views_of
from kenotron_dist.boxes import Box, local_boxes, replica_index, view_of
from kenotron_dist.placement import TensorLayout
from kenotron_optim.accumulate import GradAccumulator
from kenotron_optim.muon import flops_of, orthogonalize, scale_of
from kenotron_optim.muon_params import MatrixPart
from kenotron_optim.state_creation import Held
from kenotron_optim.torch_groups import Piece

ROUND = 1 << 24
"""Elements that a rank receives in a round, and at least one matrix."""


@dataclass(frozen=True)
class _HeldBlock:
    """A part of a matrix that a rank holds."""

    piece: Piece
    layout: TensorLayout
    """Of the piece."""
    box: Box

    def within(self, part: MatrixPart) -> tuple[slice, ...]:
        """Return the place of the block in a matrix (O, I)."""
        ends = zip(self.box.start, part.start, self.box.shape, strict=True)
        return tuple(slice(at - first, at - first + size) for at, first, size in ends)[-2:]


class MatrixExchange:
    """Updates the matrices of one stage. Collective over its ranks, as all its methods.

    Args:
        accumulator: has the layouts, and what each rank owns.
        parts: matrices by logical name (``matrix_parts``); those of other stages are passed over.
        steps: Newton-Schulz iterations.
        whole: whether each rank has the masters of all data ranks (ZeRO stage 0).
    """

    def __init__(
        self,
        accumulator: GradAccumulator,
        parts: Mapping[str, Sequence[MatrixPart]],
        steps: int,
        *,
        whole: bool,
    ) -> None:
        self._accumulator, self._steps, self._whole = accumulator, steps, whole
        self.parts = parts
        self._axis = accumulator.mesh["dp", "cp", "tp"]
        self._spans = {span.name: span for _, span in accumulator.spans()}
        self._found: dict[tuple[MatrixPart, int, bool], list[_HeldBlock]] = {}
        self._views = [views_of(accumulator.mesh.config, rank) for rank in self._axis.ranks]
        own = [part for name in sorted(parts.keys() & self._spans) for part in parts[name]]
        loads = [0] * self._axis.size
        self._rounds = [_deal(each, loads, steps) for each in _rounds(own, self._axis.size)]
        """For each round the matrices of each rank."""
        self.loads = loads
        """Operations of each rank in an update."""

    def __contains__(self, name: object) -> bool:
        """Return whether a tensor has matrices."""
        return name in self.parts

    @torch.no_grad()
    def update(
        self,
        masters: Mapping[Piece, Tensor],
        optimizers: Iterable[torch.optim.Optimizer],
        held: Held,
    ) -> None:
        """Take a step along what the gradients of the masters become when they are orthogonal.

        Args:
            masters: flat slices with their gradients.
            optimizers: their groups that are marked ``matrices`` have learning rates.
            held: gives masters memory.
        """
        groups = [group for each in optimizers for group in each.param_groups if group["matrices"]]
        rates = {master: group["lr"] for group in groups for master in group["params"]}
        sent = (self._send(each, masters) for each in self._rounds)
        arriving = deque(islice(sent, 1))
        returning: deque[tuple[list[list[MatrixPart]], Handle]] = deque()
        for each in self._rounds:
            arriving.extend(islice(sent, 1))
            returning.append((each, self._return(each, arriving.popleft().wait())))
            if len(returning) > 1:
                self._apply(*returning.popleft(), masters, rates, held)
        for last in returning:
            self._apply(*last, masters, rates, held)

    def _send(self, matrices: list[list[MatrixPart]], masters: Mapping[Piece, Tensor]) -> Handle:
        """Start bringing a round's matrices to their owners."""
        rank, gathered = self._axis.rank, list[list[Tensor]]()
        for own in matrices:
            blocks = (block for part in own for block in self._blocks(part, rank, sends=True))
            gathered.append([self._view(masters, block, gradient=True) for block in blocks])
        own = matrices[rank]
        receive = [
            sum(block.box.numel for part in own for block in self._blocks(part, i, sends=True))
            for i in range(self._axis.size)
        ]
        return self._exchange(gathered, receive)

    def _return(self, matrices: list[list[MatrixPart]], arrived: Tensor) -> Handle:
        """Make this rank's matrices of a round orthogonal; start sending them to all holders."""
        size, rank = self._axis.size, self._axis.rank
        own = matrices[rank]
        whole = [torch.empty(p.rows, p.columns, dtype=torch.bfloat16, device=arrived.device)
                 for p in own]  # fmt: skip
        at = 0
        for i in range(size):
            for part, matrix in zip(own, whole, strict=True):
                for block in self._blocks(part, i, sends=True):
                    place = matrix[block.within(part)]
                    place.copy_(arrived[at : at + place.numel()].view_as(place))
                    at += place.numel()
        done = [orthogonalize(matrix, self._steps) for matrix in whole]
        sent = [
            [
                matrix[block.within(part)]
                for part, matrix in zip(own, done, strict=True)
                for block in self._blocks(part, i)
            ]
            for i in range(size)
        ]
        receive = [
            sum(block.box.numel for part in each for block in self._blocks(part, rank))
            for each in matrices
        ]
        return self._exchange(sent, receive)

    def _apply(
        self,
        matrices: list[list[MatrixPart]],
        handle: Handle,
        masters: Mapping[Piece, Tensor],
        rates: Mapping[Tensor, float],
        held: Held,
    ) -> None:
        """Add what returns to the masters."""
        arrived, at = handle.wait(), 0
        parts = [part for own in matrices for part in own]
        blocks = [(part, block) for part in parts for block in self._blocks(part, self._axis.rank)]
        with held([masters[piece] for piece in dict.fromkeys(b.piece for _, b in blocks)]):
            for part, block in blocks:
                place = self._view(masters, block, gradient=False)
                lr = rates[masters[block.piece]] * scale_of(part.rows, part.columns)
                place.add_(arrived[at : at + place.numel()].view_as(place), alpha=-lr)
                at += place.numel()

    def _exchange(self, sent: Iterable[Sequence[Tensor]], receive: Sequence[int]) -> Handle:
        rows = [[block.reshape(-1).bfloat16() for block in blocks] for blocks in sent]
        counts = [sum(map(len, each)) for each in rows]
        none = torch.empty(0, dtype=torch.bfloat16, device=self._accumulator.mesh.device)
        flat = torch.cat([none, *(block for each in rows for block in each)])
        return all_to_all(flat, self._axis, counts, receive, async_op=True)

    def _view(
        self, masters: Mapping[Piece, Tensor], block: _HeldBlock, *, gradient: bool
    ) -> Tensor:
        master = masters[block.piece]
        tensor = master.grad if gradient else master
        assert tensor is not None  # every master has one in an update
        view = self._accumulator.mesh.view(block.layout)
        return view_of(tensor.detach(), block.layout, view, block.box)

    def _blocks(self, part: MatrixPart, rank: int, *, sends: bool = False) -> list[_HeldBlock]:
        """List a stage rank's parts of a matrix; with ``sends`` of replicas only the first."""
        key = part, rank, sends
        if key not in self._found:
            self._found[key] = list(self._find_blocks(part, rank, sends=sends))
        return self._found[key]

    def _find_blocks(self, part: MatrixPart, rank: int, *, sends: bool) -> Iterator[_HeldBlock]:
        layout = self._accumulator.layouts[part.name]
        view = self._views[rank](layout)
        size = self._accumulator.axis_of(part.name).size
        own, everyone = _index(view, view.data) % size, range(size)
        for data in everyone if self._whole and not sends else (own,):
            piece = self._accumulator.owned_layout(part.name, data)
            for box in local_boxes(piece, view):
                overlap = _overlap(box, part)
                if overlap is not None and not (sends and not _is_first(piece, view, overlap)):
                    yield _HeldBlock((part.name, data), piece, overlap)


def _rounds(parts: Sequence[MatrixPart], ranks: int) -> list[list[MatrixPart]]:
    rounds: list[list[MatrixPart]] = []
    filled = ROUND * ranks
    for part in parts:
        if filled >= ROUND * ranks:
            rounds.append([])
            filled = 0
        rounds[-1].append(part)
        filled += part.rows * part.columns
    return rounds


def _deal(parts: Sequence[MatrixPart], loads: list[int], steps: int) -> list[list[MatrixPart]]:
    """Give each matrix, the largest first, to the rank with the fewest operations so far."""
    dealt: list[list[MatrixPart]] = [[] for _ in loads]
    cost = {part: flops_of(part.rows, part.columns, steps) for part in parts}
    for part in sorted(parts, key=lambda each: (-cost[each], each.name, each.start)):
        owner = loads.index(min(loads))
        dealt[owner].append(part)
        loads[owner] += cost[part]
    return dealt


def _index(view: GridView, axes: Sequence[str]) -> int:
    index = 0
    for axis in axes:
        index = index * view.sizes[axis] + view.coords[axis]
    return index


def _is_first(layout: TensorLayout, view: GridView, box: Box) -> bool:
    """Return whether this is the first rank of the stage that holds a box."""
    stage = replace(view, sizes={axis: n for axis, n in view.sizes.items() if axis != "pp"})
    return replica_index(layout, stage, box) == 0


def _overlap(box: Box, part: MatrixPart) -> Box | None:
    low = tuple(map(max, box.start, part.start))
    ends = [
        min(a + n, b + m)
        for a, n, b, m in zip(box.start, box.shape, part.start, part.shape, strict=True)
    ]
    shape = tuple(end - first for end, first in zip(ends, low, strict=True))
    if any(size <= 0 for size in shape):
        return None
    moved = (at + first - begin for at, first, begin in zip(box.local, low, box.start, strict=True))
    return Box(tuple(moved), low, shape, box.parts)
