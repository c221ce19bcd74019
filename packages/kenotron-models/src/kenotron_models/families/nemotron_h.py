"""Nemotron-H (arXiv 2504.03624): state spaces, attention, feed-forwards, experts; no positions."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kenotron_models.attention import AttentionSpec
from kenotron_models.attention_backends import AttentionBackend
from kenotron_models.block import BlockSpec
from kenotron_models.experts import ExpertsSpec
from kenotron_models.families.keys import Rule, key, marker, with_default
from kenotron_models.families.layer_pattern import (
    LETTERS,
    pattern_of,
    pattern_problems,
    small_pattern,
    split_pattern,
)
from kenotron_models.families.mamba import BACKBONE
from kenotron_models.families.places import placed
from kenotron_models.families.routing_keys import (
    SigmoidRoutingKeys,
    balance_key,
    experts_key,
    top_k_key,
)
from kenotron_models.families.state_space_keys import (
    Mamba2Keys,
    StateSpaceKeys,
    few,
    state_space_names,
)
from kenotron_models.family import Family, HuggingFace
from kenotron_models.hf_tensors import FusedModules, Names, Stacked
from kenotron_models.mamba2 import Mamba2Spec
from kenotron_models.mlp import MLPSpec
from kenotron_models.norm import NormSpec
from kenotron_models.small import SmallSizes
from kenotron_models.spec import DecoderSpec

LEAST_STEP = 1e-30
"""Smallest step that is written where there is none: theirs takes its logarithm."""


@dataclass(frozen=True, kw_only=True)
class NemotronHConfig(SigmoidRoutingKeys, Mamba2Keys):
    """Sizes and constants of a hybrid decoder, a part and a norm in each layer, no positions."""

    is_nemotron_h_config: bool = marker()
    """Marks a YAML mapping as this class; always true."""
    layers: str = key("ME*-")
    """A letter for each layer: M Mamba-2, * attention, - feed-forward, E experts; | between the
    stages of a pipeline."""
    vocab_size: int = with_default(StateSpaceKeys, "vocab_size", 131072)
    max_position_embeddings: int = key(4096, least=1, hf=True, at="max_position_embeddings")
    """Longest sequence the model is meant for, in tokens; recorded for export only."""
    residual_in_fp32: bool = with_default(StateSpaceKeys, "residual_in_fp32", False)
    tie_word_embeddings: bool = key(False)
    num_attention_heads: int = key(32, least=1, hf=True, at="attention.heads", small="heads")
    """Query heads of a layer of attention."""
    num_key_value_heads: int = key(
        8, least=1, divides="num_attention_heads", hf=True, at="attention.kv_heads",
        small="kv_heads",
    )  # fmt: skip
    """Its key and value heads."""
    head_dim: int = key(
        128, least=1, hf=True, at="attention.head_dim", small=lambda s, n: min(n, s.head_dim)
    )
    """Features of one head."""
    attn_implementation: AttentionBackend = key("auto", at="attention.backend")
    """Attention backend; the numbers differ by rounding only."""
    intermediate_size: int = key(21504, least=1, hf=True, at="mlp.features")
    """Width of a feed-forward, in features; its activation is the square of relu."""
    mamba_num_heads: int = key(128, least=1, hf=True, at="mamba2.heads", small="heads")
    """Heads of a Mamba-2."""
    mamba_head_dim: int = key(64, least=1, hf=True, at="mamba2.head_dim")
    """Features of its heads."""
    ssm_state_size: int = key(128, least=1, hf=True, at="mamba2.state", small=few)
    """Features of its state, for each feature of a head."""
    n_groups: int = key(
        8, least=1, divides="mamba_num_heads", hf=True, at="mamba2.groups", small="kv_heads"
    )
    chunk_size: int = with_default(Mamba2Keys, "chunk_size", 128)
    n_routed_experts: int = experts_key(8)
    num_experts_per_tok: int = top_k_key(2)
    moe_intermediate_size: int = with_default(SigmoidRoutingKeys, "moe_intermediate_size", 7688)
    n_shared_experts: int = key(1, rule=Rule(lambda n: n == 1, "it must be 1"), hf=True)
    """Experts that every token is sent to; only 1 is known."""
    moe_shared_expert_intermediate_size: int = key(
        7688, least=1, hf=True, at="experts.shared_features"
    )
    """Width of the shared expert."""
    n_group: int = with_default(SigmoidRoutingKeys, "n_group", 1)
    topk_group: int = with_default(SigmoidRoutingKeys, "topk_group", 1)
    routed_scaling_factor: float = with_default(SigmoidRoutingKeys, "routed_scaling_factor", 1.0)
    router_aux_loss_coef: float = balance_key(0.0, hf=False)
    """Weight of the loss that spreads tokens over experts; router_aux_loss_type says which
    tokens."""

    def problems(self) -> list[str]:
        """Name letters that are none."""
        return super().problems() + pattern_problems("layers", self.layers, "".join(LETTERS))

    @property
    def num_hidden_layers(self) -> int:
        """Layers."""
        return len(self.letters)

    @property
    def letters(self) -> str:
        """The letter of each layer."""
        return split_pattern(self.layers)[0]

    @property
    def kv_heads(self) -> int:
        """Number of key heads, which several ranks of tp may share."""
        return self.num_key_value_heads

    def small_keys(self, sizes: SmallSizes) -> dict[str, Any]:
        """Return the layers and widths of a narrow copy."""
        head = min(self.head_dim, sizes.head_dim)
        return super().small_keys(sizes) | {
            "layers": small_pattern(self.layers, sizes.layers),
            "hidden_size": sizes.heads * head,
            "intermediate_size": 2 * sizes.tp * head,
            "mamba_head_dim": head,
            "moe_intermediate_size": sizes.tp * head,
            "moe_shared_expert_intermediate_size": sizes.tp * head,
        }

    def blocks(self) -> dict[str, BlockSpec]:
        """Return the block of each letter."""
        attention = AttentionSpec(**placed(self, "attention"), rope=None)
        mlp = MLPSpec(features=self.intermediate_size, gated=False, activation="relu2")
        places = [i for i, letter in enumerate(self.letters) if letter == "E"] or [0]
        experts = self.routed(places, gated=False, activation="relu2")[places[0]]
        norm = NormSpec(eps=self.layer_norm_epsilon)
        mixers = {"M": self.mamba2(), "*": attention}
        found = {k: BlockSpec(mixer=v, feed_forward=None, norm=norm) for k, v in mixers.items()}
        for letter, part in (("-", mlp), ("E", experts)):
            found[letter] = BlockSpec(mixer=None, feed_forward=part, norm=norm)
        return found

    @property
    def decoder(self) -> DecoderSpec:
        """Decoder that the names above describe."""
        blocks = self.blocks()
        return self._decoder(
            self.hidden_size,
            tuple(blocks[letter] for letter in self.letters),
            self.layer_norm_epsilon,
            self.max_position_embeddings,
            split_pattern(self.layers)[1],
        )

    @classmethod
    def read_hf(cls, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return the layers and the limits of steps. Raises ValueError, naming the key."""
        kinds, pattern = values.get("layers_block_type"), values.get("hybrid_override_pattern")
        pattern = str(pattern or "") if kinds is None else pattern_of(kinds, "layers_block_type")
        if kinds is None and not pattern:
            raise ValueError("layers_block_type: nothing was given; it must name each layer's kind")
        if wrong := pattern_problems("hybrid_override_pattern", pattern, "".join(LETTERS)):
            raise ValueError("\n".join(wrong))
        least = float(values["time_step_min"])
        return super().read_hf(values) | {
            "layers": pattern,
            "tie_word_embeddings": False,  # transformers never ties them, whatever the key says
            "time_step_limit": (0.0 if least <= LEAST_STEP else least, math.inf),
        }

    @classmethod
    def write_hf(cls, spec: DecoderSpec) -> dict[str, Any]:
        """Return the kinds of layers, and what parts have. Raises ValueError for other parts."""
        letters, found = [], dict[str, Any]()
        for block in spec.blocks:
            kinds = [_LETTER_OF.get(type(part), "") for part in block.parts]
            if len(kinds) != 1 or not kinds[0]:
                raise ValueError(
                    "a nemotron_h of Hugging Face has in each layer one of Mamba-2, attention, a "
                    "feed-forward and experts"
                )
            letters.append(kinds[0])
            found |= _part_keys(block.parts[0])
        own = {"layers_block_type": [LETTERS[letter] for letter in letters]}
        return super().write_hf(spec) | own | {"tie_word_embeddings": False} | found


_LETTER_OF: dict[type[Any], str] = {
    Mamba2Spec: "M",
    AttentionSpec: "*",
    MLPSpec: "-",
    ExpertsSpec: "E",
}


def _part_keys(part: object) -> dict[str, Any]:
    """Return the options of a part that no key has.

    Raises ValueError for a part that Hugging Face has not.
    """
    words, family = "", "a nemotron_h of Hugging Face"
    if isinstance(part, Mamba2Spec):
        low, high = part.step_limits
        if high == math.inf:  # the least step bounds all of them there, not only the first
            return {"time_step_min": low or LEAST_STEP}
        words = f"time_step_limit: steps of {family} have no upper limit, but {high} was given"
    elif isinstance(part, AttentionSpec):
        if part.rope is None and part.window is None and not (part.qkv_bias or part.qk_norm):
            return {}
        words = f"attention of {family} has neither positions nor a window, biases or norms"
    elif isinstance(part, MLPSpec):
        if not part.gated and part.activation == "relu2" and not part.bias:
            return {"mlp_hidden_act": "relu2"}
        words = f"a feed-forward of {family} has no gate, no biases and relu2"
    elif isinstance(part, ExpertsSpec):
        if not part.gated and part.activation == "relu2" and part.shared_features:
            return {"n_shared_experts": 1, "mlp_hidden_act": "relu2"}
        words = f"experts of {family} have no gate, relu2 and a shared expert"
    raise ValueError(words)


_NAMES: Names = {
    **state_space_names("mamba2", "mixer", "norm", norm="norm"),
    **{f"{part}_norm": FusedModules("norm") for part in ("attention", "mlp", "experts")},
    "attention.qkv": FusedModules("mixer.q_proj", "mixer.k_proj", "mixer.v_proj"),
    "attention.out": FusedModules("mixer.o_proj"),
    "mlp.up": FusedModules("mixer.up_proj"),
    "mlp.down": FusedModules("mixer.down_proj"),
    "experts.router": FusedModules("mixer.gate", choice_bias="e_score_correction_bias"),
    "experts.up": Stacked("mixer.experts.{e}.up_proj"),
    "experts.down": Stacked("mixer.experts.{e}.down_proj"),
    "experts.shared.up": FusedModules("mixer.shared_experts.up_proj"),
    "experts.shared.down": FusedModules("mixer.shared_experts.down_proj"),
}
NEMOTRON_H = Family(
    marker="is_nemotron_h_config",
    config=NemotronHConfig,
    hf=HuggingFace(
        model_type="nemotron_h",
        architecture="NemotronHForCausalLM",
        defaults={
            "tie_word_embeddings": False,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
        only={
            "mlp_hidden_act": ("relu2",),
            "mamba_hidden_act": ("silu",),
            "mlp_bias": (False,),
            "attention_bias": (False,),
            "attention_dropout": (0.0,),
            "hidden_dropout": (0.0,),
            "sliding_window": (None,),
            "moe_latent_size": (None,),
            "num_nextn_predict_layers": (0,),
        },
        names=_NAMES,
        outside=BACKBONE,
        ties=False,
    ),
)
