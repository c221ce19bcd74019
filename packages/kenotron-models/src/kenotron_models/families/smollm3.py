"""SmolLM3 (Hugging Face, 2025): every fourth layer has no rotary positions (NoPE)."""

from dataclasses import dataclass, replace
from typing import Any

from kenotron_models.families.decoder_keys import DecoderKeys
from kenotron_models.families.keys import key, marker, with_default
from kenotron_models.families.rope_keys import OutputBiasKeys, RopeKeys
from kenotron_models.families.window_keys import LayerTypeKeys, first_rope
from kenotron_models.family import Family, HuggingFace
from kenotron_models.hf_rope import FULL, SLIDING, rope_to_hf
from kenotron_models.mlp import MLPSpec
from kenotron_models.small import SmallSizes
from kenotron_models.spec import DecoderSpec


@dataclass(frozen=True, kw_only=True)
class SmolLM3Config(OutputBiasKeys, LayerTypeKeys):
    """Sizes and constants of a SmolLM3 decoder, under Hugging Face's names."""

    is_smollm3_config: bool = marker()
    """Marks a YAML mapping as this class; always true."""
    mlp_bias: bool = key(False, hf=True, at="mlp.bias")
    """True: the matrices of the feed-forward have a bias."""
    rope_theta: float = with_default(RopeKeys, "rope_theta", 2000000.0)
    tie_word_embeddings: bool = with_default(DecoderKeys, "tie_word_embeddings", True)
    use_sliding_window: bool = key(False, hf=True)
    """True: layers without rotary positions slide, or those that layer_types names."""
    sliding_window: int | None = with_default(LayerTypeKeys, "sliding_window", None)
    no_rope_layers: tuple[int, ...] | None = key(None, hf=True)
    """For each layer 1, or 0 where it has no rotary positions; None: no_rope_layer_interval says
    it."""
    no_rope_layer_interval: int = key(4, least=1, hf=True)
    """Every n-th layer has no rotary positions where no_rope_layers is null."""

    def problems(self) -> list[str]:
        """Name layers that are not one entry each, and types that use_sliding_window denies."""
        found, given, layers = super().problems(), self.no_rope_layers, self.num_hidden_layers
        if given is not None and (len(given) != layers or not {*given} <= {0, 1}):
            found.append(
                f"no_rope_layers: {list(given)} was given; it must be {layers} times 1, or 0 where "
                "a layer has no rotary positions"
            )
        if not self.use_sliding_window and SLIDING in (self.layer_types or ()):
            found.append(
                f"layer_types: {SLIDING} was given, but use_sliding_window is false; make them say "
                "the same"
            )
        return found

    @property
    def turned(self) -> tuple[bool, ...]:
        """True for each layer that has rotary positions."""
        every, given = self.no_rope_layer_interval, self.no_rope_layers
        if given is None:
            return tuple((i + 1) % every != 0 for i in range(self.num_hidden_layers))
        return tuple(bool(each) for each in given)

    def pattern(self) -> tuple[str, ...]:
        """Return the types of all layers where the config does not say them."""
        slides = self.use_sliding_window and self.sliding_window is not None
        return tuple(SLIDING if slides and not turned else FULL for turned in self.turned)

    def small_keys(self, sizes: SmallSizes) -> dict[str, Any]:
        """Return the layers without positions of a narrow copy."""
        without = [i for i, turned in enumerate(self.turned) if not turned]
        kept = sizes.some_layers(without, self.num_hidden_layers)
        rope = tuple(int(i not in kept) for i in range(sizes.layers))
        return super().small_keys(sizes) | {"no_rope_layers": rope}

    @property
    def decoder(self) -> DecoderSpec:
        """Decoder that the names above describe."""
        mlp = MLPSpec(features=self.intermediate_size, bias=self.mlp_bias)
        mixers = [
            each if turned else replace(each, rope=None)
            for each, turned in zip(self.by_type(self.attention()), self.turned, strict=True)
        ]
        return self.decoder_of(mixers, dict.fromkeys(range(len(mixers)), mlp))

    @classmethod
    def write_hf(cls, spec: DecoderSpec) -> dict[str, Any]:
        """Return the layers without positions, and the positions of the others."""
        ropes = [getattr(block.mixer, "rope", None) for block in spec.blocks]
        return {
            **super().write_hf(spec),
            **rope_to_hf(first_rope(spec)),
            "use_sliding_window": spec.window is not None,
            "no_rope_layers": [int(rope is not None) for rope in ropes],
        }


SMOLLM3 = Family(
    marker="is_smollm3_config",
    config=SmolLM3Config,
    hf=HuggingFace(
        model_type="smollm3",
        architecture="SmolLM3ForCausalLM",
        defaults={
            "max_position_embeddings": 32768,
            "num_key_value_heads": 4,
            "rope_theta": 2000000.0,
            "bos_token_id": 128000,
            "eos_token_id": 128001,
            "pad_token_id": 128004,
        },
    ),
)
