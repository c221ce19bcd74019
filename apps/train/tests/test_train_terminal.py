"""A training on terminals: one that knows no escapes, one that is made narrower."""

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

import runs

ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
BAR = re.compile(r"\s*\d+/12 .*loss")


def resize(terminal: int, columns: int) -> None:
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))


def on_terminal(folder: Path, kind: str, columns: int, later: int | None = None) -> str:
    """What a run of twelve steps writes; its terminal has ``later`` columns from step 4 on."""
    command = [sys.executable, str(runs.APP), *runs.arguments(folder, tokens__train_steps=12)]
    environ = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "LINES", "NO_COLOR")}
    main, side = pty.openpty()
    resize(side, columns)
    process = subprocess.Popen(
        command, stdin=side, stdout=side, stderr=side, cwd=folder, env=environ | {"TERM": kind}
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
    text = on_terminal(tmp_path, "dumb", 80)
    assert "iteration: 12 / 12 | " in text
    assert "\x1b" not in text and "━" not in text
    assert not any(BAR.match(line) for line in text.splitlines())
    assert all(re.match(r"\d\d/\d\d/\d{4} ", line) for line in text.splitlines())


def test_the_bar_follows_a_terminal_that_gets_narrower(tmp_path: Path) -> None:
    text = on_terminal(tmp_path, "xterm-256color", 100, later=50)
    pieces = re.split(r"[\r\n]+", ESCAPES.sub("", text))
    bars = [piece for piece in pieces if BAR.match(piece)]
    assert max(map(len, bars)) > 90
    last = [piece for piece in bars if re.match(r"\s*12/12 ", piece)]
    assert last and max(map(len, last)) <= 50
    assert "loss" in last[-1]
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l")  # the cursor is shown again
