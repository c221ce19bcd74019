"""Parameters that travel behind the next forward: every part of a run that reads them waits.

A gather that begins only when it is waited for, over parameters that are nan until then, shows who
forgot to wait: the run differs from one that waits after every update.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest
import runs
import torch
from test_train_graphed import batches, curve
from test_train_rollback import PRELOAD, poison

from kenotron_config import DEFAULT_CONFIG
from kenotron_dist import Handle, Mesh, gather_pieces, spawn
from kenotron_dist.placement import named_parameters
from kenotron_engine import LayerMetrics, step, weight_pieces
from kenotron_optim import SlicedOptimizer, parameter_gather
from kenotron_train import LifeCycle
from kenotron_train.assemble import TrainingRun, build_training
from kenotron_train.config_file import load_config
from kenotron_train.life_cycle import HookList
from kenotron_train.run import loop, session
from kenotron_train.run.sanity import check_state

QUIET = {
    "tokens__limit_val_batches": 0, "tokens__micro_batch_size": 1,
    "checkpoints__checkpoint_interval": 100, "checkpoints__save_final_state": "false",
}  # fmt: skip
"""A run that reads parameters in its forwards alone."""
LAYOUTS = {
    "dp2": {"parallelism__dp": 2},
    "dp2 pp2 interleaved": {
        "parallelism__dp": 2, "parallelism__pp": 2, "parallelism__pp_engine": "interleaved",
        "model__model_config__num_hidden_layers": 4,
        "tokens__batch_accumulation_per_replica": 2,
    },
    "dp2 tp2, tied": {
        "parallelism__dp": 2, "parallelism__tp": 2, "model__dtype": "bfloat16",
        "model__model_config__tie_word_embeddings": "true",
    },
    "dp2, two chunks split, tied": {
        "parallelism__dp": 2, "parallelism__pp": 2, "parallelism__pp_engine": "zb-v",
        "model__model_config__tie_word_embeddings": "true",
        "tokens__batch_accumulation_per_replica": 2,
    },
}  # fmt: skip


def late_gather(pieces, axis) -> Handle:
    """A gather that begins when it is waited for; what it will overwrite is nan until then."""
    for rank, own in enumerate(pieces):
        for x in own if rank != axis.rank else ():
            x.fill_(torch.nan)
    return Handle(None, lambda: gather_pieces(pieces, axis))


def travelling(late: bool) -> mock._patch:
    """Gathers that begin late, or none that outlives its update."""
    if late:
        return mock.patch.object(parameter_gather, "gather_pieces", late_gather)
    return mock.patch.object(SlicedOptimizer, "overlap_forward", lambda *_: None)


class Look(LifeCycle):
    """Reads the model's parameters after every step."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def post_train_step(self, training, progress, result) -> None:
        self.seen.append(total(training))


def total(training: TrainingRun) -> float:
    """A number of the parameters as they are, in flight or not."""
    return sum(float(p.double().sum()) for p in named_parameters(training.model.stack).values())


def digest(folder: Path) -> list[tuple[str, str]]:
    """The tensors of all checkpoints."""
    return [
        (str(path.relative_to(folder)), hashlib.sha256(path.read_bytes()).hexdigest())
        for path in sorted(folder.glob("checkpoints/*/*"))
        if path.suffix not in (".json", ".yaml")
    ]


def whole_runs(mesh: Mesh, folder: Path, layout: dict, late: bool) -> dict[str, object]:
    """Runs of which each reads parameters between its steps in one way."""
    readers = {
        "nothing": {},
        "validation": {"tokens__val_check_interval": 1, "tokens__limit_val_batches": 1},
        "checks": {"general__ignore_sanity_checks": "false"},
        "layers": {"metrics_logging": "{log_level: 1, log_detail_interval: 2}"},
        "checkpoints": {"checkpoints__checkpoint_interval": 2},
        "background saves": {
            "checkpoints__checkpoint_interval": 2,
            "checkpoints__checkpointing_engine": "datastates",
        },
        "rollback": {"checkpoints__checkpoint_interval": 3, "optimizer__nonfinite": "rollback"},
        "hook": {},
        "sample": {},
    }  # fmt: skip
    found: dict[str, object] = {}
    for reader, changes in readers.items():
        changes = QUIET | layout | changes
        own = folder / f"{reader}-{late}"
        own.mkdir(exist_ok=True)
        config = load_config(DEFAULT_CONFIG, runs.arguments(own, **changes)[1::2])
        look, built = Look(), list[TrainingRun]()

        def build(*given, built: list[TrainingRun] = built) -> TrainingRun:
            built.append(build_training(*given))
            return built[0]

        with (
            travelling(late),
            poison(17 if reader == "rollback" else -7),
            mock.patch.object(session, "build_training", build),
        ):
            sample = reader == "sample"
            hooks = (look,) if reader == "hook" else ()
            results = loop.run(mesh, config, sample, hooks=hooks).results
        steps = [(r.loss, r.grad_norm) for r in results]
        layers = [line.get("layers") for line in runs.metrics(own)]
        found[reader] = repr((steps, look.seen, total(built[0]), layers, digest(own)))
    return found


@pytest.mark.parametrize("layout", LAYOUTS)
def test_runs_are_those_that_wait_after_every_update(layout: str, tmp_path: Path) -> None:
    changes = LAYOUTS[layout]
    axes = {axis: changes.get(f"parallelism__{axis}", 1) for axis in ("pp", "dp", "tp")}
    want, got = (
        spawn(whole_runs, tmp_path, changes, late, preload=PRELOAD, **axes)
        for late in (False, True)
    )
    assert got == want


def read(mesh: Mesh, late: bool) -> dict[str, tuple[bool, object]]:
    """For each reader: whether parameters were in flight when it was called, and what it found."""
    flags = ["parallelism.dp=2", "parallelism.tp=1"]
    readers: dict[str, Callable[[TrainingRun], object]] = {
        "parameters": lambda t: [float(p.double().sum()) for p in t.parameters().values()],
        "records": lambda t: [float(x.double().sum()) for x, _ in t.records().values()],
        "pieces": lambda t: [float(values.sum()) for _, _, values, _ in weight_pieces(t)],
        "checks": lambda t: check_state(t, result, 2),
        "layers": lambda t: LayerMetrics(t).look(slices),
        "hooks": lambda t: HookList((look,)).post_train_step(t, None, None),
        "gradient": lambda t: float(step.gradient(t, batch, 3).loss),
    }
    found: dict[str, tuple[bool, object]] = {}
    with travelling(late):
        training = build_training(load_config(DEFAULT_CONFIG, flags), mesh)
        look, (batch,) = Look(), batches(training, 1, 2)
        for name, reader in readers.items():
            slices: dict[str, torch.Tensor] = {}
            result = step.training_step(training, batch, 2, look=slices.update)
            in_flight = total(training) != total(training)  # nan
            found[name] = in_flight, (reader(training), total(training))
        found["hooks"] = found["hooks"][0], look.seen
    return found


def test_a_reader_after_a_step_finds_complete_parameters() -> None:
    at_once, late = (spawn(read, late, dp=2, preload=PRELOAD) for late in (False, True))
    for want, got in zip(at_once, late, strict=True):
        assert {name: value for name, (_, value) in got.items()} == {
            name: value for name, (_, value) in want.items()
        }
        assert all(in_flight for in_flight, _ in got.values())  # else this shows nothing


def compiled(mesh: Mesh, late: bool) -> tuple[list[float], list[int]]:
    """Losses of compiled steps; how many layers wait after each."""
    flags = ["parallelism.dp=2", "parallelism.tp=1", "model.compile=true"]
    plain, waiting = torch.compile, []
    with (
        travelling(late),
        warnings.catch_warnings(),
        mock.patch("torch.compile", lambda *a, **how: plain(*a, **how, backend="eager")),
    ):
        warnings.filterwarnings("ignore", "The .grad attribute")  # dynamo looks at inputs' .grad
        training = build_training(load_config(DEFAULT_CONFIG, flags), mesh)
        (batch,) = batches(training, 1, 2)
        losses = []
        for number in (1, 2, 3):
            losses.append(step.training_step(training, batch, number).loss)
            waiting.append(sum(bool(layer._forward_pre_hooks) for layer in training.model.stack))
        training.optimizer.wait_for_parameters()
        losses.append(total(training))
    return losses, waiting


def test_compiled_layers_wait_as_others_do() -> None:
    at_once, late = (spawn(compiled, late, dp=2, preload=PRELOAD) for late in (False, True))
    assert [losses for losses, _ in late] == [losses for losses, _ in at_once]
    depth = load_config(DEFAULT_CONFIG, []).decoder.num_hidden_layers
    assert all(waiting == [depth + 3] * 3 for _, waiting in late)  # embedding, norm and head, too


def graphed(mesh: Mesh, late: bool) -> tuple[list, list[float], int]:
    with travelling(late):
        losses, weights, replays = curve(mesh, ["parallelism.tp=1", "parallelism.dp=2"], True)
    return losses, [float(w.double().sum()) for w in weights.values()], replays


def test_a_graph_is_captured_and_replayed_over_complete_parameters() -> None:
    at_once, late = (spawn(graphed, late, dp=2, preload=PRELOAD) for late in (False, True))
    assert late == at_once
    assert all(replays == 3 * 2 + 2 * 3 for *_, replays in late)
