"""Norms, feed-forward, learned positions, dropout and recomputation of all families."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from kenotron_dist import Axis, Mesh, spawn
from kenotron_dist.init import Constant, initialize
from kenotron_dist.placement import named_parameters, parameter_layouts
from kenotron_models import (
    Build,
    Context,
    DecoderSpec,
    LayerStack,
    Recompute,
    build_decoder,
    config_from_json,
    forward_flops,
    parameter_count,
    standard_init,
)
from kenotron_models.dropout import drop_features
from kenotron_models.families import (
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
    Starcoder2Config,
)
from kenotron_models.layers import MLP, Embedding, LayerNorm, MLPSpec, NormSpec
from kenotron_models.norm import OffsetRMSNorm
from kenotron_tp import TPMode

ONE = Axis.solo("tp")
HERE = Build(ONE, device="cpu")
SMALL = {
    "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_hidden_layers": 2,
    "vocab_size": 29, "max_position_embeddings": 24,
}  # fmt: skip
STARCODER = Starcoder2Config(
    **SMALL, embd_pdrop=0.0, attn_pdrop=0.0, resid_pdrop=0.0, use_position_embeddings=True,
    use_rotary_embeddings=False,
)  # fmt: skip
FAMILIES = {
    "llama": LlamaConfig(**SMALL, num_key_value_heads=2),
    "llama, wide heads": LlamaConfig(**SMALL, head_dim=12),
    "mistral": MistralConfig(**SMALL, num_key_value_heads=2, sliding_window_size=5),
    "qwen2": Qwen2Config(**SMALL, num_key_value_heads=2, attention_bias=True),
    "qwen3": Qwen3Config(**SMALL, num_key_value_heads=2, head_dim=16),
    "starcoder2": STARCODER,
}


def spec(config: Any = None, **change: Any) -> DecoderSpec:
    return replace((config or LlamaConfig(**SMALL)).decoder, **change)


def fill(stack: LayerStack, mesh: Mesh, config: Any) -> LayerStack:
    layouts = parameter_layouts(stack, mesh.sizes)
    stack.to_empty(device="cpu")
    rule = standard_init(config, 0.3)
    initialize(stack, layouts, mesh.view, seed=1, initializer=rule)
    return stack


@pytest.mark.parametrize("name", FAMILIES)
def test_counts_are_those_of_the_parameters_that_exist(name: str) -> None:
    config = FAMILIES[name]
    layouts = parameter_layouts(LayerStack(build_decoder(config, Build(ONE))), {"tp": 1})
    shapes = {layout.name: layout.shape for layout in layouts.values()}
    assert sum(torch.Size(shape).numel() for shape in shapes.values()) == parameter_count(config)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_config_survives_json(name: str) -> None:
    import json
    from dataclasses import asdict

    config = FAMILIES[name]
    assert config_from_json(json.loads(json.dumps(asdict(config)))) == config


def test_values_that_are_no_config_are_refused() -> None:
    with pytest.raises(ValueError, match="none of the markers is_llama_config, "):
        config_from_json({"hidden_size": 3})
    with pytest.raises(ValueError, match="unexpected keyword argument 'depth'"):
        config_from_json({"is_llama_config": True, "depth": 3})
    with pytest.raises(ValueError, match="hidden_size: 0 was given"):
        config_from_json({"is_llama_config": True, "hidden_size": 0})


def test_only_what_a_token_sees_counts_in_the_causal_convention() -> None:
    def scores(config: DecoderSpec, **how: Any) -> float:
        per_pair = 4 * 2 * 4 * 8
        rest = forward_flops(config, 2, 8) - config.num_hidden_layers * per_pair * 64
        return (forward_flops(config, 2, 8, **how) - rest) / per_pair

    assert scores(spec()) == 2 * 64
    assert scores(spec(), causal=True) == 2 * 36
    three = Qwen2Config(**SMALL, sliding_window_size=3)
    assert scores(spec(three), causal=True) == 2 * (1 + 2 + 6 * 3)
    assert scores(spec(replace(three, full_attention_layers=(1,))), causal=True) == 21 + 36
    assert scores(spec(replace(three, sliding_window_size=99)), causal=True) == 2 * 36


def test_layer_norm_equals_torchs() -> None:
    norm, x = LayerNorm(32, 1e-3, HERE), torch.randn(5, 32) * 3 + 1
    theirs = nn.LayerNorm(32, 1e-3)
    nn.init.normal_(theirs.weight)
    nn.init.normal_(theirs.bias)
    norm.load_state_dict(theirs.state_dict())
    torch.testing.assert_close(norm(x), theirs(x))
    half = norm.bfloat16()(x.bfloat16())
    torch.testing.assert_close(half.float(), theirs(x), rtol=0.03, atol=0.03)


@pytest.mark.parametrize("partial", [False, True])
def test_an_offset_norm_multiplies_by_one_and_its_weight(partial: bool) -> None:
    spec = NormSpec(kind="offset_rms_norm", eps=1e-3)
    norm, x = spec.build(32, HERE, partial=partial), torch.randn(5, 32, requires_grad=True)
    assert isinstance(norm, OffsetRMSNorm) and not norm.weight.any()
    layouts = parameter_layouts(norm, {"tp": 1})
    assert layouts["weight"].role == "norm_offset"
    assert layouts["weight"].partial_axes == (("tp",) if partial else ())
    assert standard_init(LlamaConfig(**SMALL), 0.3)(layouts["weight"]) == Constant(0.0)
    plain = NormSpec(eps=1e-3).build(32, HERE)
    torch.testing.assert_close(norm(x), plain(x))
    nn.init.normal_(norm.weight)
    with torch.no_grad():
        plain.weight.copy_(1 + norm.weight)
    torch.testing.assert_close(norm(x), plain(x))
    ours, theirs = (torch.autograd.grad(n(x).square().sum(), (n.weight, x)) for n in (norm, plain))
    torch.testing.assert_close(ours, theirs)
    half = norm.bfloat16()(x.bfloat16())
    assert half.dtype == torch.bfloat16
    torch.testing.assert_close(half.float(), plain(x), rtol=0.03, atol=0.03)


ACTS = {
    "silu": F.silu, "gelu": F.gelu, "relu": F.relu,
    "gelu_tanh": lambda x: x / 2 * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3))),
}  # fmt: skip


@pytest.mark.parametrize("act", ACTS)
@pytest.mark.parametrize("gated", [False, True])
def test_a_feed_forward_equals_the_formula(act: Any, gated: bool) -> None:
    layer = MLP(MLPSpec(features=48, gated=gated, activation=act, bias=True), 32, HERE)
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.3)
    x = torch.randn(9, 32)
    y = F.linear(x, layer.first.weight, layer.first.bias)
    inner = ACTS[act](y[:, :48]) * y[:, 48:] if gated else ACTS[act](y)
    want = F.linear(inner, layer.down.weight, layer.down.bias)
    torch.testing.assert_close(layer(x), want, rtol=1e-5, atol=1e-5)


def test_learned_positions_are_added_and_their_end_is_said() -> None:
    layer = Embedding(spec(learned_positions=True), HERE)
    tokens, positions = torch.tensor([3, 4, 3]), torch.tensor([[0, 23, 0]])
    assert layer.positions is not None
    want = layer.weight[tokens] + layer.positions[positions[0]]
    torch.testing.assert_close(layer(tokens, Context(positions)), want)
    with pytest.raises(IndexError, match="position 24 is outside the model's 24 learned ones"):
        layer(tokens, Context(positions + 1))


def dropped(mesh: Mesh, rows: list[int], key: int | None, sequence: bool) -> Tensor:
    """Which features of some samples are kept, put together over tp."""
    axis, samples = mesh["tp"], torch.tensor(rows)
    context = Context(torch.zeros(len(rows), 7, dtype=torch.int64), samples, key)
    x = torch.ones(7 * len(rows), 11)
    if sequence:
        n = -(-len(x) // axis.size)
        x = F.pad(x, (0, 0, 0, n * axis.size - len(x)))[axis.rank * n : (axis.rank + 1) * n]
    return drop_features(x, 0.25, context, "a", axis, sequence_parallel=sequence)


def test_what_is_dropped_depends_on_the_sample_alone() -> None:
    [whole] = spawn(dropped, [5, 9, 2], 3, False)
    whole = torch.as_tensor(whole).view(3, 7, 11)
    for number, row in enumerate([5, 9, 2]):
        [alone] = spawn(dropped, [row], 3, False)
        assert torch.equal(torch.as_tensor(alone).view(7, 11), whole[number])
    for tp in (2, 4):  # 21 tokens divide by neither
        parts = [torch.as_tensor(part) for part in spawn(dropped, [5, 9, 2], 3, True, tp=tp)]
        assert torch.equal(torch.cat(parts)[:21], whole.view(21, 11))
    [other] = spawn(dropped, [5, 9, 2], 4, False)
    assert not torch.equal(torch.as_tensor(other), whole.view(21, 11))
    [none] = spawn(dropped, [5, 9, 2], None, False)
    assert torch.equal(torch.as_tensor(none), torch.ones(21, 11))
    assert whole.unique().tolist() == pytest.approx([0, 4 / 3])


def test_the_share_that_is_dropped_and_the_mean() -> None:
    context = Context(torch.zeros(8, 64, dtype=torch.int64), torch.arange(8), 1)
    x = drop_features(torch.ones(512, 64), 0.1, context, "a", ONE, sequence_parallel=False)
    assert (x == 0).float().mean().item() == pytest.approx(0.1, abs=0.01)
    assert x.mean().item() == pytest.approx(1, abs=0.01)
    y = drop_features(torch.ones(512, 64), 0.1, context, "b", ONE, sequence_parallel=False)
    assert ((x == 0) & (y == 0)).float().mean().item() == pytest.approx(0.01, abs=0.005)


def test_samples_without_number_cannot_be_dropped_from() -> None:
    context = Context(torch.zeros(1, 4, dtype=torch.int64), None, 1)
    with pytest.raises(ValueError, match="give the Context samples_B"):
        drop_features(torch.ones(4, 4), 0.5, context, "a", ONE, sequence_parallel=False)


def gradients(mesh: Mesh, name: str, recompute: Any, sequence: bool) -> dict[str, list[float]]:
    config = FAMILIES[name]
    mode = TPMode(sequence_parallel=sequence)
    layers = build_decoder(config, Build(mesh["tp"], mode), recompute=recompute)
    stack = fill(LayerStack(layers), mesh, config)
    tokens = torch.arange(3 * 8) % 29
    out = stack(tokens, Context(torch.arange(8).expand(3, 8)))
    out.square().mean().backward()
    found = {path: p.grad.tolist() for path, p in named_parameters(stack).items()}
    return found | {"logits": out.tolist()}


def same_bits(mesh: Mesh, name: str, again: Any, sequence: bool) -> bool:
    found = [gradients(mesh, name, recompute, sequence) for recompute in (again, "none")]
    return found[0] == found[1]


@pytest.mark.parametrize("again", ["full", "selective", ["selective", "none"]], ids=str)
@pytest.mark.parametrize("name", ["llama", "qwen3", "starcoder2"])
def test_gradients_of_what_is_computed_again_are_the_same_bits(name: str, again: Any) -> None:
    assert spawn(same_bits, name, again, False) == [True]
    assert spawn(same_bits, name, again, True, tp=2) == [True, True]


def kept_bytes(recompute: Recompute, sizes: LlamaConfig) -> int:
    """Bytes that the backward of one layer needs, parameters not counted."""
    layers = build_decoder(sizes, HERE, recompute=recompute)
    layer = dict(layers)["layers.0"]
    parameters = {p.untyped_storage().data_ptr() for p in layer.parameters()}
    kept: dict[int, int] = {}

    def pack(x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        if storage.data_ptr() not in parameters:
            kept[storage.data_ptr()] = storage.nbytes()
        return x

    x = torch.randn(2 * 16, sizes.hidden_size, requires_grad=True)
    with saved_tensors_hooks(pack, lambda x: x):
        layer(x, Context(torch.arange(16).expand(2, 16)))
    return sum(kept.values())


def test_less_is_kept_where_more_is_computed_again() -> None:
    sizes = LlamaConfig(**SMALL)
    none, selective, full = (kept_bytes(r, sizes) for r in ("none", "selective", "full"))
    assert full < selective < 0.75 * none


def test_recompute_names_every_layer() -> None:
    with pytest.raises(ValueError, match="recompute names 1 layers, but the model has 2"):
        build_decoder(LlamaConfig(**SMALL), HERE, recompute=["full"])
