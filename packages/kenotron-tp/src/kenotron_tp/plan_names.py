"""The names of a plan, and what of a module each of them means."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Literal

from torch import nn

from kenotron_dist.placement import Chunk
from kenotron_tp.fused_pieces import FUSED_STYLES
from kenotron_tp.planned_layers import (
    BIASED,
    COLUMNS,
    DIVIDED,
    LATENT,
    LOCAL,
    OTHER_NAMES,
    PACKED_ROWS,
    REFUSED,
    SHARE,
    STAYS,
    STYLES,
    SUMMED,
    SUMS,
    Style,
    features_of,
    is_linear,
    style_named,
)

PARAMETERS = (*COLUMNS, "rowwise", PACKED_ROWS)
"""Styles that cut a parameter by its own name."""
What = Literal["module", "parameter", "buffer", "number"]


@dataclass(frozen=True)
class Named:
    """Entry of a plan for one name."""

    what: What
    style: Style
    pattern: str

    @property
    def is_layer(self) -> bool:
        """True where it is a layer that is cut."""
        kept = (SUMMED, STAYS, DIVIDED, LOCAL, LATENT, BIASED, SHARE, *SUMS)
        return self.what == "module" and self.style not in kept

    @property
    def is_cut_parameter(self) -> bool:
        """True where it is a parameter that is cut by its own name."""
        return self.what == "parameter" and self.style in PARAMETERS


def match_plan(module: nn.Module, plan: Mapping[str, Style]) -> tuple[dict[str, Named], list[str]]:
    """Return what is named in ``module``, by its full name, and a line for each problem."""
    there = _names(module)
    named: dict[str, Named] = {}
    problems: list[str] = []
    seen: dict[int, str] = {}
    for pattern, given in plan.items():
        style = style_named(given)
        if problem := _style_problem(style):
            problems.append(f"{pattern}: {problem}")
            continue
        matching = [name for name in there if _matches(pattern, name)]
        if not matching:
            problems.append(f"{pattern}: {_nothing(pattern, there)}")
        for name in matching:
            each = Named(there[name], style, pattern)
            if name in named:
                other = named[name].pattern
                problems.append(f"{name}: both {other} and {pattern} match it: give it one style")
            elif problem := _target_problem(each):
                problems.append(f"{name}: {problem}")
            else:
                named[name] = each
            if each.is_layer:
                first = seen.setdefault(id(module.get_submodule(name)), name)
                if first != name:
                    problems.append(f"{first} and {name} are one module: it cannot be cut twice")
    return {} if problems else named, problems


def with_pieces(
    module: nn.Module, named: Mapping[str, Named]
) -> tuple[dict[str, Named], list[str]]:
    """Give fused layers the Chunks that their styles stand for; and a line for each problem."""
    found, problems = {**named}, list[str]()
    for path, each in named.items():
        if each.style not in FUSED_STYLES:
            continue
        layer, owner = module.get_submodule(path), module.get_submodule(path.rpartition(".")[0])
        pieces: Sequence[Chunk] | str = f"style {each.style} is for linear layers"
        if is_linear(layer):
            pieces = FUSED_STYLES[str(each.style)](*features_of(layer), owner)
        if isinstance(pieces, str):
            problems.append(f"{path}: {pieces}")
        else:
            found[path] = replace(each, style=tuple(pieces))
    return found, problems


def _names(module: nn.Module) -> dict[str, What]:
    """Everything below a module that a plan can name, and what it is."""
    found: dict[str, What] = {}
    for path, each in module.named_modules(remove_duplicate=False):
        start = f"{path}." if path else ""
        if path:
            found[path] = "module"
        for name, parameter in each._parameters.items():
            if parameter is not None:
                found[start + name] = "parameter"
        for name, buffer in each._buffers.items():
            if buffer is not None:
                found[start + name] = "buffer"
        for name, value in vars(each).items():
            if type(value) is int:
                found[start + name] = "number"
    return found


def _matches(pattern: str, name: str) -> bool:
    words, parts = pattern.split("."), name.split(".")
    return len(words) == len(parts) and all(map(fnmatchcase, parts, words))


def _style_problem(style: Style) -> str | None:
    if style in STYLES:
        return None
    if isinstance(style, str) and style in REFUSED:
        return f"style {style} cannot be done here: {REFUSED[style]}"
    if isinstance(style, tuple) and style and all(isinstance(each, Chunk) for each in style):
        return None
    known = ", ".join((*STYLES, *OTHER_NAMES))
    return f"there is no style {style!r}: it is one of {known}, or the Chunks of a column layer"


def _target_problem(named: Named) -> str | None:
    """A style that does not fit what is named."""
    fits = {
        "module": named.style not in (DIVIDED, PACKED_ROWS),
        "parameter": named.style in (STAYS, SUMMED, *PARAMETERS),
        "buffer": named.style == STAYS,
        "number": named.style in (STAYS, DIVIDED),
    }[named.what]
    if fits:
        return None
    return f"style {named.style} does not fit a {named.what}"


def _nothing(pattern: str, there: Mapping[str, What]) -> str:
    """Say that a pattern matches nothing, and what is near it."""
    general = {".".join("*" if w.isdecimal() else w for w in name.split(".")) for name in there}
    near = get_close_matches(pattern, general, n=1)
    return "no such name in the module" + (f"; is it {near[0]}?" if near else "")
