"""Types of parameters over the axes of a layout, in the terms of ``spmd_types``."""

from __future__ import annotations

import re
from collections.abc import Mapping
from textwrap import wrap

from kenotron_dist import MeshConfig, views_of
from kenotron_dist.placement import TensorLayout

LEGEND = (
    "Parameters over axes (V: cut; R: whole, gradients are summed over the axis; I: whole, with "
    "whole gradients on every rank):"
)


def described_placements(
    layouts: Mapping[str, TensorLayout], sizes: MeshConfig, width: int
) -> list[str]:
    """Describe the types of parameters over the axes of more than one rank; pp cuts layers.

    Args:
        layouts: of the whole model's parameters, by name.
        sizes: of the mesh.
        width: columns of a line.

    Returns:
        A legend, and lines of each combination of types with the parameters that have it, numbers
        in their names replaced by ``*``; nothing where no axis but pp has several ranks.
    """
    view_of, found = views_of(sizes, 0), dict[str, dict[str, None]]()
    for layout in layouts.values():
        view = view_of(layout)
        axes = [axis for axis in view.axes if axis != "pp" and view.sizes[axis] > 1]
        types = ", ".join(f"{axis}~{view.type_over(axis, layout)}" for axis in axes)
        if types:
            found.setdefault(types, {})[re.sub(r"(?<=\.)\d+(?=\.)", "*", layout.name)] = None
    if not found:
        return []
    lines = wrap(LEGEND, width)
    indent = 2 + max(map(len, found)) + 2
    for types, names in found.items():
        first, *more = wrap(", ".join(names), width - indent, break_on_hyphens=False)
        lines.append(f"  {types:<{indent - 2}}{first}".replace("~", " "))
        lines += [" " * indent + each for each in more]
    return lines
