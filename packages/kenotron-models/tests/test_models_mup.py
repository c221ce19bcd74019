"""Factors of maximal update parametrisation: from roles and whole fans, relative to base widths."""

from dataclasses import fields, replace

import pytest
import torch

from kenotron_dist import Axis, Mesh
from kenotron_dist.init import initialize
from kenotron_dist.placement import materialize, named_parameters, parameter_layouts
from kenotron_models import (
    Build,
    LayerStack,
    Multipliers,
    Mup,
    TransformersSpec,
    build_decoder,
    multipliers_of,
    mup_init,
    mup_scales,
    mup_table,
    standard_init,
)
from kenotron_models.families import (
    Gemma2Config,
    GptOssConfig,
    LlamaConfig,
    MambaModelConfig,
    Qwen3MoEConfig,
    Starcoder2Config,
)

SIZES = {"num_hidden_layers": 2, "vocab_size": 60, "max_position_embeddings": 8}
WIDE = {"hidden_size": 64, "intermediate_size": 160, "num_attention_heads": 8}
BASE = {"hidden_size": 16, "intermediate_size": 40, "num_attention_heads": 2}


def llama(**sizes):
    return LlamaConfig(**{**SIZES, **sizes}).decoder


def scales(wide=WIDE, base=BASE, optimizer="adamw", std=0.02, **rule):
    mup = Mup(base=llama(**{**base, **{k: v for k, v in wide.items() if "layers" in k}}), **rule)
    return mup_scales(llama(**wide), mup, optimizer, std)


def first_values(spec, rule, seed=3):
    stack = LayerStack(build_decoder(spec, Build(Axis.solo("tp"))))
    layouts = parameter_layouts(stack, {"tp": 1, "ep": 1})
    materialize(stack, "cpu")
    view = Mesh.connect().view
    initialize(stack, layouts, view, seed=seed, initializer=rule)
    return {name: p.detach() for name, p in named_parameters(stack).items()}


MUP_350M = {
    "attention.qkv": (1024, 2048, 0.03125, 2.0),
    "attention.out": (1024, 1024, 0.03125, 1.0),
    "mlp.gate_up": (1024, 8192, 0.03125, 8.0),
    "mlp.down": (4096, 1024, 0.0078125, 0.25),
}


def test_nanotrons_rule_by_name_is_that_of_its_mup_350m():
    spec = LlamaConfig(
        hidden_size=1024, intermediate_size=4096, num_hidden_layers=14, num_attention_heads=8,
        num_key_value_heads=4, vocab_size=49152, max_position_embeddings=1024,
    ).decoder  # fmt: skip
    rule = Mup(rule="nanotron")
    found = mup_scales(spec, rule, "adamw", 0.02)
    for layer in range(14):
        for name, (fan_in, fan_out, std, lr) in MUP_350M.items():
            own = found[f"layers.{layer}.{name}.weight"]
            assert (own.fan_in, own.fan_out, own.std) == (fan_in, (fan_out,), (std,))
            assert (own.lr, own.weight_decay) == (lr, 1.0)
    head, table, norm = (found[f"{name}.weight"] for name in ("head", "embedding", "norm"))
    assert (head.std, head.lr) == ((0.03125,), 48.0)
    assert (table.std, table.lr, norm.std, norm.lr) == ((1.0,), 1.0, (), 1.0)
    assert multipliers_of(spec, rule).applied(spec).blocks[0].mixer.scale == pytest.approx(1 / 128)
    assert multipliers_of(spec, rule).logits == 1


def mu_adam(shape, base):
    """Learning rate and weight decay of MuAdam of the package mup 1.0.0, for p of ``shape``."""
    infinite = [n != b for n, b in zip(shape, base, strict=True)]
    if sum(infinite) < 2:  # vectors, tables and readouts
        return 1.0, 1.0
    width = shape[1] / base[1]
    return 1 / width, width


def mu_sgd(shape, base):
    """The same of MuSGD."""
    infinite = [n != b for n, b in zip(shape, base, strict=True)]
    if sum(infinite) < 2:
        width = next((n / b for n, b in zip(shape, base, strict=True) if n != b), 1.0)
        return width, 1 / width
    ratio = (shape[1] / base[1]) / (shape[0] / base[0])
    return 1 / ratio, ratio


@pytest.mark.parametrize(("optimizer", "rule"), [("adamw", mu_adam), ("sgd", mu_sgd)])
@pytest.mark.parametrize("tied", [False, True])
def test_factors_of_groups_are_those_of_the_package_mup(optimizer, rule, tied):
    wide, base = ({**sizes, "tie_word_embeddings": tied} for sizes in (WIDE, BASE))
    found = scales(wide, base, optimizer)
    shapes = [
        {
            layout.name: layout.shape
            for layout in parameter_layouts(
                LayerStack(build_decoder(llama(**sizes), Build(Axis.solo("tp")))), {"tp": 1}
            ).values()
        }
        for sizes in (wide, base)
    ]
    assert found.keys() == shapes[0].keys()
    for name, own in found.items():
        wanted = rule(shapes[0][name], shapes[1][name])
        assert (own.lr, own.weight_decay) == pytest.approx(wanted), name
    assert ("head.weight" in found) is not tied
    assert multipliers_of(llama(**wide), Mup(base=llama(**base))).logits == 0.25  # MuReadout's


def test_only_what_is_inside_the_model_has_the_rates_of_matrices():
    found = scales()
    assert found["layers.0.attention.qkv.weight"].lr == 0.25
    assert found["layers.1.mlp.down.weight"].lr == 0.25
    for name in ("head", "embedding", "norm", "layers.0.mlp_norm"):
        assert found[f"{name}.weight"].lr == 1.0, name


def test_muon_divides_by_the_norm_of_its_own_updates():
    found = scales(optimizer="muon")
    assert found["layers.0.attention.out.weight"].lr == pytest.approx(0.5)  # sqrt(16 / 64)
    assert found["head.weight"].lr == found["norm.weight"].lr == 1.0
    mup, left = Mup(base=llama(**BASE)), r"layers\.\d+\.mlp\..*"
    mixed = mup_scales(llama(**WIDE), mup, "muon", 0.02, adamw=[left])
    assert mixed["layers.0.mlp.down.weight"].lr == 0.25
    assert mixed["layers.0.attention.out.weight"].lr == pytest.approx(0.5)
    wider = scales({**WIDE, "intermediate_size": 640}, optimizer="muon")
    # D -> F: O from 40 to 640, I from 16 to 64; F -> D the other way.
    assert wider["layers.0.mlp.gate_up.weight"].lr == pytest.approx(16**0.5 / 64**0.5)
    small, large = (16 / 40 / 40) ** 0.5, (64 / 640 / 640) ** 0.5
    assert wider["layers.0.mlp.down.weight"].lr == pytest.approx(large / small)


def test_at_base_width_all_is_the_standard_parametrisation_to_the_bit():
    spec = llama(**WIDE)
    mup = Mup(base=spec, base_depth=2, depth_rule="inverse")
    assert multipliers_of(spec, mup).applied(spec) == spec
    for optimizer in ("adamw", "sgd", "muon"):
        found = mup_scales(spec, mup, optimizer, 0.02)
        assert {(each.lr, each.weight_decay) for each in found.values()} == {(1.0, 1.0)}
    ours = first_values(spec, mup_init(spec, found))
    standard = first_values(spec, standard_init(spec, 0.02))
    assert all(torch.equal(ours[name], values) for name, values in standard.items())


def test_draws_of_matrices_shrink_with_the_root_of_their_inputs():
    found = scales(std=0.02)
    assert found["layers.0.attention.qkv.weight"].std == pytest.approx((0.01,) * 3)
    assert found["layers.0.mlp.down.weight"].std == pytest.approx((0.005,))  # and 1/sqrt(2 L)
    assert found["embedding.weight"].std == found["head.weight"].std == (0.02,)


def test_fused_matrices_have_fans_and_draws_of_their_own():
    # Two kv heads at both widths: k and v do not grow, and their draws shrink faster.
    wide, base = ({**sizes, "num_key_value_heads": 2} for sizes in (WIDE, BASE))
    own = scales(wide, base, std=1.0)["layers.0.attention.qkv.weight"]
    assert (own.fan_in, own.fan_out, own.lr) == (64, (64, 16, 16), 0.25)
    assert own.std == pytest.approx((0.5, 0.25, 0.25))
    spec = llama(**wide)
    rule = mup_init(spec, mup_scales(spec, Mup(base=llama(**base)), "adamw", 1.0))
    q, k, v = first_values(spec, rule)["layers.0.attention.qkv.weight"].split((64, 16, 16))
    assert [float(each.std()) for each in (q, k, v)] == pytest.approx([0.5, 0.25, 0.25], rel=0.06)
    with pytest.raises(ValueError, match=r"64, 16, 16 rows .*need different rates with sgd"):
        scales(wide, base, "sgd")


def test_a_router_is_a_matrix_that_grows_on_one_side():
    sizes = {"num_experts": 4, "num_experts_per_tok": 2, **SIZES}
    spec, base = (
        Qwen3MoEConfig(**sizes, **width, moe_intermediate_size=width["hidden_size"]).decoder
        for width in (WIDE, BASE)
    )
    found = mup_scales(spec, Mup(base=base), "sgd", 0.02)
    router = next(own for own in found.values() if own.role == "router")
    assert (router.lr, router.fan_in, router.fan_out) == (0.25, 64, (4,))
    stack = next(o for n, o in found.items() if "experts" in n and o.role == "hidden")
    assert (stack.fan_in, set(stack.fan_out)) == (64, {64})


def test_fans_of_transposed_stacks_are_not_mixed_up():
    sizes = {"num_local_experts": 2, "num_experts_per_tok": 1, "head_dim": 8, **SIZES}
    wide, base = ({**width, "num_key_value_heads": 2} for width in (WIDE, BASE))
    spec, first = (GptOssConfig(**sizes, **width).decoder for width in (wide, base))
    found = mup_scales(spec, Mup(base=first), "adamw", 0.02)
    down = next(o for n, o in found.items() if "experts" in n and o.role == "residual")
    assert (down.fan_in, down.fan_out) == (160, (64,))


@pytest.mark.parametrize(
    ("optimizer", "rule", "lr"),
    [
        ("adamw", "inverse", 1.0), ("adamw", "inverse_sqrt", 0.5),
        ("sgd", "inverse", 4.0), ("sgd", "inverse_sqrt", 1.0), ("muon", "inverse_sqrt", 0.5),
    ],
)  # fmt: skip
def test_depth_divides_what_blocks_add(optimizer, rule, lr):
    deep = {**WIDE, "num_hidden_layers": 8}
    found = scales(deep, WIDE, optimizer, base_depth=2, depth_rule=rule)
    assert found["layers.5.mlp.down.weight"].lr == pytest.approx(lr)
    assert found["layers.5.mlp_norm.weight"].lr == pytest.approx(lr)
    assert found["norm.weight"].lr == 1.0
    # Draws stay those of the base depth: the block is divided instead.
    assert found["layers.5.mlp.down.weight"].std == pytest.approx((0.02 / 2,))
    mup = Mup(base=llama(**deep), base_depth=2, depth_rule=rule)
    given = multipliers_of(llama(**deep), mup)
    assert given.residual == pytest.approx({"inverse": 0.25, "inverse_sqrt": 0.5}[rule])


def test_scores_are_divided_by_the_head_width_and_by_its_root_at_the_base():
    wide, base = llama(**{**WIDE, "num_attention_heads": 2}), llama(**BASE)  # K 32 and 8
    applied = multipliers_of(wide, Mup(base=base)).applied(wide)
    assert applied.blocks[0].mixer.factor == pytest.approx(8**0.5 / 32)
    kept = multipliers_of(wide, Mup(base=base), attention_scale="inverse_sqrt").applied(wide)
    assert kept.blocks == wide.blocks
    more = multipliers_of(wide, Mup(base=base), embedding=3.0, output=2.0).applied(wide)
    assert (more.embedding_scale, more.logit_scale) == (3.0, 0.5)


def test_tokens_are_as_large_at_every_width_where_the_config_scales_them():
    sizes = {**SIZES, "head_dim": 8, "num_key_value_heads": 2}
    wide, base = (Gemma2Config(**sizes, **width).decoder for width in (WIDE, BASE))
    assert wide.embedding_scale == 8.0
    applied = multipliers_of(wide, Mup(base=base), embedding=3.0).applied(wide)
    assert applied.embedding_scale == 12.0  # 3 sqrt(16)
    assert multipliers_of(base, Mup(base=base)).applied(base) == base


def test_multipliers_survive_json():
    given = Multipliers(embedding=2.0, logits=0.25, attention=(0.5, 1.0), residual=0.5)
    assert Multipliers.from_json(given.to_json()) == given and given.change
    assert Multipliers.from_json(None) == Multipliers() and not Multipliers().change
    with pytest.raises(ValueError, match="multipliers: norms is not known: use a newer version"):
        Multipliers.from_json({"norms": 2})


def test_what_cannot_be_parametrised_says_why():
    with pytest.raises(ValueError, match="base: None was given; the spectral rule is relative to"):
        Mup()
    with pytest.raises(ValueError, match="depth_rule: inverse was given without base_depth"):
        Mup(base=llama(**BASE), depth_rule="inverse")
    other = Starcoder2Config(**SIZES, **BASE).decoder
    with pytest.raises(ValueError, match="its model has not the same parameters: .*; change width"):
        mup_scales(llama(**WIDE), Mup(base=other), "adamw", 0.02)
    values = {each.name: getattr(other, each.name) for each in fields(other)}
    foreign = TransformersSpec(**{**values, "blocks": ()}, config_json="{}", depth=2)
    with pytest.raises(ValueError, match="use_mup: true was given for layers of transformers, who"):
        mup_scales(foreign, Mup(base=other), "adamw", 0.02)
    mamba = MambaModelConfig(d_model=16, num_hidden_layers=1, vocab_size=60).decoder
    with pytest.raises(ValueError, match="for a model with .*, whose constants begin by a rule of"):
        mup_scales(mamba, Mup(base=mamba), "adamw", 0.02)


def test_the_table_has_one_row_for_equal_tensors():
    lines = mup_table(scales()).splitlines()
    assert lines[0].split() == ["parameter", "role", "fans", "std", "lr", "x", "wd", "x"]
    wanted = "layers.*.attention.qkv.weight hidden 64 -> 64 + 64 + 64 0.01 0.25 4"
    assert wanted.split() in [line.split() for line in lines]
    assert len(lines) == 10
    assert replace(scales()["norm.weight"]).std == ()
