"""Runs that are stopped by a signal or a time limit, and go on with the same command."""

from __future__ import annotations

import math
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import runs
from test_train_launch import TORCHRUN, descendants
from test_train_synchronisations import OneRead, waits_in

from kenotron_dist import Mesh, Signals
from kenotron_train.run.stopping import Stopper

STOPPED = 85
STEPS = {"one": 240, "four": 60}
"""Two seconds of each: a run must not be over before the test comes to stop it."""
LAYOUTS = {"one": {}, "four": {"parallelism__pp": 2, "parallelism__tp": 2}}
GROUPS = {name: pytest.mark.xdist_group(name) for name in LAYOUTS}  # each has one whole run
SIGNALS = [("four", "SIGTERM"), ("four", "SIGINT"), ("four", "SIGUSR1"), ("one", "SIGTERM")]
DRAW = random.Random(time.time_ns())


def flags(folder: Path, layout: str, **changes: object) -> list[str]:
    folder.mkdir(exist_ok=True)
    changes = {"tokens__train_steps": STEPS[layout], "tokens__limit_val_batches": 0} | changes
    changes = {"checkpoints__checkpoint_interval": 1000} | changes
    return runs.arguments(folder, **LAYOUTS[layout], **changes)


@contextmanager
def running(folder: Path, *arguments: str, steps: int, launcher: tuple[str, ...] = ()) -> Iterator:
    """The app, once it has made so many steps."""
    command = [*(launcher or (sys.executable,)), str(runs.APP), *arguments]
    with subprocess.Popen(
        command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        start_new_session=True,
    ) as process:  # fmt: skip
        wait_for_steps(folder, process, steps)
        try:
            yield process
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)


def wait_for_steps(folder: Path, process: subprocess.Popen, steps: int) -> None:
    metrics = folder / "checkpoints/metrics.jsonl"
    deadline = time.monotonic() + 90
    while not (metrics.exists() and metrics.read_text().count("\n") >= steps):
        assert time.monotonic() < deadline and process.poll() is None, process.stdout.read()
        time.sleep(0.02)


def ranks_of(pid: int) -> list[int]:
    """Local ranks that the app has spawned: children of the fork of it that starts them."""
    return [
        child
        for child in descendants(pid)
        if b"resource_tracker" not in Path(f"/proc/{child}/cmdline").read_bytes()
        and not descendants(child)
    ]


def curve(folder: Path) -> list[tuple]:
    keys = ("step", "lm_loss", "grad_norm", "lr", "consumed_tokens")
    return [tuple(step[key] for key in keys) for step in runs.metrics(folder)]


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=GROUPS[name]) for name in LAYOUTS],
)
def whole(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple:
    """A layout, and the curve of a run that nothing stops."""
    folder = tmp_path_factory.mktemp("whole")
    done = runs.train(folder, *flags(folder, request.param))
    assert done.returncode == 0, done.stderr
    return request.param, curve(folder)


@pytest.mark.parametrize(
    ("whole", "name"),
    [pytest.param(*each, marks=GROUPS[each[0]]) for each in SIGNALS],
    indirect=["whole"],
)
def test_a_stopped_run_goes_on_as_if_nothing_had_been(
    whole: tuple, name: str, tmp_path: Path
) -> None:
    layout, want = whole
    steps = DRAW.randint(1, STEPS[layout] // 3)
    with running(tmp_path, *flags(tmp_path, layout), steps=1) as process:
        rank = DRAW.choice(ranks_of(process.pid))  # looked for early: all steps take about a second
        wait_for_steps(tmp_path, process, steps)
        os.kill(rank, getattr(signal, name))
        out, _ = process.communicate(timeout=60)
    assert process.returncode == STOPPED, out
    stopped = len(runs.metrics(tmp_path))
    assert steps <= stopped < STEPS[layout], f"after {steps}"
    assert f"Stopped after step {stopped}, all of it saved: rank" in out and name in out
    assert (tmp_path / f"checkpoints/{stopped}/manifest.json").exists()
    again = runs.train(tmp_path, *flags(tmp_path, layout))
    assert again.returncode == 0 and f"Resumed after step {stopped}" in again.stdout, again.stderr
    assert curve(tmp_path) == want, f"stopped after {stopped}"


def test_another_layout_goes_on_within_rounding(whole: tuple, tmp_path: Path) -> None:
    layout, want = whole
    with running(tmp_path, *flags(tmp_path, layout), steps=3) as process:
        os.killpg(process.pid, signal.SIGINT)  # as Ctrl-C does: every process
        out, _ = process.communicate(timeout=60)
    assert process.returncode == STOPPED and "Traceback" not in out, out
    stopped = len(runs.metrics(tmp_path))
    other = next(name for name in LAYOUTS if name != layout)
    rest = flags(tmp_path, other, tokens__train_steps=STEPS[layout])
    assert runs.train(tmp_path, *rest).returncode == 0
    assert len(curve(tmp_path)) == len(want)
    for ours, theirs in zip(curve(tmp_path)[: stopped + 40], want, strict=False):
        assert ours[1:3] == pytest.approx(theirs[1:3], rel=1e-5)


def test_the_program_passes_signals_on_and_a_second_one_ends_it(tmp_path: Path) -> None:
    long = flags(tmp_path, "four", tokens__train_steps=100_000)
    with running(tmp_path, *long, steps=2) as process:
        process.send_signal(signal.SIGUSR2)  # save and go on
        deadline = time.monotonic() + 20
        while not list(tmp_path.glob("checkpoints/*/manifest.json")):
            assert time.monotonic() < deadline and process.poll() is None
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        out, _ = process.communicate(timeout=60)
    assert process.returncode == STOPPED, out
    with running(tmp_path, *long, steps=len(runs.metrics(tmp_path)) + 2) as process:
        ranks = ranks_of(process.pid)
        os.kill(ranks[-1], signal.SIGSTOP)  # no step ends any more
        process.send_signal(signal.SIGTERM)
        time.sleep(1.5)
        process.send_signal(signal.SIGTERM)
        began = time.monotonic()
        out, _ = process.communicate(timeout=60)
    assert time.monotonic() - began < 15
    assert process.returncode == 128 + signal.SIGTERM, out


@pytest.mark.parametrize("nohup", [False, True])
def test_a_terminal_that_closes_stops_a_run_unless_that_is_ignored(
    nohup: bool, tmp_path: Path
) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN if nohup else signal.SIG_DFL)
    try:
        many = flags(tmp_path, "four", tokens__train_steps=40 if nohup else 100_000)
        with running(tmp_path, *many, steps=2) as process:
            os.killpg(process.pid, signal.SIGHUP)  # all processes of the session get it
            out, _ = process.communicate(timeout=90)
    finally:
        signal.signal(signal.SIGHUP, before)
    if nohup:
        assert process.returncode == 0 and len(runs.metrics(tmp_path)) == 40, out
        return
    assert process.returncode == STOPPED and "received SIGHUP" in out, out
    assert (tmp_path / f"checkpoints/{len(runs.metrics(tmp_path))}/manifest.json").exists()


@pytest.fixture
def ctrl_c() -> Iterator[None]:
    """Started in the background, this process ignores SIGINT, and what it starts would too."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("ctrl_c")
def test_a_signal_before_the_first_step_ends_the_program(tmp_path: Path) -> None:
    command = [sys.executable, str(runs.APP), *flags(tmp_path, "four")]
    with subprocess.Popen(
        command, cwd=tmp_path, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        deadline = time.monotonic() + 60
        while not ranks_of(process.pid):
            assert time.monotonic() < deadline and process.poll() is None
            time.sleep(0.01)
        os.killpg(process.pid, signal.SIGINT)
        _, stderr = process.communicate(timeout=30)
    # A rank that was training already has stopped with a checkpoint.
    assert process.returncode in (130, STOPPED), stderr
    assert stderr.count("Traceback") == 0


def test_torchrun_passes_signals_on(tmp_path: Path) -> None:
    long = flags(tmp_path, "four", tokens__train_steps=100_000)
    launcher = (*TORCHRUN, "4")
    with running(tmp_path, *long, steps=3, launcher=launcher) as process:
        process.send_signal(signal.SIGTERM)
        out, _ = process.communicate(timeout=60)
    stopped = len(runs.metrics(tmp_path))
    assert process.returncode != 0 and f"Stopped after step {stopped}, all of it" in out, out
    assert (tmp_path / f"checkpoints/{stopped}/manifest.json").exists()


def test_a_time_limit_is_kept(tmp_path: Path) -> None:
    long = flags(tmp_path, "four", tokens__train_steps=100_000)
    with running(tmp_path, *long, "--time-limit", "0:25", steps=1) as process:
        began = time.monotonic()  # some of the 25 seconds have gone
        out, _ = process.communicate(timeout=60)
    assert process.returncode == STOPPED, out
    assert time.monotonic() - began < 25
    assert "all of it saved: the time limit is near" in out
    stopped = len(runs.metrics(tmp_path))
    assert (tmp_path / f"checkpoints/{stopped}/manifest.json").exists()


def test_the_time_of_a_save_is_counted() -> None:
    stopper = Stopper(Signals(), time.monotonic() + 60, 0)
    assert stopper.own_vote() == 0
    stopper.saved(50.0)
    assert stopper.own_vote() == 510
    stopper.decide([0.0, 510.0])
    assert stopper.reason == "the time limit is near"


def test_a_clock_that_is_set_stops_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    stopper = Stopper(Signals(), time.monotonic() + 60, 0)
    monkeypatch.setattr(time, "time", lambda: 4e9)
    assert stopper.own_vote() == 0
    late = Stopper(Signals(), time.monotonic() + 1, 0)
    monkeypatch.setattr(time, "time", lambda: 0.0)
    assert late.own_vote() == 510


def test_a_vote_makes_no_host_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kenotron_train.run.stopping.DeviceRead", OneRead)
    stopper = Stopper(Signals(), math.inf, 0)
    with waits_in() as files:
        stopper.vote(Mesh.connect(device="meta"))
    assert not files
    stopper.count_votes()
    assert stopper.save and not stopper.reason  # ``OneRead`` gives ones


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_finished_run_that_is_stopped_while_it_leaves_is_finished(
    layout: str, tmp_path: Path
) -> None:
    """All its processes get signals from the moment when the last step is written."""
    few = flags(tmp_path, layout, tokens__train_steps=3)
    with running(tmp_path, *few, steps=3) as process:
        began = time.monotonic()
        while process.poll() is None and time.monotonic() - began < 0.4:  # ranks take it for one
            os.kill(process.pid, signal.SIGTERM)
            time.sleep(0.01)
        out, _ = process.communicate(timeout=60)
    assert process.returncode == 0, out
    assert (tmp_path / "checkpoints/3/manifest.json").exists()


@pytest.mark.parametrize("text", ["0", "-3", "soon", "1:2:3:4", "nan", "1::2"])
def test_a_time_limit_that_is_none(text: str, tmp_path: Path) -> None:
    done = runs.train(tmp_path, f"--time-limit={text}")
    assert done.returncode == 2 and "--time-limit" in done.stderr.splitlines()[-1]


def test_a_finished_run_is_not_run_again(tmp_path: Path) -> None:
    short = flags(tmp_path, "one", tokens__train_steps=2)
    assert runs.train(tmp_path, *short).returncode == 0
    files = {
        path: path.read_bytes()
        for path in tmp_path.rglob("*")
        if path.suffix
        and path.suffix != ".lock"
        and path.name != "log.txt"  # it tells of each start
    }
    done = runs.train(tmp_path, *short)
    assert done.returncode == 0 and "nothing is left to do" in done.stdout, done.stderr
    assert {path: path.read_bytes() for path in files} == files
    other = [*short, "--set", "model.model_config.hidden_size=64"]
    done = runs.train(tmp_path, *other)
    assert done.returncode == 1 and "is of another model" in done.stderr
    assert {path: path.read_bytes() for path in files} == files
    assert not (tmp_path / "checkpoints/failure.json").exists()  # it is no failure of that run
