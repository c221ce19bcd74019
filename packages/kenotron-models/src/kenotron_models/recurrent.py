"""Code that mixers with a state share: convolution, documents, cut rows, and the cache of a text.

Shapes: B batch, S sequence, R pieces of rows of L tokens each (B rows, or two pieces of each), C
channels of the convolution; ``/t`` is divided by tp size.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kenotron_models.context import Context
from kenotron_models.part import Normed, Part
from kenotron_models.recompute import between
from kenotron_models.segments import Segments, segments_of, tokens_since_start
from kenotron_models.selective_scan import Scanned
from kenotron_models.short_convolution import ShortConvolution, tokens_before
from kenotron_models.state_passing import entering_states
from kenotron_tp import ColumnParallelLinear

Scan = Callable[..., Scanned]
"""Scan pieces, by ``first``, ``goes_on`` and ``real`` as those of ``selective_scan``."""


class Opened(NamedTuple):
    """Results of the first product of tokens."""

    x: Tensor
    """(B, S, C/t), to be convolved."""
    steps: Tensor | None
    """What else the scan reads (B, S, ...); None: it makes that of what was convolved."""
    gate: Tensor
    """(B, S, ...), read by ``gated``."""


class Recurrent(Part, ABC):
    """A convolution, then a scan whose state passes from token to token.

    Its kinds are made of a spec, the width D, a ``Build`` (how and where) and ``layer``.

    Args:
        convolution: over the channels that are scanned.
        layer: its number in the model, from 0: the cache depends on it.
        separate_documents: whether both begin again where positions do not increase by one.
    """

    reads_cache: ClassVar[bool] = True
    cuts_sequence: ClassVar[bool] = True

    def __init__(
        self, convolution: ShortConvolution, layer: int, *, separate_documents: bool
    ) -> None:
        super().__init__()
        self.conv, self.layer, self.separate_documents = convolution, layer, separate_documents

    out_proj: nn.Module

    def forward(self, x: Tensor, context: Context, *, norm: Normed | None = None) -> Tensor:
        """(T, D) -> (T, D): every token sees itself and the earlier ones of its document.

        ``norm`` is applied to x first; then neither its result, nor the convolution's, nor the
        gated output is kept for the backward. x may be wider than the weights.
        """
        y, gate = self.mixed(x, context, norm)
        # Means over tp are kept: what is computed again must not communicate.
        means = self.means(y, gate, again=norm is not None)
        return self.output(y, gate, means, again=norm is not None)

    def mixed(self, x: Tensor, context: Context, norm: Normed | None) -> tuple[Tensor, Tensor]:
        """Return what was scanned of tokens x (T, D), and what gates it: (T, ...) twice."""
        x, steps, gate = self.opened(x, context.positions_BS.shape, norm)
        y = self.mix(x, context, steps, again=norm is not None)
        return y.flatten(0, 1), gate.flatten(0, 1)

    def output(
        self, y: Tensor, gate: Tensor, means: Tensor | None, *, again: bool = False
    ) -> Tensor:
        """Return (T, D) of what was scanned and what gates it, (T, ...) twice.

        Args:
            y: of the scan.
            gate: as ``opened`` returns it.
            means: as ``means`` returns them.
            again: whether the gated output is computed again in the backward.
        """
        gated = partial(self.gated, gate=gate, means=means)
        return between(gated, y, self.out_proj) if again else self.out_proj(gated(y))

    @abstractmethod
    def opened(self, x: Tensor, rows: Sequence[int], norm: Normed | None) -> Opened:
        """Compute the first product of x (T, D) in ``rows``, B and S, normed before if it is."""
        ...

    @abstractmethod
    def scan(self, x: Tensor, steps: Tensor | None) -> Scan:
        """Return the scan of pieces: x (R, L, C/t), and steps (R, L, ...) where ``mix`` had some.

        Collective over tp where the module says so.
        """
        ...

    @abstractmethod
    def gated(self, y: Tensor, gate: Tensor, means: Tensor | None) -> Tensor:
        """Return the input (T, C/t) of the last product, of what was scanned (T, ...)."""
        ...

    def means(
        self, y: Tensor, gate: Tensor, *, added: Tensor | None = None, again: bool = False
    ) -> Tensor | None:
        """Return what ``gated`` reads of all features, (T, ...); None: nothing.

        Args:
            y: of the scan.
            gate: as ``opened`` returns it.
            added: what ``of_sum`` makes of ``added_after``, (T, ...); None: it is added up here,
                collective over tp where the module says so.
            again: whether its inputs are computed again in the backward.
        """
        return None

    def added_before(self, x: Tensor) -> Tensor | None:
        """Return what ranks of tp add up for ``scan``, of convolved x (R, L, C/t); None: nothing.

        ``scan`` gets what ``of_sum`` makes of it in place of steps.
        """
        return None

    def added_after(self, y: Tensor, gate: Tensor) -> Tensor | None:
        """Return what ranks of tp add up for ``means``, (T, ...), from its arguments; or None."""
        return None

    def decay(self, elapsed: Tensor) -> Tensor:
        """Return the factor of a state after steps that add up to ``elapsed``, (R, ...)."""
        raise AssertionError(f"{type(self).__name__} has neither a decay nor a state_map")

    def prepare(self, context: Context) -> None:
        """Make what all layers read of the micro-batch, before a compiled ``forward``."""
        tokens_since_start(context, documents=self.separate_documents)

    def leave_out_of_programs(self) -> None:
        """Loops over chunks, which a compiler would unroll, and other ranks."""
        self.mix = torch.compiler.disable(self.mix)

    def mix(
        self, x: Tensor, context: Context, steps: Tensor | None = None, *, again: bool
    ) -> Tensor:
        """Convolve and scan the tokens of a micro-batch.

        Collective over tp as ``scan`` is, and over the axis of the cut.

        Args:
            x: (B, S, C/t).
            context: the micro-batch.
            steps: what else ``scan`` reads, (B, S, ...).
            again: whether the convolution's result is computed again in the backward.

        Returns:
            (B, S, ...) of the scan.
        """
        segments, width = segments_of(context), self.conv.width - 1
        since = tokens_since_start(context, documents=self.separate_documents)
        if context.cache is None:
            before = tokens_before(x, width, segments)
        else:
            key = self.layer, "convolution"
            before = context.cache.tokens_before(key, x, width, context.padding_BS)
        cut = partial(pieces_of, count=1 if segments is None else segments.pieces)
        places = None if since is None else cut(since.expand(x.shape[:2]))

        def convolve(x: Tensor) -> Tensor:
            return F.silu(self.conv(cut(x), before, places))

        rows = None if steps is None else cut(steps)
        scan = partial(self._scan, steps=rows, context=context, segments=segments, places=places)
        y = between(convolve, x, scan) if again else scan(convolve(x))
        return y.reshape(*x.shape[:2], -1)

    def convolved(self, x: Tensor, context: Context) -> tuple[Tensor, Tensor | None]:
        """Convolve whole rows without a cache: x (B, S, C/t).

        Returns:
            (B, S, C/t), and True for tokens that a state passes on to, bool (B, S); None: for all.
        """
        since = tokens_since_start(context, documents=self.separate_documents)
        places = None if since is None else since.expand(x.shape[:2])
        y = F.silu(self.conv(x, tokens_before(x, self.conv.width - 1, None), places))
        return y, None if places is None else places > 0

    def _scan(
        self,
        x: Tensor,
        steps: Tensor | None,
        context: Context,
        segments: Segments | None,
        places: Tensor | None,
    ) -> Tensor:
        """Scan pieces (R, L, C/t), from the states before them."""
        goes_on = None if places is None else places > 0
        cache = context.cache
        if cache is None and segments is None:
            return self.whole_rows(x, steps, goes_on)
        run = partial(self.scan(x, steps), goes_on=goes_on)
        if cache is not None:
            key, padding = (self.layer, "state"), context.padding_BS
            done = run(first=cache.state(key), real=None if padding is None else ~padding)
            cache.keep(key, done.state)
            return done.y
        assert segments is not None  # else rows are whole
        state, factor = self.state_map(x, steps, goes_on)
        return run(first=entering_states(state, factor, segments, apply=self.passed)).y

    def whole_rows(self, x: Tensor, steps: Tensor | None, goes_on: Tensor | None) -> Tensor:
        """Return outputs (R, L, ...) of rows x (R, L, C/t) that begin with no state.

        ``steps`` (R, L, ...) and ``goes_on`` (R, L), bool, are as for ``mix`` and the scan.
        """
        return self.scan(x, steps)(goes_on=goes_on).y

    def passed(self, factor: Tensor, state: Tensor) -> Tensor:
        """Return what is left of a state (R, ...) after a piece with this factor."""
        return factor * state

    def state_map(
        self, x: Tensor, steps: Tensor | None, goes_on: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return the states after pieces (R, ...) when those before are 0, and their factors."""
        alone = self.scan(x, steps)(goes_on=goes_on)
        decay = self.decay(alone.elapsed)
        if goes_on is not None:
            decay = decay * goes_on.all(1).view(-1, *(1 for _ in decay.shape[1:]))
        return alone.state, decay


def pieces_of(x: Tensor, count: int) -> Tensor:
    """Return the pieces of rows: (B, S, ...) -> (B count, S / count, ...)."""
    return x.unflatten(1, (count, -1)).flatten(0, 1)


def project(linear: ColumnParallelLinear, x: Tensor, tokens: int, norm: Normed | None) -> Tensor:
    """Return the product of a part's first matrix: (T, D) -> (T, O/t).

    Args:
        linear: the matrix.
        x: (T, D), (T/t, D) under sequence parallelism; it may be wider than the weight.
        tokens: T.
        norm: applied to x first; then its result is not kept for the backward.
    """
    dtype, read = linear.weight.dtype, partial(linear, tokens=tokens)
    if norm is None:
        return read(x.to(dtype))
    return between(lambda x: norm(x).to(dtype), x, read)
