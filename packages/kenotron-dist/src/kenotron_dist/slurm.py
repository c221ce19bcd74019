"""Slurm's variables: lists of hosts, tasks on each node, a port for a job step."""

from __future__ import annotations

import re

_FIRST_PORT, _PORTS = 15_000, 15_000  # below the ports that Linux hands out by itself (32768)


def hosts(text: str) -> list[str]:
    """Names in a host list, in order: ``n[1-3,07]-x,m5`` is n1-x, n2-x, n3-x, n07-x, m5.

    Several brackets in one name are expanded too, the last one fastest. Raises ValueError when
    brackets do not match or a range is not one.
    """
    found: list[str] = []
    for part in _split(text):
        names = [""]
        for literal, ranges in re.findall(r"([^\[\]]+)|\[([^\[\]]*)\]", part):
            tails = [literal] if literal else _numbers(ranges, text)
            names = [name + tail for name in names for tail in tails]
        found.extend(names)
    if not found:
        raise ValueError(f"no host in host list {text!r}")
    return found


def tasks_per_node(text: str) -> list[int]:
    """Tasks on each node: ``2(x3),1`` is 2, 2, 2, 1. Raises ValueError for another form."""
    tasks: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if match is None:
            raise ValueError(f"{text!r} is not of the form 2(x3),1")
        tasks.extend([int(match[1])] * int(match[2] or 1))
    return tasks


def port(job: int, step: int) -> int:
    """A port between 15000 and 29999, the same on all ranks; neighbouring jobs get others."""
    return _FIRST_PORT + (job * 31 + step) % _PORTS


def _split(text: str) -> list[str]:
    """Parts between the commas that stand outside brackets."""
    parts, depth = [""], 0
    for sign in text.strip():
        depth += (sign == "[") - (sign == "]")
        if depth not in (0, 1):
            break
        if sign == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += sign
    if depth:
        raise ValueError(f"brackets do not match in host list {text!r}")
    return [part for part in parts if part]


def _numbers(ranges: str, text: str) -> list[str]:
    found: list[str] = []
    for part in ranges.split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", part)
        if match is None or int(match[2] or match[1]) < int(match[1]):
            raise ValueError(f"{part!r} is no range of numbers in host list {text!r}")
        width = len(match[1])
        found.extend(f"{n:0{width}d}" for n in range(int(match[1]), int(match[2] or match[1]) + 1))
    return found
