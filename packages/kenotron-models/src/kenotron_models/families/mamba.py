"""Mamba, and Hugging Face's names for it."""

from __future__ import annotations

import math
from typing import Any

from kenotron_models.families.fields import raise_all
from kenotron_models.families.mamba_config import MambaModelConfig, SSMConfig, step_problems
from kenotron_models.family import Family, FamilyConfig, HuggingFace, Values
from kenotron_models.hf_tensors import Fused, Names, Outside
from kenotron_models.mamba import MambaSpec
from kenotron_models.spec import DecoderSpec

BACKBONE = Outside(
    blocks="backbone.layers", embedding="backbone.embeddings.weight", norm="backbone.norm_f"
)
"""What Hugging Face's state-space models call their tensors outside of blocks."""
_NAMES: Names = {
    "mamba_norm": Fused("norm"),
    "mamba": Fused("mixer"),
    "mamba.in_proj": Fused("mixer.in_proj"),
    "mamba.conv": Fused("mixer.conv1d"),
    "mamba.x_proj": Fused("mixer.x_proj"),
    "mamba.dt_proj": Fused("mixer.dt_proj"),
    "mamba.out_proj": Fused("mixer.out_proj"),
}
_TOKENS = ("pad_token_id", "bos_token_id", "eos_token_id")


def sizes_problems(values: Values, names: tuple[str, ...]) -> None:
    """Raise ValueError for sizes of a config.json that are no whole numbers from 1."""
    wrong = [
        f"{name}: {values.get(name)!r} was given; it must be a whole number from 1"
        for name in names
        if type(values.get(name)) is not int or values[name] < 1
    ]
    if wrong:
        raise ValueError("\n".join(wrong))


def tokens_from_hf(values: Values) -> dict[str, Any]:
    """Return the numbers of special tokens; of several ends the first."""
    found = {name: values[name] for name in _TOKENS}
    ends = found["eos_token_id"]
    found["eos_token_id"] = ends[0] if isinstance(ends, list | tuple) and ends else ends
    return found


def backbone_to_hf(hf: HuggingFace, config: FamilyConfig) -> dict[str, Any]:
    """The keys of config.json that Hugging Face's state-space models share."""
    spec = config.decoder
    return {
        "architectures": [hf.architecture],
        "model_type": hf.model_type,
        "hidden_size": spec.hidden_size,
        "num_hidden_layers": spec.num_hidden_layers,
        "vocab_size": spec.vocab_size,
        "layer_norm_epsilon": spec.norm.eps,
        "residual_in_fp32": spec.residual_in_fp32,
        "tie_word_embeddings": spec.tie_word_embeddings,
        "hidden_act": "silu",
        "use_cache": True,
        "pad_token_id": getattr(config, "pad_token_id", None),
        "bos_token_id": spec.bos_token_id,
        "eos_token_id": spec.eos_token_id,
    }


def _read(values: Values) -> MambaModelConfig:
    names = (
        "hidden_size",
        "num_hidden_layers",
        "vocab_size",
        "state_size",
        "conv_kernel",
        "expand",
    )
    given = values.get("intermediate_size")
    sizes_problems(values, names if given is None else (*names, "intermediate_size"))
    low, high, floor = (float(values[f"time_step_{each}"]) for each in ("min", "max", "floor"))
    raise_all(step_problems(low, high, floor, (0.0, math.inf)))
    usual = values["expand"] * values["hidden_size"]
    return MambaModelConfig(
        d_model=values["hidden_size"],
        num_hidden_layers=values["num_hidden_layers"],
        vocab_size=values["vocab_size"],
        rms_norm_eps=float(values["layer_norm_epsilon"]),
        residual_in_fp32=values["residual_in_fp32"],
        tie_word_embeddings=values["tie_word_embeddings"],
        **tokens_from_hf(values),
        ssm_cfg=SSMConfig(
            d_state=values["state_size"],
            d_conv=values["conv_kernel"],
            expand=values["expand"],
            channels=None if given == usual else given,
            bias=values["use_bias"],
            conv_bias=values["use_conv_bias"],
            dt_rank=values["time_step_rank"],
            dt_scale=values["time_step_scale"],
            dt_min=values["time_step_min"],
            dt_max=values["time_step_max"],
            dt_init=values["time_step_init_scheme"],
            dt_init_floor=values["time_step_floor"],
        ),
    )


def _write(spec: DecoderSpec) -> dict[str, Any]:
    mixer = spec.blocks[0].mixer
    if not isinstance(mixer, MambaSpec):
        raise ValueError("a mamba of Hugging Face has a selective state space in each block")
    return {
        "state_size": mixer.state,
        "conv_kernel": mixer.width,
        "expand": max(mixer.channels // spec.hidden_size, 1),
        "intermediate_size": mixer.channels,
        "use_bias": mixer.bias,
        "use_conv_bias": mixer.conv_bias,
        "time_step_rank": mixer.step_rank,
        "time_step_scale": mixer.step_scale,
        "time_step_min": mixer.steps.low,
        "time_step_max": mixer.steps.high,
        "time_step_init_scheme": mixer.step_init,
        "time_step_floor": mixer.steps.floor,
    }


MAMBA = Family(
    marker="is_mamba_config",
    config=MambaModelConfig,
    hf=HuggingFace(
        model_type="mamba",
        architecture="MambaForCausalLM",
        defaults={
            "state_size": 16,
            "conv_kernel": 4,
            "expand": 2,
            "layer_norm_epsilon": 1e-5,
            "residual_in_fp32": True,
            "tie_word_embeddings": True,
            "use_bias": False,
            "use_conv_bias": True,
            "time_step_rank": "auto",
            "time_step_scale": 1.0,
            "time_step_min": 0.001,
            "time_step_max": 0.1,
            "time_step_init_scheme": "random",
            "time_step_floor": 1e-4,
            "pad_token_id": 0,
            "bos_token_id": 0,
            "eos_token_id": 0,
        },
        only={"hidden_act": ("silu",)},
        read=_read,
        write=_write,
        shared=backbone_to_hf,
        names=_NAMES,
        outside=BACKBONE,
    ),
)
