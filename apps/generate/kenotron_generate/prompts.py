"""Prompts to continue: from the command line, a file, or standard input."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

Prompt = str | list[dict[str, Any]]
"""A text, or the messages of a chat: mappings with ``role`` and ``content``."""
DEFAULT = "def "
FROM_STDIN = "-"


def read_prompts(given: list[str], file: str | None) -> list[Prompt | None]:
    """The prompts that the command line names; None stands for standard input.

    Arguments: texts; a file, of JSON lines (``prompt`` or ``messages``) where its name ends in
    .jsonl, else of one prompt a line.

    Raises ValueError, naming file and line, for what is no prompt; OSError.
    """
    if given and file is not None:
        raise ValueError(f"--prompt and --prompt-file {file}: give one of them")
    if file is None:
        return [None if text == FROM_STDIN else _checked(text) for text in given or [DEFAULT]]
    return _of_json_lines(file) if file.endswith(".jsonl") else _of_lines(file)


def with_stdin(prompts: Sequence[Prompt | None]) -> list[Prompt]:
    """The prompts, with all of standard input where one is None.

    Raises ValueError when it holds nothing, or no UTF-8.
    """
    known = [prompt for prompt in prompts if prompt is not None]
    if len(known) == len(prompts):
        return known
    try:
        text = sys.stdin.buffer.read().decode("utf-8").removesuffix("\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"standard input is not UTF-8: {error}") from None
    if not text:
        raise ValueError("standard input is empty: give a text to continue")
    return [text if prompt is None else prompt for prompt in prompts]


def _of_json_lines(file: str) -> list[Prompt | None]:
    """Lines that hold nothing are between prompts."""
    prompts: list[Prompt | None] = [
        _of_json(f"{file}, line {number}", line)
        for number, line in enumerate(_lines(Path(file)), start=1)
        if line.strip()
    ]
    if not prompts:
        raise ValueError(f"{file} has no prompt: give one a line")
    return prompts


def _of_lines(file: str) -> list[Prompt | None]:
    """A prompt for each line; an empty one begins a text out of nothing."""
    lines: list[Prompt | None] = [*_lines(Path(file))]
    if lines[-1] == "":  # after the last line feed
        lines.pop()
    if not any(lines):
        raise ValueError(f"{file} has no prompt: give one a line")
    return lines


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


def _checked(text: str) -> str:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:  # bytes of the command line that were none
        raise ValueError(f"--prompt {text!a} is not UTF-8") from None
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
    if known == ["prompt"] and isinstance(found, str):
        return found
    if known == ["messages"] and isinstance(found, list) and found and all(map(_is_message, found)):
        return found
    raise ValueError(
        f"{where}: {known[0]} is "
        + ("a text" if known == ["prompt"] else "a list of messages, not empty")
        + "; a message has role and content"
    )


def _is_message(value: Any) -> bool:
    return isinstance(value, dict) and isinstance(value.get("role"), str) and "content" in value
