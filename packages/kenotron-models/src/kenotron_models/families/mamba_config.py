"""The keys of a Mamba (Gu and Dao, arXiv 2312.00752), under Nanotron's names."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Self

from kenotron_models.block import BlockSpec
from kenotron_models.families.fields import at_least, marker_problems, raise_all
from kenotron_models.mamba import MambaSpec
from kenotron_models.norm import NormSpec
from kenotron_models.rope_scaling import RopeScaling
from kenotron_models.small import SmallSizes
from kenotron_models.spec import DecoderSpec
from kenotron_models.state_init import FirstSteps

LONGEST = 1 << 20
"""Tokens of a text: the state is of fixed size, so that nothing but this number bounds them."""
SMALL_STATE = 8
"""Most features of a channel's state in a narrow copy."""


@dataclass(frozen=True, kw_only=True)
class SSMConfig:
    """The selective state space of a Mamba block.

    Raises:
        ValueError: one line for each problem: field, value given, what is needed.
    """

    d_state: int = 16
    """Features of the state, for each channel."""
    d_conv: int = 4
    """Width of the convolution, in tokens."""
    expand: int = 2
    """Channels over width of the residual stream."""
    channels: int | None = None
    """Channels of a mixer, where they are no multiple of the width; None: expand times width."""
    dt_rank: int | Literal["auto"] = "auto"
    """Rank of the step's projection; auto: a sixteenth of the width, rounded up."""
    dt_min: float = 0.001
    """Smallest first step."""
    dt_max: float = 0.1
    """Largest first step."""
    dt_init: Literal["random", "constant"] = "random"
    """How the step's projection is drawn: evenly, or all weights the same."""
    dt_scale: float = 1.0
    """Factor of those draws, next to 1/sqrt(dt_rank)."""
    dt_init_floor: float = 1e-4
    """No first step is below this."""
    conv_bias: bool = True
    """True: the convolution has a bias."""
    bias: bool = False
    """True: input and output projection have one."""
    use_fast_path: bool = True
    """No effect: a choice of kernels."""

    def __post_init__(self) -> None:
        """Check all fields at once."""
        sizes = {"d_state": self.d_state, "d_conv": self.d_conv, "expand": self.expand}
        if self.channels is not None:
            sizes["channels"] = self.channels
        if self.dt_rank != "auto":
            sizes["dt_rank"] = self.dt_rank
        found = [f"ssm_cfg.{line}" for line in at_least(1, sizes)]
        if not 0 < self.dt_min <= self.dt_max < math.inf:
            found.append(
                f"ssm_cfg.dt_min: {self.dt_min} was given; it must be above 0 and at most dt_max "
                f"({self.dt_max}), which must be finite"
            )
        if self.dt_init not in ("random", "constant"):
            found.append(
                f"ssm_cfg.dt_init: {self.dt_init!r} was given; it must be random or constant"
            )
        positive = {"dt_scale": self.dt_scale, "dt_init_floor": self.dt_init_floor}
        found += [
            f"ssm_cfg.{name}: {value} was given; it must be a finite number above 0"
            for name, value in positive.items()
            if not 0 < value < math.inf
        ]
        raise_all(found)


@dataclass(frozen=True, kw_only=True)
class MambaModelConfig:
    """Sizes and constants of a Mamba model, under the names that Nanotron gives them.

    Raises:
        ValueError: one line for each problem: field, value given, what is needed.
    """

    is_mamba_config: bool = True
    """Marks a YAML mapping as this class; always true."""
    d_model: int = 2560
    """Width of the residual stream, in features."""
    num_hidden_layers: int = 64
    """Blocks."""
    vocab_size: int = 50277
    """Token numbers that exist, without padding."""
    ssm_cfg: SSMConfig | None = None
    """The state space of each block; None: all its defaults."""
    rms_norm: bool = True
    """True: RMSNorm before each mixer; False: LayerNorm. The last norm is an RMSNorm."""
    fused_add_norm: bool = True
    """No effect: a choice of kernels."""
    residual_in_fp32: bool = True
    """True: the residual stream is float32, also in a narrower model."""
    pad_vocab_size_multiple: int = 8
    """No effect, as in Nanotron: `model.make_vocab_size_divisible_by` pads the vocabulary."""
    pad_token_id: int | None = None
    """Token number of padding; no effect: padded positions carry no label."""
    bos_token_id: int | None = None
    """Token number of the beginning of a text; recorded for export, no layer reads it."""
    eos_token_id: int | None = None
    """Token number of the end of a text; generation stops on it, no layer reads it."""
    dtype: str = "float32"
    """No effect: `model.dtype` is the number format of parameters."""
    rms_norm_eps: float = 1e-5
    """Added to the mean square inside every norm."""
    tie_word_embeddings: bool = True
    """True: the head is the embedding's own matrix, as in Nanotron."""
    use_doc_masking: bool = False
    """True: state and convolution begin again with each document of a sample."""

    def __post_init__(self) -> None:
        """Check all fields at once."""
        names = ("d_model", "num_hidden_layers", "vocab_size", "pad_vocab_size_multiple")
        found = at_least(1, {name: getattr(self, name) for name in names})
        if not 0 < self.rms_norm_eps < math.inf:
            found.append(
                f"rms_norm_eps: {self.rms_norm_eps} was given; it must be a finite number above 0"
            )
        raise_all([*found, *marker_problems(self, "is_mamba_config")])

    @property
    def ssm(self) -> SSMConfig:
        """The state space, with None filled in."""
        return self.ssm_cfg or SSMConfig()

    @property
    def channels(self) -> int:
        """Channels of each mixer."""
        return self.ssm.channels or self.ssm.expand * self.d_model

    @property
    def step_rank(self) -> int:
        """Rank of the step's projection, with auto filled in."""
        rank = self.ssm.dt_rank
        return -(-self.d_model // 16) if rank == "auto" else rank

    @property
    def cut_sizes(self) -> dict[str, int]:
        """What tp cuts, by its key."""
        return {"d_model * ssm_cfg.expand": self.channels}

    @property
    def hidden_size(self) -> int:
        """Width of the residual stream, in features."""
        return self.d_model

    @property
    def num_attention_heads(self) -> int:
        """What tp cuts: channels."""
        return self.channels

    @property
    def kv_heads(self) -> int:
        """The same."""
        return self.channels

    @property
    def rope_scaling(self) -> RopeScaling | None:
        """None: there are no positions."""
        return None

    def small(self, sizes: SmallSizes) -> Self:
        """Return a narrow copy of the same structure."""
        ssm, width = self.ssm, sizes.heads * sizes.head_dim
        return replace(
            self,
            d_model=width,
            num_hidden_layers=sizes.layers,
            vocab_size=sizes.vocab_size,
            ssm_cfg=replace(
                ssm,
                d_state=min(ssm.d_state, SMALL_STATE),
                channels=None if ssm.channels is None else ssm.expand * width,
                dt_rank=ssm.dt_rank if ssm.dt_rank == "auto" else min(ssm.dt_rank, SMALL_STATE),
            ),
        )

    @property
    def decoder(self) -> DecoderSpec:
        """What the names above mean."""
        ssm = self.ssm
        mixer = MambaSpec(
            channels=self.channels,
            state=ssm.d_state,
            step_rank=self.step_rank,
            width=ssm.d_conv,
            conv_bias=ssm.conv_bias,
            bias=ssm.bias,
            separate_documents=self.use_doc_masking,
            steps=FirstSteps(ssm.dt_min, ssm.dt_max, ssm.dt_init_floor),
            step_scale=ssm.dt_scale,
            step_init=ssm.dt_init,
        )
        kind: Any = "rms_norm" if self.rms_norm else "layer_norm"
        norm = NormSpec(kind=kind, eps=self.rms_norm_eps)
        block = BlockSpec(mixer=mixer, feed_forward=None, norm=norm)
        return DecoderSpec(
            hidden_size=self.d_model,
            vocab_size=self.vocab_size,
            max_position_embeddings=LONGEST,
            blocks=(block,) * self.num_hidden_layers,
            norm=NormSpec(eps=self.rms_norm_eps),
            tie_word_embeddings=self.tie_word_embeddings,
            residual_in_fp32=self.residual_in_fp32,
            bos_token_id=self.bos_token_id,
            eos_token_id=self.eos_token_id,
        )


def step_problems(low: float, high: float, floor: float, limits: Sequence[float]) -> list[str]:
    """Name bounds of the steps of a Mamba-2 that are none.

    Args:
        low: time_step_min.
        high: time_step_max.
        floor: time_step_floor.
        limits: time_step_limit.
    """
    found = []
    if not 0 < low <= high < math.inf:
        found.append(
            f"time_step_min: {low} was given; it must be above 0 and at most "
            f"time_step_max ({high}), which must be finite"
        )
    if not 0 < floor < math.inf:
        found.append(f"time_step_floor: {floor} was given; it must be a finite number above 0")
    if len(limits) != 2 or not 0 <= limits[0] <= limits[1]:
        found.append(
            f"time_step_limit: {list(limits)} was given; it must be two numbers from 0, the "
            "smaller one first"
        )
    return found
