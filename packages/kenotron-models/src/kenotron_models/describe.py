"""The plan of a model as text: every tensor of every block, its shape, and what cuts it."""

from __future__ import annotations

from collections.abc import Iterator

from kenotron_dist.placement import Fused, Partial, Placement, Shard, TensorLayout, Tie
from kenotron_models.shapes import decoder_layouts
from kenotron_models.spec import Architecture

_BLOCKS = "layers."


def describe(config: Architecture, ep: int = 1) -> str:
    """Return a line for each tensor of a decoder; equal blocks that follow one another are one.

    A line has the name, the whole shape, the role, and what the ranks of an axis do with it:

        layers.0 ... layers.21
          attention.qkv.weight    3,072 x 2,048    hidden    tp cuts dim 0

    Args:
        config: sizes of a model.
        ep: ranks of ep.
    """
    layouts = decoder_layouts(config, ep)
    parts: dict[str, list[TensorLayout]] = {}
    for name, layout in layouts.items():
        parts.setdefault(_part_of(name), []).append(layout)
    width = max(len(name.removeprefix(_part_of(name) + ".")) for name in layouts)
    long = max(len(_shape(layout)) for layout in layouts.values())
    lines: list[str] = []
    for first, last, rows in _runs(parts, width, long):
        lines += [first if first == last else f"{first} ... {last}", *rows]
    return "\n".join(lines)


def _part_of(name: str) -> str:
    """``layers.3`` of a tensor in a block, else the name of the layer."""
    words = name.split(".")
    return ".".join(words[:2] if name.startswith(_BLOCKS) else words[:1])


def _runs(
    parts: dict[str, list[TensorLayout]], width: int, long: int
) -> Iterator[tuple[str, str, list[str]]]:
    """Yield first and last part of each run of equal ones, and their lines."""
    run: tuple[str, str, list[str]] | None = None
    for part, layouts in parts.items():
        rows = [_line(layout, part, width, long) for layout in layouts]
        if run is not None and run[2] == rows and part.startswith(_BLOCKS):
            run = (run[0], part, rows)
            continue
        if run is not None:
            yield run
        run = (part, part, rows)
    if run is not None:
        yield run


def _shape(layout: TensorLayout) -> str:
    return " x ".join(f"{size:,}" for size in layout.shape)


def _line(layout: TensorLayout, part: str, width: int, long: int) -> str:
    own = next(name for name in layout.owners if name.startswith(f"{part}."))
    cuts = "; ".join(filter(None, map(_said, layout.placement))) or "whole"
    if len(layout.owners) > 1:
        cuts += f"; one tensor: {' and '.join(layout.owners)}"
    name = own.removeprefix(f"{part}.")
    return f"  {name:<{width}}  {_shape(layout):<{long}}  {layout.role:<9}  {cuts}"


def _said(placement: Placement) -> str:
    if isinstance(placement, Shard):
        chunks = placement.chunks or ()
        sizes = " + ".join(f"{chunk.size:,}" for chunk in chunks)
        return f"{placement.axis} cuts dim {placement.dim}" + (
            f" ({sizes})" if len(chunks) > 1 else ""
        )
    if isinstance(placement, Partial):
        return f"gradient summed over {placement.axis}"
    assert isinstance(placement, Tie | Fused)
    return ""
