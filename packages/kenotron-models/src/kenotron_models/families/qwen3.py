"""Qwen3 (arXiv 2505.09388): queries and keys are normed head by head."""

from dataclasses import dataclass
from typing import Any

from kenotron_models.families.decoder_keys import HeadKeys
from kenotron_models.families.keys import marker, with_default
from kenotron_models.families.window_keys import QWEN_DEFAULTS, QwenWindowKeys
from kenotron_models.family import Family, HuggingFace
from kenotron_models.norm import NormSpec
from kenotron_models.spec import DecoderSpec


@dataclass(frozen=True, kw_only=True)
class Qwen3Config(QwenWindowKeys):
    """Sizes and constants of a Qwen3 decoder."""

    is_qwen3_config: bool = marker()
    """Marks a YAML mapping as this class; always true."""
    head_dim: int | None = with_default(HeadKeys, "head_dim", 128)

    @property
    def decoder(self) -> DecoderSpec:
        """Decoder that the names above describe."""
        mixer = self.attention(qk_norm=NormSpec(eps=self.rms_norm_eps))
        return self.decoder_of(self.windowed(mixer))

    @classmethod
    def write_hf(cls, spec: DecoderSpec) -> dict[str, Any]:
        """Return the key of biases, of which there are none."""
        return super().write_hf(spec) | {"attention_bias": False}


QWEN3 = Family(
    marker="is_qwen3_config",
    config=Qwen3Config,
    hf=HuggingFace(
        model_type="qwen3",
        architecture="Qwen3ForCausalLM",
        defaults=QWEN_DEFAULTS,
        only={"attention_bias": (False, None)},
    ),
)
