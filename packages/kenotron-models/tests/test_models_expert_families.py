"""Families with experts: what their configs refuse, and how Hugging Face's keys come and go."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from kenotron_models import SmallSizes
from kenotron_models.families import (
    DeepseekV3Config,
    Glm4MoEConfig,
    MixtralConfig,
    MoEConfig,
    OLMoEConfig,
    Qwen2Config,
    Qwen3MoEConfig,
    upcycled_config,
)
from kenotron_models.hf import (
    config_from_hf,
    config_to_hf,
    is_superfluous,
    not_carried,
    stays_fp32,
)
from kenotron_models.layers import AttentionSpec, ExpertsSpec, MLPSpec, RopeScaling

SIZES = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "vocab_size": 61, "max_position_embeddings": 64,
}  # fmt: skip
GLM = {
    **SIZES, "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
    "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1,
}  # fmt: skip
LATENT = {
    **GLM, "q_lora_rank": 12, "kv_lora_rank": 8, "qk_nope_head_dim": 4, "qk_rope_head_dim": 4,
    "v_head_dim": 4,
}  # fmt: skip
NO_BALANCE = {"router_aux_loss_coef": 0.0}
YARN = RopeScaling(
    factor=4.0, rope_type="yarn", original_max_position_embeddings=16, attention_factor=1.0
)


@pytest.mark.parametrize(
    ("kind", "sizes", "keys", "said"),
    [
        (DeepseekV3Config, LATENT, {"hidden_act": "gelu"}, "it must be 'silu'"),
        (DeepseekV3Config, LATENT, {"n_group": 3}, "must divide n_routed_experts"),
        (DeepseekV3Config, LATENT, {"topk_group": 3}, "must not be above n_group"),
        (DeepseekV3Config, LATENT, {"num_experts_per_tok": 5}, "groups have 4 experts"),
        (DeepseekV3Config, LATENT, {"first_k_dense_replace": 3}, "some layer must have experts"),
        (DeepseekV3Config, LATENT, {"v_head_dim": 9}, "must not be above qk_nope_head_dim"),
        (DeepseekV3Config, LATENT, {"qk_rope_head_dim": 3}, "it must be an even number"),
        (DeepseekV3Config, LATENT, {"q_lora_rank": 0}, "at least 1, or null"),
        (DeepseekV3Config, LATENT, {"n_shared_experts": -1}, "it must be at least 0"),
        (DeepseekV3Config, LATENT, {"routed_scaling_factor": 0.0}, "a finite number above 0"),
        (MixtralConfig, SIZES, {"num_experts_per_tok": 9}, "be above num_local_experts (8)"),
        (MixtralConfig, SIZES, {"router_aux_loss_coef": -1.0}, "finite and not negative"),
        (Qwen3MoEConfig, SIZES, {"decoder_sparse_step": 4}, "no layer has experts"),
        (OLMoEConfig, SIZES, {"num_experts_per_tok": 65}, "be above num_experts (64)"),
        (OLMoEConfig, SIZES, {"router_aux_loss_coef": -1.0}, "finite and not negative"),
        (OLMoEConfig, SIZES, {"is_olmoe_config": False}, "is_olmoe_config: false was given"),
        (
            Glm4MoEConfig,
            GLM,
            {"partial_rotary_factor": 0.4},
            "of the 8 features .* makes 3",
        ),
        (Glm4MoEConfig, GLM, {"partial_rotary_factor": 1.5}, "partial_rotary_factor: 1.5 was"),
        (Glm4MoEConfig, GLM, {"n_group": 3}, "must divide n_routed_experts"),
        (Glm4MoEConfig, GLM, {"first_k_dense_replace": 3}, "some layer must have experts"),
        (Glm4MoEConfig, GLM, {"num_key_value_heads": 3}, "it must divide num_attention_heads"),
    ],
    ids=str,
)
def test_what_does_not_fit_is_named(
    kind: type[Any], sizes: dict[str, Any], keys: dict[str, Any], said: str
) -> None:
    with pytest.raises(ValueError, match=said.replace("(", r"\(").replace(")", r"\)")):
        kind(**{**sizes, **keys})


def test_a_section_without_layers_is_a_dense_model() -> None:
    section = MoEConfig(layers=(), shared_expert_intermediate_size=0)
    blocks = Qwen2Config(**SIZES, moe_config=section).decoder.blocks
    assert all(isinstance(block.feed_forward, MLPSpec) for block in blocks)


def test_a_scale_of_yarn_goes_to_hugging_face_and_comes_back() -> None:
    width = 8**-0.5
    more = 0.1 * 1.0 * 1.3862943611198906 + 1.0  # ln 4
    config = DeepseekV3Config(**LATENT, rope_scaling=YARN, attention_scale=width * more * more)
    values = config_to_hf(config)
    assert values["rope_parameters"]["mscale_all_dim"] == 1.0
    assert config_from_hf(values).decoder.blocks[0].mixer == config.decoder.blocks[0].mixer


def test_an_export_has_the_names_of_its_keys() -> None:
    """A Qwen2 whose experts a Mixtral could compute is written under neither's names."""
    section = MoEConfig(num_experts=4, moe_intermediate_size=16, norm_topk_prob=True)
    with pytest.raises(ValueError, match="a qwen2_moe has a shared expert"):
        config_to_hf(Qwen2Config(**SIZES, moe_config=section))


def test_layers_that_predict_further_tokens_are_left_out() -> None:
    latent, mixtral = DeepseekV3Config(**LATENT), MixtralConfig(**SIZES)
    assert is_superfluous("model.layers.3.self_attn.o_proj.weight", latent)
    assert is_superfluous("model.layers.3.eh_proj.weight", Glm4MoEConfig(**GLM))
    assert not is_superfluous("model.layers.2.self_attn.o_proj.weight", latent)
    assert not is_superfluous("model.layers.3.self_attn.o_proj.weight", mixtral)


@pytest.mark.parametrize(
    ("model_type", "keys", "said"),
    [
        ("olmoe", {"clip_qkv": 8.0}, "clip_qkv: 8.0 was given; a olmoe must have null here"),
        ("olmoe", {"attention_bias": True}, "attention_bias: True"),
        ("olmoe", {"partial_rotary_factor": 0.5}, "partial_rotary_factor: 0.5"),
        ("glm4_moe", {"partial_rotary_factor": 0.4}, "partial_rotary_factor: 0.4"),
        ("glm4_moe", {"hidden_act": "gelu"}, "hidden_act: 'gelu'"),
    ],
)
def test_keys_of_hugging_face_that_are_not_computed_are_named(
    model_type: str, keys: dict[str, Any], said: str
) -> None:
    values = {**SIZES, "model_type": model_type, "num_key_value_heads": 2, **keys}
    with pytest.raises(ValueError, match=said):
        config_from_hf(values)


def test_the_share_of_features_that_turn_is_read_from_either_spelling() -> None:
    values = {**SIZES, "model_type": "glm4_moe", "num_key_value_heads": 2, "head_dim": 16}
    for keys, share in (
        ({}, 0.5),
        ({"partial_rotary_factor": 0.25}, 0.25),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.25}}, 0.25),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 1.0}}, 1.0),
    ):
        config = config_from_hf({**values, **keys})
        mixer = config.decoder.blocks[0].mixer
        assert isinstance(mixer, AttentionSpec) and mixer.rope is not None
        assert (mixer.rope.share, mixer.rope.features(16)) == (share, 16 * share)
        assert config_from_hf(config_to_hf(config)).decoder == config.decoder


def test_biases_of_the_choice_stay_fp32() -> None:
    assert stays_fp32("layers.1.experts.router.choice_bias")
    assert not stays_fp32("layers.1.experts.router.weight")


@pytest.mark.parametrize("ep", [1, 3, 4])
def test_a_small_copy_has_experts_for_its_ranks(ep: int) -> None:
    sizes = SmallSizes(
        layers=3, period=1, heads=4, kv_heads=4, head_dim=8, vocab_size=29, tp=1, sequence=64,
        small_sequence=16, ep=ep,
    )  # fmt: skip
    whole = MixtralConfig(**SIZES, num_local_experts=12, num_experts_per_tok=3)
    small = whole.small(sizes)
    assert small.num_local_experts % ep == 0 and small.num_local_experts <= 12
    experts = small.decoder.blocks[0].feed_forward
    assert isinstance(experts, ExpertsSpec) and experts.router.top_k == 3
    latent = DeepseekV3Config(**{**LATENT, "n_routed_experts": 12}).small(sizes)
    assert latent.n_routed_experts % ep == 0 == latent.n_routed_experts % latent.n_group
    glm = Glm4MoEConfig(**{**GLM, "n_routed_experts": 12, "head_dim": 80}).small(sizes)
    assert glm.n_routed_experts % ep == 0 and glm.partial_rotary_factor == 0.5
    assert OLMoEConfig(**SIZES, num_experts=12).small(sizes).num_experts % ep == 0


def test_what_has_no_copies_with_experts_is_refused() -> None:
    with pytest.raises(ValueError, match="a Mixtral like this has no copies with experts"):
        upcycled_config(MixtralConfig(**SIZES), 4, 2)
    dense = Qwen2Config(**SIZES, attention_bias=True)
    sparse = upcycled_config(dense, 4, 2)
    assert isinstance(sparse, Qwen2Config) and replace(sparse, moe_config=None) == dense


@pytest.mark.parametrize(
    ("keys", "lost"),
    [
        ({}, ["router_aux_loss_type: sample"]),
        ({"router_aux_loss_type": "micro_batch"}, ["router_aux_loss_type: micro_batch"]),
        ({"router_aux_loss_type": "all_layers"}, []),  # that of transformers
        ({**NO_BALANCE, "expert_capacity_factor": 1.0}, ["expert_capacity_factor: 1.0"]),
        ({**NO_BALANCE, "router_jitter_noise": 0.1}, []),  # Mixtral has a key for it
        ({**NO_BALANCE, "z_loss_enabled": True}, ["z_loss_enabled: True"]),
    ],
)
def test_what_a_training_alone_reads_keeps_no_model_from_its_export(
    keys: dict[str, Any], lost: list[str]
) -> None:
    config = MixtralConfig(**SIZES, **keys)
    assert config_to_hf(config)["model_type"] == "mixtral"
    assert not_carried(config) == lost
    noisy = Qwen3MoEConfig(**SIZES, router_jitter_noise=0.1, **NO_BALANCE)
    assert not_carried(noisy) == ["router_jitter_noise: 0.1"]


@pytest.mark.parametrize("given", [{"a": 1}, "12", [1.0], [True]])
def test_layers_without_experts_are_a_list_of_numbers(given: Any) -> None:
    keys = config_to_hf(Qwen3MoEConfig(**SIZES))
    with pytest.raises(ValueError, match="mlp_only_layers: .* was given; it must be a list of"):
        config_from_hf(keys | {"mlp_only_layers": given})
