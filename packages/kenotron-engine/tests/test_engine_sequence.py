"""Rows that are cut over cp: which tokens a rank has, and what the way of attention is."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from engine_cases import ADAMW, EXPERTS, LLAMA, batches_of, plan, training_of
from torch import nn

from kenotron_dist import Mesh, MeshConfig
from kenotron_dist.testing import on_ranks
from kenotron_engine import (
    NO_TARGET,
    CPMode,
    LayerMetrics,
    Training,
    build_model,
    build_training,
    decoder_layers,
    global_counts,
    training_step,
    way_of,
)
from kenotron_engine.sequence import check_cut, share_of
from kenotron_engine.training import _check_graphed
from kenotron_models import DecoderSpec
from kenotron_models.layers import AttentionSpec

Rows = list[list[int]]


def held(mesh: Mesh) -> tuple[Rows, Rows, Rows, list[int]]:
    """This rank's positions and labels of a micro-batch, all its labels, and the counts."""
    training, (batch,) = training_of(mesh), batches_of(mesh, 1)
    share = training.share_of(batch)
    micro, context = share.micros[0], share.contexts[0]
    assert share.inputs[0].shape == (context.tokens,)
    own = micro.positions_BS.tolist(), micro.labels_BS.tolist()
    return *own, batch[0].labels_BS.tolist(), global_counts(batch, mesh).tolist()


def test_each_token_with_its_label_is_on_one_rank() -> None:
    ranks = on_ranks(held, cp=2)
    _, _, labels, counts = ranks[0]
    assert ranks[1][2:] == (labels, counts) and counts == on_ranks(held)[0][3]
    targets = sum(x != NO_TARGET for row in labels for x in row)
    seen = [
        (row, place, label)
        for places, own, _, _ in ranks
        for row, pairs in enumerate(zip(places, own, strict=True))
        for place, label in zip(*pairs, strict=True)
        if label != NO_TARGET
    ]
    assert len(seen) == len(set(seen)) == targets
    assert all(labels[row][place] == label for row, place, label in seen)


def padded(mesh: Mesh) -> list[int]:
    """Places of this rank's tokens that no expert sees."""
    (batch,) = batches_of(mesh, 1)
    (context, *_) = share_of(CPMode(), EXPERTS.decoder, mesh, batch).contexts
    assert context.cut is not None and context.padding_BS is not None
    return context.cut.places_S[context.padding_BS[0]].tolist()


def test_what_pads_rows_is_padding_for_experts() -> None:
    places = [place for rank in on_ranks(padded, cp=4) for place in rank]
    assert sorted(places) == [12, 13, 14, 15]


def activations(mesh: Mesh) -> dict[str, float]:
    """Statistics of what layers put out in one step."""
    training, (batch,) = training_of(mesh), batches_of(mesh, 1)
    watch = LayerMetrics(training)
    with watch.during():
        training_step(training, batch, 1, look=watch.look)
    return {name: x for name, x in watch.collect().items() if "/activation/" in name}


@pytest.mark.parametrize("axes", [{"cp": 3}, {"cp": 2, "tp": 2}], ids=str)
def test_statistics_count_each_token_once_and_no_padding(axes: dict[str, int]) -> None:
    (one,), many = on_ranks(activations), on_ranks(activations, **axes)
    assert one and many[0] == pytest.approx(one, rel=1e-4, abs=1e-5)


ONE = {"cp": 1, "tp": 1}


def grid(**sizes: int) -> Mesh:
    return Mesh(MeshConfig(**sizes), 0, torch.device("cpu"))


def heads(count: int, kv: int, window: int | None = None) -> DecoderSpec:
    spec = LLAMA.decoder
    mixer = AttentionSpec(heads=count, kv_heads=kv, head_dim=4, window=window)
    return replace(spec, blocks=tuple(replace(block, mixer=mixer) for block in spec.blocks))


def test_auto_is_what_sends_less() -> None:
    auto = CPMode()
    assert way_of(auto, heads(8, 8), {**ONE, "cp": 2}) == "ring"
    assert way_of(auto, heads(8, 8), {**ONE, "cp": 4}) == "ulysses"
    assert way_of(auto, heads(8, 8, window=4), {**ONE, "cp": 4}) == "ring"
    assert way_of(auto, heads(8, 2), {**ONE, "cp": 8}) == "ring"  # key heads would be repeated
    assert way_of(auto, heads(8, 8), {**ONE, "cp": 8, "tp": 2}) == "ring"
    assert way_of(auto, heads(8, 8), {**ONE, "cp": 4}, 4) == "ring"
    assert way_of(CPMode("gather"), heads(8, 8), {**ONE, "cp": 4}) == "gather"


def test_what_cannot_be_cut_is_refused_by_name() -> None:
    mesh, spec = grid(cp=4), heads(6, 3)
    with pytest.raises(ValueError, match="over cp = 4 ranks, which must divide the 6 query heads"):
        check_cut(CPMode("ulysses"), spec, [], mesh)
    layers = [("embedding", nn.Embedding(4, 4)), ("mine", nn.Linear(4, 4))]
    with pytest.raises(ValueError, match="layer embedding does not say that it is right for cut"):
        check_cut(CPMode(), spec, layers, mesh)
    for _, layer in layers:
        layer.cuts_sequence = True
    check_cut(CPMode(), spec, layers, mesh)
    check_cut(CPMode("ulysses"), spec, [("x", nn.Linear(2, 2))], grid(tp=2))
    with pytest.raises(ValueError, match="with cp = 4: a graph cannot wait for other ranks"):
        model = build_model(plan(), Mesh.connect())
        on_gpu = Mesh(mesh.config, 0, torch.device("cuda", 0))
        _check_graphed(plan(cuda_graph=True), model, on_gpu, ADAMW)


def with_way(mesh: Mesh, way: str, order: str, stride: int) -> list[float]:
    """Losses and norms of two steps."""
    made = plan(cp_mode=CPMode(way, stride, order))
    training: Training = build_training(made, ADAMW, mesh, 4, layers=decoder_layers(made, mesh))
    results = [training_step(training, b, n) for n, b in enumerate(batches_of(mesh, 2), 1)]
    return [x for r in results for x in (r.loss, r.grad_norm)]


WAYS = [("ulysses", "contiguous", 1), ("gather", "zigzag", 2), ("ring", "contiguous", 1)]


@pytest.mark.parametrize(("way", "order", "stride"), WAYS)
def test_every_way_has_the_numbers_of_the_ring(way: str, order: str, stride: int) -> None:
    wanted = on_ranks(with_way, "ring", "zigzag", 1, cp=2)[0]
    assert wanted == pytest.approx(on_ranks(with_way, "ring", "zigzag", 1)[0], rel=1e-5)
    for found in on_ranks(with_way, way, order, stride, cp=2, dp=2):
        assert found == pytest.approx(wanted, rel=1e-5)
