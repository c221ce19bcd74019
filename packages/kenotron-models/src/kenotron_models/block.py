"""One block of a decoder: a mixer and a feed-forward, each normed and added to its input.

Shapes: T flattened tokens, D hidden; T/t under sequence parallelism.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from kenotron_models.attention_backends import keep_out_of_programs
from kenotron_models.block_in_chunks import Divided, block_in_chunks
from kenotron_models.build import Build
from kenotron_models.context import Context
from kenotron_models.dropout import drop_features
from kenotron_models.norm import NormSpec
from kenotron_models.part import Part, PartSpec
from kenotron_models.recompute import Recompute, whole


@dataclass(frozen=True, kw_only=True)
class BlockSpec:
    """``x + mixer(norm(x))``, then ``x + feed_forward(norm(x))``; one of the two may be missing.

    With norms ``after``: ``x + norm(mixer(x))`` (OLMo-2, arXiv 2501.00656), with ``both``:
    ``x + norm(mixer(norm(x)))`` (Gemma-2, arXiv 2408.00118).
    """

    mixer: PartSpec | None
    """The part that mixes tokens."""
    feed_forward: PartSpec | None
    """The part that works on each token alone."""
    norm: NormSpec = NormSpec()
    """Kind of their norms."""
    norms: Literal["before", "after", "both"] = "before"
    """Position of the norms of mixer and feed-forward."""
    dropout: float = 0.0
    """Share of what each of them adds that is dropped in training."""
    residual_scale: float = 1.0
    """Factor of the output that each of them adds to the residual stream (Granite)."""

    @property
    def parts(self) -> tuple[PartSpec, ...]:
        """Those of mixer and feed-forward that the block has, in this order."""
        return tuple(part for part in (self.mixer, self.feed_forward) if part is not None)


class Block(nn.Module):
    """Modules ``{name}_norm``, ``{name}`` and ``{name}_post_norm`` of each part: (T, D) -> (T, D).

    A norm that the spec does not have is an identity.

    Args:
        spec: what it is made of.
        width: D.
        build: how and where.
        layer: its number in the model, from 0.
        recompute: what is computed again in the backward instead of being kept.
    """

    def __init__(
        self,
        spec: BlockSpec,
        width: int,
        build: Build,
        *,
        layer: int = 0,
        recompute: Recompute = "none",
    ) -> None:
        super().__init__()
        self.layer, self.axis, self.recompute = layer, build.tp, recompute
        self._compiled = False
        self.dropout, self.sequence_parallel = spec.dropout, build.sequence_parallel
        self.residual_scale = spec.residual_scale
        self.parts = tuple(part.name for part in spec.parts)
        self.mixer = None if spec.mixer is None else spec.mixer.name
        self.feed_forward = None if spec.feed_forward is None else spec.feed_forward.name
        for part in spec.parts:
            before, after = (
                spec.norm.build(width, build) if spec.norms in (place, "both") else nn.Identity()
                for place in ("before", "after")
            )
            self.add_module(f"{part.name}_norm", before)
            self.add_module(part.name, part.build(width, build, layer))
            self.add_module(f"{part.name}_post_norm", after)
            again = recompute in ("full", "mixer" if part is spec.mixer else "feed_forward")
            self._part(part.name).computed_again = again

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile what the block computes; arguments are those of ``torch.compile``.

        What all blocks of a micro-batch share is made before, outside of the program, which is then
        the same for all of them.
        """
        keep_out_of_programs()
        # Keys of dropout are of one block and one step: no program is made for each of them.
        if self.dropout:
            self._drop_some = torch.compiler.disable(self._drop_some)
        for name in self.parts:
            self._part(name).leave_out_of_programs()
        self._layer = torch.compile(self._layer, *args, **kwargs)
        self._compiled = True

    def forward(self, x: Tensor, context: Context) -> Tensor:
        """(T, D) -> (T, D).

        Raises ValueError for a cache that its mixer does not read, and for rows that are cut where
        a part needs whole ones.
        """
        self._check(context)
        if self._compiled:
            for name in self.parts:
                self._part(name).prepare(context)
        if self.recompute == "full" and torch.is_grad_enabled():
            return whole(self._layer, x, context)
        return self._layer(x, context)

    def _check(self, context: Context) -> None:
        if context.cache is not None and self.mixer and not self._part(self.mixer).reads_cache:
            raise ValueError(
                f"layers.{self.layer}.{self.mixer} keeps nothing of earlier tokens: generate with "
                "cached=False (--no-cache)"
            )
        if context.cut is None:
            return
        axis = context.cut.axis
        what = f"layers.{self.layer}: rows are cut over {axis.size} ranks of {axis.name}, and"
        if not self.cuts_sequence:
            raise ValueError(
                f"{what} {' or '.join(self.parts)} needs whole ones: do not cut them, or set "
                "cuts_sequence where a part is right for cut rows"
            )
        if context.cache is not None:
            raise ValueError(f"{what} a key-value cache keeps whole ones: generate without a cut")

    @property
    def cuts_sequence(self) -> bool:
        """True where all parts are right on rows that are cut over ranks."""
        return all(self._part(name).cuts_sequence for name in self.parts)

    def _part(self, name: str) -> Part:
        part = self.get_submodule(name)
        assert isinstance(part, Part)
        return part

    def divided(self, name: str, part: Part) -> Divided:
        """Return the part ``name``, or a copy of it, as virtual ranks of tp compute it."""
        return Divided([part], lambda x: [x], lambda found: found[0])

    def _layer(self, x: Tensor, context: Context) -> Tensor:
        if context.chunks:
            return block_in_chunks(self, x, context)
        # The same lines twice and no loop: torch.compile leaves out a function that it must break
        # inside a loop, and over several ranks it breaks at each part.
        selective = self.recompute == "selective"
        if (mixer := self.mixer) is not None:
            part, norm = self._modules[mixer], self._modules[f"{mixer}_norm"]
            after = self._modules[f"{mixer}_post_norm"]
            assert part is not None and norm is not None and after is not None
            if self.recompute == "mixer" and torch.is_grad_enabled():
                y = whole(_of_normed, part, norm, x, context)
            else:
                y = part(x, context, norm=norm) if selective else part(norm(x), context)
            x = x + self.drop(after(y), context, mixer)
        if (feed_forward := self.feed_forward) is not None:
            part, norm = self._modules[feed_forward], self._modules[f"{feed_forward}_norm"]
            after = self._modules[f"{feed_forward}_post_norm"]
            assert part is not None and norm is not None and after is not None
            if self.recompute == "feed_forward" and torch.is_grad_enabled():
                y = whole(_of_normed, part, norm, x, context)
            else:
                y = part(x, context, norm=norm) if selective else part(norm(x), context)
            x = x + self.drop(after(y), context, feed_forward)
        return x

    def drop(self, x: Tensor, context: Context, part: str) -> Tensor:
        """Apply dropout and the residual factor to the output (T, D) of a part."""
        x = self._drop_some(x, context, part) if self.dropout else x
        return x if self.residual_scale == 1 else x * self.residual_scale

    def _drop_some(self, x: Tensor, context: Context, part: str) -> Tensor:
        return drop_features(
            x,
            self.dropout,
            context,
            f"layers.{self.layer}.{part}",
            self.axis,
            sequence_parallel=self.sequence_parallel,
        )


def _of_normed(part: nn.Module, norm: nn.Module, x: Tensor, context: Context) -> Tensor:
    return part(norm(x), context)
