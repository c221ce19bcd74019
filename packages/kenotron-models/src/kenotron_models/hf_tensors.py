"""Rows of Hugging Face's tensors that our tensors are made of, and the other way round.

Queries, keys and values are one matrix here, and so are gate and up: rows one after the other.
Where neighbouring features are turned (``rope_interleaved``), our rows 2i and 2i + 1 of a head are
their rows i and i + K/2: the same function, as they turn halves.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path

import torch
from torch import Tensor

from kenotron_dist.placement import TensorLayout
from kenotron_models.rope import Rope
from kenotron_models.shapes import decoder_layouts
from kenotron_models.spec import Architecture

Shape = tuple[int, ...]
Run = tuple[str, int, Shape, int]
"""(their tensor, its first row, where it begins in ours, number of rows)."""

EMBEDDING = "embedding.weight"
"""Logical name of the token embedding."""
HEAD = "head.weight"
"""Logical name of the output projection."""


@dataclass(frozen=True, kw_only=True)
class Outside:
    """Names of a Hugging Face family for its tensors outside of blocks, and the list of blocks."""

    blocks: str = "model.layers"
    """Followed by the number of a block."""
    embedding: str = "model.embed_tokens.weight"
    """The token embedding."""
    norm: str = "model.norm"
    """The norm after the last block."""
    head: str = "lm_head.weight"
    """The output projection."""

    def of(self, path: str) -> str:
        """Return their name of a tensor. Raises ValueError for one that they have not."""
        folder, _, kind = path.rpartition(".")
        if folder == "norm":
            return f"{self.norm}.{kind}"
        known = {EMBEDDING: self.embedding, HEAD: self.head}
        if path not in known:
            raise ValueError(f"{path} has no name in Hugging Face's format of this family")
        return known[path]


@dataclass(frozen=True)
class FusedModules:
    """The modules of theirs whose rows follow one another in one of ours."""

    names: tuple[str, ...]
    turned: int = 0
    """Number of the first ones that have rows with a rotary embedding."""
    kinds: Mapping[str, str] = field(default_factory=dict)
    """Parameters of ours, and what theirs are called where that is not the same."""

    def __init__(self, *names: str, turned: int = 0, **kinds: str) -> None:
        object.__setattr__(self, "names", names)
        object.__setattr__(self, "turned", turned)
        object.__setattr__(self, "kinds", kinds)


@dataclass(frozen=True)
class Stacked:
    """The modules of theirs, one set for each expert ``{e}``, that are one stack of ours."""

    names: tuple[str, ...]

    def __init__(self, *names: str) -> None:
        object.__setattr__(self, "names", names)


Names = Mapping[str, FusedModules | Stacked]
"""Modules of our block, and those of Hugging Face's that each is made of."""

LLAMA_NAMES: Names = {
    "attention_norm": FusedModules("input_layernorm"),
    "attention.qkv": FusedModules(
        "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", turned=2
    ),
    "attention.q_norm": FusedModules("self_attn.q_norm", turned=1),
    "attention.k_norm": FusedModules("self_attn.k_norm", turned=1),
    "attention.out": FusedModules("self_attn.o_proj"),
    "mlp_norm": FusedModules("post_attention_layernorm"),
    "mlp.gate_up": FusedModules("mlp.gate_proj", "mlp.up_proj"),
    "mlp.down": FusedModules("mlp.down_proj"),
}
"""Modules of our block -> those of Llama's; its descendants call theirs the same."""


@dataclass(frozen=True)
class TensorPart:
    """One of their tensors, as consecutive rows of one of ours."""

    name: str
    shape: Shape
    start: Shape
    """First index in ours, which may have an index of experts before the rows."""
    head_dim: int = 0
    """Features of its heads when halves of theirs are neighbours of ours; 0: none are."""
    turned: int = 0
    """Number of these with a rotary embedding, the first ones; the others are in the same
    places."""
    paired: int = 0
    """Rows of its heads of this kind, the first ones; 0: all."""

    def runs(self) -> Iterator[Run]:
        """Rows that are consecutive in both."""
        if not self.head_dim:
            yield self.name, 0, self.start, self.shape[0]
            return
        half, paired = self.turned // 2, self.paired or self.shape[0]
        for row in range(self.shape[0]):
            place, inner = row, row % self.head_dim
            if inner < self.turned and row < paired:
                place += 2 * (inner % half) + inner // half - inner
            yield self.name, row, (self.start[0] + place, *self.start[1:]), 1

    @property
    def block(self) -> Shape:
        """Its shape in ours."""
        return (*(1 for _ in self.start[len(self.shape) :]), *self.shape)

    def of(self, ours: Tensor) -> Tensor:
        """Return their tensor from all of ours, of any shape."""
        places = zip(self.start, self.block, strict=True)
        return self.from_ours(ours[tuple(slice(first, first + n) for first, n in places)])

    def from_ours(self, block: Tensor) -> Tensor:
        """Return their tensor, of shape ``shape``, from ours.

        Args:
            block: what begins at ``start`` of ours, of shape ``block``.
        """
        rows = block.reshape(self.shape)
        if not self.head_dim:
            return rows
        paired = self.paired or self.shape[0]
        heads = rows[:paired].unflatten(0, (-1, self.head_dim))
        by_pair = heads[:, : self.turned].unflatten(1, (-1, 2)).transpose(1, 2).flatten(1, 2)
        halves = torch.cat([by_pair, heads[:, self.turned :]], 1).flatten(0, 1)
        return torch.cat([halves, rows[paired:]]).reshape(self.shape)


@dataclass(frozen=True)
class Whole:
    """One of our tensors."""

    shape: Shape
    parts: tuple[TensorPart, ...]

    def sources(self) -> dict[str, Shape]:
        """Shapes of theirs that it is made of, by name."""
        return {part.name: part.shape for part in self.parts}

    def runs(self) -> Iterator[Run]:
        """Return the sources of all its rows."""
        for part in self.parts:
            yield from part.runs()


def tensors_of(
    config: Architecture,
    names: Names,
    outside: Outside = Outside(),
    *,
    interleaved: bool | None = None,
) -> dict[str, Whole]:
    """Return our tensors by name, in the order of the model.

    Args:
        config: the model.
        names: modules of a block and those of theirs that each is made of.
        outside: names of tensors outside of blocks.
        interleaved: whether neighbouring features are turned in ours; None: as the model says.

    Raises:
        ValueError: a module of a block has no name there.
    """
    spec, found = config.decoder, {}
    for path, layout in decoder_layouts(spec).items():
        if path != layout.name:  # tied: written once
            continue
        folder, _, kind = path.rpartition(".")
        if not folder.startswith("layers."):
            found[path] = _plain(outside.of(path), layout.shape)
            continue
        _, number, module = folder.split(".", 2)
        before = f"{outside.blocks}.{number}."
        if module not in names:
            raise ValueError(f"{path} has no name in Hugging Face's format of this family")
        mixer, fused = spec.blocks[int(number)].mixer, names[module]
        if isinstance(fused, Stacked):
            found[path] = _stacked(before, fused, kind, layout.shape)
            continue
        rope: Rope | None = getattr(mixer, "rope", None)
        pairs = rope is not None and (rope.interleaved if interleaved is None else interleaved)
        heads, width = fused.turned if pairs else 0, getattr(mixer, "head_dim", 0)
        turned = rope.features(width) if rope is not None else 0
        gated = getattr(mixer, "gate", False) and len(fused.names) > 1  # rows of q alone
        outs, kind = _chunks(layout), fused.kinds.get(kind, kind)
        found[path] = _fused(
            [f"{before}{name}.{kind}" for name in fused.names],
            [(rows, *layout.shape[1:]) for rows in outs],
            [
                (width * (1 + (gated and at == 0)), turned) if at < heads else (0, 0)
                for at in range(len(outs))
            ],
        )
    return found


def _chunks(layout: TensorLayout) -> list[int]:
    """Rows of each piece that a tensor is a concatenation of."""
    for shard in layout.shards:
        if shard.dim == 0 and shard.chunks is not None:
            return [chunk.size for chunk in shard.chunks]
    return [layout.shape[0]]


def _plain(name: str, shape: Shape) -> Whole:
    return Whole(shape, (TensorPart(name, shape, (0,) * len(shape)),))


def _stacked(before: str, stacked: Stacked, kind: str, shape: Shape) -> Whole:
    """Each expert's matrices one below the other; a matrix for each expert."""
    experts, rows, columns = shape
    each = rows // len(stacked.names)
    parts = [
        TensorPart(f"{before}{name.format(e=e)}.{kind}", (each, columns), (e, i * each, 0))
        for e in range(experts)
        for i, name in enumerate(stacked.names)
    ]
    return Whole(shape, tuple(parts))


def _fused(names: list[str], shapes: list[Shape], turned: list[tuple[int, int]]) -> Whole:
    rows, columns = [shape[0] for shape in shapes], shapes[0][1:]
    if len(names) == 1 and len(shapes) > 1:  # theirs is fused, too
        paired = sum(n for n, (width, _) in zip(rows, turned, strict=True) if width)
        whole = (sum(rows), *columns)
        part = TensorPart(names[0], whole, (0,) * len(whole), *turned[0], paired=paired)
        return Whole(whole, (part,))
    firsts = accumulate(rows, initial=0)
    parts = [
        TensorPart(name, shape, (first, *(0 for _ in shape[1:])), *head)
        for name, shape, first, head in zip(names, shapes, firsts, turned, strict=False)
    ]
    return Whole((sum(rows), *columns), tuple(parts))


def stays_fp32(name: str) -> bool:
    """Return whether a tensor is fp32 in every model, whatever the format of the others is."""
    return name.endswith(".choice_bias")


def cast(folder: str | Path, name: str, values: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a tensor in another dtype.

    Args:
        folder: it is of, for the message.
        name: its name there.
        values: of any shape.
        dtype: to have.

    Raises:
        ValueError: a number is too large for it.
    """
    found = values.to(dtype)
    if not found.isfinite().all():
        most = values.abs().max().item()
        raise ValueError(f"{folder}: {name} has numbers up to {most:.3g}, too large for {dtype}")
    return found
