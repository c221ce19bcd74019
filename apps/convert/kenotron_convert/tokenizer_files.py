"""The files of a tokenizer beside a model's weights."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

NAMES = (
    "tokenizer.json", "tokenizer.model", "tokenizer_config.json", "special_tokens_map.json",
    "added_tokens.json", "vocab.json", "merges.txt", "spiece.model", "chat_template.jinja",
    "chat_template.json",
)  # fmt: skip
"""What Hugging Face calls them."""
FAST, SETTINGS = "tokenizer.json", "tokenizer_config.json"


def tokenizer_files(path: Path) -> list[Path]:
    """The files of a tokenizer: those of a folder, or the one that is named."""
    if path.is_file():
        return [path]
    return [path / name for name in NAMES if (path / name).is_file()]


def copy_tokenizer(source: Path, folder: Path) -> None:
    """Copy a tokenizer's files into a folder, so that AutoTokenizer finds it there.

    Arguments: a folder that has one, or a ``tokenizer.json``. Raises ValueError when there is none.
    """
    found = tokenizer_files(source)
    if not found or (source.is_file() and source.name != FAST):
        raise ValueError(
            f"{source} has no tokenizer: give a folder with {FAST} (or {', '.join(NAMES[1:4])}...),"
            f" or a {FAST}"
        )
    for file in found:
        shutil.copyfile(file, folder / file.name)
    if (folder / FAST).exists() and not (folder / SETTINGS).exists():
        settings = {"tokenizer_class": "PreTrainedTokenizerFast"}
        (folder / SETTINGS).write_text(json.dumps(settings, indent=2) + "\n")
