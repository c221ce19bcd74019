"""A causal model of transformers as an ordered list of layers, which pipeline stages can share.

In a training with a balance loss of all layers, its sums travel next to the hidden features.

Shapes: B rows, S tokens of a row, T = B * S, D hidden, V vocabulary; ``/t`` is divided by tp size.
"""

from __future__ import annotations

import inspect
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from kenotron_dist import Axis
from kenotron_models.build import Build
from kenotron_models.context import Context
from kenotron_models.recompute import Recompute, whole
from kenotron_models.transformers_attention import OWN_ATTENTION, attending
from kenotron_models.transformers_balance import AddsBalance, BalanceLoss, RouterLogits, balance_of
from kenotron_models.transformers_cache import cache_of
from kenotron_models.transformers_compiled import compiled_block
from kenotron_models.transformers_model import empty_model, fill_buffers
from kenotron_models.transformers_plan import cut_model
from kenotron_models.transformers_problems import sequence_problem
from kenotron_models.transformers_rows import check_mixing
from kenotron_models.transformers_sequence import cut_tokens
from kenotron_models.transformers_skeleton import Call, Skeleton, places_of
from kenotron_models.transformers_spec import TransformersSpec
from kenotron_models.transformers_split import split_of
from kenotron_tp import join_tokens, split_tokens

Summed = tuple[Tensor, Tensor]
"""Hidden features (T, D), and the sums of the balance loss over the layers before."""


class TransformersLayer(nn.Module):
    """A part of a model of transformers: ``forward(x, context)``."""

    hf_names: dict[str, str]
    """Names of its parameters, and those in transformers."""
    cuts_sequence = False
    """True where it is right for rows that are cut over cp."""
    tokens_over = Axis.solo("tp")
    """Axis over which tokens between layers are cut."""

    @abstractmethod
    def fill_buffers(self, device: torch.device) -> None:
        """Give buffers, which need memory first, their values on ``device``."""

    def compile_block(self) -> None:
        """Compile the layer of transformers that this is; others stay as they are."""

    def take_balance(self) -> Tensor | None:
        """Return the balance loss since the last call, see ``AddsBalance``; None: it has none."""
        return None


class _OutsideLayers(TransformersLayer):
    """Modules before or after the layers of a model."""

    def __init__(self, skeleton: Skeleton, modules: Sequence[tuple[str, nn.Module]]) -> None:
        super().__init__()
        self._skeleton = (skeleton,)  # not a submodule
        self.hf_names = _adopt(self, modules)

    @property
    def skeleton(self) -> Skeleton:
        """The model that this is a part of."""
        return self._skeleton[0]

    def fill_buffers(self, device: torch.device) -> None:
        """Give the buffers that all layers share their values."""
        self.skeleton.fill_buffers(device)


class EmbeddingEntry(_OutsideLayers):
    """Tokens (T,) -> hidden features (T, D), and sums of no layers where they are wanted."""

    balance: BalanceLoss | None = None

    def forward(self, tokens: Tensor, context: Context) -> Tensor | Summed:
        """Do all that transformers does before its first layer."""
        tokens_BS = _tokens(self.skeleton.model, tokens, context)
        x = split_tokens(self.skeleton.embed(tokens_BS, context).flatten(0, 1), self.tokens_over)
        if self.balance is None or context.loss_weight is None:
            return x
        return x, self.balance.zeros(x.device)


class HeadEntry(AddsBalance, _OutsideLayers):
    """Hidden features (T, D) -> logits (T, V/t): the last norm and the product with the head."""

    def forward(self, x: Tensor | Summed, context: Context) -> Tensor:
        """Do all that transformers does after its last layer."""
        if isinstance(x, tuple):
            x, sums = x
            self.add_balance(sums, context)
        x = join_tokens(x, self.tokens_over, context.tokens)
        x_BSD = x.view(*context.positions_BS.shape, -1)
        return _wanted(self.skeleton.model, self.skeleton.finish(x_BSD, context), context)


class LayerEntry(TransformersLayer):
    """A layer of transformers: hidden features (T, D) -> (T, D)."""

    def __init__(
        self, skeleton: Skeleton, path: str, layer: nn.Module, number: int, recompute: Recompute
    ) -> None:
        super().__init__()
        self._skeleton = (skeleton,)
        self.block, self.number, self.recompute = layer, number, recompute
        self.hf_names = {f"block.{n}": f"{path}.{n}" for n in _parameters(layer)}
        self.balance: BalanceLoss | None = None
        self.logits: RouterLogits | None = None
        self._program: tuple[nn.Module, ...] = ()  # not a submodule

    @property
    def skeleton(self) -> Skeleton:
        """The model that this is a layer of."""
        return self._skeleton[0]

    def compile_block(self) -> None:
        """Compile the layer; passes that continue texts, of many lengths, stay as they are."""
        self._program = (compiled_block(self.block),)

    def forward(self, x: Tensor | Summed, context: Context) -> Tensor | Summed:
        """Call the layer as transformers would, and add its routers' logits to the sums."""
        x, sums = x if isinstance(x, tuple) else (x, None)
        shape = *context.positions_BS.shape, x.shape[-1]
        call = self.skeleton.calls(x.new_empty(()).expand(shape), context)[self.number]
        if (cache := cache_of(self.skeleton.model, context)) is not None:
            call = cache.filled(call)
        x_BSD = x.view(shape) if self.tokens_over.size == 1 else x[None]
        if self.recompute == "full" and torch.is_grad_enabled():
            return whole(self._layer, x_BSD, sums, call, context)
        return self._layer(x_BSD, sums, call, context)

    def _layer(
        self, x_BSD: Tensor, sums: Tensor | None, call: Call, context: Context
    ) -> Tensor | Summed:
        continues = context.cache is not None or context.outputs is not None
        block = self._program[0] if self._program and not continues else self.block
        with attending(context, self.skeleton.documents):
            y = block(x_BSD, *call.args, **call.options)
        y = (y[0] if isinstance(y, tuple) else y).flatten(0, 1)
        logits = [] if self.logits is None else self.logits.take()
        if sums is None or self.balance is None:
            return y
        return y, self.balance.add(sums, logits, context)

    def fill_buffers(self, device: torch.device) -> None:
        """Give the layer's own buffers, and those that all layers share, their values."""
        self.skeleton.fill_buffers(device)
        fill_buffers(self.skeleton.model, self.block, device)


class WholeEntry(AddsBalance, TransformersLayer):
    """A model that is not split: tokens (T,) -> logits (T, V/t)."""

    def __init__(self, model: Any, documents: bool) -> None:
        super().__init__()
        self.logits: RouterLogits | None = None
        self.whole, self.documents = model, documents
        self.hf_names = {f"whole.{name}": name for name in _parameters(model)}
        self._takes = {*inspect.signature(model.forward).parameters}

    def forward(self, tokens: Tensor, context: Context) -> Tensor:
        """Call the model."""
        cache = cache_of(self.whole, context)
        places = places_of(False, context) if cache is None else cache.filled(cache.places(context))
        given = {name: value for name, value in places.items() if name in self._takes}
        with attending(context, self.documents):
            logits = self.whole(input_ids=_tokens(self.whole, tokens, context), **given).logits
        routed = [] if self.logits is None else self.logits.take()
        if self.balance is not None and context.loss_weight is not None:
            zeros = self.balance.zeros(logits.device)
            self.add_balance(self.balance.add(zeros, routed, context), context)
        return _wanted(self.whole, logits, context)

    def fill_buffers(self, device: torch.device) -> None:
        """Give all buffers of the model their values."""
        fill_buffers(self.whole, self.whole, device)


def _tokens(model: Any, tokens: Tensor, context: Context) -> Tensor:
    """Tokens (B, S); texts that a cache keeps are padded on their left."""
    tokens_BS = tokens.view_as(context.positions_BS)
    cache = cache_of(model, context)
    return tokens_BS if cache is None else cache.left_padded(tokens_BS)


def _wanted(model: Any, logits_BSV: Tensor, context: Context) -> Tensor:
    """Logits (T, V/t), or those of the tokens that the context asks for."""
    logits, cache = logits_BSV.flatten(0, 1), cache_of(model, context)
    if context.outputs is None:
        return logits
    return logits[context.outputs if cache is None else cache.outputs(context.outputs)]


def _parameters(module: nn.Module) -> list[str]:
    return [name for name, _ in module.named_parameters(remove_duplicate=False)]


def _adopt(owner: nn.Module, modules: Sequence[tuple[str, nn.Module]]) -> dict[str, str]:
    """Register modules of a model below an entry by their paths there; names are the same."""
    for path, module in modules:
        parent = owner
        *folders, last = path.split(".")
        for folder in folders:
            if folder not in parent._modules:
                parent.add_module(folder, nn.Module())
            parent = parent.get_submodule(folder)
        parent.add_module(last, module)
    return {name: name for name in _parameters(owner)}


def transformers_layers(
    spec: TransformersSpec, build: Build, recompute: Sequence[Recompute]
) -> list[tuple[str, nn.Module]]:
    """Make the layers of a model of transformers by name: embedding, layers.i, head.

    A model that ``split_of`` cannot split is one layer: ``model``. Each layer has ``hf_names``: its
    parameters' names, and those in transformers.

    Raises:
        ImportError: transformers is not installed.
        ValueError: the model cannot be cut over tp, or has dropout or unknown buffers.
    """
    model = empty_model(spec, build.dtype)
    here = spec.attention == OWN_ATTENTION
    if here:
        check_mixing(model)
    cut_model(model, build, spec.tp_plan)
    split = split_of(spec)
    balance = balance_of(model) if spec.balances else None
    if split is None and spec.documents and not here:
        raise ValueError(
            f"separate_documents: true was given, but a {model.config.model_type} is not split "
            "into layers, so its masks are not known: set it to false, or attn_implementation to "
            "kenotron"
        )
    if split is None and build.sequence_parallel and build.tp.size > 1:
        raise ValueError(
            f"a {model.config.model_type} is not split into layers: its tokens stay whole"
        )
    if split is None:
        entry = WholeEntry(model, spec.documents)
        if balance is not None:
            entry.balance, entry.logits = balance, RouterLogits(model, "", model)
        return _declared([("model", entry)], spec)
    prefix, layers = split.layers, [*model.get_submodule(split.layers).children()]
    before, after = ([(n, model.get_submodule(n)) for n in each] for each in split.outside)
    skeleton = split.skeleton(model, spec.documents)
    embedding, head = EmbeddingEntry(skeleton, before), HeadEntry(skeleton, after)
    own = [LayerEntry(skeleton, f"{prefix}.{i}", m, i, recompute[i]) for i, m in enumerate(layers)]
    if build.sequence_parallel and build.tp.size > 1:
        for entry in (embedding, head, *own):
            entry.tokens_over = build.tp
        for i, layer in enumerate(layers):
            cut_tokens(f"{prefix}.{i}", layer, build.tp)
    if balance is not None:
        embedding.balance = head.balance = balance
        for i, entry in enumerate(own):
            entry.balance, entry.logits = balance, RouterLogits(model, f"{prefix}.{i}", entry.block)
    inner = [(f"layers.{i}", entry) for i, entry in enumerate(own)]
    return _declared([("embedding", embedding), *inner, ("head", head)], spec)


def _declared(
    entries: Sequence[tuple[str, TransformersLayer]], spec: TransformersSpec
) -> list[tuple[str, nn.Module]]:
    """Declare which entries are right for rows that are cut."""
    for _, entry in entries:
        entry.cuts_sequence = sequence_problem(spec) is None
    return [*entries]
