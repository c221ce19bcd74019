"""Keys of windows: one for all layers, Qwen's with layers without it, or a type for each layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from kenotron_models.attention import AttentionSpec
from kenotron_models.families.decoder_keys import windowed
from kenotron_models.families.keys import key
from kenotron_models.families.rope_keys import LlamaKeys
from kenotron_models.hf_rope import FULL, SLIDING, rope_to_hf
from kenotron_models.rope import Rope
from kenotron_models.small import SmallSizes
from kenotron_models.spec import DecoderSpec


@dataclass(frozen=True, kw_only=True)
class WindowKeys(LlamaKeys):
    """A window for all layers."""

    sliding_window_size: int | None = key(
        None, least=1, hf="sliding_window", at="attention.window", small=SmallSizes.window
    )
    """Tokens that a token sees, itself counted; None: all before it."""


QWEN_DEFAULTS: dict[str, Any] = {
    "max_position_embeddings": 32768,
    "num_key_value_heads": 32,
    "max_window_layers": 28,
    "sliding_window": 4096,
    "bos_token_id": None,
    "eos_token_id": None,
}
"""Keys that a config.json of Qwen2 or Qwen3 may leave out."""


@dataclass(frozen=True, kw_only=True)
class QwenWindowKeys(LlamaKeys):
    """A window, and layers without it."""

    sliding_window_size: int | None = key(None, least=1, small=SmallSizes.window)
    """Tokens that a token sees, itself counted; None: all before it."""
    full_attention_layers: tuple[int, ...] = key(())
    """Layers without the window, counted from 0."""

    def small_keys(self, sizes: SmallSizes) -> dict[str, Any]:
        """Return the layers without the window of a narrow copy."""
        kept = sizes.some_layers(self.full_attention_layers, self.num_hidden_layers)
        return super().small_keys(sizes) | {"full_attention_layers": kept}

    def windowed(self, mixer: AttentionSpec) -> list[AttentionSpec]:
        """Return a mixer for each layer."""
        full, layers = self.full_attention_layers, self.num_hidden_layers
        return windowed(mixer, self.sliding_window_size, full, layers)

    @classmethod
    def read_hf(cls, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return the window and the layers without it. Raises ValueError, naming the key."""
        found, layers = super().read_hf(values), values["num_hidden_layers"]
        size = values.get("sliding_window") if values.get("use_sliding_window") else None
        first, kinds = values.get("max_window_layers", 0), values.get("layer_types")
        if kinds is None:
            kinds = [SLIDING if size is not None and i >= first else FULL for i in range(layers)]
        if len(kinds) != layers or not {*kinds} <= {SLIDING, FULL}:
            raise ValueError(
                f"layer_types: {kinds} was given; it must be {layers} times {SLIDING} or {FULL}"
            )
        if SLIDING not in kinds:
            return found
        if size is None:
            raise ValueError(
                f"layer_types: {SLIDING} was given, but use_sliding_window is false or "
                "sliding_window is null; make them say the same"
            )
        full = tuple(i for i, kind in enumerate(kinds) if kind == FULL)
        return found | {"sliding_window_size": size, "full_attention_layers": full}

    @classmethod
    def write_hf(cls, spec: DecoderSpec) -> dict[str, Any]:
        """Return the keys that ``read_hf`` reads."""
        kinds = types_of(spec)
        return super().write_hf(spec) | {
            "use_sliding_window": spec.window is not None,
            "sliding_window": spec.window,
            "max_window_layers": kinds.index(SLIDING) if SLIDING in kinds else len(kinds),
            "layer_types": kinds,
        }


@dataclass(frozen=True, kw_only=True)
class LayerTypeKeys(LlamaKeys):
    """Layers of two types, with a window and without."""

    sliding_window: int | None = key(4096, least=1, hf=True, at="window", small=SmallSizes.window)
    """Tokens that a token sees in sliding layers, itself counted; None: no layer may slide."""
    layer_types: tuple[str, ...] | None = key(None, hf=True)
    """`sliding_attention` or `full_attention` for each layer; None: the pattern of the family."""

    def pattern(self) -> tuple[str, ...]:
        """Return the types of all layers where the config does not say them."""
        return self.every_nth_full(2)

    def every_nth_full(self, n: int) -> tuple[str, ...]:
        """Return the pattern in which every n-th layer has no window, as long as there is one."""
        slides = self.sliding_window is not None
        return tuple(
            SLIDING if slides and (i + 1) % n else FULL for i in range(self.num_hidden_layers)
        )

    @property
    def types(self) -> tuple[str, ...]:
        """The type of each layer, with None filled in."""
        return self.pattern() if self.layer_types is None else self.layer_types

    def problems(self) -> list[str]:
        """Name types that do not exist, or are not one for each layer, and a window without use."""
        found, given, layers = super().problems(), self.layer_types, self.num_hidden_layers
        if given is None:
            return found
        if len(given) != layers or not {*given} <= {SLIDING, FULL}:
            found.append(
                f"layer_types: {list(given)} was given; it must be {layers} times {SLIDING} or "
                f"{FULL}"
            )
        elif SLIDING in given and self.sliding_window is None:
            found.append(
                f"layer_types: {SLIDING} was given, but sliding_window is null; make them say the "
                "same"
            )
        return found

    def small_keys(self, sizes: SmallSizes) -> dict[str, Any]:
        """Return the types of the layers of a narrow copy."""
        full = [i for i, kind in enumerate(self.types) if kind == FULL]
        kept = sizes.some_layers(full, self.num_hidden_layers)
        types = tuple(FULL if i in kept else SLIDING for i in range(sizes.layers))
        return super().small_keys(sizes) | {"layer_types": types}

    @classmethod
    def write_hf(cls, spec: DecoderSpec) -> dict[str, Any]:
        """Return the type of each layer."""
        return super().write_hf(spec) | {"layer_types": types_of(spec)}

    def by_type(
        self, full: AttentionSpec, sliding: AttentionSpec | None = None
    ) -> list[AttentionSpec]:
        """Return a mixer for each layer.

        Args:
            full: that of layers without a window.
            sliding: what the others are but for their window; None: the same.
        """
        local = replace(sliding or full, window=self.sliding_window)
        return [local if kind == SLIDING else full for kind in self.types]


def types_of(spec: DecoderSpec) -> list[str]:
    """Return the type of each layer of a model."""
    windows = (getattr(block.mixer, "window", None) for block in spec.blocks)
    return [FULL if size is None else SLIDING for size in windows]


def first_rope(spec: DecoderSpec, kind: str | None = None) -> Rope:
    """Return the rotary positions of the first layer that has some, of a type of layers or of all.

    Those of a family where no layer has any.
    """
    found = (
        getattr(block.mixer, "rope", None)
        for block, own in zip(spec.blocks, types_of(spec), strict=True)
        if kind in (None, own)
    )
    return next((rope for rope in found if rope is not None), Rope())


def ropes_to_hf(spec: DecoderSpec, full: float, sliding: float) -> dict[str, Any]:
    """Return the keys that ``ropes_by_type`` reads.

    Args:
        spec: the model.
        full: the base of full layers where there are none.
        sliding: that of sliding ones.
    """
    kinds = {getattr(block.mixer, "window", None) is None for block in spec.blocks}
    whole = first_rope(spec, FULL) if True in kinds else Rope(theta=full)
    local = first_rope(spec, SLIDING) if False in kinds else Rope(theta=sliding)
    keys = rope_to_hf(whole)
    by_type = {FULL: keys["rope_parameters"], SLIDING: rope_to_hf(local)["rope_parameters"]}
    return keys | {"rope_parameters": by_type, "rope_local_base_freq": local.theta}
