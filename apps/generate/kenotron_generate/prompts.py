"""What is to be continued: prompts from the command line, a file, or standard input."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

Prompt = str | list[dict[str, Any]]
"""A text, or the messages of a chat: mappings with ``role`` and ``content``."""
DEFAULT = "def "
FROM_STDIN = "-"


def read_prompts(given: list[str], file: str | None) -> list[Prompt] | None:
    """The prompts that the command line names; None: they are on standard input.

    Arguments: texts; a file, of JSON lines (``prompt`` or ``messages``) where its name ends in
    .jsonl, else of one prompt a line.

    Raises ValueError, naming file and line, for what is no prompt; OSError.
    """
    if given and file is not None:
        raise ValueError(f"--prompt and --prompt-file {file}: give one of them")
    if given == [FROM_STDIN]:
        return None
    if file is None:
        return [_checked("--prompt", text) for text in given or [DEFAULT]]
    prompts = [
        _of_json(f"{file}, line {number}", line) if file.endswith(".jsonl") else line
        for number, line in enumerate(_lines(Path(file)), start=1)
        if line.strip()
    ]
    if not prompts:
        raise ValueError(f"{file} has no prompt: give one a line")
    return prompts


def read_stdin() -> list[Prompt]:
    """All of standard input as one prompt. Raises ValueError when there is nothing."""
    return [_checked("standard input", sys.stdin.read().removesuffix("\n"))]


def _lines(path: Path) -> list[str]:
    """Lines of a file. Only line feeds end them: a prompt may hold other separators of Unicode."""
    if not path.is_file():
        raise ValueError(f"--prompt-file {path}: there is no such file")
    lines: list[str] = []
    for number, line in enumerate(path.read_bytes().split(b"\n"), start=1):
        try:
            lines.append(line.removesuffix(b"\r").decode("utf-8-sig" if number == 1 else "utf-8"))
        except UnicodeDecodeError as error:
            raise ValueError(f"{path}, line {number} is not UTF-8: {error}") from None
    return lines


def _checked(where: str, text: str) -> str:
    if not text:
        raise ValueError(f"{where} is empty: give a text to continue")
    return text


def _of_json(where: str, line: str) -> Prompt:
    try:
        values = json.loads(line)
    except ValueError as error:
        raise ValueError(f"{where} is not JSON: {error}") from None
    known = [key for key in ("prompt", "messages") if isinstance(values, dict) and key in values]
    if len(known) != 1:
        raise ValueError(f"{where}: needed is a mapping with either prompt or messages")
    found = values[known[0]]
    if known == ["prompt"] and isinstance(found, str) and found:
        return found
    if known == ["messages"] and isinstance(found, list) and found and all(map(_is_message, found)):
        return found
    raise ValueError(
        f"{where}: {known[0]} is {'a text' if known == ['prompt'] else 'a list of messages'}, "
        "not empty; a message has role and content"
    )


def _is_message(value: Any) -> bool:
    return isinstance(value, dict) and isinstance(value.get("role"), str) and "content" in value
