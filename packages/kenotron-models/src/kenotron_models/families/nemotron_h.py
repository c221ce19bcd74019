"""Nemotron-H, and Hugging Face's names for it."""

from __future__ import annotations

import math
from typing import Any

from kenotron_models.attention import AttentionSpec
from kenotron_models.experts import ExpertsSpec
from kenotron_models.families.fields import raise_all
from kenotron_models.families.layer_pattern import LETTERS, pattern_of, pattern_problems
from kenotron_models.families.mamba import BACKBONE, sizes_problems, tokens_from_hf
from kenotron_models.families.mamba2 import state_space_to_hf
from kenotron_models.families.nemotron_h_config import NemotronHConfig
from kenotron_models.family import Family, FamilyConfig, HuggingFace, Values
from kenotron_models.hf_tensors import Fused, Names, Stacked
from kenotron_models.mamba2 import Mamba2Spec
from kenotron_models.mlp import MLPSpec
from kenotron_models.spec import DecoderSpec

_SIZES = (
    "hidden_size", "vocab_size", "max_position_embeddings", "num_attention_heads", "head_dim",
    "num_key_value_heads", "intermediate_size", "mamba_num_heads", "mamba_head_dim",
    "ssm_state_size", "n_groups", "conv_kernel", "chunk_size", "n_routed_experts",
    "num_experts_per_tok", "moe_intermediate_size", "n_shared_experts",
    "moe_shared_expert_intermediate_size", "n_group", "topk_group",
)  # fmt: skip
_CHOICES = (
    "layer_norm_epsilon", "residual_in_fp32", "use_conv_bias", "use_bias", "time_step_min",
    "time_step_max", "time_step_floor", "norm_topk_prob", "routed_scaling_factor",
)  # fmt: skip
LEAST_STEP = 1e-30
"""What is written as the smallest step where there is none: theirs takes its logarithm."""
_LETTER_OF: dict[type[Any], str] = {
    Mamba2Spec: "M",
    AttentionSpec: "*",
    MLPSpec: "-",
    ExpertsSpec: "E",
}
_NAMES: Names = {
    **{f"{part}_norm": Fused("norm") for part in ("mamba2", "attention", "mlp", "experts")},
    "mamba2": Fused("mixer"),
    "mamba2.in_proj": Fused("mixer.in_proj"),
    "mamba2.conv": Fused("mixer.conv1d"),
    "mamba2.norm": Fused("mixer.norm"),
    "mamba2.out_proj": Fused("mixer.out_proj"),
    "attention.qkv": Fused("mixer.q_proj", "mixer.k_proj", "mixer.v_proj"),
    "attention.out": Fused("mixer.o_proj"),
    "mlp.up": Fused("mixer.up_proj"),
    "mlp.down": Fused("mixer.down_proj"),
    "experts.router": Fused("mixer.gate", choice_bias="e_score_correction_bias"),
    "experts.up": Stacked("mixer.experts.{e}.up_proj"),
    "experts.down": Stacked("mixer.experts.{e}.down_proj"),
    "experts.shared.up": Fused("mixer.shared_experts.up_proj"),
    "experts.shared.down": Fused("mixer.shared_experts.down_proj"),
}


def _read(values: Values) -> NemotronHConfig:
    sizes_problems(values, _SIZES)
    kinds, pattern = values.get("layers_block_type"), values.get("hybrid_override_pattern")
    pattern = str(pattern or "") if kinds is None else pattern_of(kinds, "layers_block_type")
    if kinds is None and not pattern:
        raise ValueError("layers_block_type: nothing was given; it must name each layer's kind")
    raise_all(pattern_problems("hybrid_override_pattern", pattern, "".join(LETTERS)))
    least = float(values["time_step_min"])
    return NemotronHConfig(
        layers=pattern,
        **{name: values[name] for name in (*_SIZES, *_CHOICES)},
        **tokens_from_hf(values),
        tie_word_embeddings=False,  # transformers never ties them, whatever the key says
        time_step_limit=(0.0 if least <= LEAST_STEP else least, math.inf),
    )


def _shared(hf: HuggingFace, config: FamilyConfig) -> dict[str, Any]:
    spec = config.decoder
    return {
        "architectures": [hf.architecture],
        "model_type": hf.model_type,
        "hidden_size": spec.hidden_size,
        "vocab_size": spec.vocab_size,
        "max_position_embeddings": spec.max_position_embeddings,
        "layer_norm_epsilon": spec.norm.eps,
        "residual_in_fp32": spec.residual_in_fp32,
        "tie_word_embeddings": False,
        "use_cache": True,
        "pad_token_id": getattr(config, "pad_token_id", None),
        "bos_token_id": spec.bos_token_id,
        "eos_token_id": spec.eos_token_id,
    }


def _write(spec: DecoderSpec) -> dict[str, Any]:
    """Keys of the parts; of a kind that no layer has, the defaults of theirs."""
    letters, parts = [], dict[str, Any]()
    for block in spec.blocks:
        kinds = [_LETTER_OF.get(type(part), "") for part in block.parts]
        if len(kinds) != 1 or not kinds[0]:
            raise ValueError(
                "a nemotron_h of Hugging Face has in each layer one of Mamba-2, attention, a "
                "feed-forward and experts"
            )
        letters.append(kinds[0])
        parts[kinds[0]] = block.parts[0]
    found: dict[str, Any] = {"layers_block_type": [LETTERS[letter] for letter in letters]}
    for letter, keys in _KEYS.items():
        if letter in parts:
            found |= keys(parts[letter])
    return found


def _mamba_keys(mixer: Mamba2Spec) -> dict[str, Any]:
    low, high = mixer.step_limits
    if high != math.inf:
        raise ValueError(
            f"time_step_limit: steps of a nemotron_h of Hugging Face have no upper limit, but "
            f"{high} was given"
        )
    return {
        **state_space_to_hf(mixer),
        "time_step_min": low or LEAST_STEP,  # bounds all steps there, not only the first
        "mamba_num_heads": mixer.heads,
        "mamba_head_dim": mixer.head_dim,
        "ssm_state_size": mixer.state,
        "use_bias": mixer.bias,
    }


def _attention_keys(mixer: AttentionSpec) -> dict[str, Any]:
    if mixer.rope is not None or mixer.window is not None or mixer.qkv_bias or mixer.qk_norm:
        raise ValueError(
            "attention of a nemotron_h of Hugging Face has neither positions nor a window, biases "
            "or norms"
        )
    return {
        "num_attention_heads": mixer.heads,
        "num_key_value_heads": mixer.kv_heads,
        "head_dim": mixer.head_dim,
    }


def _mlp_keys(mlp: MLPSpec) -> dict[str, Any]:
    if mlp.gated or mlp.activation != "relu2" or mlp.bias:
        raise ValueError(
            "a feed-forward of a nemotron_h of Hugging Face has no gate, no biases and relu2"
        )
    return {"intermediate_size": mlp.features, "mlp_hidden_act": "relu2"}


def _expert_keys(experts: ExpertsSpec) -> dict[str, Any]:
    if experts.gated or experts.activation != "relu2" or not experts.shared_features:
        raise ValueError(
            "experts of a nemotron_h of Hugging Face have no gate, relu2 and a shared expert"
        )
    router = experts.router
    return {
        "n_routed_experts": router.experts,
        "num_experts_per_tok": router.top_k,
        "moe_intermediate_size": experts.features,
        "n_shared_experts": 1,
        "moe_shared_expert_intermediate_size": experts.shared_features,
        "n_group": router.groups,
        "topk_group": router.top_groups,
        "norm_topk_prob": router.normalize,
        "routed_scaling_factor": router.scale,
        "mlp_hidden_act": "relu2",
    }


_KEYS = {"M": _mamba_keys, "*": _attention_keys, "-": _mlp_keys, "E": _expert_keys}

NEMOTRON_H = Family(
    marker="is_nemotron_h_config",
    config=NemotronHConfig,
    hf=HuggingFace(
        model_type="nemotron_h",
        architecture="NemotronHForCausalLM",
        defaults={
            "max_position_embeddings": 4096,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "intermediate_size": 21504,
            "mamba_num_heads": 128,
            "mamba_head_dim": 64,
            "ssm_state_size": 128,
            "n_groups": 8,
            "conv_kernel": 4,
            "chunk_size": 128,
            "layer_norm_epsilon": 1e-5,
            "residual_in_fp32": False,
            "tie_word_embeddings": False,
            "use_conv_bias": True,
            "use_bias": False,
            "time_step_min": 0.001,
            "time_step_max": 0.1,
            "time_step_floor": 1e-4,
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 7688,
            "n_shared_experts": 1,
            "moe_shared_expert_intermediate_size": 7688,
            "n_group": 1,
            "topk_group": 1,
            "norm_topk_prob": True,
            "routed_scaling_factor": 1.0,
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
        read=_read,
        write=_write,
        shared=_shared,
        names=_NAMES,
        outside=BACKBONE,
        ties=False,
    ),
)
