"""Cut a module that is there, in place, by a plan of names.

The plan is that of transformers (``base_model_tp_plan``) and of DTensor: names with ``*`` for one
word, and a style for each:

- ``colwise``: the output features are cut. ``packed_colwise``: they are two pieces of the same
  size, each cut by itself (gate and up). A sequence of ``Chunk``: they are these pieces.
- ``qkv_colwise``, ``heads_colwise``, ``multi_query_colwise``: queries, keys and values in one
  matrix; see ``FUSED_STYLES``.
- ``own_heads_of_bias``: attention that gets a bias for each head, of which it takes its own.
- ``colwise_gather_output`` (``colwise_rep``): cut, and gathered after the product.
- ``rowwise``: the input features are cut; of an embedding, its rows (``embedding_rowwise``).
- ``rowwise_split_input`` (``rowwise_rep``): cut, and the input is whole.
- ``embedding_colwise``: the columns of an embedding are cut, and gathered after the look-up.
- ``moe_tp_experts``, ``all_reduce``: a module whose own parameters are cut, by their names, with
  ``colwise``, ``rowwise``, ``packed_colwise`` or ``packed_rowwise``; its outputs are summed.
- ``moe_identity_expert``: a module in it without parameters, which gets 1/t of its input.
- ``mla_kv_a_proj``: stays whole; the gradient of its last ``qk_rope_head_dim`` output features,
  a key that all heads share, is summed.
- ``replicated_with_grad_allreduce``: stays whole and sees this rank's features only, so its
  gradient is partial (``Partial``): a norm of each head.
- ``replicate``, ``local_params``: stays as it is. ``divide``: an integer (a number of heads) is
  divided by t.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn

from kenotron_dist import Axis
from kenotron_dist.placement import Partial, Placement, Tie
from kenotron_tp.cut import check_axis
from kenotron_tp.plan_checks import (
    attention_problems,
    bias_problems,
    cut_parents,
    divided_problems,
    latent_problems,
    shared_features,
    unsaid_problems,
)
from kenotron_tp.plan_names import Named, match_plan, with_pieces
from kenotron_tp.planned_layers import (
    BIASED,
    DIVIDED,
    LATENT,
    SHARE,
    SUMMED,
    SUMS,
    Style,
    cut_dim,
    cut_layer,
    layer_problem,
)
from kenotron_tp.planned_modules import own_heads_of_bias, share_input, share_key, sum_output
from kenotron_tp.planned_parameters import cut_named_parameter, parameter_problems


@dataclass(frozen=True)
class _TiedParameter:
    """A parameter that several modules have."""

    name: str
    """Its logical name: the first of its names."""
    owners: tuple[tuple[str, str], ...]
    """Path of each module, and its name for the parameter."""


def parallelize(
    module: nn.Module,
    plan: Mapping[str, Style],
    axis: Axis,
    *,
    overlap: bool = False,
    strict: bool = True,
) -> None:
    """Cut linear layers and embeddings of ``module`` over ``axis``, in place, with their weights.

    Afterwards ``module`` computes what it computed. Its cut layers declare placements and roles, as
    the layers of this package do. Tokens stay whole between layers.

    A name is that of a module, a parameter, a buffer or an integer attribute, from ``module`` on;
    ``*`` stands for one word, or a part of one (``layers.*.self_attn.q_proj``). Styles: see the
    module's docstring.

    With ``strict``, what is in the module of a layer with cut output is to be named: parameters and
    buffers, and numbers of heads that its ``forward`` reads. Tied parameters are cut the same way
    and become one Parameter for each owner, over one storage, declared with ``Tie``.

    Args:
        module: on any device, meta too; the same on all ranks.
        plan: a style for each name.
        axis: the tp axis.
        overlap: communication travels while pieces are multiplied; see ``ColumnParallelLinear``.
        strict: false: what is not named stays as it is, for plans that were compared with the
            whole module; see ``kenotron_dist.diagnosis.check_replicas``.

    Raises:
        ValueError: a line for each problem: a name that matches nothing or what another one
            matches; an unknown style, or one that cannot be done here; a module that is no linear
            layer or embedding; sizes that do not divide; what is not named and must be. Nothing is
            changed then.
    """
    check_axis(axis)
    named, problems = match_plan(module, plan)
    named, more = with_pieces(module, named)
    problems += more
    tied = _tied_parameters(module)
    for path, each in named.items():
        if each.is_layer:
            problem = layer_problem(module.get_submodule(path), each.style, axis)
            problems += [f"{path}: {problem}"] if problem else []
    parents = cut_parents(named)
    problems += parameter_problems(module, named, parents, axis)
    problems += latent_problems(module, named)
    problems += divided_problems(module, named, axis.size)
    problems += bias_problems(module, named)
    problems += attention_problems(module, named, axis.size)
    problems += unsaid_problems(module, named) if strict else []
    problems += [line for tie in tied for line in _tie_problems(module, tie, named)]
    # All problems are found before anything is changed.
    if problems:
        raise ValueError("\n  ".join(["the plan cannot be followed:", *_grouped(problems)]))
    for path, each in named.items():
        _apply(module, path, each, axis, overlap)
    for tie in tied:
        _tie_again(module, tie)


def _grouped(problems: list[str]) -> list[str]:
    """Return the first of those that differ in numbers of layers alone, and how many follow."""
    groups = dict[str, list[str]]()
    for line in problems:
        groups.setdefault(re.sub(r"(?<=\.)\d+(?=\.)", "*", line), []).append(line)
    more = " (and {} times more, with other numbers of layers)"
    return [own[0] + (more.format(len(own) - 1) if own[1:] else "") for own in groups.values()]


def _apply(module: nn.Module, path: str, named: Named, axis: Axis, overlap: bool) -> None:
    """Do what a style says to one name."""
    parent, _, last = path.rpartition(".")
    owner = module.get_submodule(parent)
    if named.is_layer:
        layer = owner.get_submodule(last)
        made = cut_layer(layer, named.style, axis, overlap)
        owner.add_module(last, made.train(layer.training))
    elif named.is_cut_parameter:
        _declare(owner, last, cut_named_parameter(owner, last, str(named.style), axis))
    elif named.style == DIVIDED:
        setattr(owner, last, getattr(owner, last) // axis.size)
    elif named.style in SUMS:
        sum_output(owner.get_submodule(last), axis)
    elif named.style == BIASED:
        own_heads_of_bias(owner.get_submodule(last), axis)
    elif named.style == SHARE:
        share_input(owner.get_submodule(last), axis)
    elif named.style == LATENT:
        share_key(owner.get_submodule(last), axis, shared_features(owner))
    elif named.style == SUMMED and axis.size > 1:
        _declare_partial(owner, last, named, axis)


def _declare_partial(owner: nn.Module, last: str, named: Named, axis: Axis) -> None:
    """Declare that the gradient of a parameter, or of all of a module's, is partial."""
    if named.what == "parameter":
        _declare(owner, last, Partial(axis.name))
        return
    for each in owner.get_submodule(last).modules():
        for name, _ in each.named_parameters(recurse=False):
            _declare(each, name, Partial(axis.name))


def _declare(owner: nn.Module, name: str, more: Placement) -> None:
    """Add a placement to those that a module declares."""
    declared = {**getattr(owner, "placements", {})}
    before = declared.get(name, ())
    declared[name] = (*(before if isinstance(before, tuple) else (before,)), more)
    setattr(owner, "placements", declared)  # noqa: B010 (a module's own attributes are typed)


def _tied_parameters(module: nn.Module) -> list[_TiedParameter]:
    found: dict[int, list[tuple[str, str]]] = {}
    for path, owner in module.named_modules():
        for name, parameter in owner._parameters.items():
            if parameter is not None:
                found.setdefault(id(parameter), []).append((path, name))
    return [
        _TiedParameter(".".join(filter(None, owners[0])), tuple(owners))
        for owners in found.values()
        if len(owners) > 1
    ]


def _tie_problems(module: nn.Module, tie: _TiedParameter, named: Mapping[str, Named]) -> list[str]:
    """Owners that are cut in different ways, or of which some are not cut."""
    ways: set[int | None] = set()
    for path, _ in tie.owners:
        each = named.get(path)
        cut = each is not None and each.is_layer
        ways.add(cut_dim(module.get_submodule(path), each.style) if each and cut else None)
    if len(ways) == 1:
        return []
    listed = " and ".join(path for path, _ in tie.owners)
    return [
        f"{listed}: they have one parameter, {tie.name}: cut all of them over its rows "
        "(embedding_rowwise, colwise_gather_output), or none"
    ]


def _tie_again(module: nn.Module, tie: _TiedParameter) -> None:
    """Give each owner a Parameter of its own over one storage, and declare what they are."""
    # Layers were cut one by one, each into a copy: all owners get the storage of the first one
    # again.
    (first, name), *others = tie.owners
    whole = module.get_submodule(first)._parameters[name]
    assert whole is not None
    for path, own in tie.owners:
        owner = module.get_submodule(path)
        if (path, own) in others:
            leaf = nn.Parameter(whole.data, requires_grad=whole.requires_grad)
            owner.register_parameter(own, leaf)
        _declare(owner, own, Tie(tie.name))
