"""All keys of a config, and what can be seen of a training with one of them changed."""

from __future__ import annotations

import copy
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import yaml

from kenotron_config import Config
from kenotron_train.cli import main

TIMES = re.compile(r"_s$|per_sec|tflops|mfu|memory|timestamp|seconds|time$|slowest_rank")
"""Names of figures that differ from run to run."""
CLOCK = re.compile(r"^\S+ \S+ (?=\[[A-Z]+\|)")
MEASURED = re.compile(r" iteration: |Saved checkpoint |elapsed| [mn]?s\b|PID|port ")
"""Lines whose figures differ from run to run."""
FIGURE = re.compile(r"[\d.,:]*\d(e[-+]\d+)?[kKMG]?")
KEPT = (".sbatch",)
"""Endings of files whose text is compared; of others the name."""


@dataclass(frozen=True)
class Leaf:
    """A key that has a value, in one form of its section."""

    form: str
    """Name of the section's dataclass."""
    key: str
    """Its path, with ``[]`` for the number of an item."""
    hint: Any
    default: Any
    """None where it is required."""

    def __str__(self) -> str:
        return f"{self.form}.{self.key.rpartition('.')[2]}"


def leaves() -> list[Leaf]:
    """All keys but those of models and of what is opaque: each form of a section has its own."""
    found = [leaf for name, hint in get_type_hints(Config).items() for leaf in _below(name, hint)]
    return list({(leaf.form, leaf.key): leaf for leaf in found}.values())


def _below(path: str, hint: Any) -> Iterator[Leaf]:
    path += "[]" if get_origin(hint) in (tuple, list) else ""
    for form in _dataclasses(hint):
        hints = get_type_hints(form)
        for each in fields(form):
            inner, key = hints[each.name], f"{path}.{each.name}"
            if list(_dataclasses(inner)):
                yield from _below(key, inner) if each.name != "model_config" else ()
            else:
                default = None if each.default is MISSING else each.default
                yield Leaf(form.__name__, key, inner, default)


def _dataclasses(hint: Any) -> Iterator[type]:
    if isinstance(hint, type) and is_dataclass(hint):
        yield hint
    for each in get_args(hint):
        yield from _dataclasses(each)


def other_values(hint: Any, now: Any) -> list[Any]:
    """Values of a key's type that are not the one it has."""
    kinds = get_args(hint) or (hint,)
    if get_origin(hint) is Literal:
        return [each for each in kinds if each != now]
    literal = [kind for kind in kinds if get_origin(kind) is Literal]
    if literal:
        return other_values(literal[0], now)
    if bool in kinds:
        return [not now]
    if int in kinds:
        return [(now or 0) + 1]
    if float in kinds:
        return [(now or 1.0) * 0.5]
    return [f"{now}-other"]


def get(config: Mapping[str, Any], key: str) -> Any:
    """The value at a path, or None."""
    at: Any = config
    for part in key.replace("[]", ".0").split("."):
        at = at[int(part)] if isinstance(at, list) else (at or {}).get(part)
    return at


def changed(config: Mapping[str, Any], **changes: Any) -> dict[str, Any]:
    """A config with other values at these paths; ``...`` takes a key away."""
    new = copy.deepcopy(dict(config))
    for key, value in changes.items():
        *parents, last = key.replace("[]", ".0").split(".")
        at: Any = new
        for part in parents:
            if isinstance(at, list):
                at = at[int(part)]
            else:
                at[part] = at.get(part) or {}
                at = at[part]
        if value is ...:
            at.pop(last, None)
        else:
            at[last] = copy.deepcopy(value)
    return new


def without_absent(config: Any) -> Any:
    """A config without the keys that are ``...``."""
    if isinstance(config, dict):
        return {k: without_absent(v) for k, v in config.items() if v is not ...}
    return [without_absent(v) for v in config] if isinstance(config, list) else config


@dataclass(frozen=True)
class Seen:
    """What a user sees of a run."""

    status: int
    said: tuple[tuple[str, int], ...]
    """Lines that it printed, and how often; measured figures are ``#``."""
    steps: tuple[tuple[tuple[str, str], ...], ...]
    """Figures of its steps that do not depend on the clock."""
    files: tuple[tuple[str, str], ...]
    """Names of the files that it wrote, and the text or the keys of some."""

    def differs(self, other: Seen) -> list[str]:
        """Where two runs differ."""
        names = [each.name for each in fields(self)]
        return [name for name in names if getattr(self, name) != getattr(other, name)]


def see(folder: Path, config: Mapping[str, Any], printed: Callable[[], Iterable[str]]) -> Seen:
    """Train in an empty folder, which is the current one; tell what is seen of it."""
    (folder / "blocked").mkdir()  # a run folder in which step 2 cannot be saved
    (folder / "blocked/2").write_text("")
    file = folder / "c.yaml"
    file.write_text(yaml.safe_dump(dict(config), sort_keys=False))
    main(["--config-file", "c.yaml", "--check"])
    planned = "".join(printed()).partition("\nLayout: ")[2]
    try:
        status = main(["--config-file", "c.yaml", "--threads", "1"], leaves=False)
    except SystemExit as end:
        status = int(end.code or 0)
    logs = [path.read_text() for path in folder.rglob("log.txt")]
    lines = "".join([*printed(), *logs]).replace(str(folder), "HERE").splitlines()
    said = Counter(
        FIGURE.sub("#", line) if MEASURED.search(line) else line
        for line in (CLOCK.sub("", line).strip() for line in lines)
    )
    said.update(planned.splitlines())
    steps: list[dict] = []
    for path in folder.rglob("metrics.jsonl"):
        steps += [json.loads(line) for line in path.read_text().splitlines()]
    figures = tuple(tuple((k, json.dumps(v)) for k, v in _untimed(step).items()) for step in steps)
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    texts = tuple(
        (re.sub(r"\d{6,}", "#", str(path.relative_to(folder))), _text(path, folder))
        for path in files
    )
    return Seen(status, tuple(sorted(said.items())), figures, texts)


def _untimed(figures: Any) -> Any:
    if not isinstance(figures, dict):
        return figures
    return {key: _untimed(value) for key, value in figures.items() if not TIMES.search(key)}


def _text(path: Path, folder: Path) -> str:
    """What is compared of a file: all of it, the keys of a trace, or nothing."""
    if path.name.endswith(KEPT):
        return path.read_text().replace(str(folder), "HERE")
    if path.name.endswith(".trace.json"):
        return " ".join(sorted(set(re.findall(r'"([A-Z][\w ]*)":', path.read_text()))))
    return ""
