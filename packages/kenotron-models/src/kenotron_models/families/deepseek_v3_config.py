"""DeepSeek-V3 (arXiv 2412.19437): latent attention, and experts chosen by biased sigmoid scores."""

import math
from dataclasses import dataclass, replace
from typing import Self

from kenotron_models.experts import ExpertsSpec
from kenotron_models.families.expert_fields import (
    expert_problems,
    loss_problems,
    small_experts,
)
from kenotron_models.families.fields import (
    BACKENDS,
    SharedFields,
    choice_problems,
    marker_problems,
    raise_all,
    size_problems,
)
from kenotron_models.families.routing_fields import RoutingFields
from kenotron_models.latent_attention import LatentAttentionSpec
from kenotron_models.rope import Rope
from kenotron_models.router import RouterSpec
from kenotron_models.small import SmallSizes
from kenotron_models.spec import DecoderSpec


@dataclass(frozen=True, kw_only=True)
class DeepseekV3Config(RoutingFields, SharedFields):
    """Sizes and constants of a DeepSeek-V3 decoder, under Hugging Face's names.

    Raises:
        ValueError: one line for each problem: field, value given, what is needed.
    """

    is_deepseek_v3_config: bool = True
    """Marks a YAML mapping as this class; always true."""
    rope_interleaved: bool = True
    """True: rotate neighbouring features (0, 1), (2, 3); False: feature i with i + half."""
    q_lora_rank: int | None = 1536
    """Features of the latent of queries; None: they are made of the token itself."""
    kv_lora_rank: int = 512
    """Features of the latent of keys and values."""
    qk_nope_head_dim: int = 128
    """Features of a head that positions do not turn."""
    qk_rope_head_dim: int = 64
    """Features of a head that positions turn."""
    v_head_dim: int = 128
    """Features of a value; not above those of a head."""
    attention_scale: float | None = None
    """What scores are multiplied with; None: one over the root of a head's features."""
    n_routed_experts: int = 256
    """Experts of a layer."""
    num_experts_per_tok: int = 8
    """Experts that each token is sent to."""
    n_shared_experts: int = 1
    """Experts that every token is sent to, as one of their total width."""
    moe_intermediate_size: int = 2048
    """Width of an expert, in features; ``intermediate_size`` is that of layers without experts."""
    n_group: int = 8
    """Groups of neighbouring experts."""
    topk_group: int = 4
    """Groups that the experts of a token are chosen from."""
    norm_topk_prob: bool = True
    """True: the weights of a token's experts add up to ``routed_scaling_factor``."""
    routed_scaling_factor: float = 2.5
    """What weights are multiplied with."""
    first_k_dense_replace: int = 3
    """Layers without experts, at the beginning."""
    router_aux_loss_coef: float = 0.0001
    """Weight of the loss that spreads tokens over experts; router_aux_loss_type says which
    tokens."""
    router_bias_rate: float = 0.001
    """What each update adds to the choice bias of an expert with too few tokens, and takes from one
    with too many; 0: the bias stays."""

    def __post_init__(self) -> None:
        """Check all fields at once."""
        names = (
            "n_routed_experts", "num_experts_per_tok", "moe_intermediate_size", "kv_lora_rank",
            "qk_rope_head_dim", "v_head_dim", "n_group", "topk_group",
        )  # fmt: skip
        sizes = {name: getattr(self, name) for name in names}
        found = [*size_problems(self), *marker_problems(self, "is_deepseek_v3_config")]
        found += expert_problems(sizes, "n_routed_experts", "num_experts_per_tok")
        found += loss_problems(
            router_aux_loss_coef=self.router_aux_loss_coef, router_bias_rate=self.router_bias_rate
        )
        found += self.routing_problems("n_routed_experts", "num_experts_per_tok")
        found += [*choice_problems(self), *_unread(self), *_range_problems(self)]
        raise_all([*found, *_group_problems(self), *_head_problems(self)])

    @property
    def kv_heads(self) -> int:
        """As many key and value heads as query heads."""
        return self.num_attention_heads

    @property
    def features_of_head(self) -> int:
        """Features of a head that scores are made of."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    def small(self, sizes: SmallSizes) -> Self:
        """Return a narrow copy of the same structure."""
        experts, top_k = small_experts(self.n_routed_experts, self.num_experts_per_tok, sizes.ep)
        groups = math.gcd(experts, min(self.n_group, 4))
        few = min(top_k, experts // groups)
        half = max(2, min(sizes.head_dim, self.qk_rope_head_dim) // 2 * 2)
        hidden = sizes.heads * half
        return replace(
            self,
            num_hidden_layers=sizes.layers,
            num_attention_heads=sizes.heads,
            num_key_value_heads=None,
            hidden_size=hidden,
            intermediate_size=sizes.inner(self.intermediate_size, self.hidden_size, hidden),
            q_lora_rank=None if self.q_lora_rank is None else hidden // 2,
            kv_lora_rank=hidden // 2,
            qk_nope_head_dim=half if self.qk_nope_head_dim else 0,
            qk_rope_head_dim=half,
            v_head_dim=half,
            n_routed_experts=experts,
            num_experts_per_tok=few,
            expert_capacity_factor=self.small_capacity(experts, few),
            moe_intermediate_size=2 * half,
            n_shared_experts=sizes.tp if self.n_shared_experts else 0,
            n_group=groups,
            topk_group=min(self.topk_group, groups),
            first_k_dense_replace=min(self.first_k_dense_replace, sizes.layers - 1),
            vocab_size=sizes.vocab_size,
            max_position_embeddings=sizes.reach(self.max_position_embeddings),
            rope_scaling=sizes.scaling(self.rope_scaling),
        )

    @property
    def decoder(self) -> DecoderSpec:
        """What the names above mean."""
        heads, layers = self.num_attention_heads, self.num_hidden_layers
        mixer = LatentAttentionSpec(
            heads=heads,
            kv_heads=heads,
            head_dim=self.features_of_head,
            scale=self.attention_scale,
            turned=self.qk_rope_head_dim,
            value_features=self.v_head_dim,
            kv_rank=self.kv_lora_rank,
            q_rank=self.q_lora_rank,
            rope=Rope(
                theta=self.rope_theta,
                scaling=self.rope_scaling,
                interleaved=self.rope_interleaved,
            ),
            backend=BACKENDS.get(self.attn_implementation, "auto"),
        )
        router = RouterSpec(
            experts=self.n_routed_experts,
            top_k=self.num_experts_per_tok,
            scoring="sigmoid",
            normalize=self.norm_topk_prob,
            scale=self.routed_scaling_factor,
            groups=self.n_group,
            top_groups=self.topk_group,
            choice_bias=True,
            bias_rate=self.router_bias_rate,
            balance_loss=self.router_aux_loss_coef,
        )
        experts = ExpertsSpec(
            router=router,
            features=self.moe_intermediate_size,
            shared_features=self.n_shared_experts * self.moe_intermediate_size,
        )
        routed = self.routed(experts, range(self.first_k_dense_replace, layers))
        return self.decoder_of([mixer] * layers, routed)


def _unread(config: DeepseekV3Config) -> list[str]:
    """Keys of other families that say something else than this one computes."""
    heads, own = config.num_attention_heads, "this family has"
    found = []
    if config.attention_bias:
        found.append(f"attention_bias: true was given; {own} no biases")
    if config.num_key_value_heads not in (None, heads):
        found.append(
            f"num_key_value_heads: {config.num_key_value_heads} was given; {own} as many as "
            f"num_attention_heads ({heads}); leave it out"
        )
    if config.head_dim is not None:
        found.append(
            f"head_dim: {config.head_dim} was given; {own} qk_nope_head_dim and qk_rope_head_dim"
        )
    return found


def _range_problems(config: DeepseekV3Config) -> list[str]:
    least = {"n_shared_experts": 0, "qk_nope_head_dim": 0, "first_k_dense_replace": 0}
    found = [
        f"{name}: {getattr(config, name)} was given; it must be at least {bound}"
        for name, bound in least.items()
        if getattr(config, name) < bound
    ]
    if config.q_lora_rank is not None and config.q_lora_rank < 1:
        found.append(f"q_lora_rank: {config.q_lora_rank} was given; it must be at least 1, or null")
    if not 0 < config.routed_scaling_factor < float("inf"):
        found.append(
            f"routed_scaling_factor: {config.routed_scaling_factor} was given; it must be a finite "
            "number above 0"
        )
    if config.first_k_dense_replace >= config.num_hidden_layers:
        found.append(
            f"first_k_dense_replace: {config.first_k_dense_replace} was given; it must be below "
            f"num_hidden_layers ({config.num_hidden_layers}): some layer must have experts"
        )
    return found


def _group_problems(config: DeepseekV3Config) -> list[str]:
    experts, groups, top = config.n_routed_experts, config.n_group, config.topk_group
    if groups < 1 or experts % groups:
        return [f"n_group: {groups} was given; it must divide n_routed_experts ({experts})"]
    found = []
    if top > groups:
        found.append(f"topk_group: {top} was given; it must not be above n_group ({groups})")
    if config.num_experts_per_tok > top * (experts // groups):
        found.append(
            f"num_experts_per_tok: {config.num_experts_per_tok} was given; topk_group ({top}) "
            f"groups have {top * (experts // groups)} experts"
        )
    return found


def _head_problems(config: DeepseekV3Config) -> list[str]:
    found = []
    if config.qk_rope_head_dim % 2:
        found.append(
            f"qk_rope_head_dim: {config.qk_rope_head_dim} was given; it must be an even number"
        )
    if config.v_head_dim > config.features_of_head:
        found.append(
            f"v_head_dim: {config.v_head_dim} was given; it must not be above qk_nope_head_dim + "
            f"qk_rope_head_dim ({config.features_of_head})"
        )
    return found
