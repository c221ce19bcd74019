"""A loss of one's own, that of the example: pairs of rows, against plain torch on every layout."""

from __future__ import annotations

import importlib.util
import sys
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from engine_cases import LLAMA, batches_of, plan, training_of
from torch import Tensor

from kenotron_data import Batch
from kenotron_dist import Mesh
from kenotron_dist.placement import named_parameters
from kenotron_dist.testing import on_ranks
from kenotron_engine import (
    ModelOnMesh,
    NextToken,
    Piece,
    Share,
    build_model,
    gradient,
    gradient_deviations,
    join_pieces,
    slice_pieces,
    training_step,
    weight_pieces,
)
from kenotron_models import Context
from kenotron_tp import TPMode

EXAMPLE = Path(__file__).parent.parent / "src/kenotron_engine/examples/preference_loss.py"
LAYOUTS = [{"dp": 2}, {"tp": 2}, {"pp": 2}, {"cp": 2}, {"pp": 2, "tp": 2}, {"cp": 2, "dp": 2}]
BETA = 0.7


def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("preference_loss", EXAMPLE)
    assert spec is not None and spec.loader is not None
    sys.modules["preference_loss"] = found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


def of_reference(batch: Batch) -> Tensor:
    """Log-likelihoods (M, B) that another model could have: they follow from a row's number."""
    return -40 + 8 * torch.sin(batch.samples_MB.float())


Numbers = tuple[list[float], list[Piece], list[Piece]]


def trained(mesh: Mesh, options: dict) -> Numbers:
    """Figures of three steps, the first gradient, and the weights after the last step."""
    training = training_of(mesh, plan(draws=(0.3, "NUM_LAYERS"), **options))
    batches, numbers = batches_of(mesh, 3), []
    objectives = [example().Preference(of_reference(batch), BETA) for batch in batches]
    slices = gradient(training, batches[0], 1, objective=objectives[0]).slices
    first = slice_pieces(training, slices)
    for step, (batch, objective) in enumerate(zip(batches, objectives, strict=True), 1):
        result = training_step(training, batch, step, objective=objective)
        numbers += [result.loss, result.grad_norm, *result.figures.values()]
    return numbers, first, weight_pieces(training)


@cache
def on_one() -> Numbers:
    return on_ranks(trained, {})[0]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_every_layout_has_the_numbers_of_one_process(layout: dict) -> None:
    options = {"mode": TPMode(sequence_parallel=True)} if "tp" in layout else {}
    numbers, first, weights = on_one()
    ranks = on_ranks(trained, options, **layout)
    for found, *_ in ranks:
        assert found == pytest.approx(numbers, rel=1e-5, abs=1e-5)  # margins of rows of -40
    ours = join_pieces(rank[1] for rank in ranks)
    assert max(gradient_deviations(ours, join_pieces([first])).values()) <= 1
    ours, theirs = join_pieces(rank[2] for rank in ranks), join_pieces([weights])
    assert all(abs(ours[name] - theirs[name]).max() < 1e-4 for name in theirs)


def plain(mesh: Mesh) -> tuple[float, float, dict[str, Tensor]]:
    """Loss, share of ordered pairs and gradients by plain torch."""
    model, (batch,) = build_model(plan(draws=(0.3, "NUM_LAYERS")), mesh), batches_of(mesh, 1)
    parts, ratios = named_parameters(model.stack), []
    for micro, reference in zip(batch, of_reference(batch), strict=True):
        x = parts["embedding.weight"][micro.tokens_BS.flatten()]
        for number in range(LLAMA.num_hidden_layers):
            layer = model.stack.get_submodule(f"layers.{number}")
            x = layer(x, Context(micro.positions_BS, micro.samples_B))
        x = F.rms_norm(x, x.shape[-1:], parts["norm.weight"], LLAMA.decoder.norm.eps)
        logits = (x @ parts["head.weight"].t())[:, : LLAMA.vocab_size]
        losses = F.cross_entropy(logits, micro.labels_BS.flatten(), reduction="none")
        ratios.append(-losses.view_as(micro.labels_BS).sum(-1) - reference)
    margins = torch.cat([BETA * (ratio[::2] - ratio[1::2]) for ratio in ratios])
    loss = -F.logsigmoid(margins).mean()
    loss.backward()
    gradients: dict[str, Tensor] = {}
    for path, p in parts.items():  # tied ones count in both places
        name, own = model.layouts[path].name, p.grad
        assert own is not None
        gradients[name] = gradients.get(name, torch.zeros_like(own)) + own
    return loss.item(), (margins > 0).float().mean().item(), gradients


def test_loss_and_gradients_are_those_of_plain_torch() -> None:
    (loss, ordered, gradients) = on_ranks(plain)[0]
    numbers, first, _ = on_one()
    assert (numbers[0], numbers[2]) == pytest.approx((loss, ordered), rel=1e-5)
    assert 0 < ordered < 1
    ours = join_pieces([first])
    assert ours.keys() == gradients.keys()
    theirs = {name: each.numpy()[: ours[name].shape[0]] for name, each in gradients.items()}
    assert max(gradient_deviations(ours, theirs).values()) <= 1


def learned(mesh: Mesh) -> list[tuple[float, float]]:
    return example().train(mesh)


def test_the_example_learns_its_pairs() -> None:
    steps = on_ranks(learned)[0]
    assert steps[0][0] == pytest.approx(0.6931, abs=1e-4)  # log 2: the policy is its reference
    assert steps[-1][0] < steps[0][0] / 4 and steps[-1][1] == 1


class Bare(NextToken):
    """Forgets ``Parts``."""

    def loss(self, model: ModelOnMesh, share: Share, count: Tensor) -> Any:
        return lambda x, microbatch: x.sum() / count


def test_a_loss_that_returns_a_tensor_is_named() -> None:
    mesh = Mesh.connect()
    training = training_of(mesh, plan())
    with pytest.raises(TypeError, match=r"the loss of Bare returned Tensor: return Parts\(total\)"):
        training_step(training, batches_of(mesh, 1)[0], 1, objective=Bare())
