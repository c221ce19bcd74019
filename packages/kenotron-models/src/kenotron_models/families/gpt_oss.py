"""gpt-oss (arXiv 2508.10925): attention sinks, alternating windows, experts with biases."""

from dataclasses import dataclass, replace
from typing import Any

from kenotron_models.experts import ExpertsSpec
from kenotron_models.families.expert_fields import (
    expert_problems,
    loss_problems,
    only_experts,
    small_experts,
)
from kenotron_models.families.fields import check, marker_problems, raise_all
from kenotron_models.families.hf_keys import experts_of, first_mixer, llama_from_hf, sparse_to_hf
from kenotron_models.families.layer_types import (
    LayerTypeFields,
    positive_problems,
    types_from_hf,
    types_to_hf,
)
from kenotron_models.families.routing_fields import RoutingFields
from kenotron_models.family import Family, HuggingFace, Values
from kenotron_models.hf_tensors import LLAMA_NAMES, Fused
from kenotron_models.mlp import ClampedSwiGLU
from kenotron_models.rope_scaling import RopeScaling
from kenotron_models.router import RouterSpec
from kenotron_models.small import SmallSizes
from kenotron_models.spec import DecoderSpec

THETA = 150000.0
YARN = RopeScaling(
    rope_type="yarn", factor=32.0, original_max_position_embeddings=4096, truncate=False
)
"""How positions are stretched where a config says nothing."""


@dataclass(frozen=True, kw_only=True)
class GptOssConfig(RoutingFields, LayerTypeFields):
    """Sizes and constants of a gpt-oss decoder; ``intermediate_size`` is the width of an expert.

    Raises:
        ValueError: one line for each problem: field, value given, what is needed.
    """

    is_gpt_oss_config: bool = True
    """Marks a YAML mapping as this class; always true."""
    head_dim: int | None = 64
    """Features of one head; None: hidden_size over num_attention_heads."""
    attention_bias: bool = True
    """True: queries, keys, values and the output have a bias."""
    sliding_window: int | None = 128
    """Tokens that a token sees in sliding layers, itself counted; None: no layer may slide."""
    rope_theta: float = THETA
    """Base of the rotary wave lengths."""
    rope_scaling: RopeScaling | None = YARN
    """Stretching of rotary positions; None: none."""
    num_local_experts: int = 128
    """Experts of each layer."""
    num_experts_per_tok: int = 4
    """Experts that each token is sent to; their weights add up to 1."""
    swiglu_alpha: float = 1.702
    """What a gate is multiplied with inside the sigmoid of an expert's activation."""
    swiglu_limit: float = 7.0
    """A gate is at most this, and what it multiplies is between this and its negative."""
    router_aux_loss_coef: float = 0.001
    """Weight of the loss that spreads tokens over experts; router_aux_loss_type says which
    tokens."""

    def __post_init__(self) -> None:
        """Check all fields at once."""
        sizes = {
            "num_local_experts": self.num_local_experts,
            "num_experts_per_tok": self.num_experts_per_tok,
        }
        names = ("swiglu_alpha", "swiglu_limit")
        found = [*check(self), *self.type_problems(), *expert_problems(sizes, *sizes)]
        found += positive_problems({name: getattr(self, name) for name in names})
        found += loss_problems(router_aux_loss_coef=self.router_aux_loss_coef)
        found += self.routing_problems(*sizes)
        raise_all([*found, *marker_problems(self, "is_gpt_oss_config")])

    def small_layers(self, sizes: SmallSizes) -> dict[str, Any]:
        """Return the keys of experts and windows of a narrow copy."""
        experts, top_k = small_experts(self.num_local_experts, self.num_experts_per_tok, sizes.ep)
        return LayerTypeFields.small_layers(self, sizes) | {
            "num_local_experts": experts,
            "num_experts_per_tok": top_k,
            "expert_capacity_factor": self.small_capacity(experts, top_k),
        }

    @property
    def decoder(self) -> DecoderSpec:
        """What the names above mean."""
        mixer = replace(self.attention(), out_bias=self.attention_bias, sinks=True)
        router = RouterSpec(
            experts=self.num_local_experts,
            top_k=self.num_experts_per_tok,
            normalize=True,  # a softmax of the chosen logits
            bias=True,
            balance_loss=self.router_aux_loss_coef,
        )
        experts = ExpertsSpec(
            router=router,
            features=self.intermediate_size,
            activation=ClampedSwiGLU(self.swiglu_alpha, self.swiglu_limit),
            bias=True,
            transposed=True,
        )
        layers = range(self.num_hidden_layers)
        return self.decoder_of(self.by_type(mixer), self.routed(experts, layers))


_SAME = (
    "num_local_experts", "num_experts_per_tok", "swiglu_alpha", "swiglu_limit",
    "router_aux_loss_coef", "attention_bias",
)  # fmt: skip


def _read(values: Values) -> GptOssConfig:
    own = llama_from_hf(values) | {name: values[name] for name in _SAME}
    if not (values.get("rope_parameters") or values.get("rope_scaling")):
        own["rope_scaling"] = YARN
    return GptOssConfig(**own, **types_from_hf(values))


def _write(spec: DecoderSpec) -> dict[str, Any]:
    experts = only_experts(spec, experts_of(spec))
    act = experts.activation
    if not isinstance(act, ClampedSwiGLU):
        raise ValueError(f"experts of a gpt_oss have a clamped activation, and not {act}")
    return {
        **sparse_to_hf(spec),
        **types_to_hf(spec),
        "intermediate_size": experts.features,
        "num_local_experts": experts.router.experts,
        "num_experts_per_tok": experts.router.top_k,
        "swiglu_alpha": act.alpha,
        "swiglu_limit": act.limit,
        "router_aux_loss_coef": experts.router.balance_loss,
        "attention_bias": first_mixer(spec).qkv_bias,
    }


GPT_OSS = Family(
    marker="is_gpt_oss_config",
    config=GptOssConfig,
    hf=HuggingFace(
        model_type="gpt_oss",
        architecture="GptOssForCausalLM",
        defaults={
            "max_position_embeddings": 131072,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "rms_norm_eps": 1e-5,
            "rope_theta": THETA,
            "sliding_window": 128,
            "num_local_experts": 128,
            "num_experts_per_tok": 4,
            "swiglu_alpha": 1.702,
            "swiglu_limit": 7.0,
            "router_aux_loss_coef": 0.001,
            "attention_bias": True,
            "bos_token_id": None,
            "eos_token_id": None,
        },
        only={"hidden_act": ("silu",), "attention_dropout": (0, None)},
        read=_read,
        write=_write,
        names={
            **LLAMA_NAMES,
            "attention": Fused("self_attn"),
            "experts_norm": Fused("post_attention_layernorm"),
            "experts.router": Fused("mlp.router"),
            "experts.gate_up": Fused(
                "mlp.experts", weight="gate_up_proj", bias="gate_up_proj_bias"
            ),
            "experts.down": Fused("mlp.experts", weight="down_proj", bias="down_proj_bias"),
        },
    ),
)
