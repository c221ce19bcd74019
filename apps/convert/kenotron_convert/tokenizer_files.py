"""The files of a tokenizer next to a model's weights."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from kenotron_convert.remote_code import without_code
from kenotron_models.hf import read_json

NAMES = (
    "tokenizer.json", "tokenizer.model", "tokenizer_config.json", "special_tokens_map.json",
    "added_tokens.json", "vocab.json", "merges.txt", "spiece.model", "chat_template.jinja",
    "chat_template.json",
)  # fmt: skip
"""Hugging Face's names of a tokenizer's files."""
FAST, SETTINGS = "tokenizer.json", "tokenizer_config.json"


def tokenizer_files(path: Path) -> list[Path]:
    """The files of a tokenizer: those of a folder, or the one that is named."""
    if path.is_file():
        return [path]
    return [path / name for name in NAMES if (path / name).is_file()]


def copy_tokenizer(source: Path, folder: Path) -> None:
    """Copy a tokenizer's files into a folder, so that AutoTokenizer finds it there.

    References to code in them (``auto_map``) are left out.

    Arguments: a folder that has one, or a ``tokenizer.json``. Raises ValueError when there is none,
    or when its settings are not JSON.
    """
    found = tokenizer_files(source)
    if not found or (source.is_file() and source.name != FAST):
        raise ValueError(
            f"{source} has no tokenizer: give a folder with {FAST} (or {', '.join(NAMES[1:4])}...),"
            f" or a {FAST}"
        )
    for file in found:
        _copy(file, folder / file.name)
    if (folder / FAST).exists() and not (folder / SETTINGS).exists():
        settings = {"tokenizer_class": "PreTrainedTokenizerFast"}
        (folder / SETTINGS).write_text(json.dumps(settings, indent=2) + "\n")


def _copy(file: Path, place: Path) -> None:
    if file.name != SETTINGS:
        shutil.copyfile(file, place)
        return
    settings = read_json(file)
    kept = without_code(settings)
    if kept == settings:
        shutil.copyfile(file, place)
    else:
        place.write_text(json.dumps(kept, indent=2) + "\n", encoding="utf-8")
