"""The keys of Nemotron-H (arXiv 2504.03624): state spaces, attention, feed-forwards, experts."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Self

from kenotron_models.attention import AttentionSpec
from kenotron_models.attention_backends import AttentionBackend
from kenotron_models.block import BlockSpec
from kenotron_models.experts import ExpertsSpec
from kenotron_models.families.expert_fields import expert_problems, loss_problems, small_experts
from kenotron_models.families.fields import at_least, marker_problems, raise_all
from kenotron_models.families.layer_pattern import (
    LETTERS,
    pattern_problems,
    small_pattern,
    split_pattern,
)
from kenotron_models.families.mamba_config import SMALL_STATE, step_problems
from kenotron_models.families.routing_fields import RoutingFields
from kenotron_models.families.sigmoid_experts import group_problems
from kenotron_models.mamba2 import Mamba2Spec
from kenotron_models.mlp import MLPSpec
from kenotron_models.norm import NormSpec
from kenotron_models.rope_scaling import RopeScaling
from kenotron_models.router import RouterSpec
from kenotron_models.small import SmallSizes
from kenotron_models.spec import DecoderSpec
from kenotron_models.state_init import FirstSteps

_SIZES = (
    "hidden_size", "vocab_size", "max_position_embeddings", "num_attention_heads",
    "num_key_value_heads", "head_dim", "intermediate_size", "mamba_num_heads", "mamba_head_dim",
    "ssm_state_size", "n_groups", "conv_kernel", "chunk_size", "moe_intermediate_size", "n_group",
    "topk_group", "n_routed_experts", "num_experts_per_tok", "n_shared_experts",
    "moe_shared_expert_intermediate_size",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class NemotronHConfig(RoutingFields):
    """Sizes and constants of a hybrid decoder, a part and a norm in each layer, no positions.

    Raises:
        ValueError: one line for each problem: field, value given, what is needed.
    """

    is_nemotron_h_config: bool = True
    """Marks a YAML mapping as this class; always true."""
    layers: str = "ME*-"
    """A letter for each layer: M Mamba-2, * attention, - feed-forward, E experts; | between the
    stages of a pipeline."""
    hidden_size: int = 4096
    """Width of the residual stream, in features."""
    vocab_size: int = 131072
    """Token numbers that exist, without padding."""
    max_position_embeddings: int = 4096
    """Longest sequence the model is meant for, in tokens; recorded for export only."""
    layer_norm_epsilon: float = 1e-5
    """Added to the mean square inside every norm."""
    residual_in_fp32: bool = False
    """True: the residual stream is float32, also in a narrower model."""
    tie_word_embeddings: bool = False
    """True: the head is the embedding's own matrix."""
    num_attention_heads: int = 32
    """Query heads of a layer of attention."""
    num_key_value_heads: int = 8
    """Its key and value heads."""
    head_dim: int = 128
    """Features of one head."""
    attn_implementation: AttentionBackend = "auto"
    """What computes attention; the numbers differ by rounding only."""
    intermediate_size: int = 21504
    """Width of a feed-forward, in features; its activation is the square of relu."""
    mamba_num_heads: int = 128
    """Heads of a Mamba-2."""
    mamba_head_dim: int = 64
    """Features of its heads."""
    ssm_state_size: int = 128
    """Features of its state, for each feature of a head."""
    n_groups: int = 8
    """Groups of heads that share B and C."""
    conv_kernel: int = 4
    """Width of its convolution, in tokens."""
    use_conv_bias: bool = True
    """True: the convolution has a bias."""
    use_bias: bool = False
    """True: its projections have biases."""
    chunk_size: int = 128
    """Tokens that its scan computes as one; the numbers differ by rounding only."""
    time_step_min: float = 0.001
    """Smallest first step."""
    time_step_max: float = 0.1
    """Largest first step."""
    time_step_floor: float = 1e-4
    """No first step is below this."""
    time_step_limit: tuple[float, ...] = (0.0, math.inf)
    """Smallest and largest step at any time."""
    n_routed_experts: int = 8
    """Experts of a layer."""
    num_experts_per_tok: int = 2
    """Experts that each token is sent to."""
    moe_intermediate_size: int = 7688
    """Width of an expert, in features."""
    n_shared_experts: int = 1
    """Experts that every token is sent to; only 1 is known."""
    moe_shared_expert_intermediate_size: int = 7688
    """Width of the shared expert."""
    n_group: int = 1
    """Groups of neighbouring experts."""
    topk_group: int = 1
    """Groups that the experts of a token are chosen from."""
    norm_topk_prob: bool = True
    """True: the weights of a token's experts add up to ``routed_scaling_factor``."""
    routed_scaling_factor: float = 1.0
    """What weights are multiplied with."""
    router_aux_loss_coef: float = 0.0
    """Weight of the loss that spreads tokens over experts; router_aux_loss_type says which
    tokens."""
    router_bias_rate: float = 0.001
    """What each update adds to the choice bias of an expert with too few tokens, and takes from one
    with too many; 0: the bias stays."""
    use_doc_masking: bool = False
    """True: a token sees its own document only, and states begin again with it."""
    pad_token_id: int | None = None
    """Token number of padding; no effect: padded positions carry no label."""
    bos_token_id: int | None = None
    """Token number of the beginning of a text; recorded for export, no layer reads it."""
    eos_token_id: int | None = None
    """Token number of the end of a text; generation stops on it, no layer reads it."""

    def __post_init__(self) -> None:
        """Check all fields at once."""
        found = pattern_problems("layers", self.layers, "".join(LETTERS))
        found += at_least(1, {name: getattr(self, name) for name in _SIZES})
        raise_all([*(found or self._problems()), *marker_problems(self, "is_nemotron_h_config")])

    def _problems(self) -> list[str]:
        pairs = ("num_key_value_heads", "num_attention_heads"), ("n_groups", "mamba_num_heads")
        found = [
            f"{few}: {getattr(self, few)} was given; it must divide {many} ({getattr(self, many)})"
            for few, many in pairs
            if getattr(self, many) % getattr(self, few)
        ]
        numbers = ("n_routed_experts", "num_experts_per_tok")
        found += expert_problems({name: getattr(self, name) for name in numbers}, *numbers)
        experts, top_k = self.n_routed_experts, self.num_experts_per_tok
        found += group_problems(experts, top_k, self.n_group, self.topk_group)
        if self.n_shared_experts != 1:
            found.append(f"n_shared_experts: {self.n_shared_experts} was given; it must be 1")
        found += loss_problems(
            router_aux_loss_coef=self.router_aux_loss_coef, router_bias_rate=self.router_bias_rate
        )
        for name in ("layer_norm_epsilon", "routed_scaling_factor"):
            if not 0 < getattr(self, name) < math.inf:
                found.append(
                    f"{name}: {getattr(self, name)} was given; it must be a finite number above 0"
                )
        first = self.time_step_min, self.time_step_max, self.time_step_floor
        found += step_problems(*first, self.time_step_limit)
        return found + self.routing_problems(*numbers)

    @property
    def num_hidden_layers(self) -> int:
        """Layers."""
        return len(self.letters)

    @property
    def letters(self) -> str:
        """The letter of each layer."""
        return split_pattern(self.layers)[0]

    @property
    def cut_sizes(self) -> dict[str, int]:
        """What tp cuts, by its key."""
        kinds = {
            "*": "num_attention_heads",
            "M": "mamba_num_heads",
            "-": "intermediate_size",
            "E": "moe_shared_expert_intermediate_size",
        }
        return {
            name: getattr(self, name) for letter, name in kinds.items() if letter in self.layers
        }

    @property
    def kv_heads(self) -> int:
        """What several ranks of tp may share: key heads."""
        return self.num_key_value_heads

    @property
    def rope_scaling(self) -> RopeScaling | None:
        """None: there are no positions."""
        return None

    def small(self, sizes: SmallSizes) -> Self:
        """Return a narrow copy of the same structure."""
        head = min(self.head_dim, sizes.head_dim)
        experts, top_k = small_experts(self.n_routed_experts, self.num_experts_per_tok, sizes.ep)
        groups = math.gcd(experts, min(self.n_group, 4))
        few, wide = min(top_k, experts // groups), sizes.tp * head
        return replace(
            self,
            layers=small_pattern(self.layers, sizes.layers),
            hidden_size=sizes.heads * head,
            vocab_size=sizes.vocab_size,
            num_attention_heads=sizes.heads,
            num_key_value_heads=sizes.kv_heads,
            head_dim=head,
            intermediate_size=2 * wide,
            mamba_num_heads=sizes.heads,
            mamba_head_dim=head,
            ssm_state_size=min(self.ssm_state_size, SMALL_STATE),
            n_groups=sizes.kv_heads,
            chunk_size=min(self.chunk_size, SMALL_STATE),
            n_routed_experts=experts,
            num_experts_per_tok=few,
            expert_capacity_factor=self.small_capacity(experts, few),
            moe_intermediate_size=wide,
            moe_shared_expert_intermediate_size=wide,
            n_group=groups,
            topk_group=min(self.topk_group, groups),
        )

    def blocks(self) -> dict[str, BlockSpec]:
        """Return the block of each letter."""
        low, high = self.time_step_limit
        mamba = Mamba2Spec(
            heads=self.mamba_num_heads,
            head_dim=self.mamba_head_dim,
            groups=self.n_groups,
            state=self.ssm_state_size,
            width=self.conv_kernel,
            conv_bias=self.use_conv_bias,
            bias=self.use_bias,
            separate_documents=self.use_doc_masking,
            steps=FirstSteps(self.time_step_min, self.time_step_max, self.time_step_floor),
            step_limits=(low, high),
            eps=self.layer_norm_epsilon,
            chunk=self.chunk_size,
        )
        attention = AttentionSpec(
            heads=self.num_attention_heads,
            kv_heads=self.num_key_value_heads,
            head_dim=self.head_dim,
            rope=None,
            separate_documents=self.use_doc_masking,
            backend=self.attn_implementation,
        )
        mlp = MLPSpec(features=self.intermediate_size, gated=False, activation="relu2")
        norm = NormSpec(eps=self.layer_norm_epsilon)
        mixers = {"M": mamba, "*": attention}
        found = {k: BlockSpec(mixer=v, feed_forward=None, norm=norm) for k, v in mixers.items()}
        for letter, part in (("-", mlp), ("E", self._experts())):
            found[letter] = BlockSpec(mixer=None, feed_forward=part, norm=norm)
        return found

    def _experts(self) -> ExpertsSpec:
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
            gated=False,
            activation="relu2",
            shared_features=self.moe_shared_expert_intermediate_size,
        )
        places = [i for i, letter in enumerate(self.letters) if letter == "E"]
        return self.routed(experts, places or [0])[(places or [0])[0]]

    @property
    def decoder(self) -> DecoderSpec:
        """What the names above mean."""
        blocks = self.blocks()
        return DecoderSpec(
            hidden_size=self.hidden_size,
            vocab_size=self.vocab_size,
            max_position_embeddings=self.max_position_embeddings,
            blocks=tuple(blocks[letter] for letter in self.letters),
            stage_starts=split_pattern(self.layers)[1],
            norm=NormSpec(eps=self.layer_norm_epsilon),
            tie_word_embeddings=self.tie_word_embeddings,
            residual_in_fp32=self.residual_in_fp32,
            bos_token_id=self.bos_token_id,
            eos_token_id=self.eos_token_id,
        )
