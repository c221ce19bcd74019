"""Optimizer state that is bfloat16 between updates and fp32 within them.

An update takes a block of elements at a time: widen their state to fp32, let torch's own optimizer
update it, fused or not, and round it back.

Rounding is stochastic: up or down with the probability that keeps the expected value. To nearest, a
second moment that falls by less than half a bfloat16 step (0.2 %) would never fall: with beta2
0.999 it would keep the largest value that it ever had.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kenotron_dist.rng import counter_key
from kenotron_optim.partition import Span

BLOCK = 2**24
"""Elements that are updated together. Temporaries take 4 bytes for each of them and each kind of
state, and 12 for rounding."""
DROPPED = 16
"""Bits by which fp32 is longer than bfloat16."""


class Slot(NamedTuple):
    """Elements that a master holds."""

    name: str
    """Logical name of the parameter."""
    start: int
    """Place of the first one in this rank's parameter, flattened."""


def compact_state(
    dtype: torch.dtype,
    masters: Mapping[tuple[str, int], Tensor],
    spans: Iterable[tuple[object, Span]],
) -> CompactState | None:
    """Return what steps optimizers whose state is kept in ``dtype``; None for float32.

    Args:
        dtype: float32 or bfloat16.
        masters: flat slices by logical name and data rank.
        spans: the accumulator's, which know where each master begins.

    Raises:
        ValueError: another dtype.
    """
    if dtype == torch.float32:
        return None
    if dtype != torch.bfloat16:
        raise ValueError(f"optimizer state in {dtype} is not available: choose float32 or bfloat16")
    known = {span.name: span for _, span in spans}
    return CompactState(
        {master: Slot(name, known[name].owned(rank)[0]) for (name, rank), master in masters.items()}
    )


@dataclass(frozen=True)
class _MasterBlock:
    """A block of a master with fp32 state, as the optimizer sees it."""

    master: Tensor
    leaf: Tensor
    """View of the master's elements."""
    part: slice
    """Place of the elements in the master, flattened."""
    place: int
    """Place of the first of them in its block."""
    block: int
    is_fresh: bool
    """True where the optimizer has no state of the master yet."""

    @property
    def is_last(self) -> bool:
        """True where the master ends here."""
        return self.part.stop == self.master.numel()


class CompactState:
    """Steps torch optimizers and keeps the state of their masters in bfloat16.

    What an element is rounded by is a function of the number of the update, the parameter's name
    and the element's place in this rank's parameter. So ZeRO stages, cuts of the pipeline and
    resumed runs round equally, and so do tp ranks that have the same parameter.

    Args:
        slots: the masters, fp32, and what each of them holds.
    """

    def __init__(self, slots: Mapping[Tensor, Slot]) -> None:
        self._slots = dict(slots)

    def step(self, optimizer: torch.optim.Optimizer, number: int) -> None:
        """Make update ``number`` of the optimizer's masters. Nothing is read of a device.

        Where a fused optimizer changes nothing (``found_inf``) the state keeps its bits.
        """
        groups = optimizer.param_groups
        batches = [
            (group, batch) for group in groups for batch in _batches(self._pieces(optimizer, group))
        ]
        longest = max((p.place + len(p.leaf.view(-1)) for _, b in batches for p in b), default=0)
        noise = index_noise(longest, batches[0][1][0].leaf.device) if batches else None
        try:
            for group, batch in batches:
                optimizer.param_groups = [{**group, "params": [piece.leaf for piece in batch]}]
                for piece in batch:
                    _widen(optimizer, piece)
                optimizer.step()
                for piece in batch:
                    self._round(optimizer, piece, number, noise)
        finally:
            optimizer.param_groups = groups
            for _, batch in batches:
                for piece in batch:
                    optimizer.state.pop(piece.leaf, None)

    def _pieces(
        self, optimizer: torch.optim.Optimizer, group: Mapping[str, Any]
    ) -> Iterator[_MasterBlock]:
        """Cut the masters of a group where blocks of their parameters begin."""
        for master in group["params"]:
            fresh, start, count = master not in optimizer.state, 0, master.numel()
            if master.grad is None:
                continue
            while start < count:
                block, place = divmod(self._slots[master].start + start, BLOCK)
                stop = min(count, start + BLOCK - place)
                leaf = master.detach().view(-1)[start:stop]
                leaf.grad = master.grad.view(-1)[start:stop]
                yield _MasterBlock(master, leaf, slice(start, stop), place, block, fresh)
                start = stop

    def _round(
        self,
        optimizer: torch.optim.Optimizer,
        piece: _MasterBlock,
        number: int,
        noise: Tensor | None,
    ) -> None:
        """Keep what an update left of a piece's state."""
        assert noise is not None
        kept, name = optimizer.state[piece.master], self._slots[piece.master].name
        wide = optimizer.state.pop(piece.leaf, {})
        kinds = sorted(kind for kind in wide if _is_moment(kind, wide[kind], piece.leaf))
        for kind in kinds:
            if kind not in kept:
                kept[kind] = torch.zeros_like(piece.master, dtype=torch.bfloat16)
            base = counter_key("optimizer state", name, kind, number, piece.block) & 0xFFFF
            own = noise[piece.place : piece.place + piece.leaf.numel()].bitwise_xor(base)
            value = wide.pop(kind).view(-1)
            kept[kind].view(-1)[piece.part] = round_stochastically_(value, own)
        if piece.is_last:
            kept.update(wide)


def round_stochastically_(x: Tensor, noise: Tensor) -> Tensor:
    """Round fp32 to values of bfloat16, in place: up with the probability of the part cut off.

    Args:
        x: fp32; inf and nan stay.
        noise: int32 of the same shape, uniform from 0 to 2^16 - 1.

    Returns:
        ``x``, fp32, whose lower bits are 0.
    """
    is_nan = x.isnan()
    x.view(torch.int32).add_(noise).bitwise_and_(-(1 << DROPPED))
    return x.masked_fill_(is_nan, torch.nan)


def index_noise(count: int, device: torch.device) -> Tensor:
    """Return 16 hashed bits of each number below ``count``: int32 (count,).

    Each update combines them with bits of its own, so an element has other ones every time.
    The hash is the 32-bit finalizer of Ellis and Wellons (lowbias32).
    """
    x = torch.arange(count, dtype=torch.int32, device=device)
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B - (1 << 32))):
        x.bitwise_xor_(_shifted(x, shift)).mul_(factor)
    return x.bitwise_xor_(_shifted(x, 16)).bitwise_and_((1 << DROPPED) - 1)


def _shifted(x: Tensor, bits: int) -> Tensor:
    """Shift to the right, filling with zeros."""
    return (x >> bits).bitwise_and_((1 << (32 - bits)) - 1)


def _is_moment(kind: str, entry: Any, leaf: Tensor) -> bool:
    return isinstance(entry, Tensor) and entry.shape == leaf.shape and kind != "step"


def _widen(optimizer: torch.optim.Optimizer, piece: _MasterBlock) -> None:
    """Give the optimizer fp32 state of a piece; none where its master has none."""
    if piece.is_fresh:
        return
    wide = optimizer.state[piece.leaf]
    for kind, entry in optimizer.state[piece.master].items():
        if _is_moment(kind, entry, piece.master):
            wide[kind] = entry.view(-1)[piece.part].view_as(piece.leaf).float()
        else:
            wide[kind] = entry.clone() if isinstance(entry, Tensor) else entry


def _batches(pieces: Iterable[_MasterBlock]) -> Iterator[Sequence[_MasterBlock]]:
    """Join pieces into batches of at most ``BLOCK`` elements; a longer one is alone."""
    batch: list[_MasterBlock] = []
    filled = 0
    for piece in pieces:
        if batch and filled + piece.leaf.numel() > BLOCK:
            yield batch
            batch, filled = [], 0
        batch.append(piece)
        filled += piece.leaf.numel()
    if batch:
        yield batch
