"""``python apps/train new DIR``: a template as a folder of one's own, which checks itself."""

from __future__ import annotations

import argparse
import shlex
from importlib.resources import files
from pathlib import Path

from kenotron_command import OK, framed
from kenotron_config import DEFAULT_CONFIG
from kenotron_train.called import parser_of
from kenotron_train.log.printing import fail, say

TEMPLATES = {
    "training": "python train.py --check",
    "config": "kenotron verify --config-file config.yaml",
    "mixer": "python mixer.py",
    "loss": "python preference_loss.py",
}
"""Kinds of folders, and the command with which each checks itself."""
_FOLDER = Path(__file__).with_name("templates")
_MORE = {
    "config": {"config.yaml": DEFAULT_CONFIG},
    "loss": {"preference_loss.py": files("kenotron_engine") / "examples/preference_loss.py"},
}
"""Files that are elsewhere, by their name in the new folder."""


def new_parser() -> argparse.ArgumentParser:
    """The flags."""
    parser = parser_of(
        "new",
        "Write a folder to begin with: a training in one file, a config, a mixer or a "
        "loss of your own. Its README names the command with which it checks itself.",
    )
    parser.add_argument("folder", type=Path, metavar="DIR", help="a new or an empty folder")
    parser.add_argument(
        "--template", choices=list(TEMPLATES), default="training", help="default: training"
    )
    return parser


def new_main(words: list[str]) -> int:
    """Write the folder, which must be new or empty; the exit status."""
    given = new_parser().parse_args(words)
    return framed(lambda: _write(given.folder, given.template), ValueError, OSError, report=fail)


def _write(folder: Path, template: str) -> int:
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder} is there and not empty: give another name, or empty it")
    folder.mkdir(parents=True, exist_ok=True)
    own = {each.name: each for each in (_FOLDER / template).iterdir() if each.is_file()}
    for name, source in (own | _MORE.get(template, {})).items():
        (folder / name).write_bytes(source.read_bytes())
    say(f"wrote {folder}; check it: cd {shlex.quote(str(folder))} && {TEMPLATES[template]}")
    return OK
