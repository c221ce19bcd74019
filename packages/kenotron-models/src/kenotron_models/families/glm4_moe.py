"""GLM-4-MoE (GLM-4.5, arXiv 2508.06471): DeepSeek-V3's experts behind grouped-query attention."""

from dataclasses import dataclass, replace
from typing import Any

from kenotron_models.families.fields import check, marker_problems, raise_all
from kenotron_models.families.hf_keys import first_mixer, llama_from_hf, sparse_to_hf
from kenotron_models.families.partial_rope import share_problems, small_share
from kenotron_models.families.sigmoid_experts import (
    SIGMOID_EXPERTS,
    SigmoidExpertsFields,
    routing_from_hf,
    routing_to_hf,
    sigmoid_problems,
)
from kenotron_models.family import Family, HuggingFace, Values
from kenotron_models.hf_rope import share_from_hf
from kenotron_models.hf_tensors import LLAMA_NAMES
from kenotron_models.norm import NormSpec
from kenotron_models.small import SmallSizes
from kenotron_models.spec import DecoderSpec


@dataclass(frozen=True, kw_only=True)
class Glm4MoEConfig(SigmoidExpertsFields):
    """Sizes and constants of a GLM-4-MoE decoder, under Hugging Face's names.

    Raises:
        ValueError: one line for each problem: field, value given, what is needed.
    """

    is_glm4_moe_config: bool = True
    """Marks a YAML mapping as this class; always true."""
    partial_rotary_factor: float = 0.5
    """Share of a head's features that positions turn, its first ones."""
    use_qk_norm: bool = False
    """True: queries and keys are normed head by head."""
    n_routed_experts: int = 128
    """Experts of a layer."""
    moe_intermediate_size: int = 1408
    """Width of an expert, in features; ``intermediate_size`` is that of layers without experts."""
    n_group: int = 1
    """Groups of neighbouring experts."""
    topk_group: int = 1
    """Groups that the experts of a token are chosen from."""
    routed_scaling_factor: float = 1.0
    """What weights are multiplied with."""
    first_k_dense_replace: int = 1
    """Layers without experts, at the beginning."""

    def __post_init__(self) -> None:
        """Check all fields at once."""
        found = [*check(self), *marker_problems(self, "is_glm4_moe_config")]
        share, width = self.partial_rotary_factor, self.features_of_head
        whole = [] if found else share_problems(share, width)
        raise_all([*found, *sigmoid_problems(self), *whole])

    def small_layers(self, sizes: SmallSizes) -> dict[str, Any]:
        """Return the keys of experts and positions of a narrow copy."""
        width = min(sizes.head_dim, self.features_of_head)
        share = {"partial_rotary_factor": small_share(self.partial_rotary_factor, width)}
        return self.small_routing(sizes, 2 * sizes.head_dim) | share

    @property
    def decoder(self) -> DecoderSpec:
        """What the names above mean."""
        mixer = self.attention()
        assert mixer.rope is not None  # all layers have positions
        mixer = replace(
            mixer,
            rope=replace(mixer.rope, share=self.partial_rotary_factor),
            qk_norm=NormSpec(eps=self.rms_norm_eps) if self.use_qk_norm else None,
        )
        return self.decoder_of([mixer] * self.num_hidden_layers, self.experts())


def _read(values: Values) -> Glm4MoEConfig:
    return Glm4MoEConfig(
        **llama_from_hf(values, partial=True),
        **routing_from_hf(values),
        partial_rotary_factor=share_from_hf(values),
        use_qk_norm=bool(values["use_qk_norm"]),
        attention_bias=bool(values["attention_bias"]),
        router_aux_loss_coef=0.0,
    )


def _write(spec: DecoderSpec) -> dict[str, Any]:
    mixer = first_mixer(spec)
    return {
        **sparse_to_hf(spec),
        **routing_to_hf(spec),
        "partial_rotary_factor": 1.0 if mixer.rope is None else mixer.rope.share,
        "use_qk_norm": mixer.qk_norm is not None,
        "attention_bias": mixer.qkv_bias,
        "num_nextn_predict_layers": 0,  # layers that predict further tokens are left out
    }


GLM4_MOE = Family(
    marker="is_glm4_moe_config",
    config=Glm4MoEConfig,
    hf=HuggingFace(
        model_type="glm4_moe",
        architecture="Glm4MoeForCausalLM",
        defaults={
            "max_position_embeddings": 131072,
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-5,
            "partial_rotary_factor": 0.5,
            "use_qk_norm": False,
            "attention_bias": False,
            "n_routed_experts": 128,
            "num_experts_per_tok": 8,
            "n_shared_experts": 1,
            "moe_intermediate_size": 1408,
            "n_group": 1,
            "topk_group": 1,
            "norm_topk_prob": True,
            "routed_scaling_factor": 1.0,
            "first_k_dense_replace": 1,
            "bos_token_id": None,
            "eos_token_id": None,
        },
        only={"hidden_act": ("silu",), "attention_dropout": (0, None)},
        read=_read,
        write=_write,
        names={**LLAMA_NAMES, **SIGMOID_EXPERTS},
        further_layers=True,
    ),
)
