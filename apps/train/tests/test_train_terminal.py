"""A training on terminals: narrow, without colours or escapes, made narrower."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest
import runs

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
        if later is not None and b"iteration: 4 " in written:
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
