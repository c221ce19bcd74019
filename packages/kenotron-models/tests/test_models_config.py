"""Every sentence that the sizes of a model can say."""

import pytest

from kenotron_models.families import LlamaConfig
from kenotron_models.families.keys import key_problems
from kenotron_models.rope_scaling import RopeScaling

SMALL = {"hidden_size": 16, "num_attention_heads": 4, "num_hidden_layers": 2}


def test_defaults_are_a_valid_model():
    config = LlamaConfig()
    assert (config.kv_heads, config.decoder.blocks[0].mixer.head_dim) == (32, 128)
    assert key_problems(config) == config.problems() == []


def test_grouped_heads():
    config = LlamaConfig(**SMALL, num_key_value_heads=2)
    assert (config.kv_heads, config.decoder.blocks[0].mixer.head_dim) == (2, 4)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"hidden_size": 0}, "hidden_size: 0 was given; it must be at least 1"),
        ({"vocab_size": -1}, "vocab_size: -1 was given; it must be at least 1"),
        ({"num_key_value_heads": 0}, "num_key_value_heads: 0 was given; it must be at least 1"),
        ({"rms_norm_eps": 0.0}, "rms_norm_eps: 0.0 was given; it must be a finite number above 0"),
        ({"rope_theta": float("inf")}, "rope_theta: inf was given"),
        (
            {"num_key_value_heads": 3},
            "num_key_value_heads: 3 was given; it must divide num_attention_heads (4)",
        ),
        (
            {"hidden_size": 18},
            "hidden_size: 18 was given; it must be a multiple of num_attention_heads (4); 20 would",
        ),
        (
            {"hidden_size": 20},
            "over 4 heads each has 5 features, and rotary positions need an even number; 24 would",
        ),
        ({"hidden_act": "gelu"}, "hidden_act: 'gelu' was given; it must be 'silu'"),
        (
            {"attn_implementation": "flash"},
            "'flash' was given; it must be one of sdpa, flash_attent",
        ),
        ({"z_loss_coefficient": -1.0}, "z_loss_coefficient: -1.0 was given; it must be finite"),
        ({"is_llama_config": False}, "is_llama_config: false was given; it must be true"),
    ],
)
def test_model_names_what_is_wrong(change, sentence):
    with pytest.raises(ValueError) as caught:
        LlamaConfig(**SMALL | change)
    assert sentence in str(caught.value)


def test_all_problems_come_together():
    with pytest.raises(ValueError) as caught:
        LlamaConfig(hidden_size=0, vocab_size=0, hidden_act="gelu")
    assert len(str(caught.value).splitlines()) == 3


def test_a_rope_scaling_that_shortens_is_refused():
    with pytest.raises(ValueError, match="factor: 0.5 was given; it must be at least 1"):
        RopeScaling(factor=0.5, rope_type="yarn")
