"""From the JSON lines of a GPU day to ``tests/GPU.md``."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from gpu_parts import PARTS

TITLE = """# What was seen on a GPU

Written by `python tests/gpu_day.py table DIR` from records of `python tests/gpu_day.py PART --out
DIR`. Dry runs on a CPU are left out. An item that failed or was not run is listed with its reason.
"""
NOTHING = "No GPU has been measured yet."
Record = dict[str, Any]


def write_table(folder: Path, target: Path) -> int:
    """Write what the records in ``folder`` say; how many items on a GPU were found.

    Raises:
        ValueError: a line that is no record: the file and the number of the line.
    """
    sections, count = [], 0
    for part in PARTS:
        header, records = read(folder / f"{part}.jsonl")
        count += len(records)
        if header is not None and records:
            sections.append(section(part, header, records))
        else:
            sections.append(f"## {part}\n\nNot measured yet: {PARTS[part].text}.\n")
    text = TITLE + ("" if count else f"\n**{NOTHING}**\n")
    target.write_text("\n".join([text, *sections]))
    return count


def measured(folder: Path) -> bool:
    """Return whether the folder has a record of a GPU. Raises ValueError as ``write_table``."""
    return any(read(folder / f"{part}.jsonl")[1] for part in PARTS)


def read(file: Path) -> tuple[Record | None, list[Record]]:
    """Return the last header of a GPU and the last record of each item under any such header."""
    header: Record | None = None
    records: dict[str, Record] = {}
    dry = False
    lines = file.read_text().splitlines() if file.exists() else []
    for number, line in enumerate(lines, 1):
        try:
            entry = json.loads(line)
            if "header" in entry:
                dry = bool(entry["dry"])
                header = header if dry else entry["header"]
            elif not dry:
                before = records.get(entry["item"], {"status": "not run"})
                if entry["status"] != "not run" or before["status"] == "not run":
                    records[entry["item"]] = entry | {"of": header}
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{file}, line {number}, is not a record of this program") from error
    return header, list(records.values())


def section(part: str, header: Record, records: list[Record]) -> str:
    """Return the text of one part."""
    lines = [f"## {part}", "", PARTS[part].text[:1].upper() + PARTS[part].text[1:] + ".", ""]
    lines += [surroundings(header), ""]
    lines += ["| item | status | seconds | |", "|---|---|---|---|"]
    for each in records:
        why = each.get("reason") or each.get("error", "").splitlines()[-1:] or ""
        why = why if isinstance(why, str) else why[0]
        if each["of"] != header:
            why = f"{each['of']['date']}, commit {each['of']['commit'][:12]}. {why}"
        row = [each["item"], each["status"], f"{each['seconds']:.1f}", why.strip()]
        lines.append("| " + " | ".join(map(cell, row)) + " |")
    for each in records:
        if each.get("result"):
            lines += ["", f"### {each['item']}", "", *numbers(each["result"])]
    return "\n".join(lines) + "\n"


def surroundings(header: Record) -> str:
    """Return one sentence: hardware, versions, date and commit."""
    hardware, versions = header["hardware"], header["versions"]
    names = ", ".join(f"{name} {version}" for name, version in versions.items())
    return (
        f"Seen on {hardware['gpu']} ({hardware.get('gpu_memory_gib', '?')} GiB), "
        f"{hardware['cores']} cores, {hardware['memory_gib']} GiB; {names}; "
        f"{header['date']}, commit {header['commit']}."
    )


def numbers(result: Mapping[str, Any]) -> list[str]:
    """Return single values as a list, and rows of equal columns as tables."""
    lines = [
        f"- {cell(name)}: {cell(value)}"
        for name, value in result.items()
        if not isinstance(value, dict)
    ]
    tables: dict[tuple[str, ...], dict[str, Mapping[str, Any]]] = {}
    for name, row in result.items():
        if isinstance(row, dict):
            tables.setdefault(tuple(row), {})[name] = row
    for columns, rows in tables.items():
        lines += ["", *table(columns, rows)] if lines else table(columns, rows)
    return lines


def table(columns: Iterable[str], rows: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return the lines of a table in Markdown."""
    names = ["", *columns]
    lines = ["| " + " | ".join(map(cell, names)) + " |", "|" + "---|" * len(names)]
    for name, row in rows.items():
        values = [name, *(row[column] for column in names[1:])]
        lines.append("| " + " | ".join(map(cell, values)) + " |")
    return lines


def cell(value: Any) -> str:
    """Return a value as the text of a cell: numbers with 4 digits, whole ones with commas."""
    if isinstance(value, list):
        return ", ".join(map(cell, value))
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1e4 else f"{value:.4g}"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return str(value).replace("|", "\\|").replace("\n", " ")
