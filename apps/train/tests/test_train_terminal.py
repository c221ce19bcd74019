"""A training on terminals: narrow, without colours or escapes, made narrower."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest
import runs

from kenotron_train.log.step_row import StepRows
from kenotron_train.run.stopping import STOPPED

ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
BAR = re.compile(r"\s*\d+/12 .*loss")


def resize(terminal: int, columns: int) -> None:
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))


def on_terminal(
    folder: Path,
    columns: int,
    *,
    steps: int = 6,
    later: int | None = None,
    TERM: str = "xterm-256color",
    **environ: str,
) -> str:
    """What a run writes; its terminal has ``later`` columns from step 4 on."""
    command = [sys.executable, str(runs.APP), *runs.arguments(folder, tokens__train_steps=steps)]
    own = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "LINES", "NO_COLOR")}
    own |= {"TERM": TERM} | environ
    main, side = pty.openpty()
    resize(side, columns)
    process = subprocess.Popen(
        command,
        stdin=side,
        stdout=side,
        stderr=side,
        cwd=folder,
        env=own,
    )
    os.close(side)
    written = b""
    while True:
        try:
            part = os.read(main, 65536)
        except OSError:  # the other end is closed
            break
        if not part:
            break
        written += part
        if later is not None and b"4/12 | loss" in written:
            resize(main, later)
            later = None
    os.close(main)
    assert process.wait(60) == 0, written
    return written.decode(errors="replace")


def test_a_dumb_terminal_gets_plain_lines(tmp_path: Path) -> None:
    text = on_terminal(tmp_path, 80, steps=12, TERM="dumb")
    assert "iteration: 12 / 12 | " in text
    assert "\x1b" not in text and "━" not in text
    assert not any(BAR.match(line) for line in text.splitlines())
    assert all(re.match(r"\d\d/\d\d/\d{4} ", line) for line in text.splitlines())


def test_the_bar_follows_a_terminal_that_gets_narrower(tmp_path: Path) -> None:
    text = on_terminal(tmp_path, 100, steps=12, later=50)
    pieces = re.split(r"[\r\n]+", ESCAPES.sub("", text))
    bars = [piece for piece in pieces if BAR.match(piece)]
    assert max(map(len, bars)) > 90
    last = [piece for piece in bars if re.match(r"\s*12/12 ", piece)]
    assert last and max(map(len, last)) <= 50
    assert "loss" in last[-1]
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l")  # the cursor is shown again


@pytest.mark.parametrize("columns", [80, 60])
def test_the_bar_is_one_line_of_a_terminal(columns: int, tmp_path: Path) -> None:
    text = on_terminal(tmp_path, columns)
    drawn = [
        line for line in re.split(r"[\r\n]+", ESCAPES.sub("", text)) if re.match(r"\s*\d/6 ", line)
    ]
    assert drawn
    assert max(map(len, drawn)) <= columns
    last = drawn[-1]
    assert re.match(r"\s*6/6 .*loss \d\.\d{3}", last)
    assert columns < 80 or re.search(r"tok/s .*FLOP/s +done", last)
    assert "\x1b[38;5;" in text or "\x1b[3" in text


def test_no_color_means_none(tmp_path: Path) -> None:
    text = on_terminal(tmp_path, 80, NO_COLOR="1")
    assert "6/6" in text
    assert not re.search(r"\x1b\[[0-9;]*(?:3[0-7]|38)[0-9;]*m", text)


def test_a_step_is_one_row_and_the_log_has_the_whole_line(tmp_path: Path) -> None:
    text = ESCAPES.sub("", on_terminal(tmp_path, 120))
    rows = [line for line in re.split(r"[\r\n]+", text) if " | norm " in line]
    assert len(rows) == 6 and max(map(len, rows)) <= 100
    pattern = r"[1-6]/6 \| loss \S+ +\| norm \S+ +\| lr \S+ +\| +\S+ tok/s \| "
    assert all(re.match(pattern + r"(\d+:\d\d:\d\d left|done)", row.strip()) for row in rows)
    assert "iteration: " not in text and "Parameters: " in text
    log = (tmp_path / "checkpoints/log.txt").read_text()
    assert re.search(r"\d\d:\d\d:\d\d \[INFO\|DP=0\|PP=0\|TP=0\]: iteration: 6 / 6 \| .*lr: ", log)
    assert "Parameters: " in log and "\x1b" not in log


@pytest.mark.parametrize("seconds", [0.1, 0.3, 0.6, 1.0, 1.5, 2.0])
def test_ctrl_c_at_the_start_ends_the_program_soon(tmp_path: Path, seconds: float) -> None:
    """While it imports, while ranks are started, or in the first steps: nobody stays behind."""
    started = "import runpy, signal, sys; del sys.argv[0]; print('started', flush=True); "
    program = started + "runpy.run_path(sys.argv[0], run_name='__main__')"
    arguments = runs.arguments(tmp_path, tokens__train_steps=10**5)
    process = subprocess.Popen(
        [sys.executable, "-c", program, str(runs.APP), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        cwd=tmp_path,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        assert process.stdout is not None
        process.stdout.readline()  # Python itself has started: before that it writes a traceback
        time.sleep(seconds)
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does
        begun = time.monotonic()
        written = process.communicate(timeout=30)[0].decode()
        assert time.monotonic() - begun < 5, written
        assert "Traceback" not in written
        if "iteration: 1 /" in written:  # a fast machine: it ends with a checkpoint
            assert process.returncode == STOPPED, written
        else:
            assert process.returncode == 130 and "error: interrupted" in written
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def test_rows_fit_whatever_their_numbers_are() -> None:
    rows = StepRows(10**7)
    assert rows.row(1, 5.0, 1.0, 1e-3, 100.0).endswith("| ? left")
    rows.took(1e5)
    row = rows.row(
        1, -1.23456e-300, 9.99e300, 1.234e-20, 1e17, remark="skipped, next with loss scale 1e9"
    )
    assert len(row) <= 100 and "left" in row
    for columns in (75, 60, 50, 20):
        assert len(rows.row(5, 1.0, 1.0, 1e-4, 1.0, columns=columns)) <= columns
    assert " lr " not in rows.row(5, 1.0, 1.0, 1e-4, 1.0, columns=75)
    rows.took(0.0)
    assert rows.row(10**7, 1.0, 1.0, 1.0, 1.0).endswith("| done")


def test_a_rank_of_open_mpi_writes_no_escapes(tmp_path: Path) -> None:
    mpi = {f"OMPI_COMM_WORLD_{name}": "0" for name in ("RANK", "LOCAL_RANK")}
    mpi |= {f"OMPI_COMM_WORLD_{name}": "1" for name in ("SIZE", "LOCAL_SIZE")}
    text = on_terminal(tmp_path, 80, **mpi)  # mpirun gives every rank a terminal
    assert "iteration: 6 / 6 | " in text
    assert "\x1b" not in text
