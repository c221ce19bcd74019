"""Multi-token prediction: equal to plain torch, and on every layout to one process."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from engine_cases import ADAMW, EXPERTS, LLAMA, batches_of, plan, training_of
from torch import Tensor

from kenotron_data import Batch, MicroBatch
from kenotron_dist import Mesh, RankError
from kenotron_dist.placement import named_parameters
from kenotron_dist.testing import on_ranks
from kenotron_engine import (
    Model,
    Piece,
    build_model,
    decoder_layers,
    evaluate,
    join_pieces,
    pieces_of,
    slice_pieces,
    training_step,
    weight_pieces,
)
from kenotron_engine.sequence import NO_TARGET, after_next
from kenotron_engine.step import gradient
from kenotron_models import Context, DecoderSpec
from kenotron_pp import schedule_named
from kenotron_tp import TPMode

WEIGHT = 0.3
STEPS = 2
Numbers = tuple[float, float, dict[str, Tensor]]
"""Main loss, loss of the module, and gradients by name."""


def spec_of(experts: bool = False, tied: bool = True) -> DecoderSpec:
    config = EXPERTS if experts else replace(LLAMA, tie_word_embeddings=tied)
    return replace(config.decoder, mtp_weight=WEIGHT)


def batch_of(mesh: Mesh) -> Batch:
    """Two micro-batches; every other row has two documents, the second from place 7 on."""
    (batch,) = batches_of(mesh, 1)
    batch.positions_MBS[:, ::2, 7:] -= 7
    documents = torch.zeros_like(batch.tokens_MBS)
    documents[:, ::2, 7:] = 1
    batch.labels_MBS[:, ::2, 6] = NO_TARGET
    return replace(batch, documents_MBS=documents)


def trained(
    mesh: Mesh, experts: bool, tied: bool, changes: dict[str, Any], optim: dict[str, Any]
) -> tuple[list[float], list[Piece]]:
    """Losses and norms of some steps, and the weights after them."""
    of = plan(spec=spec_of(experts, tied), draws=(0.3, "LAYER_INDEX"), **changes)
    training, batch = training_of(mesh, of, **optim), batch_of(mesh)
    numbers: list[float] = []
    for step in range(1, STEPS + 1):
        result = training_step(training, batch, step)
        assert len(result.figures.get("experts", ())) == 2 * experts
        numbers += [result.loss, result.figures["mtp_loss"], result.grad_norm]
    return numbers, weight_pieces(training)


@cache
def on_one(experts: bool, tied: bool) -> tuple[list[float], list[Piece]]:
    return on_ranks(trained, experts, tied, {}, {})[0]


SP = {"mode": TPMode(sequence_parallel=True)}
LAYOUTS: dict[str, tuple[dict[str, int], dict[str, Any], dict[str, Any], bool, bool]] = {
    "zero 2": ({"dp": 2}, {}, {"zero_stage": 2}, False, True),
    "zero 3, tied, pp": ({"dp": 2, "pp": 2}, {"recompute": "full"}, {"zero_stage": 3}, False, True),
    "tp": ({"tp": 2}, {}, {}, False, True),
    "tp, sequence parallel": ({"tp": 2}, {**SP, "recompute": "selective"}, {}, False, False),
    "pp": ({"pp": 2}, {"recompute": "full"}, {}, False, True),
    "interleaved": ({"pp": 2}, {"schedule": schedule_named("interleaved")}, {}, False, True),
    "zb-h1": ({"pp": 2}, {"schedule": schedule_named("zb-h1")}, {}, False, True),
    "zb-v": ({"pp": 2}, {"schedule": schedule_named("zb-v")}, {}, False, True),
    "cp": ({"cp": 2}, {}, {}, False, True),
    "cp, tp, sequence parallel": ({"cp": 2, "tp": 2}, SP, {}, False, True),
    "experts": ({"tp": 2, "ep": 2}, {**SP, "recompute": "full"}, {}, True, True),
    "experts, pp": ({"pp": 2}, {"schedule": schedule_named("zb-h1")}, {}, True, True),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_it_trains_on_every_layout_as_on_one_process(layout: str) -> None:
    axes, changes, optim, experts, tied = LAYOUTS[layout]
    numbers, pieces = on_one(experts, tied)
    ranks = on_ranks(trained, experts, tied, changes, optim, **axes)
    for found, _ in ranks:
        assert found == pytest.approx(numbers, rel=2e-5)
    ours, theirs = join_pieces(each[1] for each in ranks), join_pieces([pieces])
    assert ours.keys() == theirs.keys()
    assert all(abs(ours[path] - theirs[path]).max() <= 2e-4 for path in theirs)


def in_chunks(
    mesh: Mesh, changes: dict[str, Any], stage: int
) -> tuple[list[float], list[Piece], list[Piece]]:
    """Losses and norms, gradients of the last step, and weights and moments after it."""
    exact = {"reproducible": True, "virtual_chunks": 4, "virtual_shards": 2}
    of = plan(spec=spec_of(), draws=(0.3, "LAYER_INDEX"), **exact, **changes)
    rule = replace(ADAMW.optimizer_factory, torch_adam_is_fused=False)
    training = training_of(mesh, of, zero_stage=stage, optimizer_factory=rule)
    numbers, gradients, batch = list[float](), list[Piece](), batch_of(mesh)
    for step in range(1, STEPS + 1):
        gradients.clear()
        keep = lambda found: gradients.extend(slice_pieces(training, found))  # noqa: E731
        result = training_step(training, batch, step, look=keep)
        numbers += [result.loss, result.figures["mtp_loss"], result.grad_norm]
    return numbers, gradients, weight_pieces(training) + pieces_of(training.optimizer.state(), mesh)


def test_chunks_of_samples_have_the_bits_of_one_process() -> None:
    [(numbers, *want)] = on_ranks(in_chunks, {}, 0)
    zero_bubble = {"schedule": schedule_named("zb-v"), "recompute": "full"}
    for axes, changes, stage in (
        ({"cp": 2, "tp": 2}, SP, 2), ({"cp": 2, "pp": 2}, zero_bubble, 1), ({"dp": 2}, {}, 3),
    ):  # fmt: skip
        ranks = on_ranks(in_chunks, changes, stage, **axes)
        assert all(found[0] == numbers for found in ranks)
        for part, whole in enumerate(want, 1):
            ours, theirs = join_pieces(each[part] for each in ranks), join_pieces([whole])
            assert ours.keys() == theirs.keys()
            assert not [name for name in theirs if (ours[name] != theirs[name]).any()]
    assert numbers[:3] == pytest.approx(on_one(False, True)[0][:3], rel=2e-5)


def plain(model: Model, batch: Batch) -> Numbers:
    """What one process computes of a batch: shifts place by place, and products of plain torch."""
    stack, parts = model.stack, named_parameters(model.stack)
    count = (batch.labels_MBS != NO_TARGET).sum()
    table, projection = parts["embedding.weight"], parts["mtp.0.projection.weight"]
    losses = [torch.zeros(()), torch.zeros(())]
    for micro in batch:
        context = Context(micro.positions_BS, micro.samples_B)
        x = table[micro.tokens_BS.flatten()]
        for number in range(LLAMA.num_hidden_layers):
            x = stack.get_submodule(f"layers.{number}")(x, context)
        tokens, labels = shifted(micro)
        joined = torch.cat([norm(parts, "mtp.0.hidden_norm", x),
            norm(parts, "mtp.0.embedding_norm", table[tokens.flatten()])], -1)  # fmt: skip
        ahead = stack.get_submodule("mtp.0.block")(joined @ projection.t(), context)
        for place, (hidden, wanted) in enumerate([(x, micro.labels_BS), (ahead, labels)]):
            logits = norm(parts, "norm", hidden) @ parts["head.weight"].t()
            logits = logits[:, : LLAMA.vocab_size]
            summed = F.cross_entropy(logits, wanted.flatten(), reduction="sum")
            losses[place] = losses[place] + summed / count
    (losses[0] + WEIGHT * losses[1]).backward()
    main, further = (loss.item() for loss in losses)
    gradients: dict[str, Tensor] = {}
    for path, p in parts.items():  # tied ones count in all their places
        name, own = model.layouts[path].name, p.grad
        assert own is not None or path == "mtp.0.embedding.weight"
        if own is not None:
            gradients[name] = gradients.get(name, torch.zeros_like(own)) + own
    return main, further, gradients


def norm(parts: dict[str, torch.nn.Parameter], name: str, x: Tensor) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], parts[f"{name}.weight"], LLAMA.decoder.norm.eps)


def shifted(micro: MicroBatch) -> tuple[Tensor, Tensor]:
    """Next tokens and the labels of those after them, one place at a time."""
    tokens, labels = torch.zeros_like(micro.tokens_BS), torch.full_like(micro.labels_BS, NO_TARGET)
    documents = micro.documents_BS
    assert documents is not None
    rows, sequence = tokens.shape
    for row in range(rows):
        for place in range(sequence - 1):
            tokens[row, place] = micro.tokens_BS[row, place + 1]
            if documents[row, place] == documents[row, place + 1]:
                labels[row, place] = micro.labels_BS[row, place + 1]
    return tokens, labels


def compared(mesh: Mesh, tied: bool) -> tuple[Numbers, Numbers]:
    training = training_of(mesh, plan(spec=spec_of(tied=tied), draws=(0.3, "NUM_LAYERS")))
    batch = batch_of(mesh)
    found = gradient(training, batch, 1)
    ours = {name: part.clone() for name, part in found.slices.items()}
    parts = {training.model.layouts[path].name: p for path, p in training.parameters().items()}
    shaped = {name: part.view_as(parts[name]) for name, part in ours.items()}
    numbers = found.loss.item(), found.reports[-1].item(), shaped
    return numbers, plain(build_model(training.plan, mesh), batch)


@pytest.mark.parametrize("tied", [True, False])
def test_losses_and_gradients_are_those_of_plain_torch(tied: bool) -> None:
    (ours, theirs) = on_ranks(compared, tied)[0]
    assert ours[0] == pytest.approx(theirs[0], rel=1e-5)
    assert ours[1] == pytest.approx(theirs[1], rel=1e-5)
    assert ours[2].keys() == theirs[2].keys()
    assert sum(name.startswith("mtp.0.") for name in ours[2]) == 9
    for name, found in ours[2].items():
        torch.testing.assert_close(found, theirs[2][name], rtol=1e-5, atol=1e-6, msg=name)


def test_no_target_crosses_a_document_or_the_row() -> None:
    tokens = torch.arange(10, 18)[None]
    labels = torch.tensor([[11, 12, NO_TARGET, 14, NO_TARGET, 16, 17, 18]])
    places = torch.tensor([[0, 1, 2, 0, 1, 0, 1, 2]])
    documents = torch.tensor([[0, 0, 0, 1, 1, 2, 2, 2]])
    none = NO_TARGET
    wanted = [[12, none, none, none, none, 17, 18, none]]
    for known in (documents, None):  # by the positions alone, too
        micro = MicroBatch(tokens, labels, places, torch.zeros(1).long(), documents_BS=known)
        following, found = after_next(micro)
        assert found.tolist() == wanted
        assert following[0, :-1].tolist() == tokens[0, 1:].tolist()
    running = MicroBatch(tokens, labels, torch.arange(8)[None], torch.zeros(1).long())
    _, found = after_next(replace(running, documents_BS=documents))
    assert found.tolist() == wanted


def with_layers(mesh: Mesh) -> None:
    build_model(plan(spec=spec_of()), mesh, decoder_layers(plan(), mesh))


def test_layers_of_another_model_have_no_module() -> None:
    with pytest.raises(RankError, match=r"mtp_weight 0.3 was given for layers .*; set it to 0"):
        on_ranks(with_layers)


def evaluated(mesh: Mesh) -> tuple[float, float]:
    """The loss of a step, and that of the same batch without training."""
    training, batch = training_of(mesh, plan(spec=spec_of())), batch_of(mesh)
    batch = replace(batch, sources_MB=torch.zeros_like(batch.samples_MB))
    held = evaluate(training, [batch], ("all",)).loss
    return training_step(training, batch, 1).loss, held


def test_an_evaluation_has_the_main_loss_alone() -> None:
    (step, held) = on_ranks(evaluated)[0]
    assert step == pytest.approx(held, rel=1e-6)
