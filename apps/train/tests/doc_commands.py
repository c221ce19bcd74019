"""The commands of documents: what their fences hold, and what they print."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

RUN = ("bash", "console")
MARKS = {
    "network": "downloads something",
    "cluster": "needs Slurm or several machines",
    "gpu": "needs an accelerator",
    "nanotron": "needs a checkpoint that Nanotron wrote",
    "server": "does not end by itself",
}
"""Words behind ``bash`` that take a fence out of the tests, and why."""
OTHERS = ("python", "yaml", "text")
PROGRAM = re.compile(
    r"^\s*(?:\$ |[A-Z_]+=\S+ )?(?:python[0-9.]*|pip|uv|torchrun|srun|sbatch|mpirun|cp|echo|nox|git|"
    r"tensorboard|pytest|docker|wget|curl|nvidia-smi|source|\.ci/run)\s"
)
NUMBER = r"-?[\d,]+(?:\.\d+)?(?:[eE][-+]?\d+)?[KMGTP]?"


@dataclass(frozen=True)
class Command:
    """One command of a fence."""

    line: int
    """Of the document, from 1."""
    text: str
    output: tuple[str, ...] = ()
    """What a console fence shows below it."""


@dataclass(frozen=True)
class Fence:
    """A block between three backticks."""

    line: int
    info: str
    body: str

    @property
    def marks(self) -> list[str]:
        """The words behind the language."""
        return self.info.split()[1:]

    @property
    def language(self) -> str:
        """The first word; empty where there is none."""
        return (self.info.split() or [""])[0]

    def commands(self) -> list[Command]:
        """Commands in order, continued lines joined."""
        found: list[Command] = []
        lines = self.body.splitlines()
        for number, line in enumerate(lines, self.line + 1):
            if self.language == "console" and not line.startswith("$ "):
                last = found.pop()
                found.append(Command(last.line, last.text, (*last.output, line)))
            elif found and found[-1].text.endswith("\\"):
                last = found.pop()
                found.append(Command(last.line, last.text[:-1] + line.strip()))
            elif line.strip() and not line.lstrip().startswith("#"):
                found.append(Command(number, line.removeprefix("$ ")))
        return found


def fences(text: str) -> list[Fence]:
    """All fences of a document."""
    found = re.finditer(r"^```([^\n]*)\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    return [Fence(text[: m.start()].count("\n") + 1, m[1].strip(), m[2]) for m in found]


def complaints(path: Path) -> list[str]:
    """Name fences that no test would run and that do not say why."""
    found = []
    for fence in fences(path.read_text(encoding="utf-8")):
        place = f"{path.name}:{fence.line}"
        runs = fence.language in RUN
        if fence.language not in (*RUN, *OTHERS, ""):
            found.append(f"{place}: {fence.language!r} is none of {', '.join((*RUN, *OTHERS))}")
        found += [
            f"{place}: {mark!r} is no mark of a fence; known are {', '.join(MARKS)}"
            for mark in fence.marks
            if not runs or mark not in MARKS
        ]
        if not runs and fence.language in ("", "text"):
            found += [
                f"{place}: {line.strip()!r} is a command: call the fence bash, or bash with a mark"
                for line in fence.body.splitlines()
                if PROGRAM.match(line)
            ]
    return found


def to_run(path: Path) -> list[Command]:
    """The commands of a document that need nothing special."""
    parts = fences(path.read_text(encoding="utf-8"))
    return [c for f in parts if f.language in RUN and not f.marks for c in f.commands()]


def missing(shown: tuple[str, ...], printed: str, exact: bool) -> str:
    """The first line of a document that the command did not print, in order; else an empty text.

    ``...`` stands for anything; blanks count as one; without ``exact`` a number for any other.
    """
    lines = [" ".join(line.split()) for line in printed.splitlines()]
    for line in (" ".join(each.split()) for each in shown):
        if line in ("", "..."):
            continue
        pattern = ".*".join(re.escape(part) for part in line.split("..."))
        if not exact:
            pattern = re.sub(r"\d(?:[\d,]|\\\.\d|e\\?[-+]\d)*[KMGTP]?", lambda _: NUMBER, pattern)
        at = next((i for i, each in enumerate(lines) if re.fullmatch(pattern, each)), None)
        if at is None:
            return line
        del lines[: at + 1]
    return ""
