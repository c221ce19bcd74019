"""Blocks whose bits do not depend on tp: parts as virtual ranks compute them, added in one tree.

A part is what each of n virtual ranks of tp computes alone, up to one sum of their outputs, and
some up to a sum inside, too. A rank computes n/t of them in turn, with slices of its weights
(``kenotron_tp.virtual_shards``).

Shapes: T flattened tokens, D hidden; k = n/t virtual shards of a rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from kenotron_dist import Axis
from kenotron_dist.placement import Partial, Placements, Shard
from kenotron_models.block import Block, BlockSpec
from kenotron_models.block_in_chunks import Divided, block_in_chunks
from kenotron_models.build import Build
from kenotron_models.context import Context
from kenotron_models.experts import Experts
from kenotron_models.part import Normed, Part, PartSpec
from kenotron_models.recompute import Recompute, whole
from kenotron_models.spec import DecoderSpec
from kenotron_models.with_values import with_values
from kenotron_tp import (
    OwnChunk,
    RowParallelLinear,
    from_shards,
    join_tokens,
    shards_of,
    split_tokens,
    to_shards,
)


class BlockInShards(Block):
    """A block, computed in ``build.shards`` virtual shards: (T, D) -> (T, D).

    With ``build.cuts_between`` its input and its output are this rank's tokens (T/t, D). Between
    them are all tokens: norms and sums have one shape on every layout.

    Args:
        spec: what it is made of.
        width: D.
        build: how and where.
        layer: its number in the model, from 0.
        recompute: what is computed again in the backward instead of being kept.
        last: its output is all tokens.
    """

    def __init__(
        self,
        spec: BlockSpec,
        width: int,
        build: Build,
        *,
        layer: int = 0,
        recompute: Recompute = "none",
        last: bool = False,
    ) -> None:
        super().__init__(spec, width, build, layer=layer, recompute=recompute)
        self._cut, self._last = build.cuts_between, last
        self._shards = {
            part.name: _in_shards(self._part(part.name), part, width, build, layer)
            for part in spec.parts
        }

    def divided(self, name: str, part: Part) -> Divided:
        """See ``Block``."""
        made = self._shards[name]
        return made.divided(part) if isinstance(made, PartInShards) else super().divided(name, part)

    def _layer(self, x: Tensor, context: Context) -> Tensor:
        if self._cut:
            x = join_tokens(x, self.axis, context.positions_BS.numel())
        x = block_in_chunks(self, x, context) if context.chunks else self._parts(x, context)
        return split_tokens(x, self.axis) if self._cut and not self._last else x

    def _parts(self, x: Tensor, context: Context) -> Tensor:
        for name in self.parts:
            norm, after = (self.get_submodule(f"{name}_{each}") for each in ("norm", "post_norm"))
            run = partial(self._shards[name], norm=norm, again=self.recompute == "selective")
            alone = "mixer" if name == self.mixer else "feed_forward"
            again = self.recompute == alone and torch.is_grad_enabled()
            y = whole(run, x, context) if again else run(x, context)
            x = x + self.drop(after(y), context, name)
        return x


class PartInShards:
    """Calls a part as its virtual ranks would.

    Gradients of what a part does not cut (norms of heads) are summed here, in each backward.

    Args:
        part: has the parameters of this rank.
        spec: makes the part.
        width: D.
        build: how and where.
        layer: number of the block.
    """

    def __init__(self, part: Part, spec: PartSpec, width: int, build: Build, layer: int) -> None:
        self._part, self._axis, self._count = part, build.tp, build.own_shards
        self._of_all, first = build.shards, build.tp.rank * self._count
        self._virtual = [
            virtual_part(spec, width, build, layer, first + i) for i in range(self._count)
        ]
        self._cuts: dict[str, tuple[int, list[OwnChunk]] | None] = {}
        """By name: dimension that is cut, and its chunks; None: there is none."""
        self._bias: str | None = None
        for path, module in part.named_modules():
            placements: Placements = getattr(module, "placements", {})
            for name, parameter in module.named_parameters(prefix=path, recurse=False):
                cut = placements.get(name.rpartition(".")[2])
                self._cuts[name] = (
                    _cut_of(parameter, cut, build) if isinstance(cut, Shard) else None
                )
            kept = {n: each for n, each in placements.items() if not isinstance(each, Partial)}
            if kept != placements:
                setattr(module, "placements", kept)  # noqa: B010
            if isinstance(module, RowParallelLinear) and module.bias is not None:
                self._bias = f"{path}.bias"
                del self._cuts[self._bias]  # added once, after the sum

    def __call__(
        self, x: Tensor, context: Context, *, norm: Normed, again: bool, part: Part | None = None
    ) -> Tensor:
        """(T, D) -> (T, D). Collective over tp, forward and backward.

        Args:
            x: all tokens.
            context: the micro-batch.
            norm: of x.
            again: whether what is cheap in the part is computed again in the backward.
            part: the part, or a copy with other values; None: the part.
        """
        pieces, enter, leave, inside = self.divided(self._part if part is None else part)
        more = {"norm": _same} if again else {}
        pairs = zip(pieces, enter(norm(x)), strict=True)
        if self._virtual[0].adds_inside:
            assert inside is not None
            begun = [piece.begin(each, context, **more) for piece, each in pairs]
            known = inside([each for each, _ in begun])
            found = [finish(each) for (_, finish), each in zip(begun, known, strict=True)]
        else:
            found = [piece(each, context, **more) for piece, each in pairs]
        return leave(found)

    def divided(self, part: Part) -> Divided:
        """Return a part with the parameters of this rank's, or with copies of them."""
        given = dict(part.named_parameters())
        own = {name: self._slices(given[name], name) for name in self._cuts}
        pieces = [
            with_values(virtual, {name: parts[i] for name, parts in own.items()})
            for i, virtual in enumerate(self._virtual)
        ]

        def leave(found: Sequence[Tensor]) -> Tensor:
            y = from_shards(found, self._axis)
            return y if self._bias is None else y + given[self._bias]

        enter = partial(to_shards, count=self._count, axis=self._axis)
        return Divided(pieces, enter, leave, partial(self._added_inside, part))

    def _added_inside(self, part: Part, parts: Sequence[Tensor]) -> Sequence[Tensor]:
        """Return what each virtual rank reads of the sum inside ``part``. Collective over tp."""
        total = from_shards(parts, self._axis)
        return to_shards(part.of_sum(total, self._of_all), self._count, self._axis)

    def _slices(self, parameter: Tensor, name: str) -> tuple[Tensor, ...]:
        """Values of a parameter for each virtual rank."""
        cut = self._cuts[name]
        if cut is None:
            return to_shards(parameter, self._count, self._axis)
        return shards_of(parameter, *cut, self._count, self._axis)


def _in_shards(
    part: Part, spec: PartSpec, width: int, build: Build, layer: int
) -> Callable[..., Tensor]:
    """Return what calls a part as ``PartInShards`` does; arguments are those of it.

    Experts take the tokens of virtual ranks apart themselves.
    """
    if not isinstance(part, Experts):
        return PartInShards(part, spec, width, build, layer)
    if part.shared is not None:
        assert part.spec.shared is not None
        shared = PartInShards(part.shared, part.spec.shared, width, build, layer)
        part.run_shared = lambda mlp, x, own: shared(x, own, norm=_same, again=False, part=mlp)

    def call(x: Tensor, context: Context, *, norm: Normed, again: bool) -> Tensor:
        return part(x, context, norm=norm) if again else part(norm(x), context)

    return call


def virtual_shards(spec: DecoderSpec, most: int) -> int:
    """Return the virtual shards of a model: a power of two up to ``most``.

    It is the largest that divides all heads and widths that tp cuts.
    """
    count = 1 << most.bit_length() - 1
    while count > 1 and not all(
        _divides(block, spec.hidden_size, count) for block in {*spec.blocks}
    ):
        count //= 2
    return count


def virtual_part(spec: PartSpec, width: int, build: Build, layer: int, number: int) -> Part:
    """Make a part as virtual rank ``number`` has it, on meta; it communicates with no other rank.

    Raises ValueError where the shards do not divide it.
    """
    axis = Axis(build.tp.name, number, tuple(range(build.shards)))
    alone = replace(build, tp=axis, device="meta", shapes_only=True, shards=1)
    part = spec.build(width, alone, layer)
    for module in part.modules():
        if getattr(module, "axis", None) is axis:
            setattr(module, "axis", Axis.solo(axis.name))  # noqa: B010
        if isinstance(module, RowParallelLinear):
            module.bias = None
    return part


def _same(x: Tensor) -> Tensor:
    return x


def _cut_of(parameter: Tensor, cut: Shard, build: Build) -> tuple[int, list[OwnChunk]]:
    """Return the dimension of a local parameter that is cut, and its chunks."""
    if cut.chunks is None:
        return cut.dim, [OwnChunk(parameter.shape[cut.dim])]
    chunks = []
    for chunk in cut.chunks:
        own = chunk.size // min(chunk.parts or build.tp.size, build.tp.size)
        shared = chunk.parts is not None and chunk.parts < build.shards
        chunks.append(OwnChunk(own, chunk.parts if shared else None))
    return cut.dim, chunks


def _divides(block: BlockSpec, width: int, count: int) -> bool:
    """Return whether each of ``count`` ranks has its own part of a block."""
    axis = Axis("tp", 0, tuple(range(count)))
    try:
        parts = [part.build(width, Build(axis, shapes_only=True), 0) for part in block.parts]
    except ValueError:
        return False
    return all(part.in_shards for part in parts)
