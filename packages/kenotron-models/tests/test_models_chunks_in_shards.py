"""Blocks in virtual chunks and virtual shards: the same bits on every cp and tp."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
from decoder_gradients import Sink
from test_models_block_in_shards import BLOCKS, WIDTH, draw
from torch import Tensor

from kenotron_cp import AttentionWay, Cut, Layout
from kenotron_dist import Axis, GridView, Mesh
from kenotron_dist.boxes import scatter
from kenotron_dist.placement import TensorLayout, parameter_layouts
from kenotron_dist.separate_uses import set_use_receiver
from kenotron_dist.testing import on_ranks
from kenotron_models import Build, Context, Recompute, SequenceCut
from kenotron_models.block_in_shards import BlockInShards
from kenotron_models.layers import Block, Experts, RouterSpec

SEQUENCE, VIRTUAL, SHARDS = 37, 4, 4
LATENT = replace(BLOCKS["latent"].mixer, head_dim=12)
MANY_HEADS = replace(BLOCKS["attention"].mixer, heads=8, kv_heads=8)
EXPERTS = replace(
    BLOCKS["experts"].feed_forward,
    router=RouterSpec(experts=4, top_k=2, bias=True, balance_loss=0.3, z_loss=0.1),
    capacity_factor=0.9,
)
SINKS = replace(BLOCKS["sinks"].mixer, kv_heads=8)
FEW_KEY_HEADS = replace(BLOCKS["attention"].mixer, heads=16, kv_heads=2)
RESET = {"separate_documents": True}
OVER_HEADS = (MANY_HEADS, SINKS, FEW_KEY_HEADS)
"""Their heads are exchanged over two ranks; of the last four copies of key heads."""
IN_CHUNKS = {
    "attention": BLOCKS["attention"],
    "gate": BLOCKS["gate"],
    "latent": replace(BLOCKS["latent"], mixer=LATENT),
    "two key heads of a shard": replace(BLOCKS["attention"], mixer=MANY_HEADS),
    "one key head of a shard": replace(BLOCKS["attention"], mixer=FEW_KEY_HEADS),
    "sinks": replace(BLOCKS["sinks"], mixer=SINKS),
    "width": BLOCKS["width"],
    "experts": replace(BLOCKS["experts"], feed_forward=EXPERTS),
    "delta": replace(BLOCKS["delta"], mixer=replace(BLOCKS["delta"].mixer, **RESET)),
    "mamba": replace(BLOCKS["mamba"], mixer=replace(BLOCKS["mamba"].mixer, **RESET)),
    "mamba2": replace(BLOCKS["mamba2"], feed_forward=BLOCKS["attention"].feed_forward),
    "groups": replace(BLOCKS["groups"], mixer=replace(BLOCKS["groups"].mixer, **RESET)),
}


class Found(NamedTuple):
    """What one rank computes."""

    outputs: dict[int, Tensor]
    """Of each token, by its place in the row: first the output, then the input's gradient."""
    gradients: dict[tuple[int, int, str], Tensor]
    """Of this rank's part of each parameter, by virtual chunk and name; of experts by virtual
    shard, too."""


def layouts_of(block: Block, tp: int) -> dict[str, TensorLayout]:
    return parameter_layouts(block, {"tp": tp, "ep": 1}, lambda _: 0)


def fill(block: Block, tp: Axis, dtype: torch.dtype) -> None:
    layouts = layouts_of(block, tp.size)
    block.to_empty(device="cpu")
    with torch.no_grad():
        for name, parameter in block.named_parameters():
            whole = 0.5 * draw(name, *layouts[name].shape) + (parameter.ndim == 1)
            parameter.copy_(scatter(whole.to(dtype), layouts[name], view(tp.size, tp.rank)))


def added_losses(block: Block) -> list[Tensor]:
    """Losses that the block will add."""
    found: list[Tensor] = []
    for module in block.modules():
        if isinstance(module, Experts):
            module.auxiliary_losses = Sink(found)
    return found


def view(ranks: int, rank: int) -> GridView:
    return GridView({"tp": ranks, "ep": 1}, {"tp": rank, "ep": 0})


def computed(
    mesh: Mesh,
    name: str,
    dtype: torch.dtype,
    way: AttentionWay,
    recompute: Recompute,
    all_shards: int = SHARDS,
) -> Found:
    torch.set_num_threads(1)
    cp, tp = mesh["cp"], mesh["tp"]
    build = Build(tp, dtype=dtype, shards=all_shards, by_source=True)
    kind = BlockInShards if all_shards > 1 else Block
    block = kind(IN_CHUNKS[name], WIDTH, build, recompute=recompute)
    fill(block, tp, dtype)
    losses = added_losses(block)
    layout = Layout(strips=Cut(SEQUENCE, VIRTUAL, Layout()).strips)
    positions = torch.arange(SEQUENCE) - 20 * (torch.arange(SEQUENCE) >= 20)  # two documents
    cut = SequenceCut(cp, positions[None], way=way, layout=layout, virtual=VIRTUAL)
    places, chunks = cut.places_S, VIRTUAL // cp.size
    padded = torch.cat([positions, torch.zeros(64, dtype=torch.int64)])
    context = Context(
        padded[places][None], cut=cut, chunks=chunks, padding_BS=(places >= SEQUENCE)[None],
        loss_weight=torch.tensor(1 / SEQUENCE),
    )  # fmt: skip
    found: dict[tuple[int, int, str], Tensor] = {}
    layouts, total = layouts_of(block, tp.size), 0
    for path, parameter in block.named_parameters():
        of_expert = layouts[path].grid == "expert"
        shards, first = (all_shards // tp.size, tp.rank) if of_expert else (1, 0)
        total += chunks * shards

        def receive(
            use: int, gradient: Tensor, path: str = path, shards: int = shards, first: int = first
        ) -> None:
            chunk, shard = divmod(use, shards)
            found[cp.rank * chunks + chunk, first * shards + shard, path] = gradient

        set_use_receiver(parameter, receive)
    rows = [draw(each, SEQUENCE + 64, WIDTH).to(dtype)[places] for each in "xy"]
    x = rows[0].requires_grad_()
    y = block(x, context)
    dy = rows[1] * (places < SEQUENCE)[:, None]
    torch.autograd.backward([y, *losses], [dy, *map(torch.ones_like, losses)])
    assert x.grad is not None and len(found) == total
    each = zip(places.tolist(), torch.stack([y.detach(), x.grad], 1), strict=True)
    return Found({place: row for place, row in each if place < SEQUENCE}, found)


@functools.cache
def alone(name: str, dtype: torch.dtype) -> Found:
    [found] = on_ranks(computed, name, dtype, "ring", "none")
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", IN_CHUNKS)
def test_every_cp_and_tp_has_the_bits_of_one_process(name: str, dtype: torch.dtype) -> None:
    want = alone(name, dtype)
    build = Build(Axis.solo("tp"), dtype=dtype, shards=SHARDS)
    layouts = layouts_of(BlockInShards(IN_CHUNKS[name], WIDTH, build), 1)
    over_heads = "ulysses" if IN_CHUNKS[name].mixer in OVER_HEADS else "gather"
    for cp, tp, way, recompute in (
        (1, 4, "ring", "full"), (2, 2, over_heads, "mixer"), (4, 1, "ring", "selective"),
    ):  # fmt: skip
        ranks = on_ranks(computed, name, dtype, way, recompute, cp=cp, tp=tp)
        for rank, got in enumerate(ranks):
            assert all(torch.equal(row, want.outputs[at]) for at, row in got.outputs.items())
            for (*place, path), gradient in got.gradients.items():
                own = scatter(want.gradients[*place, path], layouts[path], view(tp, rank % tp))
                assert torch.equal(gradient, own), (cp, tp, place, path)
        assert set().union(*(got.outputs for got in ranks)) == {*range(SEQUENCE)}


def test_chunks_of_a_layer_without_virtual_shards_have_the_bits_of_one_process() -> None:
    given = "mamba", torch.float32, "ring", "none", 1
    [want], ranks = on_ranks(computed, *given), on_ranks(computed, *given, cp=2)
    for got in ranks:
        assert all(torch.equal(row, want.outputs[at]) for at, row in got.outputs.items())
        assert all(torch.equal(x, want.gradients[key]) for key, x in got.gradients.items())
    shards = alone("mamba", torch.float32)
    for at, row in want.outputs.items():
        torch.testing.assert_close(row, shards.outputs[at], rtol=1e-3, atol=1e-4)
    assert want.gradients.keys() == shards.gradients.keys()
    for key, x in want.gradients.items():
        torch.testing.assert_close(x, shards.gradients[key], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", IN_CHUNKS)
def test_the_numbers_are_those_of_an_ordinary_block(name: str) -> None:
    block = Block(IN_CHUNKS[name], WIDTH, Build(Axis.solo("tp"), dtype=torch.float32))
    fill(block, Axis.solo("tp"), torch.float32)
    x, grad = (draw(each, SEQUENCE + 64, WIDTH)[:SEQUENCE] for each in "xy")
    positions = torch.arange(SEQUENCE) - 20 * (torch.arange(SEQUENCE) >= 20)
    losses, weight = added_losses(block), torch.tensor(1 / SEQUENCE)
    y = block(x.requires_grad_(), Context(positions[None], loss_weight=weight))
    torch.autograd.backward([y, *losses], [grad, *map(torch.ones_like, losses)])
    found = alone(name, torch.float32)
    assert x.grad is not None
    want = torch.stack([y.detach(), x.grad], 1)
    got = torch.stack([found.outputs[place] for place in range(SEQUENCE)])
    torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-4)
    for path, parameter in block.named_parameters():
        leaves = [each for (*_, of), each in found.gradients.items() if of == path]
        total = torch.stack(leaves).sum(0)
        torch.testing.assert_close(total, parameter.grad, rtol=1e-3, atol=1e-3)
