"""Checkpoints in memory: a run loses few steps, and takes copies of no other run."""

from __future__ import annotations

import re
import shutil
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from test_train_elastic import STEPS, check, config_of, curve, recoveries, trained, undisturbed

from kenotron_ckpt import latest_step, saver
from kenotron_dist import Mesh, MeshConfig, RankError
from kenotron_train.library import train
from kenotron_train.run import memory_copies, memory_folder
from kenotron_train.run.loop import run

__all__ = ["undisturbed"]  # a fixture
SEVEN = {"checkpoints__checkpoint_interval": 7, "checkpoints__checkpointing_engine": "torch"}


def in_memory(folder: Path, every: int = 1, **more: Any) -> dict[str, Any]:
    """Keys of a run with copies in a folder that stands for memory."""
    (folder / "memory").mkdir(exist_ok=True, parents=True)
    return {
        "checkpoints__memory_every": every, "checkpoints__memory_path": folder / "memory",
        **SEVEN, **more,
    }  # fmt: skip


def copies(folder: Path) -> list[Path]:
    return [each for each in (folder / "memory").iterdir() if each.is_dir()]


@pytest.mark.parametrize(
    ("more", "lost"),
    [
        ({}, 0),
        ({"checkpoints__checkpointing_engine": "datastates"}, 1),
        ({"parallelism__tp": 2, "optimizer__zero_stage": 1}, 0),
    ],
    ids=str,
)
def test_no_more_steps_are_made_again_than_asked(
    more: dict[str, Any], lost: int, tmp_path: Path, undisturbed: Callable
) -> None:
    """Deaths before the first checkpoint on the disk, and after it; of rank 0, too."""
    ranks = 2 * more.get("parallelism__tp", 1)
    plan = [(5, ranks + ranks // 2, 1, signal.SIGKILL), (11, ranks, 0, signal.SIGKILL)]
    if ranks == 4:
        plan[1] = (11, 4, 0, signal.SIGKILL)
    found = trained(tmp_path, ranks + ranks // 2, plan, **in_memory(tmp_path, **more))
    few = {key: value for key, value in more.items() if "tp" in key}
    check(found, undisturbed(2 if few else 1, **few))
    after = recoveries(found)
    assert sum(each["losses"] for each in after.values()) >= 2
    # The hook that kills is called before the step's own copy is made.
    assert all(each["lost_steps"] <= each["losses"] * (1 + lost) for each in after.values())
    assert not copies(tmp_path)  # the run is over


def test_a_copy_every_few_steps(tmp_path: Path, undisturbed: Callable) -> None:
    found = trained(tmp_path, 2, [(6, 2, 1, signal.SIGKILL)], **in_memory(tmp_path, 3))
    check(found, undisturbed())
    assert list(recoveries(found)) == [4]


def test_a_checkpoint_on_the_disk_is_newer(tmp_path: Path, undisturbed: Callable) -> None:
    """The copy of step 6 is still there when step 7 has been saved, and step 8 has not."""
    plan = [(8, 2, 1, signal.SIGKILL)]
    found = trained(tmp_path, 2, plan, **in_memory(tmp_path, 6))
    check(found, undisturbed())
    assert list(recoveries(found)) == [8]


class Ended(NamedTuple):
    """A run of one process that was killed after step 5, with copies."""

    folder: Path
    keys: dict[str, Any]


@pytest.fixture
def ended(tmp_path: Path) -> Ended:
    keys = in_memory(tmp_path)
    with pytest.raises(RankError, match="too few|SIGKILL"):
        trained(tmp_path, 1, [(5, 1, 0, signal.SIGKILL)], **keys)
    (folder,) = copies(tmp_path)
    assert {"4", memory_folder.OWNER} <= {each.name for each in folder.iterdir()}
    return Ended(tmp_path, keys)


def first_step_of_the_next(ended: Ended, **more: Any) -> tuple[int, list[dict[str, Any]]]:
    """Start the run again; the first step that it makes, and the curve."""
    log = ended.folder / "checkpoints/log.txt"
    before = log.read_text() if log.exists() else ""
    train(config_of(ended.folder, **ended.keys, **more)(1), threads=1)
    said = log.read_text().removeprefix(before)
    resumed = re.findall(r"Resumed after step (\d+) from", said)
    return 1 + sum(map(int, resumed)), curve(ended.folder)


def test_the_next_start_resumes_from_memory(ended: Ended, undisturbed: Callable) -> None:
    step, found = first_step_of_the_next(ended)
    assert step == 5
    check(found, undisturbed())


def test_copies_of_a_removed_run_are_not_taken(ended: Ended, undisturbed: Callable) -> None:
    shutil.rmtree(ended.folder / "checkpoints")
    step, found = first_step_of_the_next(ended)
    assert step == 1
    check(found, undisturbed())


def test_copies_come_before_another_run_that_has_gone_on(ended: Ended) -> None:
    """The run began with the other one, whose newest step is later than the copies now."""
    trained(ended.folder / "other", 1, tokens__train_steps=7)
    other = ended.folder / "other/checkpoints"
    assert latest_step(other) == 7
    step, _ = first_step_of_the_next(ended, checkpoints__resume_checkpoint_path=other)
    assert step == 5


def test_the_store_of_another_run_is_not_its_own(tmp_path: Path) -> None:
    section, url = config_of(tmp_path)(1).checkpoints, "s3://bucket/run1"
    own = [memory_folder.is_own(section, url, url + more) for more in ("", "/", "/7", "0")]
    assert own == [True, True, True, False]  # run10 is another run


@pytest.mark.parametrize(
    ("interval", "more", "killed", "steps"),
    [
        (7, {}, (), [7]),
        (7, {}, (10,), [7, 9]),  # from its own copy
        (4, {"checkpoints__memory_every": "null"}, (6, 10), [4, 4, 8]),  # once it has saved
    ],
)
def test_a_run_that_is_set_back_forgets_them(
    interval: int, more: dict[str, Any], killed: Sequence[int], steps: list[int], tmp_path: Path,
    undisturbed: Callable,
) -> None:  # fmt: skip
    """It had come to step 12: neither copies nor checkpoints of later steps are taken any more."""
    keys = in_memory(tmp_path) | {"checkpoints__checkpoint_interval": interval}
    with pytest.raises(RankError):
        trained(tmp_path, 1, [(12, 1, 0, signal.SIGKILL)], **keys)
    log, ranks = tmp_path / "checkpoints/log.txt", 1 + len(killed)
    before = len(log.read_text())
    back = {"checkpoints__resume_checkpoint_path": tmp_path / f"checkpoints/{interval}"}
    plan = [(step, ranks - n, 0, signal.SIGKILL) for n, step in enumerate(killed)]
    found = trained(tmp_path, ranks, plan, **keys | more | back)
    said = log.read_text()[before:]
    assert list(map(int, re.findall(r"Resumed after step (\d+) from", said))) == steps
    check(found, undisturbed())


def test_copies_that_cannot_be_removed_end_no_run(
    tmp_path: Path, undisturbed: Callable, monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """It is set back to step 7, and had come to step 12."""
    keys = in_memory(tmp_path)
    with pytest.raises(RankError):
        trained(tmp_path, 1, [(12, 1, 0, signal.SIGKILL)], **keys)
    (copy,) = copies(tmp_path)

    def busy(folder: object) -> None:
        raise OSError(f"{folder}: busy")

    monkeypatch.setattr(memory_copies, "remove_steps", busy)
    back = {"checkpoints__resume_checkpoint_path": tmp_path / "checkpoints/7"}
    alone = Mesh(MeshConfig(), 0, torch.device("cpu"))
    run(alone, config_of(tmp_path, **keys, **back)(1))
    check(curve(tmp_path), undisturbed())
    said = f"steps that are undone are still there: {copy}: busy; a start that comes before"
    assert said in "".join(capfd.readouterr())


def test_a_warning_says_what_failed_after_a_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def busy(*_: object, **__: object) -> None:
        raise OSError("busy")

    monkeypatch.setattr(saver, "prune", busy)
    run(Mesh(MeshConfig(), 0, torch.device("cpu")), config_of(tmp_path, **in_memory(tmp_path))(1))
    assert re.search(r"the copy in \S+/2 stands, but .*busy", "".join(capfd.readouterr()))


def test_copies_of_a_start_that_was_superseded_are_not_taken(
    tmp_path: Path, undisturbed: Callable
) -> None:
    """The run continued without the copies, and saved an earlier step than theirs."""
    keys = in_memory(tmp_path)
    with pytest.raises(RankError):
        trained(tmp_path, 1, [(12, 1, 0, signal.SIGKILL)], **keys)
    (copy,) = copies(tmp_path)
    shutil.move(copy, tmp_path / "of another host")
    more = keys | {"checkpoints__checkpoint_interval": 2, "checkpoints__memory_every": "null"}
    with pytest.raises(RankError):
        trained(tmp_path, 1, [(9, 1, 0, signal.SIGKILL)], **more)
    shutil.move(tmp_path / "of another host", copy)
    assert latest_step(copy) == 11 and latest_step(tmp_path / "checkpoints") == 8
    step, found = first_step_of_the_next(Ended(tmp_path, keys))
    assert step == 9
    check(found, undisturbed())
    said = (tmp_path / "checkpoints/log.txt").read_text()
    assert "generation 1 made its copy of step 11, and generation 2 has saved step 8 since" in said


def damage(folder: Path) -> None:
    """Change a byte of every file of tensors."""
    for file in folder.rglob("*.safetensors"):
        held = bytearray(file.read_bytes())
        held[-3] ^= 1
        file.write_bytes(held)


def test_a_damaged_copy_is_passed_over(tmp_path: Path, undisturbed: Callable) -> None:
    keys = in_memory(tmp_path)
    with pytest.raises(RankError):
        trained(tmp_path, 1, [(12, 1, 0, signal.SIGKILL)], **keys)
    damage(tmp_path / "memory")
    step, found = first_step_of_the_next(Ended(tmp_path, keys))
    assert step == 8
    check(found, undisturbed())


def test_a_damaged_copy_without_another_checkpoint_is_named(ended: Ended) -> None:
    damage(ended.folder / "memory")
    with pytest.raises(RankError, match="The run has no other checkpoint: remove") as error:
        first_step_of_the_next(ended)
    assert "no checkpoint at" in str(error.value)


def test_what_cannot_be_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = in_memory(tmp_path)
    with pytest.raises(ValueError, match="memory_every: 7 was given; it must be at least 1 step"):
        config_of(tmp_path, **keys | {"checkpoints__memory_every": 7})(1)
    absent = config_of(tmp_path, **keys | {"checkpoints__memory_path": tmp_path / "absent"})(1)
    with pytest.raises(RankError, match="memory_path: .*absent was given; it must be a folder"):
        train(absent, threads=1)
    monkeypatch.setattr(memory_copies, "AT_A_TIME", 1 << 40)
    alone = Mesh(MeshConfig(), 0, torch.device("cpu"))
    with pytest.raises(ValueError, match=r"memory_every: 1 was given; 1099511627776 copies of"):
        run(alone, config_of(tmp_path, **keys)(1))
    assert STEPS > 7 and not (tmp_path / "checkpoints/metrics.jsonl").exists()
