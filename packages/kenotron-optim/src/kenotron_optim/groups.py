"""Parameter groups of an optimizer, from plain rules.

Everything here is a pure function of the *whole* model's names, so that all ranks of all pipeline
stages come to the same groups.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import get_args

from kenotron_dist import Role
from kenotron_dist.placement import TensorLayout
from kenotron_optim.config import Kind, LRMultiplier

KIND_ROLES: dict[Kind, frozenset[Role]] = {
    "norms": frozenset({"norm", "norm_offset", "norm_bias"}),
    "biases": frozenset({"bias", "norm_bias"}),
    "embeddings": frozenset({"embedding"}),
}
"""Roles of the parameters that a kind stands for."""
NEVER_DECAYED: frozenset[Role] = frozenset({"state"})
"""Roles without weight decay: 0 is no neutral value of the constants of a state-space layer."""
SHOWN_NAMES = 4
"""Names of a group that a report shows, where numbers are left out."""


@dataclass(frozen=True)
class ParameterGroup:
    """Logical tensors with the same options."""

    names: tuple[str, ...]
    weight_decay: float
    lr_multiplier: float = 1.0
    """Factor of the schedule's learning rate (and so of the weight decay of a step)."""


def parameter_groups(
    names: Iterable[str],
    weight_decay: float,
    *,
    exclude: Sequence[str] = (),
    exclude_kinds: Collection[Kind] = (),
    layouts: Mapping[str, TensorLayout] | None = None,
    lr_multipliers: Sequence[LRMultiplier] = (),
    factors_of: Mapping[str, tuple[float, float]] | None = None,
) -> list[ParameterGroup]:
    """Sort all parameters of a model into groups with the same options.

    Args:
        names: logical names of the whole model (``GradAccumulator.names``).
        weight_decay: of all parameters but the excluded ones, which have none. With ``layouts`` the
            roles of ``NEVER_DECAYED`` have none either.
        exclude: regular expressions for whole names without weight decay.
        exclude_kinds: kinds without weight decay, by the roles that modules declare. A kind that no
            parameter has excludes nothing.
        layouts: layouts of the whole model, for ``exclude_kinds`` and roles.
        lr_multipliers: factors of learning rates by regular expressions for whole names, or by
            roles; the first that holds for a name counts.
        factors_of: further factors of learning rate and weight decay by name; None: all are 1.

    Returns:
        Groups that are not empty: those without multiplier, then in the order of the rules, with
        weight decay before without, then those of further factors. Names keep their order.

    Raises:
        ValueError: a pattern or role that holds for no name, a multiplier that earlier ones leave
            nothing to, or kinds or roles without ``layouts``.
    """
    names = list(names)
    if not 0 <= weight_decay < float("inf"):
        raise ValueError(f"weight_decay {weight_decay} must be finite and not negative")
    unknown = [each for each in exclude_kinds if each not in get_args(Kind)]
    if unknown or isinstance(exclude_kinds, str):
        known = ", ".join(map(repr, get_args(Kind)))
        raise ValueError(f"exclude_kinds {exclude_kinds!r}: give a list of some of {known}")
    roles = [rule.role for rule in lr_multipliers if rule.role is not None]
    if layouts is None:
        _check_asks_nothing(exclude_kinds=sorted(exclude_kinds), lr_multipliers=roles)
    for pattern in exclude:
        _matches(pattern, names, "which shall have no weight decay (exclude)")
    role_of = {layout.name: layout.role for layout in (layouts or {}).values()}
    factors = _first_matches(names, lr_multipliers, role_of)
    plain = NEVER_DECAYED.union(*(KIND_ROLES[kind] for kind in exclude_kinds))
    free = {layout.name for layout in (layouts or {}).values() if layout.role in plain}
    free |= {name for name in names if any(re.fullmatch(pattern, name) for pattern in exclude)}
    order = dict.fromkeys([1.0, *(rule.multiplier for rule in lr_multipliers)])
    members: dict[tuple[float, float], list[str]] = {
        (factor, decay): [] for factor in order for decay in (weight_decay, 0.0)
    }
    for name in names:
        lr, shrink = (1.0, 1.0) if factors_of is None else factors_of[name]
        decay = 0.0 if name in free else weight_decay * shrink
        members.setdefault((factors.get(name, 1.0) * lr, decay), []).append(name)
    return [
        ParameterGroup(tuple(own), decay, factor) for (factor, decay), own in members.items() if own
    ]


def _check_asks_nothing(**asked: Sequence[str]) -> None:
    """Refuse kinds and roles, which layouts alone know."""
    for what, names in asked.items():
        if names:
            raise ValueError(
                f"{what} {names} were given without layouts: pass "
                "layouts=parameter_layouts(model, mesh.axis_sizes)"
            )


def decay_groups(
    names: Iterable[str], weight_decay: float, exclude: Sequence[str] = ()
) -> list[ParameterGroup]:
    """Two groups: with weight decay, and without for names that match an ``exclude`` pattern.

    ``parameter_groups`` with no other rule.
    """
    return parameter_groups(names, weight_decay, exclude=exclude)


def describe_groups(
    groups: Sequence[ParameterGroup],
    layouts: Iterable[TensorLayout] | Mapping[str, TensorLayout],
) -> str:
    """A table of groups: multiplier, weight decay, tensors, logical elements, some names.

    Numbers in names are shown as ``*``.

    Args:
        groups: the groups.
        layouts: of the whole model (tied ones may come more than once).

    Raises:
        ValueError: a name has no layout.
    """
    each = layouts.values() if isinstance(layouts, Mapping) else layouts
    shapes = {layout.name: layout.shape for layout in each}
    unknown = sorted({name for group in groups for name in group.names} - set(shapes))
    if unknown:
        raise ValueError(f"no layout for parameters {unknown}: layouts are of the whole model")
    rows = [("group", "lr x", "weight decay", "tensors", "elements", "names")]
    for number, group in enumerate(groups):
        if group.names:
            rows.append(
                (
                    str(number),
                    f"{group.lr_multiplier:.6g}",
                    f"{group.weight_decay:.6g}",
                    str(len(group.names)),
                    f"{sum(_product(shapes[name]) for name in group.names):,}",
                    _shortened(group.names),
                )
            )
    *widths, _ = (max(map(len, column)) for column in zip(*rows, strict=True))
    return "\n".join(
        "  ".join([*(cell.rjust(n) for cell, n in zip(row, widths, strict=False)), row[-1]])
        for row in rows
    )


def _matches(pattern: str, names: Sequence[str], purpose: str) -> list[str]:
    """The names that a pattern matches, which are some."""
    found = [name for name in names if re.fullmatch(pattern, name)]
    if not found:
        near = difflib.get_close_matches(pattern, names, n=1, cutoff=0.0)
        raise ValueError(
            f"no parameter is named by {pattern!r}, {purpose}: a pattern must match a whole name, "
            f"such as {near[0] if near else '(none)'!r}"
        )
    return found


def _first_matches(
    names: Sequence[str], rules: Sequence[LRMultiplier], role_of: Mapping[str, str]
) -> dict[str, float]:
    """The factor of every name that a rule holds for."""
    factors: dict[str, float] = {}
    purpose = "which shall have a learning rate of its own (lr_multipliers)"
    for rule in rules:
        if rule.pattern is not None:
            matched = _matches(rule.pattern, names, purpose)
        elif not (matched := [name for name in names if role_of[name] == rule.role]):
            there = ", ".join(sorted({role_of[name] for name in names}))
            raise ValueError(
                f"no parameter has the role {rule.role!r}, {purpose}: the model's have {there}"
            )
        # The first rule that matches a name counts; a rule with no name left is a mistake.
        fresh = [name for name in matched if name not in factors]
        if not fresh:
            raise ValueError(
                f"the rule {rule.pattern or rule.role!r} of lr_multipliers has no effect: earlier "
                f"rules match all of its parameters, such as {matched[0]!r}, and the first match "
                "counts; put the narrower rule first"
            )
        factors |= dict.fromkeys(fresh, rule.multiplier)
    return factors


def _shortened(names: Sequence[str]) -> str:
    """Names with ``*`` for numbers, each once, the first few of them."""
    short = list(dict.fromkeys(re.sub(r"(?<![^.])\d+(?![^.])", "*", name) for name in names))
    more = len(short) - SHOWN_NAMES
    return ", ".join(short[:SHOWN_NAMES]) + (f" and {more} more" if more > 0 else "")


def _product(shape: Sequence[int]) -> int:
    size = 1
    for extent in shape:
        size *= extent
    return size
