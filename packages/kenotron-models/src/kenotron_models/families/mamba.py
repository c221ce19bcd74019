"""Mamba (Gu and Dao, arXiv 2312.00752): Nanotron's keys, and Hugging Face's names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

from kenotron_models.block import BlockSpec
from kenotron_models.families.hf_keys import keys_from_hf, part_to_hf, table_defaults
from kenotron_models.families.keys import POSITIVE, KeyTable, Rule, key, marker, with_default
from kenotron_models.families.places import in_spec, placed
from kenotron_models.families.state_space_keys import (
    SMALL_STATE,
    StateSpaceKeys,
    few,
    first_step_problems,
    state_space_names,
)
from kenotron_models.family import Family, HuggingFace
from kenotron_models.hf_tensors import Outside
from kenotron_models.mamba import MambaSpec
from kenotron_models.norm import NormSpec
from kenotron_models.small import SmallSizes
from kenotron_models.spec import DecoderSpec
from kenotron_models.state_init import FirstSteps

BACKBONE = Outside(
    blocks="backbone.layers", embedding="backbone.embeddings.weight", norm="backbone.norm_f"
)
"""Names of the tensors outside of blocks in Hugging Face's state-space models."""
RANK = Rule(lambda n: n == "auto" or n >= 1, "it must be at least 1, or auto")


@dataclass(frozen=True, kw_only=True)
class SSMConfig(KeyTable):
    """The selective state space of a Mamba block."""

    d_state: int = key(16, least=1, hf="state_size", at="mamba.state", small=few)
    """Features of the state, for each channel."""
    d_conv: int = key(4, least=1, hf="conv_kernel", at="mamba.width")
    """Width of the convolution, in tokens."""
    expand: int = key(2, least=1, hf=True)
    """Channels over width of the residual stream."""
    channels: int | None = key(None, least=1, hf="intermediate_size", at="mamba.channels")
    """Channels of a mixer, where they are no multiple of the width; None: expand times width."""
    dt_rank: int | Literal["auto"] = key(
        "auto", rule=RANK, hf="time_step_rank", at="mamba.step_rank",
        small=lambda _, rank: rank if rank == "auto" else min(rank, SMALL_STATE),
    )  # fmt: skip
    """Rank of the step's projection; auto: a sixteenth of the width, rounded up."""
    dt_min: float = key(0.001, hf="time_step_min", at="mamba.steps.low")
    """Smallest first step."""
    dt_max: float = key(0.1, hf="time_step_max", at="mamba.steps.high")
    """Largest first step."""
    dt_init: Literal["random", "constant"] = key(
        "random",
        rule=Rule(lambda x: x in ("random", "constant"), "it must be random or constant"),
        hf="time_step_init_scheme",
        at="mamba.step_init",
    )
    """Initialisation of the step's projection: drawn evenly, or all weights the same."""
    dt_scale: float = key(1.0, rule=POSITIVE, hf="time_step_scale", at="mamba.step_scale")
    """Factor of those draws, next to 1/sqrt(dt_rank)."""
    dt_init_floor: float = key(1e-4, rule=POSITIVE, hf="time_step_floor", at="mamba.steps.floor")
    """No first step is below this."""
    conv_bias: bool = key(True, hf="use_conv_bias", at="mamba.conv_bias")
    """True: the convolution has a bias."""
    bias: bool = key(False, hf="use_bias", at="mamba.bias")
    """True: input and output projection have one."""
    use_fast_path: bool = key(True)
    """No effect: a choice of kernels."""

    def problems(self) -> list[str]:
        """Name bounds of steps that are none."""
        return first_step_problems(self.dt_min, self.dt_max, ("dt_min", "dt_max"))

    @classmethod
    def read_hf(cls, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return the channels where they are no multiple of the width."""
        given = values.get("intermediate_size")
        usual = values["expand"] * values["hidden_size"]
        return {"channels": None if given == usual else given}

    @classmethod
    def write_hf(cls, spec: DecoderSpec) -> dict[str, Any]:
        """Return the channels over width. Raises ValueError for other mixers."""
        channels = in_spec(spec, "mamba.channels")
        if not isinstance(channels, int):
            raise ValueError("a mamba of Hugging Face has a selective state space in each block")
        return {"expand": max(channels // spec.hidden_size, 1)}


@dataclass(frozen=True, kw_only=True)
class MambaModelConfig(StateSpaceKeys):
    """Sizes and constants of a Mamba model, under the names that Nanotron gives them."""

    products: ClassVar = {"mamba.channels": "d_model * ssm_cfg.expand"}
    is_mamba_config: bool = marker()
    """Marks a YAML mapping as this class; always true."""
    d_model: int = key(2560, least=1, hf="hidden_size", needed=True, at="hidden_size")
    """Width of the residual stream, in features."""
    num_hidden_layers: int = key(
        64, least=1, hf=True, needed=True, at="num_hidden_layers", small="layers"
    )
    """Blocks."""
    vocab_size: int = with_default(StateSpaceKeys, "vocab_size", 50277)
    ssm_cfg: SSMConfig | None = key(None)
    """The state space of each block; None: all its defaults."""
    rms_norm: bool = key(True)
    """True: RMSNorm before each mixer; False: LayerNorm. The last norm is an RMSNorm."""
    fused_add_norm: bool = key(True)
    """No effect: a choice of kernels."""
    pad_vocab_size_multiple: int = key(8, least=1)
    """No effect, as in Nanotron: `model.make_vocab_size_divisible_by` pads the vocabulary."""
    dtype: str = key("float32")
    """No effect: `model.dtype` is the number format of parameters."""
    rms_norm_eps: float = key(1e-5, rule=POSITIVE, hf="layer_norm_epsilon", at="norm.eps")
    """Added to the mean square inside every norm."""
    tie_word_embeddings: bool = with_default(StateSpaceKeys, "tie_word_embeddings", True)

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
    def hidden_size(self) -> int:
        """Width of the residual stream, in features."""
        return self.d_model

    @property
    def num_attention_heads(self) -> int:
        """Number of channels, which tp cuts."""
        return self.channels

    @property
    def kv_heads(self) -> int:
        """The same."""
        return self.channels

    def small_keys(self, sizes: SmallSizes) -> dict[str, Any]:
        """Return the widths of a narrow copy."""
        ssm, width = self.ssm, sizes.heads * sizes.head_dim
        channels = None if ssm.channels is None else ssm.expand * width
        return {"d_model": width, "ssm_cfg": replace(ssm.small(sizes), channels=channels)}

    @property
    def decoder(self) -> DecoderSpec:
        """Decoder that the names above describe."""
        ssm = self.ssm
        own: dict[str, Any] = {"channels": self.channels, "step_rank": self.step_rank}
        mixer = MambaSpec(
            **placed(ssm, "mamba") | placed(self, "mamba") | own,
            steps=FirstSteps(ssm.dt_min, ssm.dt_max, ssm.dt_init_floor),
        )
        # The kind is that of the norms of blocks; the last norm is made by ``_decoder``.
        kind: Any = "rms_norm" if self.rms_norm else "layer_norm"
        norm = NormSpec(kind=kind, eps=self.rms_norm_eps)
        block = BlockSpec(mixer=mixer, feed_forward=None, norm=norm)
        return self._decoder(self.d_model, (block,) * self.num_hidden_layers, self.rms_norm_eps)

    @classmethod
    def read_hf(cls, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return the state space."""
        return {"ssm_cfg": SSMConfig(**keys_from_hf(SSMConfig, values))}

    @classmethod
    def write_hf(cls, spec: DecoderSpec) -> dict[str, Any]:
        """Return the keys of the state space."""
        return {"hidden_act": "silu", **part_to_hf(SSMConfig, spec)}


MAMBA = Family(
    marker="is_mamba_config",
    config=MambaModelConfig,
    hf=HuggingFace(
        model_type="mamba",
        architecture="MambaForCausalLM",
        defaults={
            **table_defaults(SSMConfig),
            "pad_token_id": 0,
            "bos_token_id": 0,
            "eos_token_id": 0,
        },
        only={"hidden_act": ("silu",)},
        names=state_space_names("mamba", "mixer", "norm", x_proj="x_proj", dt_proj="dt_proj"),
        outside=BACKBONE,
    ),
)
