"""Keys of rotary positions, of a part of a head's features, and of biases of the output."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from kenotron_models.attention import AttentionSpec
from kenotron_models.families.decoder_keys import DecoderKeys, HeadKeys
from kenotron_models.families.keys import POSITIVE, KeyTable, key
from kenotron_models.families.places import MISSING, in_spec
from kenotron_models.hf_rope import check_whole_heads, rope_from_hf, rope_to_hf, share_from_hf
from kenotron_models.rope import Rope
from kenotron_models.rope_scaling import RopeScaling
from kenotron_models.small import SmallSizes
from kenotron_models.spec import DecoderSpec


@dataclass(frozen=True, kw_only=True)
class RopeKeys(DecoderKeys):
    """A decoder with rotary positions."""

    rope_scaling: RopeScaling | None = key(None, small=SmallSizes.scaling)
    """Stretching of rotary positions; None: none."""
    rope_theta: float = key(10000.0, rule=POSITIVE)
    """Base of the rotary wave lengths."""
    rope_interleaved: bool = key(False)
    """True: rotate neighbouring features (0, 1), (2, 3); False: feature i with i + half."""

    def rope(self) -> Rope | None:
        """Return the rotary positions of a layer that has some."""
        return Rope(
            theta=self.rope_theta, scaling=self.rope_scaling, interleaved=self.rope_interleaved
        )

    @classmethod
    def read_hf(cls, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return base and stretching. Raises ValueError where a part of a head turns."""
        theta, scaling = rope_from_hf(values)
        if not issubclass(cls, PartialRopeKeys):
            check_whole_heads(values)
        return super().read_hf(values) | {"rope_theta": theta, "rope_scaling": scaling}

    @classmethod
    def write_hf(cls, spec: DecoderSpec) -> dict[str, Any]:
        """Return base and stretching in both spellings."""
        rope = in_spec(spec, "attention.rope")
        return super().write_hf(spec) | ({} if rope is MISSING else rope_to_hf(rope))


@dataclass(frozen=True, kw_only=True)
class LlamaKeys(RopeKeys, HeadKeys):
    """A decoder with RMSNorm, rotary positions, grouped-query attention, a gated feed-forward."""


@dataclass(frozen=True, kw_only=True)
class NanotronKeys(KeyTable):
    """Keys that Nanotron's files have and nothing reads."""

    pretraining_tp: int = key(1)
    """No effect: parallelism is chosen when the model is built, not by the model's sizes."""
    use_cache: bool = key(True)
    """No effect: generation decides by itself whether it keeps keys and values."""


@dataclass(frozen=True, kw_only=True)
class OutputBiasKeys(HeadKeys):
    """Attention whose output has a bias where queries, keys and values have one.

    A family names this base first: dataclasses take a key from the first base that has it.
    """

    attention_bias: bool = key(False, hf=True, at="attention.qkv_bias")
    """True: queries, keys, values and the output have a bias."""

    def attention(self, **changes: Any) -> AttentionSpec:
        """Return what these keys say of attention, with changed fields of the spec."""
        return super().attention(**{"out_bias": self.attention_bias} | changes)


@dataclass(frozen=True, kw_only=True)
class PartialRopeKeys(LlamaKeys):
    """Positions turn a part of a head's features."""

    partial_rotary_factor: float = key(1.0, hf=True, at="attention.rope.share")
    """Share of a head's features that positions turn, its first ones."""

    def problems(self) -> list[str]:
        """Name a share of the features of a head that is not an even number of them."""
        found, share, width = super().problems(), self.partial_rotary_factor, self.features_of_head
        if found or (0 < share <= 1 and (turned := int(width * share)) >= 2 and turned % 2 == 0):
            return found
        return [
            f"partial_rotary_factor: {share} was given; of the {width} features of a head it makes "
            f"{int(width * share)}, rounded down; it must be an even number from 2 to {width}"
        ]

    def small_keys(self, sizes: SmallSizes) -> dict[str, Any]:
        """Return about the same share of a narrow head, an even number of features."""
        width = min(sizes.head_dim, self.features_of_head)
        share = max(2, int(width * self.partial_rotary_factor) // 2 * 2) / width
        return super().small_keys(sizes) | {"partial_rotary_factor": share}

    def rope(self) -> Rope | None:
        """Return the rotary positions of a layer."""
        rope = super().rope()
        return rope and replace(rope, share=self.partial_rotary_factor)

    @classmethod
    def read_hf(cls, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return the share, from either spelling."""
        return super().read_hf(values) | {"partial_rotary_factor": share_from_hf(values)}

    @classmethod
    def write_hf(cls, spec: DecoderSpec) -> dict[str, Any]:
        """Return the share, also of whole heads and of none."""
        rope = in_spec(spec, "attention.rope")
        share = getattr(rope, "share", 1.0)
        return super().write_hf(spec) | {"partial_rotary_factor": share}
