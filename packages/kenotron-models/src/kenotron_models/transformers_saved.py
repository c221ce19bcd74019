"""The tensors of a file that `save_pretrained` makes of each parameter of a model."""

from __future__ import annotations

import importlib
from functools import lru_cache
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode

from kenotron_models.hf_tensors import TensorPart
from kenotron_models.transformers_model import empty_model
from kenotron_models.transformers_spec import TransformersSpec


class _Views(TorchFunctionMode):
    """Tensors stay views of what they were cut from."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is Tensor.contiguous:
            return args[0]
        return func(*args, **(kwargs or {}))


@lru_cache(maxsize=8)
def saved_parts(spec: TransformersSpec) -> dict[str, tuple[TensorPart, ...]]:
    """Return the tensors that ``save_pretrained`` makes of each parameter, by its name.

    They are its boxes: the matrices of a stack of experts. A parameter that is turned or joined
    with others keeps its name, which no file has.
    """
    model = empty_model(spec, None)
    revert = importlib.import_module("transformers.core_model_loading").revert_weight_conversion
    named = model.named_parameters(remove_duplicate=False)
    given = {name: parameter.detach().clone() for name, parameter in named}  # tied ones are two
    owners = {tensor.untyped_storage()._cdata: name for name, tensor in given.items()}
    with _Views():
        saved = revert(model, given)
    found: dict[str, list[TensorPart]] = {name: [] for name in given}
    for name, tensor in saved.items():
        owner = owners.get(tensor.untyped_storage()._cdata)
        if owner is not None and (part := _box(name, tensor, given[owner])):
            found[owner].append(part)
    return {name: tuple(found[name]) or (_all_of(name, tensor),) for name, tensor in given.items()}


def _box(name: str, view: Tensor, whole: Tensor) -> TensorPart | None:
    """Return a view as a box of consecutive elements; None: its elements have another order."""
    rest, start = int(view.storage_offset()), []
    for stride in whole.stride():
        start.append(rest // max(stride, 1))
        rest %= max(stride, 1)
    if view.stride() != whole.stride()[whole.ndim - view.ndim :]:
        return None
    return TensorPart(name, tuple(view.shape), tuple(start))


def _all_of(name: str, tensor: Tensor) -> TensorPart:
    return TensorPart(name, tuple(tensor.shape), (0,) * tensor.ndim)
