"""Optimizers and groups of parameters through the app: the report, every stage alike, resuming."""

from __future__ import annotations

from pathlib import Path

import pytest
import runs

from kenotron_config import DEFAULT_CONFIG
from kenotron_dist import Mesh, spawn
from kenotron_optim import ParameterGroup, describe_groups
from kenotron_train.assemble import build_training
from kenotron_train.config_file import load_config

RULES = {
    "optimizer.weight_decay_exclude_kinds": "[norms, biases, embeddings]",
    "optimizer.lr_multipliers": r"[{pattern: 'head\..*', multiplier: 0.5}]",
}
SGD = {
    "optimizer__optimizer_factory": "{name: sgd, momentum: 0.9, nesterov: true}",
    "optimizer__learning_rate_scheduler__learning_rate": 0.1,
}


def groups(mesh: Mesh) -> tuple[list[ParameterGroup], str]:
    sizes = {f"parallelism.{axis}": mesh.sizes[axis] for axis in ("pp", "tp", "dp")}
    config = load_config(DEFAULT_CONFIG, [f"{key}={v}" for key, v in (RULES | sizes).items()])
    training = build_training(config, mesh)
    return training.groups, describe_groups(training.groups, training.model.layouts.values())


def test_every_rank_of_every_layout_has_the_same_groups() -> None:
    [want] = spawn(groups)
    decayed, free, head = want[0]
    assert head == ParameterGroup(("head.weight",), 0.01, 0.5)
    assert "embedding.weight" in free.names and "norm.weight" in free.names
    assert len(free.names) == 1 + 2 * 4 + 1 and free.weight_decay == 0.0
    assert all(name.startswith("layers.") and "norm" not in name for name in decayed.names)
    assert spawn(groups, pp=2, tp=2) == [want] * 4


def test_a_run_reports_its_groups_and_trains_alike_on_another_layout(tmp_path: Path) -> None:
    rules = {key.replace(".", "__"): value for key, value in RULES.items()}
    found = []
    for name, changes in (("one", {}), ("two", {"parallelism__pp": 2})):
        folder = tmp_path / name
        folder.mkdir()
        done = runs.train(folder, *runs.arguments(folder, **SGD, **rules, **changes))
        assert done.returncode == 0, done.stderr
        lines = [line.split("]: ")[-1] for line in done.stdout.splitlines()]
        at = lines.index("Optimizer: sgd, groups of parameters:")
        assert lines[at + 1].split("  ")[:2] == ["group", "lr x"]
        assert lines[at + 4].split() == ["2", "0.5", "0.01", "1", "8,224", "head.weight"]
        found.append([step["lm_loss"] for step in runs.metrics(folder)])
    assert found[0] == pytest.approx(found[1], rel=1e-6)
    assert found[0][-1] < found[0][0]


@pytest.mark.parametrize(
    ("factory", "bound"),
    [
        (SGD["optimizer__optimizer_factory"], 1e-6),
        ("{name: sgd}", 1e-6),
        ("{name: muon}", 1e-3),  # it makes updates orthogonal in bf16
    ],
)
def test_training_resumes_on_another_layout_as_if_never_stopped(
    tmp_path: Path, factory: str, bound: float
) -> None:
    changes = SGD | {"optimizer__optimizer_factory": factory}
    if "muon" in factory:
        changes["optimizer__learning_rate_scheduler__learning_rate"] = 0.003
    for name in "ab":
        (tmp_path / name).mkdir()
    whole = runs.train(tmp_path / "a", *runs.arguments(tmp_path / "a", **changes))
    assert whole.returncode == 0, whole.stderr
    changes["checkpoints__resume_checkpoint_path"] = tmp_path / "a/checkpoints/3"
    changes |= {"parallelism__dp": 2, "tokens__micro_batch_size": 1}
    changes |= {"parallelism__tp": 2} if "muon" in factory else {}
    resumed = runs.train(tmp_path / "b", *runs.arguments(tmp_path / "b", **changes))
    assert resumed.returncode == 0, resumed.stderr
    want, got = runs.metrics(tmp_path / "a")[3:], runs.metrics(tmp_path / "b")
    assert [step["step"] for step in got] == [4, 5, 6]
    losses = [[step["lm_loss"] for step in steps] for steps in (got, want)]
    assert losses[0] == pytest.approx(losses[1], rel=bound)
    assert losses[0][-1] < runs.metrics(tmp_path / "a")[0]["lm_loss"]


def test_resuming_with_another_optimizer_is_a_sentence(tmp_path: Path) -> None:
    done = runs.train(tmp_path, *runs.arguments(tmp_path, tokens__train_steps=3))
    assert done.returncode == 0, done.stderr
    resume = {"checkpoints__resume_checkpoint_path": tmp_path / "checkpoints/3"}
    done = runs.train(tmp_path, *runs.arguments(tmp_path, **SGD, **resume))
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert "has no momentum_buffer of optimizer.optimizer_factory (sgd): it was" in done.stderr
    resume["optimizer__optimizer_factory"] = "{name: sgd}"
    done = runs.train(tmp_path, *runs.arguments(tmp_path, **resume))
    assert done.returncode == 0, done.stderr
    assert "3; exp_avg, exp_avg_sq of another optimizer is left behind" in done.stdout
    resume = {"checkpoints__load_optimizer": "false"} | resume
    del resume["optimizer__optimizer_factory"]
    done = runs.train(tmp_path, *runs.arguments(tmp_path, **SGD, **resume))
    assert done.returncode == 0, done.stderr


def test_resuming_muon_with_adamw_is_a_sentence(tmp_path: Path) -> None:
    muon = {"optimizer__optimizer_factory": "{name: muon}", "tokens__train_steps": 3}
    done = runs.train(tmp_path, *runs.arguments(tmp_path, **muon))
    assert done.returncode == 0, done.stderr
    resume = {"checkpoints__resume_checkpoint_path": tmp_path / "checkpoints/3"}
    done = runs.train(tmp_path, *runs.arguments(tmp_path, **resume))
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert "has no exp_avg, exp_avg_sq of optimizer.optimizer_factory (adamW): it" in done.stderr
    assert "without optimizer.exp_avg.layers.0" in done.stderr
