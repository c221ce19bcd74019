"""transformers' models cut over tp by the plans of their families, and the roles of parameters."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn

from kenotron_dist import Role, declare_roles
from kenotron_dist.placement import Chunk
from kenotron_models.build import Build
from kenotron_models.transformers_corrections import CORRECTIONS
from kenotron_models.transformers_experts import declare_stacks, exchange_experts
from kenotron_models.transformers_structure import found_plan
from kenotron_models.transformers_twin import meta_twin
from kenotron_tp import Style, parallelize, vocabulary_chunk

Plan = Iterable[tuple[str, str]]
"""Names, with ``*`` for one word, and the style of each."""
FUSED = ("qkv_proj", "query_key_value", "qkv", "c_attn", "Wqkv", "W_pack", "in_proj")
"""Matrices that ``base_model_tp_plan`` cuts by heads: queries, keys and values of each together."""


def base_of(model: Any) -> Any:
    """Return the model without its head, whose names plans begin with."""
    base = model.base_model
    if base is not model or model.get_input_embeddings() is None:
        return base
    return model.get_submodule(path_of(model, model.get_input_embeddings()).rpartition(".")[0])


def path_of(model: nn.Module, module: nn.Module) -> str:
    """Return the name of a module in a model."""
    return next(path for path, each in model.named_modules() if each is module)


def tp_plan(model: Any, given: Plan = ()) -> dict[str, str] | None:
    """Return the plan of a model's layers, by full names; None: it has none.

    It is transformers' ``base_model_tp_plan``, corrected, without names of other variants of the
    family, and then ``given``, whose entries replace those of the same name.
    """
    plan = _family_plan(model)
    if not (plan or given):
        return None
    prefix = path_of(model, base_of(model))
    start = f"{prefix}." if prefix else ""
    found = {start + name: style for name, style in plan.items()}
    held = [*_names(model)]
    known = {name: style for name, style in found.items() if any(_fits(name, h) for h in held)}
    return known | dict(given)


def _family_plan(model: Any) -> dict[str, str]:
    text = model.config.get_text_config(decoder=True)
    plan = getattr(text, "base_model_tp_plan", None)
    return {**plan, **CORRECTIONS.get(text.model_type, {})} if plan else {}


def cut_model(model: Any, build: Build, given: Plan = ()) -> None:
    """Cut a model in place: layers over tp by their plan, the vocabulary, and experts over ep.

    Args:
        model: of transformers, on meta.
        build: with both axes.
        given: styles that replace those of its family, by full names.

    Raises:
        ValueError: there is no plan and tp is not 1, or the plan cannot be followed; experts that
            cannot be cut over ep.
    """
    tp, plan, kind = build.tp, tp_plan(model, given), model.config.model_type
    if tp.size > 1 and getattr(model.config, "slow_but_exact", False):
        raise ValueError(
            f"slow_but_exact is true in the config.json of a {kind}, which then computes with "
            "weights that tp cuts: set it to false"
        )
    if not isinstance(model.get_output_embeddings(), nn.Linear):
        raise ValueError(f"a {kind} has no linear layer that makes logits")
    if plan is None and tp.size > 1:
        hint = f"; its layers' names suggest {json.dumps(p)}" if (p := found_plan(model)) else ""
        raise ValueError(
            f"tp {tp.size} was given, but transformers has no base_model_tp_plan for a {kind}: set "
            f"tp to 1, or give a plan with model.model_config.tp_plan{hint}"
        )
    rest = exchange_experts(model, plan or {}, build) if build.ep.size > 1 else plan
    try:
        styles = _styles(model, rest, {*dict(given)}, tp.size)
        strict = not _family_plan(model)  # those of families are compared with plain models
        parallelize(model, styles, tp, overlap=build.mode.overlap, strict=strict)
    except ValueError as error:
        if tp.size > 1 or given:
            where = f"over tp {tp.size}" if tp.size > 1 else "with the tp_plan that is given"
            raise ValueError(
                f"a {kind} {where}: {error}\nmodel.model_config.tp_plan gives a name "
                "another style, replicate to leave it whole"
            ) from error
        parallelize(model, {}, tp)  # it trains on one rank
    declare_stacks(model)
    _declare_roles(model, plan or {})


def _styles(
    model: Any, plan: dict[str, str] | None, given: set[str], ranks: int
) -> dict[str, Style]:
    """The plan of all layers, of embedding and head too; empty where there is none."""
    if plan is None:
        return {}
    styles: dict[str, Style] = {  # of given ones it is not known how pieces lie
        name: style if name in given else _style(model, name, style, ranks)
        for name, style in plan.items()
    }
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    path = path_of(model, embedding)
    rows = isinstance(embedding, nn.Embedding) and len([*embedding.parameters()]) == 1
    if rows:
        styles.setdefault(path, "embedding_rowwise")
    if (output := path_of(model, head)) in styles:
        raise ValueError(f"{output}: it is cut over the vocabulary, for the loss: leave it out")
    styles[output] = (vocabulary_chunk(head.out_features, ranks),)
    return styles


def _style(model: Any, pattern: str, style: str, ranks: int) -> Style:
    """A style of transformers; what is cut by heads is cut between them."""
    if style != "colwise":
        return style
    layer, owner = next(_matching(model, pattern), (None, None))
    if not isinstance(layer, nn.Linear):
        return style
    config = model.config.get_text_config(decoder=True)
    fused = pattern.rpartition(".")[2] in FUSED
    latent = isinstance(getattr(owner, "qk_rope_head_dim", None), int)
    if not (fused or latent):
        return style
    heads = config.num_attention_heads
    if heads % ranks:
        raise ValueError(
            f"{pattern} has {heads} heads, which {ranks} ranks cannot share: choose a tp that "
            "divides them"
        )
    return (Chunk(layer.out_features, parts=heads),)


def _declare_roles(model: Any, plan: dict[str, str]) -> None:
    """Declare what parameters are where their shape does not tell: first values ask for it."""
    declare_roles(model.get_output_embeddings(), weight="output")
    for pattern, style in plan.items():
        if not style.startswith("rowwise"):
            continue
        for layer, owner in _matching(model, pattern):
            if isinstance(layer, nn.Parameter):
                residual: dict[str, Role] = {pattern.rpartition(".")[2]: "residual"}
                declare_roles(owner, **residual)
            elif isinstance(layer, nn.Module) and "weight" in layer._parameters:
                declare_roles(layer, weight="residual")
    for module in model.modules():
        small = [n for n, p in module._parameters.items() if p is not None and p.ndim < 2]
        plain = isinstance(module, nn.Linear | nn.LayerNorm) or hasattr(module, "roles")
        if small and not plain:
            declare_roles(module, **_constants(model, module, small))


def _matching(model: nn.Module, pattern: str) -> Iterator[tuple[Any, nn.Module]]:
    """Modules, parameters and attributes of a name, and the module that each of them is in."""
    for path in _names(model):
        if _fits(pattern, path):
            owner, _, last = path.rpartition(".")
            parent = model.get_submodule(owner)
            yield getattr(parent, last), parent


def _names(model: nn.Module) -> Iterator[str]:
    for path, module in model.named_modules():
        if path:
            yield path
        for name, _ in module.named_parameters(recurse=False):
            yield f"{path}.{name}" if path else name


def _fits(pattern: str, name: str) -> bool:
    words, parts = pattern.split("."), name.split(".")
    return len(words) == len(parts) and all(map(fnmatchcase, parts, words))


def _constants(model: Any, module: nn.Module, names: list[str]) -> dict[str, Role]:
    """Roles of vectors, from the constants that transformers begins them with."""
    twin = meta_twin(module)
    twin._parameters = {
        name: nn.Parameter(torch.full(p.shape if name in names else (1, 1), torch.nan))
        for name, p in module._parameters.items()
        if p is not None
    }
    try:
        with torch.no_grad():
            model._init_weights(twin)
    except (AttributeError, RuntimeError, IndexError):  # it looks at what the twin does not have
        return {}
    found: dict[str, Role] = {}
    for name in names:
        values = twin._parameters[name]
        if values is None:
            continue
        if bool((values == 1).all()):
            found[name] = "norm"
        elif bool((values == 0).all()):
            found[name] = "norm_offset" if name == "weight" else "norm_bias"
    return found
