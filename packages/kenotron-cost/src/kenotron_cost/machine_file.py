"""A machine in numbers, each with its source: what times and limits of a plan follow from."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).with_name("machines")
"""Files of the machines that are known by name."""
NUMBERS = {
    "peak_flops": "dense operations a second of a device",
    "product_efficiency": "share of the peak that products with matrices reach",
    "attention_efficiency": "share of the peak that attention and scans reach",
    "memory": "bytes of a device's memory",
    "context": "bytes of it that a process has in use before there is a tensor",
    "channels": "channels of a communicator; 0 where none has buffers in this memory",
    "channel_buffer": "bytes of a channel's buffers",
    "graph_node": "bytes of a kernel in a CUDA graph",
    "memory_bandwidth": "bytes a second between a device and its memory",
    "node_bandwidth": "bytes a second that a device sends to others of its node",
    "network_bandwidth": "bytes a second that a device sends to other nodes",
    "host_bandwidth": "bytes a second between a device and the host's memory",
    "latency": "seconds of the shortest message",
    "kernel_seconds": "seconds that a kernel takes besides its bytes and operations",
    "watts": "power of a device in use",
}
"""Numbers that a machine file has, by key."""
MAY_BE_ZERO = {"context", "channels", "channel_buffer", "graph_node"}
OLD = {"reserved": ("context", "channels", "channel_buffer", "graph_node")}
"""Numbers that files of earlier versions have, and those that took their place."""
CALIBRATED, UNPROVED = "calibrated here", "not measured here"


@dataclass(frozen=True)
class MachineNumber:
    """A number of a machine and the place that it is from."""

    value: float
    source: str
    measured: bool = False
    """True where this machine was measured, False for a data sheet or an assumption."""

    @property
    def proof(self) -> str:
        """The words for where it is from."""
        return CALIBRATED if self.measured else UNPROVED


@dataclass(frozen=True)
class Machine:
    """Nodes of equal devices."""

    name: str
    date: str
    """Day on which its numbers were written down."""
    devices: int
    """Devices of a node."""
    dtype: str
    """Of the products whose rates these are."""
    numbers: Mapping[str, MachineNumber]
    sharing: float = 1.0
    """Times that a rank computes longer while all ranks compute, where ranks share cores. A rank
    that waits then leaves its cores to the others."""

    def __getitem__(self, key: str) -> float:
        """Return the value of one of ``NUMBERS``."""
        return self.numbers[key].value

    def proof(self, *keys: str) -> str:
        """Return ``calibrated here`` where all of these numbers were measured."""
        measured = all(self.numbers[key].measured for key in keys)
        return CALIBRATED if measured else UNPROVED

    def sources(self) -> list[str]:
        """Return a line for each source, with the numbers that are from it."""
        found: dict[str, list[str]] = {}
        for key, number in self.numbers.items():
            line = f"{number.source} ({number.proof})"
            found.setdefault(line, []).append(f"{key} {number.value:.4g}")
        return [f"{', '.join(keys)}: {source}" for source, keys in found.items()]


def known_machines() -> list[str]:
    """Return the names of the machines that come with the program."""
    return sorted(file.stem for file in FOLDER.glob("*.json"))


def machine_named(name: str) -> Machine:
    """Return a machine by its name or the path of its file.

    Raises:
        ValueError: there is no such machine, or its file lacks a number or a source.
        OSError: the file cannot be read.
    """
    if name.lower() in known_machines():
        return read_machine(FOLDER / f"{name.lower()}.json")
    if not Path(name).is_file():
        raise ValueError(
            f"{name}: there is no machine of this name and no such file; give the path of a "
            f"machine file, or one of {', '.join(known_machines())}"
        )
    return read_machine(Path(name))


def read_machine(file: Path) -> Machine:
    """Read a machine file.

    Raises:
        ValueError: it is no JSON of a machine; one line for each number that is missing or wrong.
        OSError: it cannot be read.
    """
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{file}: this is no JSON ({error}); correct it") from None
    if not isinstance(values, dict) or not isinstance(values.get("numbers"), dict):
        raise ValueError(
            f"{file}: numbers: a machine file is a mapping with name, date, devices and numbers; "
            f"copy one of {FOLDER}"
        )
    problems = [f"{file}: {key}: it is missing; add it" for key in ("name", "date", "devices")
                if key not in values]  # fmt: skip
    given = values["numbers"]
    problems += [
        f"{file}: numbers.{key}: there is no such number{_replaced(key)}"
        for key in sorted(given.keys() - NUMBERS)
    ]
    for key, what in NUMBERS.items():
        if problem := _problem(given.get(key), zero=key in MAY_BE_ZERO):
            problems.append(f"{file}: numbers.{key}: {problem}; it is the {what}")
    if not _is_number(sharing := values.get("sharing", 1.0)) or sharing < 1:
        problems.append(
            f"{file}: sharing: value is {sharing!r}; give a number from 1, or leave it out"
        )
    if problems:
        raise ValueError("\n".join(problems))
    numbers = {key: MachineNumber(**given[key]) for key in NUMBERS}
    dtype = values.get("dtype", "bfloat16")
    name, date, devices = values["name"], values["date"], int(values["devices"])
    return Machine(name, date, devices, dtype, numbers, float(sharing))


def _replaced(key: str) -> str:
    """Return what to give in the place of a number of earlier versions."""
    if key not in OLD:
        return ""
    return f" any more; give {', '.join(OLD[key])} in its place, as the files of {FOLDER} do"


def _problem(number: Any, *, zero: bool) -> str:
    """Return what is wrong with a number of a file, which may be 0 or not; empty: nothing."""
    if number is None:
        return "it is missing; add {value, source}"
    if not isinstance(number, dict) or not number.keys() <= {"value", "source", "measured"}:
        return "it is no mapping of value, source and measured"
    value, source = number.get("value"), number.get("source")
    if not _is_number(value) and not (zero and value == 0 and value is not False):
        return f"value is {value!r}; give a number {'from' if zero else 'above'} 0"
    return "" if source and isinstance(source, str) else "source is missing; say where it is from"


def _is_number(value: Any) -> bool:
    """Return True for a finite number above 0."""
    return isinstance(value, int | float) and value is not True and 0 < value < math.inf
