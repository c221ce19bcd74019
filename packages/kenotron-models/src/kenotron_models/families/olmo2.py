"""OLMo-2 (arXiv 2501.00656) and OLMo-3: norms after attention and feed-forward, not before."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kenotron_models.attention import AttentionSpec
from kenotron_models.families.keys import POSITIVE, key, marker, with_default
from kenotron_models.families.rope_keys import LlamaKeys, OutputBiasKeys, RopeKeys
from kenotron_models.families.window_keys import LayerTypeKeys, ropes_to_hf
from kenotron_models.family import Family, HuggingFace
from kenotron_models.hf_rope import ropes_by_type
from kenotron_models.hf_tensors import LLAMA_NAMES, FusedModules
from kenotron_models.norm import NormSpec
from kenotron_models.spec import DecoderSpec

OLMO3_THETA = 500000.0
"""Base of the rotary wave lengths of an OLMo-3 where a config.json says none."""


@dataclass(frozen=True, kw_only=True)
class OLMo2Config(OutputBiasKeys, LlamaKeys):
    """Sizes and constants of an OLMo-2 decoder, under Hugging Face's names.

    Queries are normed over all heads together, and so are keys.
    """

    is_olmo2_config: bool = marker()
    """Marks a YAML mapping as this class; always true."""

    @property
    def decoder(self) -> DecoderSpec:
        """Decoder that the names above describe."""
        return _normed_after(self, [_mixer(self)] * self.num_hidden_layers)


@dataclass(frozen=True, kw_only=True)
class OLMo3Config(OutputBiasKeys, LayerTypeKeys):
    """Sizes and constants of an OLMo-3 decoder: an OLMo-2, of which most layers have a window.

    ``rope_scaling`` stretches the positions of full layers only.
    """

    is_olmo3_config: bool = marker()
    """Marks a YAML mapping as this class; always true."""
    rope_theta: float = with_default(RopeKeys, "rope_theta", OLMO3_THETA)
    rope_local_base_freq: float | None = key(None, rule=POSITIVE)
    """The base in sliding layers; None: rope_theta."""

    def pattern(self) -> tuple[str, ...]:
        """Return the types of all layers where the config does not say them."""
        return self.every_nth_full(4)

    @property
    def decoder(self) -> DecoderSpec:
        """Decoder that the names above describe."""
        mixer, base = _mixer(self), self.rope_local_base_freq or self.rope_theta
        assert mixer.rope is not None  # all layers have positions
        local = replace(mixer, rope=replace(mixer.rope, theta=base, scaling=None))
        return _normed_after(self, self.by_type(mixer, local))

    @classmethod
    def read_hf(cls, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return the positions of each type of layers."""
        known = ropes_by_type(values, OLMO3_THETA, OLMO3_THETA)
        local = {"rope_local_base_freq": known["rope_local_base_freq"]}
        return super().read_hf(known) | local

    @classmethod
    def write_hf(cls, spec: DecoderSpec) -> dict[str, Any]:
        """Return the positions of each type of layers."""
        return super().write_hf(spec) | ropes_to_hf(spec, OLMO3_THETA, OLMO3_THETA)


def _mixer(config: OLMo2Config | OLMo3Config) -> AttentionSpec:
    return config.attention(qk_norm=NormSpec(eps=config.rms_norm_eps), qk_norm_over="width")


def _normed_after(config: LlamaKeys, mixers: Sequence[AttentionSpec]) -> DecoderSpec:
    spec = config.decoder_of(mixers)
    return replace(spec, blocks=tuple(replace(block, norms="after") for block in spec.blocks))


_NAMES = {
    **LLAMA_NAMES,
    "attention_post_norm": FusedModules("post_attention_layernorm"),
    "mlp_post_norm": FusedModules("post_feedforward_layernorm"),
}
_DEFAULTS = {
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "bos_token_id": None,
    "eos_token_id": 50279,
    "pad_token_id": 1,
}
OLMO2 = Family(
    marker="is_olmo2_config",
    config=OLMo2Config,
    hf=HuggingFace(
        model_type="olmo2",
        architecture="Olmo2ForCausalLM",
        defaults=_DEFAULTS,
        names=_NAMES,
    ),
)
OLMO3 = Family(
    marker="is_olmo3_config",
    config=OLMo3Config,
    hf=HuggingFace(
        model_type="olmo3",
        architecture="Olmo3ForCausalLM",
        defaults=_DEFAULTS,
        names=_NAMES,
    ),
)
