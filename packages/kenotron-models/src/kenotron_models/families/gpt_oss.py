"""gpt-oss (arXiv 2508.10925): attention sinks, alternating windows, experts with biases."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kenotron_models.families.decoder_keys import HeadKeys
from kenotron_models.families.keys import POSITIVE, key, marker, with_default
from kenotron_models.families.places import in_spec
from kenotron_models.families.rope_keys import OutputBiasKeys, RopeKeys
from kenotron_models.families.routing_keys import (
    RoutingKeys,
    balance_key,
    experts_key,
    top_k_key,
)
from kenotron_models.families.window_keys import LayerTypeKeys
from kenotron_models.family import Family, HuggingFace
from kenotron_models.hf_tensors import LLAMA_NAMES, FusedModules
from kenotron_models.mlp import ClampedSwiGLU
from kenotron_models.rope_scaling import RopeScaling
from kenotron_models.spec import DecoderSpec

THETA = 150000.0
YARN = RopeScaling(
    rope_type="yarn", factor=32.0, original_max_position_embeddings=4096, truncate=False
)
"""Scaling of positions where a config has none."""


@dataclass(frozen=True, kw_only=True)
class GptOssConfig(RoutingKeys, OutputBiasKeys, LayerTypeKeys):
    """Sizes and constants of a gpt-oss decoder; ``intermediate_size`` is the width of an expert."""

    is_gpt_oss_config: bool = marker()
    """Marks a YAML mapping as this class; always true."""
    head_dim: int | None = with_default(HeadKeys, "head_dim", 64)
    attention_bias: bool = with_default(OutputBiasKeys, "attention_bias", True)
    sliding_window: int | None = with_default(LayerTypeKeys, "sliding_window", 128)
    rope_theta: float = with_default(RopeKeys, "rope_theta", THETA)
    rope_scaling: RopeScaling | None = with_default(RopeKeys, "rope_scaling", YARN)
    num_local_experts: int = experts_key(128)
    """Experts of each layer."""
    num_experts_per_tok: int = top_k_key(4)
    """Experts that each token is sent to; their weights add up to 1."""
    swiglu_alpha: float = key(1.702, rule=POSITIVE, hf=True, at="experts.activation.alpha")
    """Factor of a gate inside the sigmoid of an expert's activation."""
    swiglu_limit: float = key(7.0, rule=POSITIVE, hf=True, at="experts.activation.limit")
    """A gate is at most this, and what it multiplies is between this and its negative."""
    router_aux_loss_coef: float = balance_key(0.001)
    """Weight of the loss that spreads tokens over experts; router_aux_loss_type says which
    tokens."""

    @property
    def decoder(self) -> DecoderSpec:
        """Decoder that the names above describe."""
        experts = self.routed(
            range(self.num_hidden_layers),
            self.router(normalize=True, bias=True),  # a softmax of the chosen logits
            activation=ClampedSwiGLU(self.swiglu_alpha, self.swiglu_limit),
            bias=True,
            transposed=True,
        )
        return self.decoder_of(self.by_type(self.attention(sinks=True)), experts)

    @classmethod
    def read_hf(cls, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return the stretching of positions, with the default of this family."""
        found = super().read_hf(values)
        stretched = values.get("rope_parameters") or values.get("rope_scaling")
        return found if stretched else found | {"rope_scaling": YARN}

    @classmethod
    def write_hf(cls, spec: DecoderSpec) -> dict[str, Any]:
        """Check the activation. Raises ValueError for another one."""
        act = in_spec(spec, "experts.activation")
        if not isinstance(act, ClampedSwiGLU):
            raise ValueError(f"experts of a gpt_oss have a clamped activation, and not {act}")
        return super().write_hf(spec)


GPT_OSS = Family(
    marker="is_gpt_oss_config",
    config=GptOssConfig,
    hf=HuggingFace(
        model_type="gpt_oss",
        architecture="GptOssForCausalLM",
        defaults={
            "max_position_embeddings": 131072,
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-5,
            "rope_theta": THETA,
            "bos_token_id": None,
            "eos_token_id": None,
        },
        names={
            **LLAMA_NAMES,
            "attention": FusedModules("self_attn"),
            "experts_norm": FusedModules("post_attention_layernorm"),
            "experts.router": FusedModules("mlp.router"),
            "experts.gate_up": FusedModules(
                "mlp.experts", weight="gate_up_proj", bias="gate_up_proj_bias"
            ),
            "experts.down": FusedModules("mlp.experts", weight="down_proj", bias="down_proj_bias"),
        },
    ),
)
