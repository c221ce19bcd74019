"""Signals that a program hears, also while its main thread is blocked; what launchers are told."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest

from kenotron_dist import explained, first_cause, listening
from kenotron_dist.launch import tell_launcher
from kenotron_dist.signals import ECHO, STOPS, Signals
from kenotron_dist.spawn import RankError

BLOCKED = """
import ctypes
from kenotron_dist import listening
libc = ctypes.CDLL(None)
with listening():
    print("ready", flush=True)
    mutex = ctypes.create_string_buffer(64)
    libc.pthread_mutex_lock(mutex)
    libc.pthread_mutex_lock(mutex)  # for ever, in C: no Python handler runs
"""


def until(condition, seconds: float = 5.0) -> bool:
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.01)
    return condition()


@pytest.fixture
def hang_up():
    """SIGHUP does what it does by default, also where the tests were started with nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


def test_a_terminal_that_closes_asks_for_an_end() -> None:
    assert signal.SIGHUP in STOPS


@pytest.mark.usefixtures("hang_up")
def test_an_ignored_hang_up_stays_ignored() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    with listening() as signals:
        os.kill(os.getpid(), signal.SIGHUP)
        os.kill(os.getpid(), signal.SIGUSR2)
        assert until(lambda: signals._save)
        assert signals.stop == 0
    assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN


@pytest.mark.usefixtures("hang_up")
@pytest.mark.parametrize("number", STOPS)
def test_a_signal_is_heard_and_its_echo_is_not(number: int) -> None:
    before = [signal.getsignal(each) for each in STOPS]
    with listening() as signals:
        assert signals.stop == 0
        for _ in range(3):
            os.kill(os.getpid(), number)
        assert until(lambda: signals.stop == number)
        os.kill(os.getpid(), signal.SIGUSR2)
        saves = []
        assert until(lambda: saves.append(signals.take_save()) or any(saves))
        assert not signals.take_save()
    assert [signal.getsignal(each) for each in STOPS] == before


def test_another_thread_hears_nothing() -> None:
    found = []

    def body() -> None:
        with listening() as signals:
            found.append(signals.stop)

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    assert found == [0]


def test_a_second_request_ends_a_program_that_is_blocked() -> None:
    with subprocess.Popen([sys.executable, "-c", BLOCKED], stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"ready\n"
        time.sleep(0.2)
        process.send_signal(signal.SIGTERM)
        time.sleep(ECHO + 0.3)
        assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        assert process.wait(5) == 128 + signal.SIGTERM


def test_a_save_is_no_request_for_an_end() -> None:
    signals = Signals()
    signals.receive(signal.SIGUSR2)
    assert signals.stop == 0 and signals.take_save()


def test_the_parent_and_the_rank_name_one_cause() -> None:
    error = ValueError("bad field\nand more")
    assert first_cause(error) == "rank 0 has ended (ValueError: bad field)"
    heard = RankError(2, "ValueError", str(error), "trace")
    assert first_cause(heard) == "rank 2 has ended (ValueError: bad field)"


def test_an_error_is_a_message_and_an_exit_code() -> None:
    failed = RankError(2, "ValueError", "bad field", "trace", ("ValueError", "Exception"), code=3)
    assert explained(failed, ValueError) == ("rank 2: ValueError: bad field", 3)
    assert explained(failed, OSError) == ("trace", 3)
    assert explained(RankError(2, "killed", "by signal 9", code=75)) == (
        "rank 2: killed: by signal 9",
        75,
    )
    assert explained(ValueError("bad"), ValueError) == ("bad", 1)
    assert explained(KeyError("bad"), ValueError) is None


def test_torchrun_is_told_in_its_own_file(tmp_path) -> None:
    path = tmp_path / "error.json"
    tell_launcher("rank 1 has ended", {"TORCHELASTIC_ERROR_FILE": str(path)})
    message = json.loads(path.read_text())["message"]
    assert message["message"] == message["extraInfo"]["py_callstack"] == "rank 1 has ended"
    assert abs(int(message["extraInfo"]["timestamp"]) - time.time()) < 60
    tell_launcher("nobody hears", {})


EARLY = """
import signal, sys
from kenotron_dist import spawn

def work(mesh):
    return mesh.rank

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        spawn(work, tp=2, preload=["slow_module"])
    except KeyboardInterrupt:
        sys.exit(130)
"""


def test_ctrl_c_while_ranks_are_started_ends_at_once_without_a_traceback(tmp_path) -> None:
    (tmp_path / "program.py").write_text(EARLY)
    (tmp_path / "slow_module.py").write_text(
        "import pathlib, time\npathlib.Path('loading').touch()\ntime.sleep(20)\n"
    )
    with subprocess.Popen(
        [sys.executable, "program.py"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])},
        start_new_session=True,
        stderr=subprocess.PIPE,
        text=True,
    ) as program:
        try:
            assert until((tmp_path / "loading").exists, 60)
            os.killpg(program.pid, signal.SIGINT)
            begun = time.monotonic()
            assert program.wait(30) == 130
            assert time.monotonic() - begun < 5  # it does not wait until all is loaded
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(program.pid, signal.SIGKILL)
        assert program.stderr.read() == ""


LEAVING = """
import os, signal, sys, time
from kenotron_dist import MeshConfig, listening, start

def work(mesh):
    with listening() as signals:
        signals.finished = True
        signals.receive(signal.SIGTERM)
        time.sleep(1.1)
        signals.receive(signal.SIGTERM)  # a second request would end the process before
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        os.kill(os.getpid(), number)
    return mesh.rank

if __name__ == "__main__":
    leaves = sys.argv[1] == "leaves"
    assert start(work, config=MeshConfig(tp=2), leaves=leaves) == 0
    print("done", flush=True)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(0.3)
    print("left", flush=True)
"""


@pytest.mark.parametrize(("word", "code"), [("leaves", 0), ("stays", -signal.SIGTERM)])
def test_a_process_that_leaves_ignores_requests_for_an_end(word: str, code: int, tmp_path) -> None:
    (tmp_path / "program.py").write_text(LEAVING)
    done = subprocess.run(
        [sys.executable, "program.py", word],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == code, done.stderr
    assert done.stdout == ("done\nleft\n" if code == 0 else "done\n")


STARTING = """
from kenotron_dist import MeshConfig, start

def work(mesh):
    raise AssertionError("the ranks did not start")

if __name__ == "__main__":
    start(work, config=MeshConfig(tp=2))
"""


def test_a_program_that_is_asked_to_end_while_its_ranks_start_leaves_nothing(tmp_path) -> None:
    """The first rank waits for seconds until torch is loaded."""
    (tmp_path / "program.py").write_text(STARTING)
    with tempfile.TemporaryDirectory() as short:  # sockets have paths of 107 characters at most
        paths = {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path]), "TMPDIR": short}
        command = [sys.executable, "program.py"]
        with subprocess.Popen(command, cwd=tmp_path, env=os.environ | paths) as process:
            assert until(lambda: any(Path(short).glob("kenotron-*")), 60)
            process.send_signal(signal.SIGTERM)
            assert process.wait(30) == 128 + signal.SIGTERM
        assert not [*Path(short).glob("kenotron-*")]


def test_handlers_are_back_unless_the_work_is_finished() -> None:
    before = [signal.getsignal(each) for each in STOPS]
    try:
        with listening() as signals:
            signals.finished = True
        assert {signal.getsignal(each) for each in STOPS} == {signal.SIG_IGN}
    finally:
        for number, handler in zip(
            (*STOPS, signal.SIGUSR2), [*before, signal.SIG_DFL], strict=True
        ):
            signal.signal(number, handler)


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
@pytest.mark.parametrize("full", [False, True])
def test_a_process_leaves_though_nobody_reads(stream: str, full: bool) -> None:
    program = (
        "import sys; from kenotron_dist.rendezvous import leave_late\n"
        "sys.stdout.write('x' * 100); leave_late('who is missing')"
    )
    if full:
        writer = os.open("/dev/full", os.O_WRONLY)
    else:
        reader, writer = os.pipe()
        os.close(reader)
    buffered = {key: value for key, value in os.environ.items() if key != "PYTHONUNBUFFERED"}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, check=False, env=buffered, **{stream: writer})
    os.close(writer)
    assert done.returncode == 75
