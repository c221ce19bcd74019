"""transformers' own ``forward`` with recorders in the place of layers.

It makes what is done to embeddings before the first layer, the masks and rotary angles that each
layer is called with, and what follows the last layer. Nothing of a family is written down here.

Shapes: B rows, S tokens of a row, D hidden, V vocabulary; ``/t`` is divided by tp size.
"""

from __future__ import annotations

import contextlib
from collections import UserDict
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from kenotron_models.context import Context
from kenotron_models.transformers_attention import OWN_ATTENTION, attending
from kenotron_models.transformers_cache import cache_of
from kenotron_models.transformers_model import fill_buffers
from kenotron_models.transformers_plan import base_of, path_of
from kenotron_models.transformers_twin import alike_on_meta, meta_twin, on_meta


class Call(NamedTuple):
    """Arguments of a call of a layer, next to its hidden features."""

    args: tuple[Any, ...]
    options: dict[str, Any]


class WriteOnly(UserDict[Any, Any]):
    """An empty mapping that layers put values into for later ones, which may be of another stage,
    or computed again: nothing can be read from it."""

    def __setitem__(self, key: Any, item: Any) -> None:
        """Forget it."""

    def __getitem__(self, key: Any) -> Any:
        """Raise LookupError: what another layer has put there is wanted."""
        raise LookupError(f"a layer reads {key!r} of another one: such a model cannot be trained")


class _LayerReached(Exception):
    """The layer where a run of ``forward`` ends."""

    def __init__(self, hidden: Tensor) -> None:
        self.hidden = hidden


class _Standin(nn.Module):
    """Stands in the place of a module in ``forward``; has that module's attributes."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._of = (module,)  # not a submodule

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["_of"][0], name)


class _CallRecorder(_Standin):
    """Stands in the place of a layer."""

    def __init__(self, layer: nn.Module, results: int) -> None:
        super().__init__(layer)
        self._results = results
        self.calls: list[Call] | None = None
        self.ends = False
        self.result: Tensor | None = None

    def forward(self, *args: Any, **options: Any) -> Tensor | tuple[Tensor, ...]:
        """Note the call, and hand on the hidden features or ``result``, as the layer does."""
        hidden = args[0] if args else options.pop("hidden_states")
        if hidden.ndim != 3:
            raise RuntimeError(f"a layer was called with {hidden.ndim} dims: one row of a result")
        if self.calls is not None:
            self.calls.append(Call(args[1:], {k: _apart(each) for k, each in options.items()}))
        if self.ends:
            raise _LayerReached(hidden)
        handed: Tensor = hidden if self.result is None else self.result
        if not self._results:
            return handed
        return (handed, *[torch.full_like(handed, torch.nan)] * (self._results - 1))


class _Stub(_Standin):
    """Stands in the place of a module whose weights another stage may have."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__(meta_twin(module))
        self.value = 0.0

    def forward(self, *args: Any, **options: Any) -> Any:
        """Return results of the module's shapes, with ``value`` in every place."""
        tensors = [each for each in tree_leaves((args, options)) if isinstance(each, Tensor)]
        device = tensors[0].device if tensors else torch.device("cpu")
        there = tree_map(on_meta, (args, options))
        with torch.no_grad():
            made = self._of[0](*there[0], **there[1])
        return tree_map(lambda x: torch.full_like(x, self.value, device=device), made)


class Skeleton:
    """A model whose layers are recorders. All its layers share one; it is no module of theirs.

    Args:
        model: of transformers, on meta; it loses its layers.
        layers: of it.
        documents: a token sees its own document only.
        before: names of modules that are called before the layers.
        results: values that a layer returns in a tuple, hidden features first; 0: it returns these.
    """

    def __init__(
        self,
        model: Any,
        layers: nn.Module,
        documents: bool,
        before: Sequence[str],
        results: int,
    ) -> None:
        self.model, self.base, self.documents = model, base_of(model), documents
        self.masks_documents = documents and not attends_here(model)
        self.recorders = [_CallRecorder(layer, results) for layer in layers.children()]
        model.set_submodule(path_of(model, layers), nn.ModuleList(self.recorders))
        self.stubs = {name: _Stub(model.get_submodule(name)) for name in before}
        self._filled: torch.device | None = None
        self._checked = not self.masks_documents

    def run_empty(self, width: int) -> None:
        """Run ``forward`` on hidden features (3, 5, ``width``) of the CPU that are all NaN.

        The modules ``before`` are not called.
        """
        cpu = torch.device("cpu")
        self.fill_buffers(cpu)
        self._reset()
        for stub in self.stubs.values():
            stub.value = torch.nan
        context = Context(torch.arange(5, device=cpu).expand(3, -1))  # 3 rows: no pair of results
        x_BSD = torch.full((3, 5, width), torch.nan, device=cpu)
        with torch.no_grad(), attending(context, False), self._stubbed():
            self.model(inputs_embeds=x_BSD, **self._places(context))

    def embed(self, tokens_BS: Tensor, context: Context) -> Tensor:
        """Return the hidden features (B, S, D) that the first layer is called with."""
        self._reset()
        self.recorders[0].ends = True
        with attending(context, self.documents):
            return self._reach(input_ids=tokens_BS, **self._places(context))

    def calls(self, x_BSD: Tensor, context: Context) -> list[Call]:
        """Return what each layer is called with for x (B, S, D); made once a micro-batch."""
        return context.once(("transformers", id(self)), partial(self._record, x_BSD, context))

    def calls_on_meta(self, width: int, dtype: torch.dtype, context: Context) -> list[Call]:
        """Return the calls of a micro-batch on device meta, made on the CPU.

        transformers asks for values of masks, which tensors on meta do not have.

        Args:
            width: D.
            dtype: of hidden features.
            context: the micro-batch, of whole rows that are one document each.
        """
        rows, sequence = context.positions_BS.shape
        with torch.device("cpu"):
            self.fill_buffers(torch.device("cpu"))
            there = Context(torch.arange(sequence).expand(rows, -1))
            made = self.calls(torch.zeros(rows, sequence, width, dtype=dtype), there)
        known = {there.positions_BS.untyped_storage()._cdata: context.positions_BS}
        calls = [Call(*tree_map(partial(alike_on_meta, known), call)) for call in made]
        return context.once(("transformers", id(self)), lambda: calls)

    def finish(self, x_BSD: Tensor, context: Context) -> Tensor:
        """Return the logits (B, S, V/t) of the last layer's output."""
        self._reset()
        self.recorders[-1].result = x_BSD
        with attending(context, self.documents), self._stubbed():
            places = self._places(context)
            logits: Tensor = self.model(inputs_embeds=torch.zeros_like(x_BSD), **places).logits
        self._reset()
        return logits

    def fill_buffers(self, device: torch.device) -> None:
        """Give the buffers that all layers share their values, the first time."""
        if self._filled != device:
            fill_buffers(self.model, self.model, device)
            self._filled = device

    def _record(self, x_BSD: Tensor, context: Context) -> list[Call]:
        self._reset()
        found: list[Call] = []
        for recorder in self.recorders:
            recorder.calls = found
        self.recorders[-1].ends = True
        with torch.no_grad(), attending(context, self.documents), self._stubbed():
            self._reach(inputs_embeds=torch.zeros_like(x_BSD), **self._places(context))
        self._reset()  # else the last micro-batch's would be kept
        if not self._checked and context.cache is None and not context.positions_BS.is_meta:
            kind = self.model.config.model_type
            self._checked = check_documents(found, context.positions_BS, kind)
        return found

    @contextlib.contextmanager
    def _stubbed(self) -> Iterator[None]:
        """Put stubs in the place of the modules before the layers."""
        modules: Mapping[str, nn.Module] = {n: self.model.get_submodule(n) for n in self.stubs}
        try:
            for name, stub in self.stubs.items():
                self.model.set_submodule(name, stub)
            yield
        finally:
            for name, module in modules.items():
                self.model.set_submodule(name, module)

    def _reach(self, **options: Any) -> Tensor:
        """Run the base model up to the recorder that ends it."""
        try:
            self.base(**options)
        except _LayerReached as reached:
            return reached.hidden
        raise RuntimeError(f"{type(self.base).__name__}.forward did not call its layers")

    def _places(self, context: Context) -> dict[str, Any]:
        cache = cache_of(self.model, context)
        if cache is not None:
            return cache.places(context)
        return places_of(self.masks_documents, context)

    def _reset(self) -> None:
        for recorder in self.recorders:
            recorder.calls, recorder.ends, recorder.result = None, False, None


def _apart(value: Any) -> Any:
    """Return a value for one layer: a mapping that all of them write to is not shared."""
    return WriteOnly() if isinstance(value, MutableMapping) and not value else value


def attends_here(model: Any) -> bool:
    """Return True where attention of a model is that of ``transformers_attention``."""
    text = model.config.get_text_config(decoder=True)
    return bool(getattr(text, "_attn_implementation", None) == OWN_ATTENTION)


def check_documents(calls: Sequence[Call], positions_BS: Tensor, kind: str) -> bool:
    """Return True where positions (B, S) start again anywhere: all layers' masks can be compared.

    Raises:
        ValueError: a layer's mask lets a token see another document.
    """
    first = positions_BS[:, :1] - 1
    documents = (torch.diff(positions_BS, prepend=first, dim=-1) != 1).cumsum(-1)
    if not bool(documents.any()):
        return False
    others = documents[:, :, None] != documents[:, None, :]
    for i, call in enumerate(calls):
        mask = call.options.get("attention_mask")
        if not isinstance(mask, Tensor) or mask.ndim != 4:
            seen = True
        else:
            seen = bool(((mask if mask.dtype == torch.bool else mask == 0)[:, 0] & others).any())
        if seen:
            raise ValueError(
                f"separate_documents: true was given, but layer {i} of a {kind} sees tokens of "
                "other documents in transformers: set it to false"
            )
    return True


def places_of(documents: bool, context: Context) -> dict[str, Any]:
    """Positions, and which tokens see one another, as transformers takes them."""
    positions = context.positions_BS
    places: dict[str, Any] = {"position_ids": positions, "use_cache": False}
    if not documents:  # without a mask positions that start again would separate documents
        places["attention_mask"] = torch.ones_like(positions)
    return places
