"""Plain modules and ``torch.optim`` optimizers as logical tensors: every rank holds all of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from kenotron_ckpt.loading import Loaded, open_checkpoint
from kenotron_ckpt.random_state import restore_random_state
from kenotron_dist import Mesh
from kenotron_dist.placement import TensorLayout

_STATE = "optimizer."
GROUPS = "optimizer_groups"
"""The key of ``state`` under which ``load_plain`` finds what ``plain_state`` gave."""


class PlainTensors(dict[str, tuple[Tensor, TensorLayout]]):
    """Tensors to save, made by ``plain_tensors``, and which of them a forward may change.

    A ``Saver`` copies those in the call, as if ``volatile`` named them; a plain copy of this dict
    (``{**tensors}``) does not tell it.
    """

    volatile: frozenset[str] = frozenset()


def plain_tensors(
    module: nn.Module, optimizer: torch.optim.Optimizer | None = None
) -> PlainTensors:
    """Return the input of ``save`` for a module that is whole on every rank, and its optimizer.

    Parameters and buffers go by their names in ``state_dict()``; what has two names is kept once.
    The optimizer's state goes by ``optimizer.<state>.<parameter>``. Buffers are ``volatile``:
    BatchNorm changes its own in the next forward, before ``Saver.wait`` is called.

    Raises ValueError for an optimizer that has parameters of another module, or state that is not
    made of tensors.
    """
    found = {}
    for name, parameter in _parameters(module, optimizer):
        for key, value in optimizer.state.get(parameter, {}).items() if optimizer else ():
            if value is None:  # SGD without momentum
                continue
            if not isinstance(value, Tensor):
                raise ValueError(
                    f"the optimizer's {key} of {name} is a {type(value).__name__}: only tensors "
                    "can be saved"
                )
            found[f"{_STATE}{key}.{name}"] = value
    own = _own(module)
    tensors = PlainTensors(
        {name: (each, _whole(name, each.shape)) for name, each in (own | found).items()}
    )
    tensors.volatile = frozenset({name for name, _ in module.named_buffers()} & {*own})
    return tensors


def plain_state(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """The options of the optimizer's groups (learning rates, betas, ...), made of JSON values.

    Raises ValueError when one is a tensor.
    """
    groups = []
    for group in optimizer.param_groups:
        options = {key: value for key, value in group.items() if key != "params"}
        for key, value in options.items():
            if isinstance(value, Tensor):
                raise ValueError(f"the optimizer's {key} is a tensor: give it a number instead")
        groups.append(options)
    return groups


def load_plain(
    path: str | Path,
    module: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    mesh: Mesh | None = None,
) -> Loaded:
    """Fill a module, and an optimizer that may be fresh, from what ``plain_tensors`` gave to save.

    The optimizer's state is made as the checkpoint has it. The options of its groups (learning
    rates, ...) come back where ``state["optimizer_groups"]`` is what ``plain_state`` gave, the
    random streams where ``rank_state`` is what ``random_state`` gave. Without either a resumed run
    differs from one that was not stopped.

    Collective over the mesh (default: this process). Raises ValueError as ``load`` does, or when
    the optimizer has another number of groups, before anything is changed.
    """
    checkpoint = open_checkpoint(path, mesh or Mesh.connect())
    wanted = {name: (each, _whole(name, each.shape)) for name, each in _own(module).items()}
    states: dict[str, dict[str, Tensor]] = {}
    parameters = dict(_parameters(module, optimizer))
    for record_name, record in checkpoint.manifest.records.items():
        _, _, rest = record_name.partition(_STATE)
        key, _, name = rest.partition(".")
        if record_name.startswith(_STATE) and name in parameters:
            place = parameters[name].device if record.shape else "cpu"  # a step count
            state = torch.empty(record.shape, dtype=getattr(torch, record.dtype), device=place)
            states.setdefault(name, {})[key] = state
            wanted[record_name] = (state, _whole(record_name, record.shape))
    groups = checkpoint.manifest.state.get(GROUPS)
    if optimizer is not None and groups is not None and len(groups) != len(optimizer.param_groups):
        raise ValueError(
            f"the checkpoint has the options of {len(groups)} groups of parameters, but the "
            f"optimizer has {len(optimizer.param_groups)}: make its groups as they were"
        )
    loaded = checkpoint.load(wanted)
    if optimizer is not None and groups is not None:
        for group, options in zip(optimizer.param_groups, groups, strict=True):
            group.update({key: _as_before(group.get(key), v) for key, v in options.items()})
    if isinstance(loaded.rank_state, dict) and {"python", "torch"} <= loaded.rank_state.keys():
        restore_random_state(loaded.rank_state)
    for name, parameter in parameters.items():
        if optimizer is not None and name in states:
            optimizer.state[parameter] = states[name]
    return loaded


def _as_before(now: Any, saved: Any) -> Any:
    """JSON makes lists of tuples: betas."""
    return tuple(saved) if isinstance(now, tuple) else saved


def _own(module: nn.Module) -> dict[str, Tensor]:
    """Parameters and the buffers that ``state_dict`` keeps, each once, by their first name."""
    names: dict[int, str] = {}
    tensors = module.state_dict(keep_vars=True)
    for name, tensor in tensors.items():
        names.setdefault(id(tensor), name)
    return {name: tensors[name].detach() for name in names.values()}


def _parameters(
    module: nn.Module, optimizer: torch.optim.Optimizer | None
) -> Iterator[tuple[str, nn.Parameter]]:
    """The optimizer's parameters by their names in the module."""
    if optimizer is None:
        return
    names = {parameter: name for name, parameter in reversed([*module.named_parameters()])}
    for number, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            if parameter not in names:
                raise ValueError(
                    f"group {number} of the optimizer has a parameter of shape "
                    f"{list(parameter.shape)} that is not the module's"
                )
            yield names[parameter], parameter


def _whole(name: str, shape: torch.Size | tuple[int, ...]) -> TensorLayout:
    return TensorLayout(name, tuple(shape))
