"""DeepSeek-V3 (arXiv 2412.19437): latent attention, and experts chosen by biased sigmoid scores."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from kenotron_models.families.keys import Rule, key, marker
from kenotron_models.families.places import placed
from kenotron_models.families.rope_keys import RopeKeys
from kenotron_models.families.sigmoid_experts import SIGMOID_EXPERTS, SigmoidExpertsKeys
from kenotron_models.family import Family, HuggingFace
from kenotron_models.hf_rope import rope_to_hf
from kenotron_models.hf_tensors import LLAMA_NAMES, FusedModules
from kenotron_models.latent_attention import LatentAttentionSpec
from kenotron_models.small import SmallSizes
from kenotron_models.spec import DecoderSpec

EVEN = Rule(lambda n: n >= 1 and n % 2 == 0, "it must be an even number")


@dataclass(frozen=True, kw_only=True)
class DeepseekV3Config(SigmoidExpertsKeys, RopeKeys):
    """Sizes and constants of a DeepSeek-V3 decoder, under Hugging Face's names."""

    former: ClassVar = (*RopeKeys.former, "attention_bias", "num_key_value_heads", "head_dim")
    is_deepseek_v3_config: bool = marker()
    """Marks a YAML mapping as this class; always true."""
    rope_interleaved: bool = key(True, hf="rope_interleave")
    q_lora_rank: int | None = key(1536, least=1, hf=True, at="attention.q_rank")
    """Features of the latent of queries; None: they are made of the token itself."""
    kv_lora_rank: int = key(512, least=1, hf=True, at="attention.kv_rank")
    """Features of the latent of keys and values."""
    qk_nope_head_dim: int = key(128, least=0, hf=True)
    """Features of a head that positions do not turn."""
    qk_rope_head_dim: int = key(64, least=1, rule=EVEN, hf=True, at="attention.turned")
    """Features of a head that positions turn."""
    v_head_dim: int = key(128, least=1, hf=True, at="attention.value_features")
    """Features of a value; not above those of a head."""
    attention_scale: float | None = key(None, at="attention.scale")
    """Factor of the scores; None: one over the root of a head's features."""

    def problems(self) -> list[str]:
        """Name values that are wider than heads."""
        found, width = super().problems(), self.features_of_head
        if self.v_head_dim > width:
            found.append(
                f"v_head_dim: {self.v_head_dim} was given; it must not be above qk_nope_head_dim + "
                f"qk_rope_head_dim ({width})"
            )
        return found

    @property
    def kv_heads(self) -> int:
        """As many key and value heads as query heads."""
        return self.num_attention_heads

    @property
    def features_of_head(self) -> int:
        """Features of a head that scores are made of."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    def small_keys(self, sizes: SmallSizes) -> dict[str, Any]:
        """Return the widths of a narrow copy."""
        half = max(2, min(sizes.head_dim, self.qk_rope_head_dim) // 2 * 2)
        hidden = sizes.heads * half
        return super().small_keys(sizes) | {
            "hidden_size": hidden,
            "intermediate_size": sizes.inner(self.intermediate_size, self.hidden_size, hidden),
            "q_lora_rank": None if self.q_lora_rank is None else hidden // 2,
            "kv_lora_rank": hidden // 2,
            "qk_nope_head_dim": half if self.qk_nope_head_dim else 0,
            "qk_rope_head_dim": half,
            "v_head_dim": half,
            "moe_intermediate_size": 2 * half,
        }

    @property
    def decoder(self) -> DecoderSpec:
        """Decoder that the names above describe."""
        mixer = LatentAttentionSpec(
            **placed(self, "attention"),
            kv_heads=self.kv_heads,
            head_dim=self.features_of_head,
            rope=self.rope(),
            backend=self.backend,
        )
        return self.decoder_of([mixer] * self.num_hidden_layers, self.experts())

    @classmethod
    def read_hf(cls, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return the scale of scores."""
        return super().read_hf(values) | {"attention_scale": _scale(values)}

    @classmethod
    def write_hf(cls, spec: DecoderSpec) -> dict[str, Any]:
        """Return the keys of latent attention. Raises ValueError for another one."""
        mixer = spec.blocks[0].mixer
        if not isinstance(mixer, LatentAttentionSpec):
            raise ValueError("a deepseek_v3 has latent attention")
        return {
            **super().write_hf(spec),
            **_rope_keys(mixer),
            "num_key_value_heads": mixer.kv_heads,
            "qk_nope_head_dim": mixer.head_dim - mixer.turned,
            "rope_interleave": mixer.rope is not None and mixer.rope.interleaved,
            "attention_bias": False,
        }


def _scale(values: Mapping[str, Any]) -> float | None:
    """Return the factor of yarn for the scores of this family."""
    given = values.get("rope_parameters") or values.get("rope_scaling") or {}
    share, factor = given.get("mscale_all_dim"), given.get("factor")
    if not share or not factor or factor <= 1:
        return None
    width = values["qk_nope_head_dim"] + values["qk_rope_head_dim"]
    more = 0.1 * share * math.log(factor) + 1.0
    return float(width**-0.5 * more * more)


def _rope_keys(mixer: LatentAttentionSpec) -> dict[str, Any]:
    """Rotary keys in both spellings; scale and attention factor as the shares that say them."""
    found = rope_to_hf(mixer.rope)
    scaling = None if mixer.rope is None else mixer.rope.scaling
    if mixer.scale is None or scaling is None or scaling.factor <= 1:
        return found
    log = 0.1 * math.log(scaling.factor)
    below = round((math.sqrt(mixer.scale * math.sqrt(mixer.head_dim)) - 1) / log, 9)
    above = round(((scaling.attention_factor or 1 + log) * (below * log + 1) - 1) / log, 9)
    shares = {"mscale": above, "mscale_all_dim": below}
    for name in ("rope_parameters", "rope_scaling"):
        own = {part: value for part, value in found[name].items() if part != "attention_factor"}
        found[name] = own | shares
    return found


DEEPSEEK_V3 = Family(
    marker="is_deepseek_v3_config",
    config=DeepseekV3Config,
    hf=HuggingFace(
        model_type="deepseek_v3",
        architecture="DeepseekV3ForCausalLM",
        defaults={"max_position_embeddings": 4096, "bos_token_id": 0, "eos_token_id": 1},
        only={"attention_bias": (False, None)},
        names={
            **LLAMA_NAMES,
            **SIGMOID_EXPERTS,
            "attention.q": FusedModules("self_attn.q_proj"),
            "attention.q_a": FusedModules("self_attn.q_a_proj"),
            "attention.q_norm": FusedModules("self_attn.q_a_layernorm"),
            "attention.q_b": FusedModules("self_attn.q_b_proj"),
            "attention.kv_a": FusedModules("self_attn.kv_a_proj_with_mqa"),
            "attention.kv_norm": FusedModules("self_attn.kv_a_layernorm"),
            "attention.kv_b": FusedModules("self_attn.kv_b_proj"),
        },
        further_layers=True,
    ),
)
