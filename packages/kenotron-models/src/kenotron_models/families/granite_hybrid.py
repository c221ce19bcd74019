"""Granite-4 (IBM, 2025): Mamba-2, some attention, experts, and four multipliers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

from kenotron_models.attention import AttentionSpec
from kenotron_models.families.hf_keys import without_rope
from kenotron_models.families.hybrid_layers import HybridKeys, layer_words
from kenotron_models.families.keys import POSITIVE, Rule, key, marker
from kenotron_models.families.places import in_spec, placed
from kenotron_models.families.rope_keys import LlamaKeys, OutputBiasKeys
from kenotron_models.families.routing_keys import RoutingKeys, balance_key, experts_key, top_k_key
from kenotron_models.families.state_space_keys import LIMITS, few, state_space_names, step_limits
from kenotron_models.family import Family, HuggingFace
from kenotron_models.hf_rope import FULL, LINEAR
from kenotron_models.hf_tensors import LLAMA_NAMES, FusedModules, Names
from kenotron_models.mamba2 import Mamba2Spec
from kenotron_models.mlp import MLPSpec
from kenotron_models.part import PartSpec
from kenotron_models.rope import Rope
from kenotron_models.spec import DecoderSpec

_WORDS = {Mamba2Spec: LINEAR, AttentionSpec: FULL}
_OLD_WORDS = {"mamba": LINEAR, "attention": FULL}


@dataclass(frozen=True, kw_only=True)
class GraniteHybridConfig(RoutingKeys, HybridKeys, OutputBiasKeys, LlamaKeys):
    """Sizes and constants of a Granite-4 decoder, under Hugging Face's names."""

    words: ClassVar = {"M": LINEAR, "*": FULL}
    is_granite_hybrid_config: bool = marker()
    """Marks a YAML mapping as this class; always true."""
    layers: str | None = key(None)
    """A letter for each layer: M Mamba-2, * attention; | between the stages of a pipeline. None:
    layer_types."""
    layer_types: tuple[str, ...] | None = key(None)
    """`linear_attention` (Mamba-2) or `full_attention` for each layer; None: layers says it, or
    all are Mamba-2."""
    position_embedding_type: Literal["rope"] | None = key(
        None, hf=True, rule=Rule(lambda x: x == "rope", "it must be rope")
    )
    """rope: positions turn queries and keys; None: there are no positions."""
    embedding_multiplier: float = key(1.0, rule=POSITIVE, hf=True)
    """Factor of embedded tokens."""
    attention_multiplier: float = key(1.0, rule=POSITIVE, hf=True, at="attention.factor")
    """Factor of the attention scores."""
    residual_multiplier: float = key(1.0, rule=POSITIVE, hf=True, at="block.residual_scale")
    """Factor of the output that a mixer or a feed-forward adds to the residual stream."""
    logits_scaling: float = key(
        1.0, rule=POSITIVE, hf=True, at="logit_scale", write=lambda scale: 1 / scale
    )
    """Divisor of the logits."""
    intermediate_size: int = key(
        11008, least=1, hf=True, needed=True, at=("experts.features", "mlp.features")
    )
    """Width of an expert, in features."""
    shared_intermediate_size: int = key(
        1024, least=1, hf=True, at=("mlp.features", "experts.shared_features"),
        small=lambda sizes, _: sizes.tp * sizes.head_dim,
    )  # fmt: skip
    """Width of the feed-forward that all tokens go through, next to experts if there are some."""
    num_local_experts: int = experts_key(8, least=0)
    """Experts of each layer; 0: there are none."""
    num_experts_per_tok: int = top_k_key(2)
    """Experts that each token is sent to."""
    router_aux_loss_coef: float = balance_key(0.001)
    """Weight of the loss that spreads tokens over experts; router_aux_loss_type says which
    tokens."""
    mamba_n_heads: int = key(128, least=1, hf=True, at="mamba2.heads", small="heads")
    """Heads of a Mamba-2."""
    mamba_n_groups: int = key(
        1, least=1, divides="mamba_n_heads", hf=True, at="mamba2.groups", small="kv_heads"
    )
    """Groups of heads that share B and C."""
    mamba_d_state: int = key(256, least=1, hf=True, at="mamba2.state", small=few)
    """Features of its state, for each feature of a head."""
    mamba_d_conv: int = key(4, least=1, hf=True, at="mamba2.width")
    """Width of its convolution, in tokens."""
    mamba_expand: int = key(2, least=1, hf=True)
    """Features of all its heads over width of the residual stream."""
    mamba_chunk_size: int = key(256, least=1, hf=True, at="mamba2.chunk", small=few)
    """Tokens that its scan computes as one; the numbers differ by rounding only."""
    mamba_conv_bias: bool = key(True, hf=True, at="mamba2.conv_bias")
    """True: the convolution has a bias."""
    mamba_proj_bias: bool = key(False, hf=True, at="mamba2.bias")
    """True: its projections have biases."""
    time_step_limit: tuple[float, ...] = key(
        (0.0, math.inf), rule=LIMITS, hf=True, at="mamba2.step_limits", read=step_limits,
        write=list,
    )  # fmt: skip
    """Smallest and largest step at any time."""

    def problems(self) -> list[str]:
        """Name heads that do not divide their features."""
        found, heads = super().problems(), self.mamba_n_heads
        if (features := self.mamba_expand * self.hidden_size) % heads:
            found.append(
                f"mamba_n_heads: {heads} was given; it must divide mamba_expand * hidden_size "
                f"({features})"
            )
        return found

    def pattern(self) -> str:
        """Return the letters of all layers where the config does not say them."""
        return "M" * self.num_hidden_layers

    @property
    def has_experts(self) -> bool:
        """True where layers have experts."""
        return self.num_local_experts > 0

    def rope(self) -> Rope | None:
        """Return the rotary positions of layers with attention."""
        return super().rope() if self.position_embedding_type == "rope" else None

    @property
    def decoder(self) -> DecoderSpec:
        """Decoder that the names above describe."""
        documents, (low, high) = self.use_doc_masking, self.time_step_limit
        attention = self.attention(scale=self.attention_multiplier, separate_documents=documents)
        mamba = Mamba2Spec(
            **placed(self, "mamba2"),
            head_dim=self.mamba_expand * self.hidden_size // self.mamba_n_heads,
            step_limits=(low, high),
            eps=self.rms_norm_eps,
        )
        mixers = self.by_letter({"M": mamba, "*": attention})
        spec = self.decoder_of(mixers, self._feed_forwards())
        # Four multipliers: attention's is in its spec above, the others are of blocks, of the
        # embedding and of the logits.
        scale = self.residual_multiplier
        return replace(
            spec,
            blocks=tuple(replace(block, residual_scale=scale) for block in spec.blocks),
            stage_starts=self.stage_starts,
            embedding_scale=None if self.embedding_multiplier == 1 else self.embedding_multiplier,
            logit_scale=1 / self.logits_scaling,
        )

    def _feed_forwards(self) -> dict[int, PartSpec]:
        """The feed-forward of each layer."""
        layers = range(self.num_hidden_layers)
        if not self.has_experts:
            return dict.fromkeys(layers, MLPSpec(features=self.shared_intermediate_size))
        shared = self.shared_intermediate_size
        return {**self.routed(layers, self.router(normalize=True), shared_features=shared)}

    @classmethod
    def read_hf(cls, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return the types of layers. Raises ValueError for heads that features deny."""
        kinds = values.get("layer_types") or values.get("layers_block_type")
        heads, width = values["mamba_n_heads"], values["mamba_d_head"]
        features = values["mamba_expand"] * values["hidden_size"]
        if width != "auto" and width * heads != features:
            raise ValueError(
                f"mamba_d_head: {width} was given; times mamba_n_heads ({heads}) it must be "
                f"mamba_expand * hidden_size ({features})"
            )
        types = None if kinds is None else tuple(_OLD_WORDS.get(word, word) for word in kinds)
        return super().read_hf(values) | {"layer_types": types}

    @classmethod
    def write_hf(cls, spec: DecoderSpec) -> dict[str, Any]:
        """Return the types of layers, and what a model without some parts has."""
        found, rope = super().write_hf(spec), in_spec(spec, "attention.rope")
        scale = 1.0 if spec.embedding_scale is None else spec.embedding_scale
        mambas = [block.mixer for block in spec.blocks if isinstance(block.mixer, Mamba2Spec)]
        own = {"layer_types": layer_words(spec, _WORDS), "embedding_multiplier": scale}
        own |= {"position_embedding_type": None if rope is None else "rope"}
        own |= {} if spec.routes else {"num_local_experts": 0}
        for mamba in mambas[:1]:
            own |= {"mamba_d_head": mamba.head_dim}
            own |= {"mamba_expand": mamba.features // spec.hidden_size}
        return (found if rope is not None else without_rope(found)) | own


_NAMES: Names = {
    **LLAMA_NAMES,
    **state_space_names("mamba2", "mamba", "input_layernorm", norm="norm"),
    "mlp.gate_up": FusedModules("shared_mlp.input_linear"),
    "mlp.down": FusedModules("shared_mlp.output_linear"),
    "experts_norm": FusedModules("post_attention_layernorm"),
    "experts.router": FusedModules("block_sparse_moe.router.layer"),
    "experts.gate_up": FusedModules("block_sparse_moe.input_linear"),
    "experts.down": FusedModules("block_sparse_moe.output_linear"),
    "experts.shared.gate_up": FusedModules("shared_mlp.input_linear"),
    "experts.shared.down": FusedModules("shared_mlp.output_linear"),
}
GRANITE_HYBRID = Family(
    marker="is_granite_hybrid_config",
    config=GraniteHybridConfig,
    hf=HuggingFace(
        model_type="granitemoehybrid",
        architecture="GraniteMoeHybridForCausalLM",
        defaults={"mamba_d_head": "auto"},
        names=_NAMES,
    ),
)
