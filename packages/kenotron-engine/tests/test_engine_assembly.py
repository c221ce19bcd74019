"""Assembly of a stage and of a training: what is refused, models of others, first values."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from engine_cases import ADAMW, LLAMA, plan, training_of

from kenotron_dist import Mesh
from kenotron_dist.testing import on_ranks
from kenotron_engine import assemble, build_model, build_training, decoder_layers
from kenotron_engine.training import _check_graphed


def names(mesh: Mesh) -> list[str]:
    """Names of this rank's parameters, all of them 0."""
    model = build_model(plan(draws=None), mesh)
    assert not any(p.any() for p in model.stack.parameters())
    assert (model.head is not None) == model.pipeline.is_last
    return [name for name, _ in model.stack.named_parameters()]


def test_stages_have_the_layers_of_the_model_once_and_zeros_without_draws() -> None:
    first, last = on_ranks(names, pp=2)
    (whole,) = on_ranks(names)
    assert [*first, *last] == whole and first[0] == "embedding.weight"
    assert last[-1] == "head.weight"


def test_own_layers_have_values_of_their_own() -> None:
    mesh = Mesh.connect()
    layers = decoder_layers(plan(), mesh)

    def ones(stack: torch.nn.Module, layouts: dict) -> None:
        assert set(layouts) == {name for name, _ in stack.named_parameters()}
        for parameter in stack.parameters():
            torch.nn.init.ones_(parameter)

    model = assemble(layers, mesh, ones)
    assert all(bool((p == 1).all()) for p in model.stack.parameters())
    built = build_training(plan(), ADAMW, mesh, 4, layers=decoder_layers(plan(), mesh))
    drawn = dict(build_model(plan(), mesh).stack.named_parameters())
    assert all(torch.equal(p, drawn[name]) for name, p in built.parameters().items())


def test_a_graph_needs_a_gpu() -> None:
    with pytest.raises(ValueError, match="this rank computes on cpu: CUDA graphs need a GPU"):
        build_training(plan(cuda_graph=True), ADAMW, Mesh.connect(), 4)


def test_layers_that_add_losses_are_not_graphed() -> None:
    mesh = Mesh.connect()
    layer = torch.nn.Linear(2, 2)
    layer.adds_loss = True
    model = training_of(mesh).model
    model.stack.add_module("moe", layer)
    with pytest.raises(ValueError, match="true was given, but moe adds a loss"):
        of = plan(cuda_graph=True)
        _check_graphed(of, model, Mesh(mesh.config, 0, torch.device("cuda", 0)), ADAMW)
    sharded = replace(ADAMW, zero_stage=2)
    with pytest.raises(ValueError, match="given with zero_stage 2: a graph adds up whole gradient"):
        _check_graphed(of, model, Mesh(mesh.config, 0, torch.device("cuda", 0)), sharded)


def test_what_layers_compute_again_is_named_for_each_or_for_all() -> None:
    mesh = Mesh.connect()
    assert LLAMA.decoder.num_hidden_layers == 2
    build_model(plan(recompute=("full", "none")), mesh)
    with pytest.raises(ValueError, match="recompute names 1 layers, but the model has 2"):
        build_model(plan(recompute=("full",)), mesh)
