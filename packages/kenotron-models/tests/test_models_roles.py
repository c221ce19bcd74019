"""Every parameter of every family has the role that its layer declares."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kenotron_dist import Axis
from kenotron_dist.init import Constant, Normal
from kenotron_dist.placement import parameter_layouts
from kenotron_models import Build, LayerStack, build_decoder, standard_init
from kenotron_models.families import (
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
    Starcoder2Config,
)

SIZES = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "vocab_size": 60, "max_position_embeddings": 8,
}  # fmt: skip
LLAMA = {
    "attention_norm.weight": "norm",
    "attention.qkv.weight": "hidden",
    "attention.out.weight": "residual",
    "mlp_norm.weight": "norm",
    "mlp.gate_up.weight": "hidden",
    "mlp.down.weight": "residual",
}
STARCODER2 = {
    "attention_norm.weight": "norm",
    "attention_norm.bias": "norm_bias",
    "attention.qkv.weight": "hidden",
    "attention.qkv.bias": "bias",
    "attention.out.weight": "residual",
    "attention.out.bias": "bias",
    "mlp_norm.weight": "norm",
    "mlp_norm.bias": "norm_bias",
    "mlp.up.weight": "hidden",
    "mlp.up.bias": "bias",
    "mlp.down.weight": "residual",
    "mlp.down.bias": "bias",
}
QK_NORM = {"attention.q_norm.weight": "norm", "attention.k_norm.weight": "norm"}
ENDS = {"embedding.weight": "embedding", "norm.weight": "norm", "head.weight": "output"}
FAMILIES = [
    (LlamaConfig(**SIZES), LLAMA, ENDS),
    (MistralConfig(**SIZES), LLAMA, ENDS),
    (
        Qwen2Config(**SIZES, attention_bias=True),
        {**LLAMA, "attention.qkv.bias": "bias"},
        ENDS,
    ),
    (Qwen3Config(**SIZES), {**LLAMA, **QK_NORM}, ENDS),
    (
        Starcoder2Config(**SIZES),
        STARCODER2,
        {
            "embedding.weight": "embedding",
            "norm.weight": "norm",
            "norm.bias": "norm_bias",
            "head.weight": "embedding",  # tied
        },
    ),
    (
        replace(
            Starcoder2Config(**SIZES, tie_word_embeddings=False),
            use_position_embeddings=True,
            use_rotary_embeddings=False,
        ),
        STARCODER2,
        {**ENDS, "norm.bias": "norm_bias", "embedding.positions": "embedding"},
    ),
]


def layouts_of(config, tp=1):
    axis = Axis("tp", 0, tuple(range(tp)))
    return parameter_layouts(LayerStack(build_decoder(config, Build(axis))), {"tp": tp})


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize(("config", "layer", "ends"), FAMILIES)
def test_roles_of_all_parameters_of_a_family(config, layer, ends, tp):
    layers = {f"layers.{i}.{name}": role for i in range(2) for name, role in layer.items()}
    found = {path: layout.role for path, layout in layouts_of(config, tp).items()}
    assert found == {**layers, **ends}


@pytest.mark.parametrize("config", [each[0] for each in FAMILIES])
def test_first_values_are_chosen_by_role(config):
    for scaling, factors in (("NONE", (1, 1)), ("NUM_LAYERS", (2, 2)), ("LAYER_INDEX", (2, 4))):
        rule = standard_init(config, 0.5, scaling)
        for layout in layouts_of(config).values():
            number = int(layout.name.split(".")[1]) if layout.role == "residual" else 0
            root = {1: 1.0, 2: 2**0.5, 4: 2.0}[factors[number]]
            if scaling == "NUM_LAYERS":
                root = 2.0
            wanted = {
                "norm": Constant(1.0),
                "norm_bias": Constant(0.0),
                "bias": Constant(0.0),
                "residual": Normal(0.5 / root),
            }
            assert rule(layout) == wanted.get(layout.role, Normal(0.5)), layout.name


def test_a_role_without_first_values_is_an_error():
    config = FAMILIES[0][0]
    layout = layouts_of(config)["layers.0.attention.out.weight"]
    other = replace(layout, name="temperature", shape=(1,), role="other")
    words = r"parameter 'temperature' of shape \[1\] has the role 'other', which has no first value"
    with pytest.raises(ValueError, match=words):
        standard_init(config, 0.5)(other)
    alone = replace(layout, name="tail.out.weight")
    assert standard_init(config, 0.5)(alone) == Normal(0.25)
    with pytest.raises(ValueError, match="'tail.out.weight' is in no numbered layer"):
        standard_init(config, 0.5, "LAYER_INDEX")(alone)
