"""Checks that a plan names the neighbours of a cut layer: tensors, and numbers of heads."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from inspect import unwrap
from types import CodeType

from torch import nn

from kenotron_tp.fused_pieces import FUSED_STYLES, head_width
from kenotron_tp.plan_names import Named
from kenotron_tp.planned_layers import (
    BIASED,
    DIVIDED,
    LATENT,
    STAYS,
    SUMMED,
    features_of,
    gives_cut_features,
    is_linear,
)
from kenotron_tp.planned_modules import HEADS

_FUSED = re.compile(r"(?i).*(qkv|query_key_value|gate_up|up_gate|c_attn|kv_proj|w_?pack|in_proj).*")
"""Names of layers that are several matrices in one."""
_COUNTS = re.compile(
    r"(?i).*heads?|hidden_size|embed_(dim|size)|d_model|all_head_size|inner_(dim|size)|n_embd"
    r"|intermediate_size|split_size|ffn_dim"
)
"""Names of numbers that differ on a rank: numbers of heads, and widths."""


def cut_parents(named: Mapping[str, Named]) -> dict[str, list[str]]:
    """Return the modules that have layers with cut outputs, and these layers.

    A layer of the outermost module is not among them: its output is the result.
    """
    found: dict[str, list[str]] = {}
    for path, each in named.items():
        if each.is_layer and gives_cut_features(each.style):
            found.setdefault(path.rpartition(".")[0], []).append(path)
    found.pop("", None)
    return found


def attention_problems(module: nn.Module, named: Mapping[str, Named], ranks: int) -> list[str]:
    """Fused matrices whose pieces the plan does not say, and heads that would be cut."""
    problems: list[str] = []
    for path, each in named.items():
        if each.style != "colwise" or each.what != "module":
            continue
        if not is_linear(layer := module.get_submodule(path)):
            continue
        out = features_of(layer)[1]
        parent, _, last = path.rpartition(".")
        width = head_width(module.get_submodule(parent))
        # Its rows are those of several matrices, one below the other: equal cuts would deal whole
        # matrices to some ranks.
        if _FUSED.fullmatch(last):
            problems.append(
                f"{path}: colwise does not say how its pieces lie in its "
                f"{out} output features: give packed_colwise for two halves, "
                f"{', '.join(FUSED_STYLES)} for attention, or its Chunks"
            )
        elif width and out % width == 0 and out // width % ranks:
            problems.append(
                f"{path}: its {out // width} heads of {width} features cannot be "
                f"shared by {ranks} ranks: choose a tp that divides them"
            )
    return problems


def divided_problems(module: nn.Module, named: Mapping[str, Named], ranks: int) -> list[str]:
    """Numbers of heads and widths that ranks cannot share."""
    problems: list[str] = []
    for path, each in named.items():
        if each.style != DIVIDED:
            continue
        owner, _, last = path.rpartition(".")
        if (value := getattr(module.get_submodule(owner), last)) % ranks:
            problems.append(
                f"{path}: {ranks} ranks cannot share {value}: choose a tp that divides it, or give "
                f"it {STAYS}"
            )
    return problems


def bias_problems(module: nn.Module, named: Mapping[str, Named]) -> list[str]:
    """Attention with biases of heads whose number of heads is not known, or not divided."""
    problems: list[str] = []
    for path, each in named.items():
        if each.style != BIASED:
            continue
        held = [f"{path}.{name}" for name in HEADS if hasattr(module.get_submodule(path), name)]
        if not any(name in named and named[name].style == DIVIDED for name in held):
            problems.append(
                f"{path}: {BIASED} is for attention whose number of heads ({', '.join(HEADS)}) has "
                f"the style {DIVIDED}"
            )
    return problems


def shared_features(owner: nn.Module) -> int:
    """Return the features of the key that all heads of latent attention share; 0: not known."""
    for holder in (owner, getattr(owner, "config", None)):
        value = getattr(holder, "qk_rope_head_dim", None)
        if type(value) is int and value > 0:
            return value
    return 0


def latent_problems(module: nn.Module, named: Mapping[str, Named]) -> list[str]:
    """Layers that are no projection of latent attention, and keys of unknown size."""
    problems: list[str] = []
    for path, each in named.items():
        if each.style != LATENT:
            continue
        layer, owner = module.get_submodule(path), module.get_submodule(path.rpartition(".")[0])
        features = shared_features(owner)
        if not isinstance(layer, nn.Linear) or not 0 < features <= layer.out_features:
            problems.append(
                f"{path}: {LATENT} is for a linear layer whose last qk_rope_head_dim features are a"
                f" key of all heads, and {type(owner).__name__} gives {features} for it: set "
                "qk_rope_head_dim of its module or config"
            )
    return problems


def unsaid_problems(module: nn.Module, named: Mapping[str, Named]) -> list[str]:
    """Tensors and numbers next to a layer with cut output that the plan does not name."""
    problems: list[str] = []
    # A parent of a cut layer sees a part of the features: its tensors may need a cut, too, and
    # numbers that its code reads may count what is now a part.
    for parent, layers in cut_parents(named).items():
        owner = module.get_submodule(parent)
        for name, kind in _tensors(owner):
            path = f"{parent}.{name}"
            if not _is_said(path, named):
                problems.append(
                    f"{path}: this {kind} is next to {layers[0]}, whose output is cut: give it (or "
                    f"its module) {STAYS} where it sees whole features"
                    + (f", {SUMMED} where it sees those of a rank" if kind == "parameter" else "")
                )
        for name, value in _counts_read(owner):
            path = f"{parent}.{name}"
            if path not in named:
                problems.append(_count_problem(path, value, owner, layers[0]))
    return problems


def _count_problem(path: str, value: int, owner: nn.Module, layer: str) -> str:
    start = (
        f"{path}: {type(owner).__name__} reads this number ({value}) next to {layer}, whose output "
        "is cut"
    )
    if ".config." in path:
        return f"{start}, and all layers share the config: gather the output, or read an attribute"
    return f"{start}: give it {DIVIDED} where it counts what a rank has, else {STAYS}"


def _tensors(owner: nn.Module) -> Iterator[tuple[str, str]]:
    for name, _ in owner.named_parameters():
        yield name, "parameter"
    for name, buffer in owner.named_buffers():
        if buffer.ndim:
            yield name, "buffer"


def _is_said(path: str, named: Mapping[str, Named]) -> bool:
    """Return whether a tensor, or a module that has it, is named."""
    words = path.split(".")
    start = (named.get(".".join(words[:i])) for i in range(1, len(words) + 1))
    return any(each is not None and each.style != BIASED for each in start)


def _counts_read(owner: nn.Module) -> Iterator[tuple[str, int]]:
    """Numbers of heads and widths that the methods of a module read from it or its config."""
    read = {name for code in _codes(type(owner)) for name in _names_in(code)}
    config = getattr(owner, "config", None)
    for name in sorted(read):
        if not _COUNTS.fullmatch(name):
            continue
        value = getattr(owner, name, None)
        if type(value) is int and value > 1:
            yield name, value
        elif not hasattr(owner, name) and type(value := getattr(config, name, None)) is int:
            yield f"config.{name}", value


def _codes(kind: type) -> Iterator[CodeType]:
    """The compiled methods of a module's own classes, without those that build it."""
    for base in kind.__mro__:
        if base is nn.Module:
            return
        for name, value in vars(base).items():
            function = unwrap(value) if callable(value) else None
            code = getattr(function, "__code__", None)
            if isinstance(code, CodeType) and name not in ("__init__", "extra_repr"):
                yield code


def _names_in(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names_in(constant)
