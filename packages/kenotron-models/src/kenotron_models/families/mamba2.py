"""Mamba-2 (Dao and Gu, arXiv 2405.21060), under Hugging Face's names."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

from kenotron_models.block import BlockSpec
from kenotron_models.families.fields import at_least, marker_problems, raise_all
from kenotron_models.families.mamba import (
    BACKBONE,
    backbone_to_hf,
    sizes_problems,
    tokens_from_hf,
)
from kenotron_models.families.mamba_config import LONGEST, SMALL_STATE, step_problems
from kenotron_models.family import Family, HuggingFace, Values
from kenotron_models.hf_tensors import Fused, Names
from kenotron_models.mamba2 import Mamba2Spec
from kenotron_models.norm import NormSpec
from kenotron_models.rope_scaling import RopeScaling
from kenotron_models.small import SmallSizes
from kenotron_models.spec import DecoderSpec
from kenotron_models.state_init import FirstSteps

_SIZES = (
    "hidden_size", "num_hidden_layers", "vocab_size", "num_heads", "head_dim", "state_size",
    "conv_kernel", "n_groups", "chunk_size",
)  # fmt: skip
_CHOICES = (
    "layer_norm_epsilon", "residual_in_fp32", "tie_word_embeddings", "use_bias", "use_conv_bias",
    "time_step_min", "time_step_max", "time_step_floor",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Mamba2ModelConfig:
    """Sizes and constants of a Mamba-2 model.

    Raises:
        ValueError: one line for each problem: field, value given, what is needed.
    """

    is_mamba2_config: bool = True
    """Marks a YAML mapping as this class; always true."""
    hidden_size: int = 4096
    """Width of the residual stream, in features."""
    num_hidden_layers: int = 64
    """Blocks."""
    vocab_size: int = 32768
    """Token numbers that exist, without padding."""
    num_heads: int = 128
    """Heads of each mixer."""
    head_dim: int = 64
    """Features of a head."""
    state_size: int = 128
    """Features of the state, for each feature of a head."""
    n_groups: int = 8
    """Groups of heads that share B and C."""
    conv_kernel: int = 4
    """Width of the convolution, in tokens."""
    use_bias: bool = False
    """True: input and output projection have a bias."""
    use_conv_bias: bool = True
    """True: the convolution has a bias."""
    layer_norm_epsilon: float = 1e-5
    """Added to the mean square inside every norm."""
    residual_in_fp32: bool = True
    """True: the residual stream is float32, also in a narrower model."""
    time_step_min: float = 0.001
    """Smallest first step."""
    time_step_max: float = 0.1
    """Largest first step."""
    time_step_floor: float = 1e-4
    """No first step is below this."""
    time_step_limit: tuple[float, ...] = (0.0, math.inf)
    """Smallest and largest step at any time."""
    chunk_size: int = 256
    """Tokens that the scan computes as one; the numbers differ by rounding only."""
    tie_word_embeddings: bool = False
    """True: the head is the embedding's own matrix."""
    use_doc_masking: bool = False
    """True: state and convolution begin again with each document of a sample."""
    pad_token_id: int | None = None
    """Token number of padding; no effect: padded positions carry no label."""
    bos_token_id: int | None = None
    """Token number of the beginning of a text; recorded for export, no layer reads it."""
    eos_token_id: int | None = None
    """Token number of the end of a text; generation stops on it, no layer reads it."""

    def __post_init__(self) -> None:
        """Check all fields at once."""
        found = at_least(1, {name: getattr(self, name) for name in _SIZES})
        if not found and self.num_heads % self.n_groups:
            found.append(
                f"n_groups: {self.n_groups} was given; it must divide num_heads ({self.num_heads})"
            )
        if not 0 < self.layer_norm_epsilon < math.inf:
            found.append(
                f"layer_norm_epsilon: {self.layer_norm_epsilon} was given; it must be a finite "
                "number above 0"
            )
        first = self.time_step_min, self.time_step_max, self.time_step_floor
        found += step_problems(*first, self.time_step_limit)
        raise_all([*found, *marker_problems(self, "is_mamba2_config")])

    @property
    def cut_sizes(self) -> dict[str, int]:
        """What tp cuts, by its key."""
        return {"num_heads": self.num_heads}

    @property
    def num_attention_heads(self) -> int:
        """What tp cuts: heads."""
        return self.num_heads

    @property
    def kv_heads(self) -> int:
        """What several ranks of tp may share: groups."""
        return self.n_groups

    @property
    def rope_scaling(self) -> RopeScaling | None:
        """None: there are no positions."""
        return None

    def small(self, sizes: SmallSizes) -> Self:
        """Return a narrow copy of the same structure."""
        head = min(self.head_dim, sizes.head_dim)
        return replace(
            self,
            hidden_size=max(head, sizes.heads * head // 2),
            num_hidden_layers=sizes.layers,
            vocab_size=sizes.vocab_size,
            num_heads=sizes.heads,
            head_dim=head,
            n_groups=sizes.kv_heads,
            state_size=min(self.state_size, SMALL_STATE),
            chunk_size=min(self.chunk_size, SMALL_STATE),
        )

    @property
    def decoder(self) -> DecoderSpec:
        """What the names above mean."""
        low, high = self.time_step_limit
        mixer = Mamba2Spec(
            heads=self.num_heads,
            head_dim=self.head_dim,
            groups=self.n_groups,
            state=self.state_size,
            width=self.conv_kernel,
            conv_bias=self.use_conv_bias,
            bias=self.use_bias,
            separate_documents=self.use_doc_masking,
            steps=FirstSteps(self.time_step_min, self.time_step_max, self.time_step_floor),
            step_limits=(low, high),
            eps=self.layer_norm_epsilon,
            chunk=self.chunk_size,
        )
        norm = NormSpec(eps=self.layer_norm_epsilon)
        block = BlockSpec(mixer=mixer, feed_forward=None, norm=norm)
        return DecoderSpec(
            hidden_size=self.hidden_size,
            vocab_size=self.vocab_size,
            max_position_embeddings=LONGEST,
            blocks=(block,) * self.num_hidden_layers,
            norm=norm,
            tie_word_embeddings=self.tie_word_embeddings,
            residual_in_fp32=self.residual_in_fp32,
            bos_token_id=self.bos_token_id,
            eos_token_id=self.eos_token_id,
        )


def _read(values: Values) -> Mamba2ModelConfig:
    sizes_problems(values, (*_SIZES, "expand"))
    if values["expand"] * values["hidden_size"] != values["num_heads"] * values["head_dim"]:
        raise ValueError(
            f"expand: {values['expand']} was given; times hidden_size ({values['hidden_size']}) it "
            f"must be num_heads ({values['num_heads']}) times head_dim ({values['head_dim']})"
        )
    return Mamba2ModelConfig(
        **{name: values[name] for name in (*_SIZES, *_CHOICES)},
        **tokens_from_hf(values),
        time_step_limit=step_limits(values["time_step_limit"]),
    )


def step_limits(limits: Sequence[Any]) -> tuple[float, ...]:
    """Return the limits of steps as a config.json has them."""
    return tuple(map(_number, limits))


def _number(limit: Any) -> float:
    """A limit as JSON has it, where infinity may be a mapping or a word."""
    if isinstance(limit, dict):
        limit = limit.get("__float__", limit)
    return float(limit)


def _write(spec: DecoderSpec) -> dict[str, Any]:
    mixer = spec.blocks[0].mixer
    if not isinstance(mixer, Mamba2Spec) or mixer.features % spec.hidden_size:
        raise ValueError(
            "a mamba2 of Hugging Face has a state space of heads in each block, and a multiple of "
            "hidden_size as their features"
        )
    return {
        **state_space_to_hf(mixer),
        "num_heads": mixer.heads,
        "head_dim": mixer.head_dim,
        "state_size": mixer.state,
        "expand": mixer.features // spec.hidden_size,
        "use_bias": mixer.bias,
    }


def state_space_to_hf(mixer: Mamba2Spec) -> dict[str, Any]:
    """Return the keys that Hugging Face's families with Mamba-2 share."""
    return {
        "n_groups": mixer.groups,
        "conv_kernel": mixer.width,
        "use_conv_bias": mixer.conv_bias,
        "time_step_min": mixer.steps.low,
        "time_step_max": mixer.steps.high,
        "time_step_floor": mixer.steps.floor,
        "time_step_limit": list(mixer.step_limits),
        "chunk_size": mixer.chunk,
    }


_NAMES: Names = {
    "mamba2_norm": Fused("norm"),
    "mamba2": Fused("mixer"),
    "mamba2.in_proj": Fused("mixer.in_proj"),
    "mamba2.conv": Fused("mixer.conv1d"),
    "mamba2.norm": Fused("mixer.norm"),
    "mamba2.out_proj": Fused("mixer.out_proj"),
}

MAMBA2 = Family(
    marker="is_mamba2_config",
    config=Mamba2ModelConfig,
    hf=HuggingFace(
        model_type="mamba2",
        architecture="Mamba2ForCausalLM",
        defaults={
            "num_heads": 128,
            "head_dim": 64,
            "state_size": 128,
            "expand": 2,
            "conv_kernel": 4,
            "n_groups": 8,
            "layer_norm_epsilon": 1e-5,
            "residual_in_fp32": True,
            "tie_word_embeddings": False,
            "use_bias": False,
            "use_conv_bias": True,
            "time_step_min": 0.001,
            "time_step_max": 0.1,
            "time_step_floor": 1e-4,
            "time_step_limit": (0.0, math.inf),
            "chunk_size": 256,
            "pad_token_id": 1,
            "bos_token_id": 0,
            "eos_token_id": 2,
        },
        only={"hidden_act": ("silu",)},
        read=_read,
        write=_write,
        shared=backbone_to_hf,
        names=_NAMES,
        outside=BACKBONE,
    ),
)
