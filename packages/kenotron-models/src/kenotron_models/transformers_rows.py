"""Layers of transformers that need whole rows of tokens: they cannot be cut, nor have documents."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from kenotron_models.context import Context
from kenotron_models.transformers_attention import ADVICE
from kenotron_models.transformers_plan import base_of
from kenotron_models.transformers_skeleton import Skeleton

INTERFACE = "ALL_ATTENTION_FUNCTIONS"
"""Name by which the code of transformers' attention calls a function that was registered."""
CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
OF_ALL_POSITIONS = ("dynamic", "longrope")
"""Kinds of rotary embeddings whose angles depend on the largest position that a rank has."""


def check_mixing(model: Any) -> None:
    """Raise ValueError for a model whose tokens see one another outside attention's interface."""
    problem = next(_mixers(model), None)
    if problem is not None:
        raise ValueError(
            f"{problem}: tokens of a {model.config.model_type} see one another outside "
            f"attention{ADVICE}"
        )


def _mixers(model: Any) -> Iterator[str]:
    depth = model.config.get_text_config(decoder=True).num_hidden_layers
    for path, module in model.named_modules():
        if isinstance(module, CONVOLUTIONS) or type(module).__name__.endswith("Indexer"):
            yield f"{path} is a {type(module).__name__}"
        if not isinstance(module, nn.ModuleList) or len(module) != depth:
            continue
        for i, layer in enumerate(module if type(module[0]) is not nn.Linear else ()):
            if not any(_calls_interface(each) for each in layer.modules()):
                yield f"{path}.{i} does not call {INTERFACE}"


def _calls_interface(module: nn.Module) -> bool:
    try:
        return re.search(INTERFACE, inspect.getsource(type(module).forward)) is not None
    except (OSError, TypeError):  # without source
        return False


def cut_rows_problem(model: Any, skeleton: Skeleton | None, width: int) -> str | None:
    """Return why rows of a model cannot be cut over cp; None: they can.

    Args:
        model: on meta; its attention is ours.
        skeleton: of the model; None where it is not split into layers.
        width: D.
    """
    for path, module in base_of(model).named_modules():
        kinds = getattr(module, "rope_type", None) or ()
        for kind in kinds.values() if isinstance(kinds, dict) else (kinds,):
            if kind in OF_ALL_POSITIONS:
                return f"{path}: angles of rope_type {kind} depend on the positions of other ranks"
    if skeleton is None or _follows_positions(skeleton, width):
        return None
    return f"{type(model).__name__} does not make all that layers read from position_ids"


def _follows_positions(skeleton: Skeleton, width: int) -> bool:
    """Return True where what layers are called with is that of their tokens' positions."""
    cpu = torch.device("cpu")
    places, rows = torch.tensor([0, 1, 6, 7], device=cpu), torch.arange(8, device=cpu)
    skeleton.fill_buffers(cpu)
    whole, own = (
        tree_leaves(
            skeleton.calls(
                torch.zeros(3, len(each), width, device=cpu), Context(each.expand(3, -1))
            )
        )
        for each in (rows, rows[places])
    )
    return len(whole) == len(own) and all(map(_same_rows, whole, own, [places] * len(own)))


def _same_rows(whole: Any, own: Any, places: Tensor) -> bool:
    """Return True for a value of ``places``, or one that no token has a part of."""
    if not isinstance(whole, Tensor) or not isinstance(own, Tensor):
        return bool(whole == own)
    for dim, (size, held) in enumerate(zip(whole.shape, own.shape, strict=True)):
        if size != held:
            whole = whole.index_select(dim, places)
    return torch.equal(whole, own)
