"""Qwen3 with experts (arXiv 2505.09388), in all layers or in some."""

from dataclasses import dataclass, replace
from typing import Any

from kenotron_models.experts import ExpertsSpec
from kenotron_models.families.expert_fields import (
    QWEN_EXPERTS,
    expert_problems,
    loss_problems,
    small_experts,
    sparse_from_hf,
    sparse_layers,
)
from kenotron_models.families.fields import SharedFields, check, marker_problems, raise_all
from kenotron_models.families.hf_keys import llama_from_hf, sparse_to_hf
from kenotron_models.families.moe_config import qwen_experts_to_hf
from kenotron_models.families.routing_fields import RoutingFields
from kenotron_models.family import Family, HuggingFace, Values
from kenotron_models.norm import NormSpec
from kenotron_models.router import RouterSpec
from kenotron_models.small import SmallSizes
from kenotron_models.spec import DecoderSpec


@dataclass(frozen=True, kw_only=True)
class Qwen3MoEConfig(RoutingFields, SharedFields):
    """Sizes and constants of a Qwen3 decoder with experts.

    Raises:
        ValueError: one line for each problem: field, value given, what is needed.
    """

    is_qwen3_moe_config: bool = True
    """Marks a YAML mapping as this class; always true."""
    head_dim: int | None = 128
    """Features of one head; None: hidden_size over num_attention_heads."""
    num_experts: int = 128
    """Experts of a layer."""
    num_experts_per_tok: int = 8
    """Experts that each token is sent to."""
    moe_intermediate_size: int = 768
    """Width of an expert, in features; ``intermediate_size`` is that of layers without experts."""
    norm_topk_prob: bool = True
    """True: the weights of a token's experts add up to 1."""
    mlp_only_layers: tuple[int, ...] = ()
    """Layers without experts, counted from 0."""
    decoder_sparse_step: int = 1
    """Every n-th layer has experts."""
    router_aux_loss_coef: float = 0.001
    """Weight of the loss that spreads tokens over experts; router_aux_loss_type says which
    tokens."""

    def __post_init__(self) -> None:
        """Check all fields at once."""
        sizes = {
            "num_experts": self.num_experts,
            "num_experts_per_tok": self.num_experts_per_tok,
            "moe_intermediate_size": self.moe_intermediate_size,
            "decoder_sparse_step": self.decoder_sparse_step,
        }
        found = [*check(self), *expert_problems(sizes, "num_experts", "num_experts_per_tok")]
        found += loss_problems(router_aux_loss_coef=self.router_aux_loss_coef)
        found += self.routing_problems("num_experts", "num_experts_per_tok")
        if self.decoder_sparse_step >= 1 and not self.layers_with_experts:
            found.append(
                f"decoder_sparse_step: {self.decoder_sparse_step} was given, mlp_only_layers: "
                f"{list(self.mlp_only_layers)}; no layer has experts: choose others, or qwen3"
            )
        raise_all([*found, *marker_problems(self, "is_qwen3_moe_config")])

    @property
    def layers_with_experts(self) -> list[int]:
        """Layers with experts, counted from 0."""
        return sparse_layers(self.num_hidden_layers, self.decoder_sparse_step, self.mlp_only_layers)

    def small_layers(self, sizes: SmallSizes) -> dict[str, Any]:
        """Return the keys of experts of a narrow copy."""
        experts, top_k = small_experts(self.num_experts, self.num_experts_per_tok, sizes.ep)
        with_experts = self.layers_with_experts
        without = {*range(self.num_hidden_layers)} - {*with_experts}
        return {
            "num_experts": experts,
            "num_experts_per_tok": top_k,
            "expert_capacity_factor": self.small_capacity(experts, top_k),
            "moe_intermediate_size": sizes.head_dim * 2,
            "mlp_only_layers": sizes.some_layers(without, self.num_hidden_layers),
            "decoder_sparse_step": 1,
        }

    @property
    def decoder(self) -> DecoderSpec:
        """What the names above mean."""
        mixer = replace(self.attention(), qk_norm=NormSpec(eps=self.rms_norm_eps))
        router = RouterSpec(
            experts=self.num_experts,
            top_k=self.num_experts_per_tok,
            normalize=self.norm_topk_prob,
            balance_loss=self.router_aux_loss_coef,
        )
        experts = ExpertsSpec(router=router, features=self.moe_intermediate_size)
        mixers = [mixer] * self.num_hidden_layers
        return self.decoder_of(mixers, self.routed(experts, self.layers_with_experts))


def _read(values: Values) -> Qwen3MoEConfig:
    layers, found = values["num_hidden_layers"], sparse_from_hf(values)
    return Qwen3MoEConfig(
        **llama_from_hf(values),
        num_experts=values.get("num_local_experts") or values["num_experts"],  # newer, older
        num_experts_per_tok=values["num_experts_per_tok"],
        moe_intermediate_size=values["moe_intermediate_size"],
        norm_topk_prob=values["norm_topk_prob"],
        mlp_only_layers=tuple(i for i in range(layers) if i not in found),
        router_aux_loss_coef=values["router_aux_loss_coef"],
    )


def _write(spec: DecoderSpec) -> dict[str, Any]:
    return {
        **sparse_to_hf(spec), **qwen_experts_to_hf(spec), "attention_bias": False,
        "use_sliding_window": False, "sliding_window": None,
    }  # fmt: skip


QWEN3_MOE = Family(
    marker="is_qwen3_moe_config",
    config=Qwen3MoEConfig,
    hf=HuggingFace(
        model_type="qwen3_moe",
        architecture="Qwen3MoeForCausalLM",
        defaults={
            "max_position_embeddings": 32768,
            "num_key_value_heads": 4,
            "rms_norm_eps": 1e-6,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
            "norm_topk_prob": False,
            "decoder_sparse_step": 1,
            "router_aux_loss_coef": 0.001,
            "bos_token_id": None,
            "eos_token_id": None,
        },
        only={
            "hidden_act": ("silu",),
            "attention_bias": (False, None),
            "attention_dropout": (0, None),
            "use_sliding_window": (False, None),
        },
        read=_read,
        write=_write,
        names=QWEN_EXPERTS,
    ),
)
