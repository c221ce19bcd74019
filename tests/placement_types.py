"""Types of ``spmd_types`` for our layers: what a tensor is on the ranks of an axis.

``R``: the same values, whose gradients are still to be summed; ``I``: the same values and
gradients; ``V``: others on each rank; ``P``: to be summed. A parameter's type follows from its
placement, that of an input from its cut. Rules say what our collectives and kernels make of them,
and whatever else torch computes is checked by the package: an independent judge of placements.

Axes are those that ranks of a dense tensor have; the ranks of ep must be those of some of them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from pkgutil import resolve_name
from typing import Any
from unittest import mock

import spmd_types as spmd
import torch

sys.path.append(str(Path(__file__).parents[1] / "packages/kenotron-models/tests"))
import decoder_gradients  # noqa: F401  (tests take it from here)
from attention_cases import positions
from decoder_gradients import MODES, SPECS, Sink
from spmd_types import I, MeshAxis, P, R, V, rules
from spmd_types.checker import typecheck
from torch import Tensor

from kenotron_cp import cut_sequence
from kenotron_dist import Axis, Mesh
from kenotron_dist.placement import TensorLayout, parameter_layouts
from kenotron_dist.rng import counter_key
from kenotron_models import (
    Build,
    Context,
    LayerStack,
    SequenceCut,
    build_decoder,
)
from kenotron_models.layers import Experts
from kenotron_tp import cross_entropy

Type = dict[MeshAxis, Any]


def place(axis: Axis) -> MeshAxis:
    """Axis of the checker."""
    return MeshAxis.of(axis.size, axis.ranks[1] - axis.ranks[0])


def parameter_type(layout: TensorLayout, mesh: Mesh, axes: tuple[str, ...]) -> Type:
    """Type on axes of the tensor's grid (``GridView.type_over``), or on those with their ranks."""
    view, found = mesh.view(layout), dict[MeshAxis, Any]()
    for axis in (mesh[name] for name in axes):
        own = [axis.name] if axis.name in view.axes else [
            each for each in view.axes if set(axis.ranks) <= set(mesh[each].ranks)
        ]  # fmt: skip
        types = {view.type_over(each, layout) for each in own}
        found[place(axis)] = next((kind for kind in (V, R) if kind.name in types), I)
    return found


def _copy_to(*, x: Tensor, axis: Axis) -> Any:
    _must(x, axis, (I,), "copy_to")
    return _same(x, axis, R)


def _reduce_from(*, x: Tensor, axis: Axis) -> Any:
    _must(x, axis, (V, P), "reduce_from")  # what is the same on all would count several times
    return _same(x, axis, I)


def _same(x: Any, axis: Axis, to: Any) -> Any:
    """The type of a tensor, with another one on an axis."""
    return rules._make(x.ndim, {**spmd.get_local_type(x), place(axis): to}, None)


def _must(x: Any, axis: Axis, wanted: tuple[Any, ...], what: str) -> None:
    """Raise SpmdTypeError where a tensor has another type on an axis than is wanted."""
    rules._touch(x)
    found = spmd.get_axis_local_type(x, place(axis))
    if found not in wanted:
        raise spmd.SpmdTypeError(f"{what}: {found} over {axis.name}, not one of {wanted}")


def _gather_from(*, x: Tensor, axis: Axis, dim: int) -> Any:
    _must(x, axis, (V,), "gather_from")
    return _same(x, axis, I)


def _scatter_to(*, x: Tensor, axis: Axis, dim: int) -> Any:
    _must(x, axis, (I,), "scatter_to")
    return _same(x, axis, V)


def _all_gather_from(*, x: Tensor, axis: Axis, dim: int) -> Any:
    _must(x, axis, (V,), "all_gather_from")
    return _same(x, axis, R)


def _reduce_scatter_to(*, x: Tensor, axis: Axis, dim: int) -> Any:
    _must(x, axis, (V, P), "reduce_scatter_to")
    return _same(x, axis, V)


def _all_to_all(*, x: Tensor, axis: Axis, send: Any, receive: Any) -> Any:
    _must(x, axis, (V,), "all_to_all")
    return _same(x, axis, V)


def _column(*, x: Tensor, weight: Tensor, bias: Tensor | None, call: Any) -> Any:
    axis = call.how.axis
    if axis.size > 1:
        _must(x, axis, (V,) if call.how.sequence else (I,), "column product")
        x = _same(x, axis, R)
    y = rules.einsum("ni,oi->no", x, weight)
    return y if bias is None else rules.einsum("no,o->no", y, bias)


def _row(*, x: Tensor, weight: Tensor, bias: Tensor | None, call: Any) -> Any:
    axis = call.how.axis
    y = rules.einsum("ni,oi->no", x, weight)
    if axis.size > 1:
        _must(y, axis, (V,), "row product")
        y = _same(y, axis, V if call.how.sequence else I)
    return y if bias is None else rules.einsum("no,o->no", y, bias)


def _losses(*, logits: Tensor, labels: Tensor, terms: Any, in_place: bool) -> Any:
    y = rules.einsum("nv,n->n", logits, labels)
    if terms.axis.size > 1:
        _must(y, terms.axis, (V,), "loss of logits")
        y = _same(y, terms.axis, I)
    return y, y


def _attend(*, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, run: Any) -> Any:
    axis = run.axis
    if axis.size > 1:
        for x in (q, k, v):
            _must(x, axis, (V,), "attend")
    y = rules.einsum("bnhd,bmkd,bmkv->bnhv", q, k, v)
    return y if sinks is None else rules.einsum("bnhv,h->bnhv", y, sinks)


def _mean_squares(*, qk: Tensor, heads: int, axis: Axis) -> Any:
    y = rules.einsum("...hk->...k", qk)
    if axis.size > 1:
        _must(y, axis, (V,), "mean of squares")
        y = _same(y, axis, R)  # its gradient is summed in the backward pass
    return y


def _sent(what: str, *tensors: Tensor, axis: Axis) -> Any:
    """Something that is sent to other ranks, and comes from others: different on each."""
    for x in tensors:
        rules._touch(x)
        if axis.size > 1:
            _must(x, axis, (V,), what)
    return tensors[0]


def _start_dispatch(*, x_TD: Tensor, route: Any, flight: Any) -> Any:
    return rules._make(1, spmd.get_local_type(_sent("dispatch", x_TD, axis=route.axis)), None)


def _finish_dispatch(*, started: Tensor, route: Any, flight: Any) -> Any:
    return rules._make(2, spmd.get_local_type(_sent("dispatch", started, axis=route.axis)), None)


def _start_combine(*, y: Tensor, rows: Tensor | None, anchor: Tensor, x: Any, flight: Any) -> Any:
    rules.ignore(*(each for each in (rows, anchor) if each is not None))
    return rules._make(1, spmd.get_local_type(_sent("combine", y, axis=x.axis)), None)


def _finish_combine(*, started: Tensor, weights_TK: Tensor, x: Any, flight: Any) -> Any:
    _sent("combine", started, weights_TK, axis=x.axis)
    return rules.einsum("r,tk->tk", started, weights_TK)


def _stacked(*, x: Tensor, weight: Tensor, counts: Tensor) -> Any:
    rules.ignore(counts)
    return rules.einsum("ri,eoi->ro", x, weight)


RULES = {
    "kenotron_dist.autograd:_CopyTo": _copy_to,
    "kenotron_dist.autograd:_ReduceFrom": _reduce_from,
    "kenotron_dist.autograd:_GatherFrom": _gather_from,
    "kenotron_dist.autograd:_ScatterTo": _scatter_to,
    "kenotron_dist.autograd:_AllGatherFrom": _all_gather_from,
    "kenotron_dist.autograd:_ReduceScatterTo": _reduce_scatter_to,
    "kenotron_dist.autograd:_AllToAll": _all_to_all,
    "kenotron_tp.matmul:_ColumnProduct": _column,
    "kenotron_tp.matmul:_RowProduct": _row,
    "kenotron_tp.cross_entropy:_LogitLosses": _losses,
    "kenotron_cp.attend:_Attend": _attend,
    "kenotron_ep.dispatching:_StartDispatch": _start_dispatch,
    "kenotron_ep.dispatching:_FinishDispatch": _finish_dispatch,
    "kenotron_ep.combining:_StartCombine": _start_combine,
    "kenotron_ep.combining:_FinishCombine": _finish_combine,
    "kenotron_models.stacked_linear:_StackedProduct": _stacked,
    "kenotron_models.norm:_MeanSquares": _mean_squares,
}
"""Functions with a backward of their own, and what they make of types."""
LOCAL = (
    "kenotron_models.rope:_Rotation",
    "kenotron_models.meta_block:_MetaAttention",
    "kenotron_models.meta_block:_Norm",
    "kenotron_models.meta_block:_GroupedProducts",
    "kenotron_models.working_memory:_Output",
    "kenotron_models.short_convolution:_Convolve",
    "kenotron_models.selective_scan:_Scan",
    "kenotron_models.ssd:_ChunkedScan",
)
"""Those that communicate nothing."""
TOKENS = {"dp": V, "cp": V, "tp": R}
"""Types of what is made of tokens, before the first layer."""


PLAN = resolve_name("kenotron_ep.exchange:plan_chunks")


def _typed_plan(parts: Any, experts: int, axis: Axis, *options: Any, **named: Any) -> Any:
    """Plan exchanges without checks: integers, of which a rank's own come out."""
    with spmd.no_typecheck():
        made = PLAN(parts, experts, axis, *options, **named)
    kind = spmd.get_local_type(parts[0]) | ({place(axis): V} if axis.size > 1 else {})
    for exchange in made:
        spmd.assert_type(exchange.counts, kind)
    return made


@contextmanager
def checked(mesh: Mesh, axes: tuple[str, ...]) -> Iterator[None]:
    """Check the types of all operations on the axes."""
    for name, rule in RULES.items():
        function = resolve_name(name)
        function.spmd_typecheck = staticmethod(rule)
        spmd.register_autograd_function(function)
    for name in LOCAL:
        spmd.register_local_autograd_function(resolve_name(name))
    with (
        mock.patch("kenotron_ep.expert_layer.plan_chunks", _typed_plan),
        spmd.set_current_mesh(frozenset(place(mesh[name]) for name in axes)),
        typecheck(),
    ):
        yield


Retype = Callable[[str, Type], Type]


def loss_type(
    name: str, mode: str, retype: Retype = lambda _, kind: kind, **sizes: int
) -> dict[str, Any]:
    """Compute a decoder's loss on a rank of a world without processes, and check all types.

    Args:
        name: key of ``SPECS``.
        mode: key of ``MODES``.
        retype: the type that a parameter is to have, of its path and the type of its placement.
        sizes: of axes.

    Returns the loss's type on each axis. Raises SpmdTypeError where types do not fit.
    """
    spec, whole, samples = SPECS[name], positions(15), torch.arange(3, device="meta")
    with closing(Mesh.connect(**sizes, backend="fake", rank=0)) as mesh:
        # The model, on meta, and its inputs.
        axes, cp = tuple(axis for axis in TOKENS if mesh[axis].size > 1), mesh["cp"]
        build = Build(mesh["tp"], MODES[mode], ep=mesh["ep"])
        stack = LayerStack(build_decoder(spec, build)).to_empty(device=mesh.device)
        layouts = parameter_layouts(stack, mesh.axis_sizes)
        ids = torch.zeros(3, 15, dtype=torch.int64)
        places, tokens, labels = (
            cut_sequence(x, cp, fill=fill).to(mesh.device)
            for x, fill in ((whole, 0), (ids, 0), (ids, -100))
        )
        padding = torch.zeros_like(places, dtype=torch.bool) if spec.routes else None
        weight = torch.tensor(1 / 45, device=mesh.device) if spec.routes else None
        cut = SequenceCut(cp, whole) if cp.size > 1 else None
        added: list[Tensor] = []
        for module in stack.modules():
            if isinstance(module, Experts):
                module.auxiliary_losses = Sink(added)
        with checked(mesh, axes):
            # Their types.
            of_tokens = {place(mesh[axis]): TOKENS[axis] for axis in axes}
            of_rows = {**of_tokens, **({place(cp): R} if cp.size > 1 else {})}
            for x in (places, tokens, labels, *(() if padding is None else (padding,))):
                spmd.assert_type(x, of_tokens)
            for x in (whole, samples):
                spmd.assert_type(x, of_rows)
            if weight is not None:
                spmd.assert_type(weight, dict.fromkeys(of_tokens, R))
            for path, parameter in stack.named_parameters():
                kind = parameter_type(layouts[path], mesh, axes)
                spmd.assert_type(parameter, retype(path, kind))
            # The step, as far as autograd records it.
            context = Context(
                places, samples, counter_key(0, 7), cut=cut, padding_BS=padding,
                loss_weight=weight, host_positions_BS=whole,
            )  # fmt: skip
            logits = stack(tokens.flatten(), context)
            each = cross_entropy(logits, labels.flatten(), mesh["tp"], vocab_size=32)[0]
            found = [spmd.get_local_type(x) for x in (each.sum(), *added)]
        kinds = {axis: {kind[place(mesh[axis])] for kind in found} for axis in axes}
    return {axis: kind.pop() if len(kind) == 1 else kind for axis, kind in kinds.items()}
