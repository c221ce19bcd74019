"""Mixtral (Jiang et al., arXiv 2401.04088): experts in every layer, two for each token."""

from dataclasses import dataclass

from kenotron_models.families.decoder_keys import windowed
from kenotron_models.families.keys import SHARE, key, marker
from kenotron_models.families.routing_keys import (
    RoutingKeys,
    balance_key,
    experts_key,
    top_k_key,
)
from kenotron_models.families.window_keys import WindowKeys
from kenotron_models.family import Family, HuggingFace
from kenotron_models.hf_tensors import LLAMA_NAMES, FusedModules, Stacked
from kenotron_models.spec import DecoderSpec

EXPERTS = "block_sparse_moe.experts.{e}"


@dataclass(frozen=True, kw_only=True)
class MixtralConfig(RoutingKeys, WindowKeys):
    """Sizes and constants of a Mixtral decoder; ``intermediate_size`` is the width of an expert."""

    is_mixtral_config: bool = marker()
    """Marks a YAML mapping as this class; always true."""
    num_local_experts: int = experts_key(8)
    """Experts of each layer."""
    num_experts_per_tok: int = top_k_key(2)
    """Experts that each token is sent to; their weights add up to 1."""
    router_aux_loss_coef: float = balance_key(0.001)
    """Weight of the loss that spreads tokens over experts; router_aux_loss_type says which
    tokens."""
    router_jitter_noise: float = key(0.0, rule=SHARE, hf=True, at="experts.router.jitter")

    @property
    def decoder(self) -> DecoderSpec:
        """Decoder that the names above describe."""
        layers = self.num_hidden_layers
        mixers = windowed(self.attention(), self.sliding_window_size, (), layers)
        return self.decoder_of(mixers, self.routed(range(layers), self.router(normalize=True)))


MIXTRAL = Family(
    marker="is_mixtral_config",
    config=MixtralConfig,
    hf=HuggingFace(
        model_type="mixtral",
        architecture="MixtralForCausalLM",
        defaults={
            "max_position_embeddings": 131072,
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1e6,
        },
        names={
            **LLAMA_NAMES,
            "experts_norm": FusedModules("post_attention_layernorm"),
            "experts.router": FusedModules("block_sparse_moe.gate"),
            "experts.gate_up": Stacked(f"{EXPERTS}.w1", f"{EXPERTS}.w3"),
            "experts.down": Stacked(f"{EXPERTS}.w2"),
        },
    ),
)
