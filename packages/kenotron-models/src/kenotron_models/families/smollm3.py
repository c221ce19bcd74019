"""SmolLM3 (Hugging Face, 2025): every fourth layer has no rotary positions (NoPE)."""

from dataclasses import dataclass, replace
from typing import Any

from kenotron_models.families.fields import at_least, check, marker_problems, raise_all
from kenotron_models.families.hf_keys import first_mixer, first_mlp, llama_from_hf, llama_to_hf
from kenotron_models.families.layer_types import (
    LayerTypeFields,
    first_rope,
    types_from_hf,
    types_to_hf,
)
from kenotron_models.family import Family, HuggingFace, Values
from kenotron_models.hf_rope import FULL, SLIDING, rope_to_hf
from kenotron_models.mlp import MLPSpec
from kenotron_models.small import SmallSizes
from kenotron_models.spec import DecoderSpec


@dataclass(frozen=True, kw_only=True)
class SmolLM3Config(LayerTypeFields):
    """Sizes and constants of a SmolLM3 decoder, under Hugging Face's names.

    Raises:
        ValueError: one line for each problem: field, value given, what is needed.
    """

    is_smollm3_config: bool = True
    """Marks a YAML mapping as this class; always true."""
    attention_bias: bool = False
    """True: queries, keys, values and the output have a bias."""
    mlp_bias: bool = False
    """True: the matrices of the feed-forward have a bias."""
    rope_theta: float = 2000000.0
    """Base of the rotary wave lengths."""
    tie_word_embeddings: bool = True
    """True: the head is the embedding's own matrix."""
    use_sliding_window: bool = False
    """True: layers without rotary positions slide, or those that layer_types names."""
    sliding_window: int | None = None
    """Tokens that a token sees in sliding layers, itself counted; None: no layer may slide."""
    no_rope_layers: tuple[int, ...] | None = None
    """For each layer 1, or 0 where it has no rotary positions; None: no_rope_layer_interval says
    it."""
    no_rope_layer_interval: int = 4
    """Every n-th layer has no rotary positions where no_rope_layers is null."""

    def __post_init__(self) -> None:
        """Check all fields at once."""
        found = [*check(self), *marker_problems(self, "is_smollm3_config")]
        given, layers = self.no_rope_layers, self.num_hidden_layers
        if given is not None and (len(given) != layers or not {*given} <= {0, 1}):
            found.append(
                f"no_rope_layers: {list(given)} was given; it must be {layers} times 1, or 0 where "
                "a layer has no rotary positions"
            )
        found += at_least(1, {"no_rope_layer_interval": self.no_rope_layer_interval})
        if not self.use_sliding_window and SLIDING in (self.layer_types or ()):
            found.append(
                f"layer_types: {SLIDING} was given, but use_sliding_window is false; make them say "
                "the same"
            )
        raise_all([*found, *self.type_problems()])

    @property
    def turned(self) -> tuple[bool, ...]:
        """Whether each layer has rotary positions."""
        every, given = self.no_rope_layer_interval, self.no_rope_layers
        if given is None:
            return tuple((i + 1) % every != 0 for i in range(self.num_hidden_layers))
        return tuple(bool(each) for each in given)

    def pattern(self) -> tuple[str, ...]:
        """Return the types of all layers where the config does not say them."""
        slides = self.use_sliding_window and self.sliding_window is not None
        return tuple(SLIDING if slides and not turned else FULL for turned in self.turned)

    def small_layers(self, sizes: SmallSizes) -> dict[str, Any]:
        """Return the keys of windows and positions of a narrow copy."""
        without = [i for i, turned in enumerate(self.turned) if not turned]
        kept = sizes.some_layers(without, self.num_hidden_layers)
        rope = tuple(int(i not in kept) for i in range(sizes.layers))
        return LayerTypeFields.small_layers(self, sizes) | {"no_rope_layers": rope}

    @property
    def decoder(self) -> DecoderSpec:
        """What the names above mean."""
        mixer = replace(self.attention(), out_bias=self.attention_bias)
        mlp = MLPSpec(features=self.intermediate_size, bias=self.mlp_bias)
        mixers = [
            each if turned else replace(each, rope=None)
            for each, turned in zip(self.by_type(mixer), self.turned, strict=True)
        ]
        return self.decoder_of(mixers, dict.fromkeys(range(len(mixers)), mlp))


def _read(values: Values) -> SmolLM3Config:
    without = values.get("no_rope_layers")
    return SmolLM3Config(
        **llama_from_hf(values),
        **types_from_hf(values),
        no_rope_layers=None if without is None else tuple(without),
        no_rope_layer_interval=values["no_rope_layer_interval"],
        use_sliding_window=bool(values["use_sliding_window"]),
        attention_bias=bool(values["attention_bias"]),
        mlp_bias=bool(values["mlp_bias"]),
    )


def _write(spec: DecoderSpec) -> dict[str, Any]:
    ropes = [getattr(block.mixer, "rope", None) for block in spec.blocks]
    return {
        **llama_to_hf(spec),
        **types_to_hf(spec),
        **rope_to_hf(first_rope(spec)),
        "use_sliding_window": spec.window is not None,
        "no_rope_layers": [int(rope is not None) for rope in ropes],
        "attention_bias": first_mixer(spec).qkv_bias,
        "mlp_bias": first_mlp(spec).bias,
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
            "rms_norm_eps": 1e-6,
            "rope_theta": 2000000.0,
            "tie_word_embeddings": True,
            "use_sliding_window": False,
            "no_rope_layer_interval": 4,
            "attention_bias": False,
            "mlp_bias": False,
            "bos_token_id": 128000,
            "eos_token_id": 128001,
            "pad_token_id": 128004,
        },
        only={"hidden_act": ("silu",), "attention_dropout": (0, None)},
        read=_read,
        write=_write,
    ),
)
