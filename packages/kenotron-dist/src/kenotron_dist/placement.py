"""Places of the elements of a logical tensor: tp writes them, optim and ckpt read them.

A *logical tensor* has a name, a global shape and a dtype; a rank holds a *local* tensor. A
placement describes, axis by axis, how one becomes the other. Placements stand on the module that
owns the parameter (``module.placements = {"weight": Shard("tp", 0)}``): an attribute on the
Parameter itself would be lost by ``deepcopy``, ``to_empty`` and ``load_state_dict(assign=True)``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from kenotron_dist.grid import DATA_AXES, grid_of
from kenotron_dist.placement_kinds import (
    Chunk,
    FlatSlice,
    Fused,
    Partial,
    Placement,
    Placements,
    Shard,
    Tie,
)
from kenotron_dist.roles import Role, named_roles, role_of_tie

__all__ = [
    "Chunk",
    "FlatSlice",
    "Fused",
    "Partial",
    "Placement",
    "Placements",
    "Shard",
    "TensorLayout",
    "Tie",
    "materialize",
    "named_parameters",
    "named_placements",
    "parameter_layouts",
    "tie_storages",
]


@dataclass(frozen=True)
class TensorLayout:
    """One logical tensor and how it is cut."""

    name: str
    """Logical name: that of the tie, or else the parameter's own."""
    shape: tuple[int, ...]
    """Global shape, without padding."""
    placement: tuple[Placement, ...] = ()
    """From the outermost axis to the innermost."""
    stages: tuple[int, ...] = (0,)
    """pp coordinates that hold the tensor; more than one when it is tied across stages."""
    owners: tuple[str, ...] = ()
    """Names of the parameters that are this tensor, sorted (several when tied)."""
    owner_stages: tuple[int, ...] = ()
    """The pp coordinate of each owner."""
    role: Role = "other"
    """Role of the tensor, as the modules that own it declare it (``kenotron_dist.roles``)."""

    @property
    def shards(self) -> tuple[Shard, ...]:
        """The cuts, from the outermost axis to the innermost."""
        return tuple(p for p in self.placement if isinstance(p, Shard))

    @property
    def partial_axes(self) -> tuple[str, ...]:
        """Axes over which the whole gradient is partial."""
        return tuple(p.axis for p in self.placement if isinstance(p, Partial))

    @property
    def grid(self) -> str:
        """The grid that the tensor lives in: ``expert`` where a placement names one of its axes.

        Raises ValueError when placements name axes of both grids.
        """
        return grid_of(_axes_of(self.placement), self.name)

    @property
    def flat(self) -> FlatSlice | None:
        """The range of the flattened local tensor that this rank holds, if not all of it."""
        return next((p for p in self.placement if isinstance(p, FlatSlice)), None)

    def renamed(self, name: str) -> TensorLayout:
        """A tensor of another name, cut the same way (optimizer state of a parameter)."""
        return replace(self, name=name)

    def sliced(
        self,
        start: int,
        stop: int,
        axes: tuple[str, ...] | None = None,
        block: int | None = None,
    ) -> TensorLayout:
        """The same tensor of which this rank holds only a range of its flattened local part.

        ``axes`` have a different range on each of their ranks; None: the data axes of its grid.
        ``block``: see ``FlatSlice``.
        """
        flat = FlatSlice(start, stop, DATA_AXES[self.grid] if axes is None else axes, block)
        return replace(self, placement=(*self.placement, flat))


def named_placements(module: nn.Module) -> dict[str, tuple[Placement, ...]]:
    """Every placement below ``module`` by the full name of its parameter.

    ``torch.compile``'s ``_orig_mod.`` is stripped from names. Raises ValueError for a placement
    whose parameter does not exist.
    """
    found: dict[str, tuple[Placement, ...]] = {}
    for prefix, child in module.named_modules(remove_duplicate=False):
        if "_orig_mod" in child._modules:  # torch.compile's wrapper shows what its module declares
            continue
        declared: Mapping[str, Placement | tuple[Placement, ...]] = getattr(child, "placements", {})
        for name, placement in declared.items():
            path = _clean(f"{prefix}.{name}" if prefix else name)
            if child._parameters.get(name) is None:
                raise ValueError(
                    f"placement without a parameter: {path!r} is declared in placements, but "
                    f"{type(child).__name__} has no parameter {name!r}"
                )
            found[path] = placement if isinstance(placement, tuple) else (placement,)
    return found


def named_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """Parameters by full name, ``_orig_mod.`` stripped, tied ones under each of their names."""
    return {_clean(n): p for n, p in module.named_parameters(remove_duplicate=False)}


def parameter_layouts(
    module: nn.Module,
    sizes: Mapping[str, int],
    stage_of: Callable[[str], int] = lambda name: 0,
) -> dict[str, TensorLayout]:
    """The layout of every parameter of a *whole* model (it may be on meta), by parameter name.

    Pure: every rank computes the same.

    Args:
        module: the model.
        sizes: of the axes that its placements may name (``mesh.sizes``, or with experts
            ``mesh.axis_sizes``).
        stage_of: from a parameter's name to the pipeline stage that holds it.

    Raises:
        ValueError: a local shape contradicts its placement, one axis cuts twice, axes of both grids
            are named, tied parameters differ in shape, cut or role, or a Parameter has two names.
    """
    declared, roles = named_placements(module), named_roles(module)
    _check_apart(named_parameters(module))
    layouts: dict[str, TensorLayout] = {}
    ties: dict[str, list[str]] = {}
    for path, parameter in named_parameters(module).items():
        placement = declared.get(path, ())
        tie = _logical_name(path, placement)
        ties.setdefault(tie, []).append(path)
        shape = _global_shape(path, tuple(parameter.shape), placement, sizes)
        layouts[path] = TensorLayout(tie, shape, placement)
    for tie, paths in ties.items():
        _check_tie(tie, {path: layouts[path] for path in paths})
        owners = tuple(sorted(paths))
        role = role_of_tie(tie, [roles[path] for path in paths])
        at = tuple(stage_of(path) for path in owners)
        stages = tuple(sorted(set(at)))
        for path in paths:
            layouts[path] = replace(
                layouts[path], stages=stages, owners=owners, owner_stages=at, role=role
            )
    return layouts


def materialize(
    module: nn.Module,
    device: torch.device | str,
    *,
    memory: Callable[[nn.Parameter], bool] | None = None,
) -> None:
    """Give a module on meta memory on ``device``, not initialised; tied parameters share theirs.

    As ``to_empty`` and ``tie_storages``, but without the import of sympy, which takes a second.

    Args:
        module: the module, changed in place.
        device: where its tensors are to be.
        memory: says which parameters have memory; the others get a storage of no bytes, which is
            to be resized where they are used. One of these at a time has memory meanwhile. None:
            all have.
    """

    def on_device(x: Tensor) -> Tensor:
        made = torch.empty(x.shape, dtype=x.dtype, device=device)
        if memory is not None and isinstance(x, nn.Parameter) and not memory(x):
            made.untyped_storage().resize_(0)
        return made

    module._apply(on_device)
    tie_storages(module)


def tie_storages(module: nn.Module) -> None:
    """Let tied parameters that live in ``module`` share one storage again, as separate leaves.

    ``to_empty`` and ``deepcopy`` part shared storages; call this after them. The parameter whose
    name sorts first keeps its values.
    """
    declared = named_placements(module)
    first: dict[str, nn.Parameter] = {}
    for path, parameter in sorted(named_parameters(module).items()):
        owner = first.setdefault(_logical_name(path, declared.get(path, ())), parameter)
        if owner is not parameter:
            parameter.data = owner.data


def _clean(path: str) -> str:
    return ".".join(part for part in path.split(".") if part != "_orig_mod")


def _logical_name(path: str, placement: tuple[Placement, ...]) -> str:
    return next((p.name for p in placement if isinstance(p, Tie)), path)


def _axes_of(placement: tuple[Placement, ...]) -> Iterator[str]:
    """Every axis that is named."""
    for each in placement:
        if isinstance(each, Shard | Partial):
            yield each.axis
        elif isinstance(each, FlatSlice):
            yield from each.axes


def _check_apart(parameters: Mapping[str, nn.Parameter]) -> None:
    """One Parameter would collect both gradients, and they would be counted once for each name."""
    names: dict[int, str] = {}
    for path, parameter in parameters.items():
        other = names.setdefault(id(parameter), path)
        if other != path:
            raise ValueError(
                f"{other!r} and {path!r} are one Parameter: give each its own, with the same "
                "Tie(name) in placements"
            )


def _check_tie(tie: str, layouts: Mapping[str, TensorLayout]) -> None:
    cuts = {(a.shape, tuple((s.axis, s.dim) for s in a.shards)) for a in layouts.values()}
    if len(cuts) > 1:
        listed = ", ".join(
            f"{path} {list(layout.shape)} cut at {[(s.axis, s.dim) for s in layout.shards]}"
            for path, layout in layouts.items()
        )
        raise ValueError(f"tied parameters of {tie!r} differ: {listed}")


def _global_shape(
    path: str,
    local: tuple[int, ...],
    placement: tuple[Placement, ...],
    sizes: Mapping[str, int],
) -> tuple[int, ...]:
    """Undo the cuts, innermost first."""
    grid_of(_axes_of(placement), path)
    shape = list(local)
    shards = [p for p in placement if isinstance(p, Shard)]
    if len({shard.axis for shard in shards}) < len(shards):
        raise ValueError(f"{path}: one axis cuts twice: {', '.join(s.axis for s in shards)}")
    for shard in reversed(shards):
        if shard.axis not in sizes:
            raise ValueError(f"{path}: no mesh axis {shard.axis!r}; there are {', '.join(sizes)}")
        if not 0 <= shard.dim < len(shape):
            raise ValueError(
                f"{path}: no dim {shard.dim} to cut in a tensor of shape {list(local)}"
            )
        ranks = sizes[shard.axis]
        if shard.chunks is None:
            shape[shard.dim] *= ranks
            continue
        held = sum((c.size + c.pad) // min(c.parts or ranks, ranks) for c in shard.chunks)
        if held != shape[shard.dim]:
            raise ValueError(
                f"{path}: dim {shard.dim} has {shape[shard.dim]} local elements, but chunks "
                f"{[c.size for c in shard.chunks]} over {ranks} {shard.axis} ranks leave {held}"
            )
        shape[shard.dim] = sum(chunk.size for chunk in shard.chunks)
    return tuple(shape)
