"""Which tensors an optimizer updates as whole matrices (Muon, Jordan et al., 2024)."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from kenotron_dist import MATRICES, TensorLayout


def whole_matrices(
    layouts: Mapping[str, TensorLayout],
    sizes: Mapping[str, int],
    exclude: Sequence[str] = (),
) -> set[str]:
    """Return the logical names of the matrices inside the model, without the excluded ones.

    These are the tensors of two dimensions whose role is one of ``kenotron_dist.MATRICES``: no
    tables and no output layer.

    Arguments: layouts of the whole model; sizes of the axes that placements may name
    (``mesh.axis_sizes``); regular expressions for whole names that stay with the other optimizer.
    Pure: the same on every rank.

    Raises ValueError for a matrix that is cut over ranks (orthogonalising a part of it is not what
    Muon does to the whole), for a pattern that no name matches, and when no matrix is left.
    """
    found = set()
    for pattern in exclude:
        if not any(re.fullmatch(pattern, layout.name) for layout in layouts.values()):
            raise ValueError(
                f"no parameter is named by {pattern!r}, which shall be left to AdamW "
                "(adamw_named_params): a pattern must match a whole name"
            )
    for layout in layouts.values():
        other = any(re.fullmatch(pattern, layout.name) for pattern in exclude)
        if len(layout.shape) != 2 or other or layout.role not in MATRICES:
            continue
        cut = [each.axis for each in layout.shards if sizes[each.axis] > 1]
        if cut:
            raise ValueError(
                f"parameter {layout.name!r} is cut over {cut[0]}, but Muon needs whole matrices: "
                f"train with {cut[0]} 1, or leave it to AdamW by a pattern in adamw_named_params"
            )
        found.add(layout.name)
    if not found:
        raise ValueError("no matrix is left for Muon: take AdamW, or exclude less")
    return found
