"""``python apps/train new FILE``: the default config as a file of one's own."""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path

from kenotron_command import framed
from kenotron_train.called import called
from kenotron_train.config_file import DEFAULT_CONFIG
from kenotron_train.log.printing import fail, say


def new_parser() -> argparse.ArgumentParser:
    """The flags."""
    parser = argparse.ArgumentParser(
        prog=called("new"), description="Write a config to change: that of a run without a file."
    )
    parser.add_argument("file", type=Path, metavar="FILE", help="to write, as my.yaml")
    return parser


def new_main(words: list[str]) -> int:
    """Write the file, which must not be there; the exit status."""
    file: Path = new_parser().parse_args(words).file
    return framed(lambda: _write(file), ValueError, report=fail)


def _write(file: Path) -> int:
    try:
        if file.suffix not in (".yaml", ".yml"):
            raise ValueError(f"{file} is no name of a config: give one that ends with .yaml")
        with file.open("x", encoding="utf-8") as opened:
            opened.write(DEFAULT_CONFIG.read_text(encoding="utf-8"))
    except FileExistsError:
        raise ValueError(f"{file} is there: give another name, or remove it") from None
    except OSError as error:
        raise ValueError(f"{file} cannot be written: {error.strerror}") from None
    say(f"wrote {file}; train with: {called('--config-file', shlex.quote(str(file)))}")
    return 0
