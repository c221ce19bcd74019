"""A graph of a micro-batch's kernels, replayed, gives the numbers of a run.

The stand-in records ATen operations with the tensors they ran on and runs them again: as with a
CUDA graph, no line of Python is run again and every tensor stays where it was.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from kenotron_config import DEFAULT_CONFIG
from kenotron_data import Batch
from kenotron_dist import Mesh, spawn
from kenotron_engine import MicroBatchGraphs, training_step
from kenotron_engine.cuda_graphs import WARM_UP
from kenotron_train.assemble import TrainingRun, build_training
from kenotron_train.config_file import load_config

ONE = ["parallelism.tp=1"]


class Tape(TorchDispatchMode):
    """Operations, and what they returned."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        found = func(*args, **kwargs)
        if func is not torch.ops.aten._local_scalar_dense.default:  # checks that only CPUs make
            self.calls.append((func, args, kwargs, found))
        return found


class TapeGraph:
    """A graph of CPU operations."""

    replays = 0

    def capture(self, run: Callable[[], None]) -> None:
        for _ in range(WARM_UP):
            run()
        with Tape() as self.tape:
            run()

    @torch.no_grad()
    def replay(self) -> None:
        TapeGraph.replays += 1
        for func, args, kwargs, found in self.tape.calls:
            again = func(*args, **kwargs)
            for old, new in zip(tree_leaves(found), tree_leaves(again), strict=True):
                if isinstance(old, Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)


def batches(training: TrainingRun, count: int, microbatches: int) -> list[Batch]:
    rows, sequence = training.data.tokens.micro_batch_size, 32
    generator = torch.Generator().manual_seed(1)
    found = []
    for _ in range(count):
        ids = torch.randint(250, (microbatches, rows, sequence + 1), generator=generator)
        labels = ids[..., 1:].clone()
        labels[0, 0, :5] = -100  # another number of targets than tokens
        places = torch.arange(sequence).expand_as(labels).contiguous()
        samples = torch.arange(microbatches * rows).view(microbatches, rows)
        found.append(Batch(ids[..., :-1].contiguous(), labels, places, samples))
    return found


def curve(mesh: Mesh, flags: list[str], graphed: bool) -> tuple[list, dict[str, Tensor], int]:
    """Results of five steps, the last ones with more micro-batches; weights; replays."""
    training = build_training(load_config(DEFAULT_CONFIG, flags), mesh)
    if graphed:
        graphs = MicroBatchGraphs(training.grads, training.model.stack, TapeGraph)
        training = replace(training, graphs=graphs)
    TapeGraph.replays = 0
    steps = [*batches(training, 3, 2), *batches(training, 2, 3)]
    results = [training_step(training, batch, n) for n, batch in enumerate(steps, 1)]
    weights = {name: p.detach() for name, p in training.parameters().items()}
    return [(r.loss, r.grad_norm) for r in results], weights, TapeGraph.replays


CASES = [
    [],
    ["model.model_config.tie_word_embeddings=true"],
    ["model.dtype=bfloat16", "parallelism.recompute_layer=true"],
    ["optimizer.accumulate_grad_in_fp32=false"],
    ["model.model_config.z_loss_enabled=true"],
]


@pytest.mark.parametrize("flags", CASES, ids=" ".join)
def test_replays_give_the_bits_of_runs(flags: list[str]) -> None:
    mesh = Mesh.connect()
    plain, weights, _ = curve(mesh, [*ONE, *flags], graphed=False)
    graphed, found, replays = curve(mesh, [*ONE, *flags], graphed=True)
    assert replays == 3 * 2 + 2 * 3
    assert graphed == plain
    assert all(torch.equal(found[name], weights[name]) for name in weights)


def over_data_ranks(mesh: Mesh) -> bool:
    flags = ["parallelism.tp=1", "parallelism.dp=2"]
    (plain, weights, _), (graphed, found, _) = (curve(mesh, flags, g) for g in (False, True))
    return graphed == plain and all(torch.equal(found[name], weights[name]) for name in weights)


def test_gradients_are_summed_over_data_ranks() -> None:
    assert spawn(over_data_ranks, dp=2) == [True, True]


def test_a_step_with_hooks_is_not_graphed() -> None:
    mesh = Mesh.connect()
    training = build_training(load_config(DEFAULT_CONFIG, ONE), mesh)
    graphs = MicroBatchGraphs(training.grads, training.model.stack, TapeGraph)
    assert graphs.usable
    handle = training.model.stack.register_forward_hook(lambda *_: None)
    assert not graphs.usable
    handle.remove()
    assert graphs.usable


def test_documents_are_refused() -> None:
    training = build_training(load_config(DEFAULT_CONFIG, ONE), Mesh.connect())
    graphs = MicroBatchGraphs(training.grads, training.model.stack, TapeGraph)
    (batch,) = batches(training, 1, 2)
    packed = replace(batch, documents_MBS=torch.zeros_like(batch.tokens_MBS))
    with pytest.raises(ValueError, match="cuda_graph: true, but rows hold several documents"):
        training_step(replace(training, graphs=graphs), packed, 1)


def test_what_cannot_be_graphed_is_refused() -> None:
    for name in ("pp", "tp"):
        with pytest.raises(ValueError, match=f"with parallelism.{name} 2; .* set {name} to 1 or"):
            load_config(DEFAULT_CONFIG, ["model.cuda_graph=true", *ONE, f"parallelism.{name}=2"])
    with pytest.raises(ValueError, match="this rank computes on cpu: CUDA graphs need a GPU"):
        build_training(load_config(DEFAULT_CONFIG, ["model.cuda_graph=true", *ONE]), Mesh.connect())
