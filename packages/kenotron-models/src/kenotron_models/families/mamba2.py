"""Mamba-2 (Dao and Gu, arXiv 2405.21060), under Hugging Face's names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kenotron_models.block import BlockSpec
from kenotron_models.families.keys import key, marker
from kenotron_models.families.mamba import BACKBONE
from kenotron_models.families.state_space_keys import Mamba2Keys, few, state_space_names
from kenotron_models.family import Family, HuggingFace
from kenotron_models.mamba2 import Mamba2Spec
from kenotron_models.norm import NormSpec
from kenotron_models.small import SmallSizes
from kenotron_models.spec import DecoderSpec


@dataclass(frozen=True, kw_only=True)
class Mamba2ModelConfig(Mamba2Keys):
    """Sizes and constants of a Mamba-2 model."""

    is_mamba2_config: bool = marker()
    """Marks a YAML mapping as this class; always true."""
    num_hidden_layers: int = key(
        64, least=1, hf=True, needed=True, at="num_hidden_layers", small="layers"
    )
    """Blocks."""
    num_heads: int = key(128, least=1, hf=True, at="mamba2.heads", small="heads")
    """Heads of each mixer."""
    head_dim: int = key(
        64, least=1, hf=True, at="mamba2.head_dim", small=lambda s, n: min(n, s.head_dim)
    )
    """Features of a head."""
    n_groups: int = key(
        8, least=1, divides="num_heads", hf=True, at="mamba2.groups", small="kv_heads"
    )
    state_size: int = key(128, least=1, hf=True, at="mamba2.state", small=few)
    """Features of the state, for each feature of a head."""

    @property
    def num_attention_heads(self) -> int:
        """Number of heads, which tp cuts."""
        return self.num_heads

    @property
    def kv_heads(self) -> int:
        """Number of groups, which several ranks of tp may share."""
        return self.n_groups

    def small_keys(self, sizes: SmallSizes) -> dict[str, Any]:
        """Return the width of a narrow copy: heads have twice as many features."""
        head = min(self.head_dim, sizes.head_dim)
        return {"hidden_size": max(head, sizes.heads * head // 2)}

    @property
    def decoder(self) -> DecoderSpec:
        """Decoder that the names above describe."""
        norm = NormSpec(eps=self.layer_norm_epsilon)
        block = BlockSpec(mixer=self.mamba2(), feed_forward=None, norm=norm)
        blocks = (block,) * self.num_hidden_layers
        return self._decoder(self.hidden_size, blocks, self.layer_norm_epsilon)

    @classmethod
    def read_hf(cls, values: Mapping[str, Any]) -> dict[str, Any]:
        """Check what heads say twice. Raises ValueError, naming the key."""
        expand, hidden, heads, width = (
            values[name] for name in ("expand", "hidden_size", "num_heads", "head_dim")
        )
        if type(expand) is not int or expand * hidden != heads * width:
            raise ValueError(
                f"expand: {expand!r} was given; times hidden_size ({hidden}) it must be num_heads "
                f"({heads}) times head_dim ({width})"
            )
        return {}

    @classmethod
    def write_hf(cls, spec: DecoderSpec) -> dict[str, Any]:
        """Return the features of heads over width. Raises ValueError for other mixers."""
        mixer = spec.blocks[0].mixer
        if not isinstance(mixer, Mamba2Spec) or mixer.features % spec.hidden_size:
            raise ValueError(
                "a mamba2 of Hugging Face has a state space of heads in each block, and a multiple "
                "of hidden_size as their features"
            )
        return {"expand": mixer.features // spec.hidden_size, "hidden_act": "silu"}


MAMBA2 = Family(
    marker="is_mamba2_config",
    config=Mamba2ModelConfig,
    hf=HuggingFace(
        model_type="mamba2",
        architecture="Mamba2ForCausalLM",
        defaults={"expand": 2, "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2},
        only={"hidden_act": ("silu",)},
        names=state_space_names("mamba2", "mixer", "norm", norm="norm"),
        outside=BACKBONE,
    ),
)
