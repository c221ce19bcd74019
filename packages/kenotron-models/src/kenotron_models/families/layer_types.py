"""Keys of families whose layers have a window or none, as ``layer_types`` says."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from kenotron_models.attention import AttentionSpec
from kenotron_models.families.fields import SharedFields, at_least
from kenotron_models.families.hf_keys import windows_of
from kenotron_models.family import Values
from kenotron_models.hf_rope import FULL, SLIDING, rope_to_hf
from kenotron_models.rope import Rope
from kenotron_models.small import SmallSizes
from kenotron_models.spec import DecoderSpec


@dataclass(frozen=True, kw_only=True)
class LayerTypeFields(SharedFields):
    """Sizes and constants of a decoder with layers of two types; a config inherits it."""

    sliding_window: int | None = 4096
    """Tokens that a token sees in sliding layers, itself counted; None: no layer may slide."""
    layer_types: tuple[str, ...] | None = None
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

    def type_problems(self) -> list[str]:
        """Name types that do not exist, or are not one for each layer, and a window without use."""
        given, layers = self.layer_types, self.num_hidden_layers
        found = (
            []
            if self.sliding_window is None
            else at_least(1, {"sliding_window": self.sliding_window})
        )
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

    def small_layers(self, sizes: SmallSizes) -> dict[str, Any]:
        """Return the keys of windows of a narrow copy."""
        full = [i for i, kind in enumerate(self.types) if kind == FULL]
        kept = sizes.some_layers(full, self.num_hidden_layers)
        return {
            "sliding_window": sizes.window(self.sliding_window),
            "layer_types": tuple(FULL if i in kept else SLIDING for i in range(sizes.layers)),
        }

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


def positive_problems(numbers: Mapping[str, float | None]) -> list[str]:
    """Name numbers (by key) that are not finite and above 0; None is none."""
    return [
        f"{name}: {value} was given; it must be a finite number above 0"
        for name, value in numbers.items()
        if value is not None and not 0 < value < float("inf")
    ]


def types_from_hf(values: Values) -> dict[str, Any]:
    """Return the keys of windows."""
    kinds = values.get("layer_types")
    return {
        "sliding_window": values.get("sliding_window"),
        "layer_types": None if kinds is None else tuple(kinds),
    }


def types_to_hf(spec: DecoderSpec) -> dict[str, Any]:
    """Return the keys that ``types_from_hf`` reads."""
    kinds = [FULL if size is None else SLIDING for size in windows_of(spec)]
    return {"sliding_window": spec.window, "layer_types": kinds}


def first_rope(spec: DecoderSpec, kind: str | None = None) -> Rope:
    """Return the rotary positions of the first layer that has some, of a type of layers or of all.

    Those of a family where no layer has any.
    """
    kinds = types_to_hf(spec)["layer_types"]
    found = (
        getattr(block.mixer, "rope", None)
        for block, own in zip(spec.blocks, kinds, strict=True)
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
