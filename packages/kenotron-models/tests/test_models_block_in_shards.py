"""Blocks in virtual shards: the same bits on every tp, and the numbers of an ordinary block."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from decoder_gradients import DELTA, LATENT
from torch import Tensor

from kenotron_dist import Axis, GridView, Mesh
from kenotron_dist.boxes import scatter
from kenotron_dist.placement import parameter_layouts
from kenotron_dist.testing import on_ranks
from kenotron_models import Build, Context, DecoderSpec, Recompute, virtual_shards
from kenotron_models.block_in_shards import BlockInShards
from kenotron_models.layers import (
    AttentionSpec,
    Block,
    BlockSpec,
    ExpertsSpec,
    Mamba2Spec,
    MambaSpec,
    MLPSpec,
    NormSpec,
    RouterSpec,
)

WIDTH, ROWS, SEQUENCE = 32, 2, 7
MLP = MLPSpec(features=40, bias=True)
ATTENTION = AttentionSpec(heads=8, kv_heads=2, head_dim=4, qk_norm=NormSpec(), qkv_bias=True)
BLOCKS = {
    "attention": BlockSpec(mixer=ATTENTION, feed_forward=MLP, norms="both"),
    "gate": BlockSpec(mixer=replace(ATTENTION, gate=True, out_bias=True), feed_forward=None),
    "sinks": BlockSpec(
        mixer=AttentionSpec(heads=8, kv_heads=4, head_dim=4, sinks=True, window=3),
        feed_forward=replace(MLP, gated=False, activation="gelu"),
        norm=NormSpec(kind="layer_norm"),
    ),
    "latent": BlockSpec(mixer=replace(LATENT, heads=8, kv_heads=8), feed_forward=MLP),
    "delta": BlockSpec(mixer=replace(DELTA, key_heads=8, value_heads=16), feed_forward=None),
    "mamba2": BlockSpec(
        mixer=Mamba2Spec(heads=8, head_dim=4, groups=8, state=8, chunk=4, bias=True),
        feed_forward=None,
    ),
    "groups": BlockSpec(
        mixer=Mamba2Spec(heads=8, head_dim=4, groups=2, state=8, chunk=4), feed_forward=None
    ),
    "mamba": BlockSpec(
        mixer=MambaSpec(channels=48, state=4, step_rank=3, inner_norm=NormSpec(), bias=True),
        feed_forward=None,
    ),
    "width": BlockSpec(mixer=replace(ATTENTION, qk_norm_over="width"), feed_forward=MLP),
    "experts": BlockSpec(
        mixer=None,
        feed_forward=ExpertsSpec(
            router=RouterSpec(experts=4, top_k=2, bias=True), features=12, bias=True,
            shared_features=16, shared_gate=True,
        ),
    ),
}  # fmt: skip
SHARDS = 8


def draw(name: str, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(sum(map(ord, name)))
    return torch.randn(shape, generator=generator)


def result(
    block: Block, mesh_sizes: dict[str, int], rank: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Output, gradient of the input, and gradients of this rank's parameters."""
    layouts = parameter_layouts(block, {**mesh_sizes, "ep": 1}, lambda _: 0)
    view = views(mesh_sizes["tp"], rank)
    block.to_empty(device="cpu")
    with torch.no_grad():
        for name, parameter in block.named_parameters():
            whole = 0.5 * draw(name, *layouts[name].shape) + (parameter.ndim == 1)
            parameter.copy_(scatter(whole.to(parameter.dtype), layouts[name], view))
    x = draw("x", ROWS * SEQUENCE, WIDTH).to(dtype).requires_grad_()
    context = Context(torch.arange(SEQUENCE).expand(ROWS, -1))
    y = block(x, context)
    y.backward(draw("y", *y.shape).to(dtype))
    assert x.grad is not None
    found = {name: p.grad for name, p in block.named_parameters() if p.grad is not None}
    assert len(found) == len(list(block.parameters()))
    return y.detach(), x.grad, found


def views(ranks: int, rank: int) -> GridView:
    return GridView({"tp": ranks, "ep": 1}, {"tp": rank, "ep": 0})


def shaped(
    mesh: Mesh, name: str, dtype: torch.dtype, recompute: Recompute
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    torch.set_num_threads(1)
    build = Build(mesh["tp"], dtype=dtype, shards=SHARDS, by_source=True)
    block = BlockInShards(BLOCKS[name], WIDTH, build, recompute=recompute)
    return result(block, mesh.sizes, mesh["tp"].rank, dtype)


@pytest.mark.parametrize("name", BLOCKS)
def test_every_tp_has_the_bits_of_one_rank(name: str) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        [(y, dx, gradients)] = on_ranks(shaped, name, dtype, "none")
        layouts = parameter_layouts(
            BlockInShards(BLOCKS[name], WIDTH, Build(Axis.solo("tp"), dtype=dtype, shards=SHARDS)),
            {"tp": 1, "ep": 1},
        )
        for ranks, recompute in ((2, "full"), (4, "selective")):
            for rank, found in enumerate(on_ranks(shaped, name, dtype, recompute, tp=ranks)):
                assert torch.equal(found[0], y) and torch.equal(found[1], dx)
                for path, want in gradients.items():
                    if layouts[path].grid == "expert":  # of this rank's tokens, added later
                        continue
                    own = scatter(want, layouts[path], views(ranks, rank))
                    assert torch.equal(found[2][path], own), path


@pytest.mark.parametrize("name", BLOCKS)
def test_the_numbers_are_those_of_an_ordinary_block(name: str) -> None:
    build = Build(Axis.solo("tp"), dtype=torch.float32)
    blocks = (
        Block(BLOCKS[name], WIDTH, build),
        BlockInShards(BLOCKS[name], WIDTH, replace(build, shards=SHARDS, by_source=True)),
    )
    want, got = (result(block, {"tp": 1}, 0, torch.float32) for block in blocks)
    torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    ("block", "shards"),
    [
        *((block, SHARDS) for block in BLOCKS.values()),
        (replace(BLOCKS["gate"], feed_forward=MLPSpec(features=12)), 4),
        (replace(BLOCKS["gate"], mixer=replace(ATTENTION, heads=6)), 2),
        (replace(BLOCKS["mamba"], mixer=MambaSpec(channels=12, step_rank=3)), 4),
        (replace(BLOCKS["mamba2"], mixer=Mamba2Spec(heads=8, head_dim=4, groups=3)), 1),
    ],
)
def test_shards_are_as_many_as_divide_all(block: BlockSpec, shards: int) -> None:
    spec = DecoderSpec(
        blocks=(BLOCKS["attention"], block),
        hidden_size=WIDTH,
        vocab_size=61,
        max_position_embeddings=8,
    )
    assert virtual_shards(spec, 8) == virtual_shards(spec, 15) == shards
    assert virtual_shards(spec, 1) == 1
