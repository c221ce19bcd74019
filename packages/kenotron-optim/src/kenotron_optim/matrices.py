"""Which tensors an optimizer updates as whole matrices (Muon, Jordan et al., 2024)."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence

from kenotron_dist import TensorLayout
from kenotron_optim.config import Kind

_OUTPUT = r"(.*\.)?(lm_)?head\..*"


def whole_matrices(
    layouts: Mapping[str, TensorLayout],
    kinds: Mapping[str, Collection[Kind]],
    sizes: Mapping[str, int],
    exclude: Sequence[str] = (),
) -> set[str]:
    """Logical names of the model's matrices, but for tables, the output layer and excluded ones.

    Arguments: layouts of the whole model; kinds of parameters (``parameter_kinds``); sizes of the
    mesh; regular expressions for whole names that stay with the other optimizer. The output layer
    is known by its name, ``head`` or ``lm_head``. Pure: the same on every rank.

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
        other = any(re.fullmatch(pattern, layout.name) for pattern in (*exclude, _OUTPUT))
        if len(layout.shape) != 2 or other or "embeddings" in kinds.get(layout.name, ()):
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
