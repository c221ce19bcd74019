"""A model of transformers as modules before its layers, the layers, and modules after them.

No plan of the family is read: transformers' own ``forward`` is run once on a model without weights,
and what it calls, in which order and with what, says whether pipeline stages can share the layers.

Shapes: B rows, S tokens of a row, D hidden.
"""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from kenotron_models.transformers_model import empty_model
from kenotron_models.transformers_skeleton import Skeleton
from kenotron_models.transformers_spec import TransformersSpec

Modules = list[tuple[str, nn.Module]]
VALUES = (Tensor, bool, int, float, str, torch.dtype, type(None), MutableMapping)
"""What a layer may be called with; see ``WriteOnly`` for a mapping."""


class Split(NamedTuple):
    """Names of the modules of a model, in the order in which they are called."""

    before: tuple[str, ...]
    """The first is the embedding of tokens, or has it."""
    layers: str
    after: tuple[str, ...]
    results: int
    """Values that a layer returns in a tuple, of which the first is used; 0: it returns one."""

    @property
    def outside(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Names of modules before the layers, and after them."""
        return self.before, self.after

    def skeleton(self, model: Any, documents: bool) -> Skeleton:
        """Return a model of these names without its layers; ``documents``: they are separate."""
        layers = model.get_submodule(self.layers)
        return Skeleton(model, layers, documents, self.before, self.results)


@lru_cache(maxsize=8)
def split_of(spec: TransformersSpec) -> Split | None:
    """Return how a model is split into layers; None: it has to stay in one piece.

    Each layer is called once, in order, with the hidden features that the one before it returned,
    unchanged, and with nothing else that depends on them; and every parameter is of a layer, or of
    a module that is called before the first or after the last one.

    Raises:
        ValueError: the model cannot be trained here.
    """
    for results in (0, 1, 2):
        model = empty_model(spec, None)  # not cut: nothing is communicated on meta
        lists = [
            name
            for name, module in model.named_modules()
            if isinstance(module, nn.ModuleList) and [*module.parameters()]
        ]
        outer = [name for name in lists if not any(name.startswith(f"{each}.") for each in lists)]
        if len(outer) != 1:
            return None
        if (split := _watched(model, outer[0], spec, results)) is not None:
            return split
    return None


def _outside(model: Any, path: str) -> Modules:
    """Return modules with parameters next to the layers, and next to modules that have these."""
    words = path.split(".")
    parents = [".".join(words[:n]) for n in range(len(words))]
    inside = {*parents, path}
    found = [
        (f"{parent}.{name}" if parent else name, each)
        for parent in reversed(parents)
        for name, each in model.get_submodule(parent).named_children()
    ]
    return [(name, m) for name, m in found if name not in inside and [*m.parameters()]]


def _watched(model: Any, path: str, spec: TransformersSpec, results: int) -> Split | None:
    """Run the model once; None: its layers are no chain that stages can share."""
    layers, outside = model.get_submodule(path), _outside(model, path)
    owned = {id(p) for module in (layers, *dict(outside).values()) for p in module.parameters()}
    if {id(p) for p in model.parameters()} != owned:
        return None
    embedding = model.get_input_embeddings()
    first = [name for name, each in outside if any(m is embedding for m in each.modules())]
    skeleton = Skeleton(model, layers, False, [name for name, _ in outside], results)
    events: list[tuple[Any, ...]] = []
    for i, recorder in enumerate(skeleton.recorders):
        recorder.register_forward_hook(partial(_note, events, i), with_kwargs=True)
    for name, stub in skeleton.stubs.items():
        stub.register_forward_hook(partial(_note, events, name), with_kwargs=True)
    try:
        skeleton.run_empty(spec.hidden_size)
    except Exception:  # of any kind: transformers' code got other results than its layers'
        return None
    called = [key for key, *_ in events]
    numbers = [key for key in called if isinstance(key, int)]
    if numbers != [*range(len(skeleton.recorders))] or not _is_chain(events, spec.hidden_size):
        return None
    start, stop = called.index(0), len(numbers)
    before = [*first, *(name for name in called[:start] if name not in first)]
    after = called[start + stop :]
    between = called[start : start + stop] != numbers
    once = len({*before, *after}) == len(before) + len(after) == len(outside)
    return None if between or not once else Split((*before,), path, (*after,), results)


def _note(
    events: list[tuple[Any, ...]], key: int | str, _: Any, args: Any, options: Any, result: Any
) -> None:
    events.append((key, args, options, result))


def _is_chain(events: Sequence[tuple[Any, ...]], width: int) -> bool:
    """Return True where layers have hidden features from one another, and nothing else of them.

    Hidden features are NaN, and so is all that is computed from them.
    """
    handed: Any = None
    for key, args, options, result in events:
        if not isinstance(key, int):
            continue
        options = {**options}
        given, *rest = args or (options.pop("hidden_states"),)
        rest += options.values()
        leaves = tree_leaves(rest)
        if given.shape[-1] != width or (handed is not None and given is not handed):
            return False
        if not all(isinstance(each, VALUES) for each in leaves):
            return False
        tensors = [each for each in leaves if isinstance(each, Tensor)]
        if any(t.is_meta or (t.is_floating_point() and bool(t.isnan().any())) for t in tensors):
            return False
        handed = result[0] if isinstance(result, tuple) else result
    return True
