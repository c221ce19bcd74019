"""transformers' own cache of texts that are continued: each rank has that of its layers and heads.

Texts of unequal length are padded on their left here, as transformers does: windows, convolutions
and states then see a text's tokens next to one another.

Shapes: B texts, S tokens that are read at once, L slots: tokens of the longest text, read or new.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from kenotron_models.context import Context
from kenotron_models.transformers_corrections import UNCACHED
from kenotron_models.transformers_model import dynamic_cache

WORDS = ("cache", "past_key_values", "cache_params")
"""Names that models give this argument of their ``forward``, the newest first."""


class ModelCache:
    """Caches of one model's layers for the texts of a batch.

    Args:
        model: of transformers.
        context: the first pass, with whole prompts, padded on their right.
    """

    def __init__(self, model: Any, context: Context) -> None:
        self.word = cache_word(model)
        self.layers = dynamic_cache(model)
        """Keys, values and states; those of other ranks' layers stay empty."""
        self.lengths = dynamic_cache(model)
        """The number of tokens that each layer of the model has read: masks are made of it."""
        padding = context.padding_BS
        positions = context.positions_BS
        rows = len(positions)
        self.pads_B = positions.new_zeros(rows) if padding is None else padding.sum(1)
        self.slots = 0
        """L after the pass that is computed now."""
        self._new = 0

    def begin(self, context: Context) -> None:
        """Count the tokens of a pass. Raises ValueError for padding in any but the first."""
        if self.slots and context.padding_BS is not None:
            raise ValueError(
                "padding_BS was given in a later pass of a cache of transformers: give one token "
                "of each text"
            )
        if self._new:
            _lengthen(self.lengths, self._new)
        self._new = context.positions_BS.shape[1]
        self.slots += self._new

    def places(self, context: Context) -> dict[str, Any]:
        """Return positions (B, S), seen slots (B, L) and lengths, as ``forward`` takes them."""
        positions = context.positions_BS
        if self.slots == self._new:  # the first pass
            positions = (positions - self.pads_B[:, None]).clamp(min=0)
        slots = torch.arange(self.slots, device=positions.device)
        seen = (slots >= self.pads_B[:, None]).to(torch.int64)
        if not any(map(_attends, self.lengths.layers)):  # a state has read what is before
            seen = seen[:, -self._new :]
        options = {"position_ids": positions, "attention_mask": seen, "use_cache": True}
        return options | {self.word: self.lengths}

    def left_padded(self, tokens_BS: Tensor) -> Tensor:
        """Return tokens (B, S) with their padding on the left."""
        return tokens_BS.gather(1, self._sources(tokens_BS.shape[1]))

    def outputs(self, outputs: Tensor) -> Tensor:
        """Return the numbers, of any shape, among B * S that tokens have with padding at left."""
        if self.slots != self._new:
            return outputs
        return outputs + self.pads_B[outputs // self._new]

    def filled(self, call: Any) -> Any:
        """Return the arguments of a layer's call with its cache in the place of the lengths."""
        lengths, layers = self.lengths, self.layers
        return tree_map(
            lambda x: layers if x is lengths else x, call, is_leaf=lambda x: x is lengths
        )

    def _sources(self, width: int) -> Tensor:
        """Return which token lies in each slot of a pass, (B, S)."""
        slots = torch.arange(width, device=self.pads_B.device).expand(len(self.pads_B), -1)
        return slots if self.slots != self._new else (slots - self.pads_B[:, None]) % width


def cache_of(model: Any, context: Context) -> ModelCache | None:
    """Return the cache of a model for this pass; None: nothing is kept.

    The first layer of a rank that asks in a pass begins it. Raises ValueError for a model that
    cannot read from one.
    """
    if context.cache is None:
        return None
    return context.once(("transformers cache", id(model)), partial(_begun, model, context))


def _begun(model: Any, context: Context) -> ModelCache:
    assert context.cache is not None
    others = context.cache.others
    if id(model) not in others:
        try:
            others[id(model)] = ModelCache(model, context)
        except ValueError as error:
            raise ValueError(f"{error}: generate with cached=False (--no-cache)") from None
    found: ModelCache = others[id(model)]
    found.begin(context)
    return found


def cache_word(model: Any) -> str:
    """Return the name of the argument of ``forward`` that takes a cache.

    Raises:
        ValueError: there is none, or the model has a cache of another kind.
    """
    takes: Mapping[str, Any] = inspect.signature(model.forward).parameters
    found = next((word for word in WORDS if word in takes), None)
    general = getattr(model, "_supports_default_dynamic_cache", lambda: True)
    kind = model.config.get_text_config(decoder=True).model_type
    if kind in UNCACHED:
        raise ValueError(f"a {kind} cannot read from a cache: {UNCACHED[kind]}")
    if found is None or not general():
        raise ValueError(f"a {kind} takes no DynamicCache of transformers")
    return found


def _lengthen(cache: Any, tokens: int) -> None:
    """Let all layers of a cache have read so many tokens more, of one feature of one text."""
    for layer in cache.layers:
        if hasattr(layer, "has_previous_state"):
            layer.has_previous_state = dict.fromkeys(layer.has_previous_state, True)
        if _attends(layer):
            nothing = torch.zeros(1, 1, tokens, 1)
            layer.update(nothing, nothing)


def _attends(layer: Any) -> bool:
    """Return True for a layer of a cache that has keys."""
    return hasattr(layer, "get_mask_sizes")
