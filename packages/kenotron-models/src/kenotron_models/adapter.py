"""Linear layers with adapters: the layer does not learn, two narrow matrices next to it do.

A column layer's A is whole on every rank of tp and its B is cut as the layer is; of a row layer A
is cut and B is whole. Under sequence parallelism what is whole sees this rank's tokens only, so its
gradient is partial. So it is in modules of transformers that return a summand of each rank, whose
layers communicate nothing (``summed_over``, see ``transformers_sequence``).

Shapes: T tokens, I input and O output features, r rank; ``/t`` is divided by tp size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from kenotron_dist import Axis, GridView, all_reduce, declare_roles
from kenotron_dist.boxes import local_shape
from kenotron_dist.placement import Chunk, Partial, Placements, Shard, TensorLayout
from kenotron_models.adapter_spec import AdapterSpec, adapter_name
from kenotron_models.adapter_stacks import attach_stack
from kenotron_models.adapter_targets import LINEAR, is_conv1d, key_of
from kenotron_models.context import Context
from kenotron_models.dropout import drop_features
from kenotron_models.part import Part
from kenotron_models.transformers_attention import context_now
from kenotron_models.transformers_layers import LayerEntry, WholeEntry
from kenotron_tp import (
    ColumnParallelLinear,
    GatheredColumnLinear,
    RowParallelLinear,
    SplitRowLinear,
    mark_partial,
    matmul,
)

Linear = nn.Linear | ColumnParallelLinear | RowParallelLinear


class Adapter(nn.Module):
    """``scale * B A x`` for some rows of a linear layer; DoRA's norms ``m`` of these rows."""

    def __init__(self, a: Linear, b: Linear, spec: AdapterSpec, name: str) -> None:
        super().__init__()
        self.a, self.b = a, b
        self.scale, self.dropout, self.name = spec.scale, spec.dropout, name
        self.context: Context | None = None
        """The micro-batch that is computed, for dropout."""
        self.placements: Placements = {}
        declare_roles(a, weight="hidden")
        declare_roles(b, weight="hidden")
        self.m: nn.Parameter | None = None
        if spec.kind == "dora":
            self.m = nn.Parameter(b.weight.detach()[:, 0].clone())  # (O/t,)
            declare_roles(self, m="norm")
            if "weight" in (placements := getattr(b, "placements", {})):
                self.placements["m"] = placements["weight"]


class Adapted(nn.Module):
    """Stands in front of a linear layer's class; the adapters are in ``lora``, by module."""

    lora: nn.ModuleDict
    adapted_rows: tuple[tuple[slice, str | None], ...]
    """Local output features one after the other, and the adapter of each."""
    weight: nn.Parameter

    def forward(self, x: Tensor, **options: Any) -> Tensor:
        """Return what the layer returns of x (..., I), and what its adapters add."""
        y, found = super().forward(x, **options), []
        for rows, key in self.adapted_rows:
            piece = y if len(self.adapted_rows) == 1 else y[..., rows]
            found.append(piece if key is None else self._added(piece, rows, key, x, options))
        return found[0] if len(found) == 1 else torch.cat(found, -1)

    def _added(
        self, y: Tensor, rows: slice, key: str, x: Tensor, options: dict[str, Any]
    ) -> Tensor:
        """Return y (..., O/t) of some features of the layer with their adapter."""
        adapter = self.lora[key]
        assert isinstance(adapter, Adapter)
        dropped = self._dropped(x, adapter)
        columns = isinstance(adapter.b, ColumnParallelLinear)
        h = adapter.a(dropped, **({} if columns else options))
        added = adapter.scale * adapter.b(h, **(options if columns else {}))
        if adapter.m is None:
            return y + added
        plain = y if dropped is x else super().forward(dropped, **options)[..., rows]
        bias = getattr(self, "bias", None)
        plain = plain if bias is None else plain - bias[rows]
        share = (adapter.m / self._norms(rows, adapter)).to(y.dtype)
        return y + (share - 1) * plain + share * added

    @torch.no_grad()
    def _norms(self, rows: slice, adapter: Adapter) -> Tensor:
        """Return the norms (O/t,) of rows of ``W + scale * B A``, which count as constants."""
        added = matmul(adapter.b.weight, adapter.a.weight.t())
        own = self.weight.t() if is_conv1d(self) else self.weight
        weight = own[rows] + adapter.scale * added
        if not isinstance(adapter.a, RowParallelLinear):
            return torch.linalg.norm(weight, dim=1)
        axis = getattr(self, "summed_over", None) or adapter.a.axis
        return all_reduce(weight.square().sum(1), axis).sqrt()

    @torch.no_grad()
    def norms_of_base(self) -> dict[str, Tensor]:
        """Return norms (O/t,) of the layer's own rows by the logical name of DoRA's parameter."""
        found = {}
        for rows, key in self.adapted_rows:
            adapter = None if key is None else self.lora[key]
            if isinstance(adapter, Adapter) and adapter.m is not None:
                found[f"{adapter.name}.m"] = self._norms(rows, adapter)
        return found

    def _dropped(self, x: Tensor, adapter: Adapter) -> Tensor:
        """Return x (..., I) without the features that are dropped, the same on every layout."""
        context = adapter.context
        axis = getattr(self, "summed_over", None) or getattr(self, "axis", None)
        if not adapter.dropout or context is None or context.dropout_key is None:
            return x
        cut = isinstance(adapter.a, RowParallelLinear)
        flat, first = x.reshape(-1, x.shape[-1]), axis.rank * x.shape[-1] if cut and axis else 0
        sequence = bool(getattr(self, "sequence_parallel", False)) and not cut
        kept = drop_features(
            flat, adapter.dropout, context, adapter.name, axis or Axis.solo("tp"),
            sequence_parallel=sequence, first=first,
        )  # fmt: skip
        return kept.view_as(x)


class _GivesContext:
    """A hook that gives adapters the micro-batch before they are called."""

    def __init__(self, adapters: Sequence[Adapter]) -> None:
        self.adapters = adapters

    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        context = args[1] if isinstance(module, Part) else context_now()
        for each in self.adapters:
            each.context = context


def adapt(layers: Sequence[tuple[str, nn.Module]], spec: AdapterSpec, axis: Axis) -> None:
    """Give layers of a model their adapters in place; nothing else of the model learns.

    Args:
        layers: all layers by name, on meta, cut over tp already.
        spec: the adapters.
        axis: the tp axis.

    Raises:
        ValueError: a weight with an adapter is not that of a linear layer here.
    """
    left = {*spec.weights}
    for entry, layer in layers:
        for parameter in layer.parameters():
            parameter.requires_grad_(False)
        for name, module in [*layer.named_modules()]:
            for own, _ in [*module.named_parameters(recurse=False)]:
                if (path := ".".join(filter(None, (entry, name, own)))) in left:
                    left.discard(path)
                    _attach(module, path, spec, axis)
        for module in [*layer.modules()]:
            _give_context(module)
    if left:
        raise ValueError(f"{min(left)} is no weight of a linear layer: it cannot have an adapter")


def _give_context(module: nn.Module) -> None:
    """Let the adapters of a part know the micro-batch, also where it is computed again."""
    inner = module.block if isinstance(module, LayerEntry) else module
    inner = module.whole if isinstance(module, WholeEntry) else inner
    adapters = [each for each in inner.modules() if isinstance(each, Adapter) and each.dropout]
    if adapters and isinstance(module, Part | LayerEntry | WholeEntry):
        inner.register_forward_pre_hook(_GivesContext(adapters))


def _attach(module: nn.Module, path: str, spec: AdapterSpec, axis: Axis) -> None:
    """Give a layer its adapters, and the class that adds them."""
    if len(spec.weights[path][0].shape) == 3:
        attach_stack(module, path.rpartition(".")[2], spec, spec.weights[path][0])
        return
    if not (isinstance(module, LINEAR) or is_conv1d(module)):
        kind = type(module).__name__
        raise ValueError(f"{path} is the weight of a {kind}, no linear layer")
    if spec.kind == "dora" and isinstance(module, GatheredColumnLinear | SplitRowLinear):
        raise ValueError(f"{path}: dora needs whole rows, and tp cuts them: choose lora")
    rows, made, first = [], {}, 0
    for part, chunks in _pieces(module, path, spec):
        width = sum(_local_rows(chunk, axis) for chunk in chunks) or spec.weights[path][0].shape[0]
        rows.append((slice(first, first := first + width), None if part is None else key_of(part)))
        if part is not None:
            how = _matrices(module, part.shape, spec.rank, chunks, axis)
            made[key_of(part)] = Adapter(*how, spec, adapter_name(path, part))
    own = type(module)
    before = own.__bases__[:-1] if own.__bases__[-1] is nn.Linear else ()
    # A class in front of torch's (a key that all heads share) sees what the adapters add, too.
    bases = (*before, Adapted, nn.Linear) if before else (Adapted, own)
    module.__class__ = type(f"Adapted{own.__name__}", bases, {})
    module.lora = nn.ModuleDict(made)
    setattr(module, "adapted_rows", tuple(rows))  # noqa: B010 (it is no tensor)


def _is_column(module: nn.Module) -> bool:
    cut = isinstance(module, ColumnParallelLinear)
    return cut and not isinstance(module, GatheredColumnLinear)


def _pieces(
    module: nn.Module, path: str, spec: AdapterSpec
) -> Iterator[tuple[Any, tuple[Chunk, ...]]]:
    """Yield the parts of a layer's output features in order, and None for those between."""
    parts = {part.start[0]: part for part in spec.weights[path]}
    if not _is_column(module):
        (part,) = parts.values()
        yield part, ()
        return
    placements: Placements = getattr(module, "placements", {})
    shard = placements["weight"]
    assert isinstance(shard, Shard) and shard.chunks  # as a column layer declares it
    starts = [0, *accumulate(chunk.size for chunk in shard.chunks)]
    at = 0
    while at < len(shard.chunks):
        part, end = parts.get(starts[at]), at + 1
        if part is not None:
            end = starts.index(starts[at] + part.shape[0])
        yield part, tuple(shard.chunks[at:end])
        at = end


def _local_rows(chunk: Chunk, axis: Axis) -> int:
    layout = TensorLayout("rows", (chunk.size,), (Shard(axis.name, 0, (chunk,)),))
    return local_shape(layout, GridView({axis.name: axis.size}, {axis.name: axis.rank}))[0]


def _matrices(
    module: Any, shape: Sequence[int], rank: int, chunks: Sequence[Chunk], axis: Axis
) -> tuple[Linear, Linear]:
    """Return A and B of some rows (O, I) of a layer, cut as it is."""
    (outputs, inputs), kept = shape, {"device": "meta", "dtype": module.weight.dtype}
    sequence = bool(getattr(module, "sequence_parallel", False))
    summand = getattr(module, "summed_over", None) is not None
    a: Linear
    b: Linear
    if _is_column(module):
        a = nn.Linear(inputs, rank, bias=False, **kept)
        b = ColumnParallelLinear(
            rank, outputs, axis, sequence_parallel=sequence, regather=module.regather,
            chunks=chunks, **kept,
        )  # fmt: skip
        b.axis = module.axis
        partial = [a] if sequence or summand else []
    elif isinstance(module, RowParallelLinear) and not isinstance(module, SplitRowLinear):
        a = RowParallelLinear(inputs, rank, axis, sequence_parallel=sequence, **kept)
        a.axis = module.axis
        b = nn.Linear(rank, outputs, bias=False, **kept)
        partial = [b] if sequence or summand else []
    else:
        a, b = (
            nn.Linear(*sizes, bias=False, **kept) for sizes in ((inputs, rank), (rank, outputs))
        )
        given = getattr(module, "placements", {}).get("weight")
        partial = [a, b] if isinstance(given, Partial) else []
    for each in partial:
        mark_partial(each, axis)
    return a, b
