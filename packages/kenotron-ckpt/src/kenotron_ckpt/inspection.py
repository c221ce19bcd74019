"""Contents of a checkpoint, as data (JSON values), and as a tree of tensors to look at.

Only manifests and lengths of files are read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from kenotron_ckpt.folder import (
    defect,
    is_verified,
    latest_named,
    latest_step,
    preferred,
    steps_in,
)
from kenotron_ckpt.index import FORMAT, VERSION, Record
from kenotron_ckpt.store import Location, Store, store_at

OPTIMIZER = "optimizer."
"""Prefix of names of optimizer state: ``optimizer.<kind>.<parameter>``."""
_INDENT = "  "


def describe(path: Location) -> dict[str, Any]:
    """Everything ``render`` shows, and each record, as JSON values.

    Args:
        path: a step folder, or a run folder (its latest complete checkpoint).

    Raises:
        ValueError: there is no checkpoint.
    """
    given = store_at(path)
    folder, manifest = preferred(given)
    records = [_row(name, record) for name, record in manifest.records.items()]
    totals: dict[str, dict[str, int]] = {}
    for row in records:
        total = totals.setdefault(row["kind"].split(".")[0], {"records": 0, "bytes": 0})
        total["records"] += 1
        total["bytes"] += row["bytes"]
    lengths = [entry.bytes for entry in manifest.files.values()]
    return {
        "path": str(folder),
        "run": _run(given) if str(folder) != str(given) else None,
        "step": manifest.step,
        "format": f"{FORMAT} {VERSION}",
        "mesh": dict(manifest.mesh),
        "libraries": dict(manifest.libraries),
        "state": dict(manifest.state),
        "totals": totals,
        "files": {"count": len(lengths), "bytes": sum(lengths)},
        "records": records,
    }


def render(data: Mapping[str, Any]) -> str:
    """Render the result of ``describe`` as text: steps, totals, a tree for each kind of tensor.

    Equal layers are shown once. Optimizer state that has the weights' names and shapes is
    one line.
    """
    lines = [*_run_lines(data["run"]), *_head_lines(data)]
    rows: dict[str, list[Mapping[str, Any]]] = {}
    for row in data["records"]:
        rows.setdefault(row["kind"], []).append(row)
    # Optimizer state with one tensor for each weight would repeat the tree of the weights.
    weights = {(row["module"], tuple(row["shape"])) for row in rows.get("weights", [])}
    for kind, group in sorted(rows.items(), key=lambda item: (item[0] != "weights", item[0])):
        dtypes = sorted({row["dtype"] for row in group})
        same = {(row["module"], tuple(row["shape"])) for row in group} == weights
        if kind != "weights" and same and len(dtypes) == 1:
            size = sum(row["bytes"] for row in group)
            lines += ["", f"{kind}: {dtypes[0]} of every weight's shape, {size:,} bytes"]
        else:
            lines += ["", *_table(kind, group)]
    return "\n".join(lines)


def kind_of(name: str) -> tuple[str, str]:
    """(``weights`` or ``optimizer.<kind>``, the parameter's name) of a record's name."""
    if not name.startswith(OPTIMIZER) or name.count(".") < 2:
        return "weights", name
    _, kind, module = name.split(".", 2)
    return OPTIMIZER + kind, module


def _row(name: str, record: Record) -> dict[str, Any]:
    kind, module = kind_of(name)
    ranks = len({piece.file.split("-of-")[0] for piece in record.pieces})
    return {
        "name": name,
        "kind": kind,
        "module": module,
        "shape": list(record.shape),
        "dtype": record.dtype,
        "bytes": record.numel * getattr(torch, record.dtype).itemsize,
        "pieces": len(record.pieces),
        "cut": _cut(record),
        "ranks": ranks,
    }


def _cut(record: Record) -> str:
    """Describe the cut of a record: ``whole``, ``2x1`` blocks as a grid, or so many ``pieces``."""
    count = len(record.pieces)
    if count <= 1:
        return "whole" if count else "empty"
    grid = [len({piece.start[dim] for piece in record.pieces}) for dim in range(len(record.shape))]
    return "x".join(map(str, grid)) if torch.Size(grid).numel() == count else f"{count} pieces"


def _run(folder: Store) -> dict[str, Any]:
    """The steps of a run folder, newest first."""
    return {
        "folder": str(folder),
        "latest": latest_step(folder),
        "named": latest_named(folder),
        "steps": [
            {
                "step": step,
                "fault": defect(folder.at(str(step))),
                "verified": is_verified(folder.at(str(step))),
            }
            for step in reversed(steps_in(folder))
        ],
    }


def _run_lines(run: Mapping[str, Any] | None) -> Iterator[str]:
    if run is None:
        return
    yield f"{run['folder']}: {len(run['steps'])} steps, latest.txt names {run['named']}"
    width = max(len(str(each["step"])) for each in run["steps"])
    for each in run["steps"]:
        text = each["fault"] or ("complete, verified" if each["verified"] else "complete")
        mark = "  <- shown below" if each["step"] == run["latest"] else ""
        yield f"{_INDENT}{each['step']:>{width}}  {text}{mark}"
    yield ""


def _head_lines(data: Mapping[str, Any]) -> Iterator[str]:
    mesh = " ".join(f"{axis}={size}" for axis, size in data["mesh"].items())
    libraries = " ".join(f"{name}={number}" for name, number in data["libraries"].items())
    yield f"{data['path']}: step {data['step']}, {data['format']}"
    yield f"{_INDENT}written on {mesh} by {libraries}"
    for kind, total in sorted(data["totals"].items(), reverse=True):
        yield f"{_INDENT}{kind}: {total['records']} records, {total['bytes']:,} bytes"
    yield f"{_INDENT}on the disk: {data['files']['count']} files, {data['files']['bytes']:,} bytes"
    yield f"{_INDENT}state: {', '.join(sorted(data['state'])) or 'empty'}"


@dataclass
class _Node:
    """A module, or a tensor when it has a row."""

    row: Mapping[str, Any] | None = None
    children: dict[str, _Node] = field(default_factory=dict)

    def signature(self) -> Any:
        """The same for nodes that are printed as one."""
        own = self.row and (tuple(self.row["shape"]), self.row["dtype"], self.row["cut"])
        return own, tuple((name, node.signature()) for name, node in self.children.items())


Line = tuple[str, str, str, str, str]
"""label, shape, dtype, bytes, cut"""


def _table(kind: str, rows: Sequence[Mapping[str, Any]]) -> list[str]:
    # Names cut at their dots become a tree, whose lines are then set in columns of equal width.
    root = _Node()
    for row in rows:
        node = root
        for part in row["module"].split("."):
            node = node.children.setdefault(part, _Node())
        node.row = row
    lines: list[Line] = [(kind, "shape", "dtype", "bytes", "stored as"), *_tree(root, 1)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    right = (False, False, False, True, False)
    return [
        "  ".join(
            text.rjust(width) if flush else text.ljust(width)
            for text, width, flush in zip(line, widths, right, strict=True)
        ).rstrip()
        for line in lines
    ]


def _tree(node: _Node, depth: int) -> Iterator[Line]:
    for label, child in _alike(node.children):
        text = _INDENT * depth + label
        if child.row is None:
            yield text, "", "", "", ""
        else:
            row = child.row
            shape = "x".join(map(str, row["shape"])) or "scalar"
            by = f" by {row['ranks']} ranks" if row["ranks"] > 1 else ""
            yield text, shape, row["dtype"], f"{row['bytes']:,}", row["cut"] + by
        yield from _tree(child, depth + 1)


def _alike(children: Mapping[str, _Node]) -> Iterator[tuple[str, _Node]]:
    """Children and labels; equal numbered children are one line, and so is a chain of modules."""
    named = sorted(children.items(), key=lambda item: int(item[0]) if item[0].isdecimal() else -1)
    # Neighbours with consecutive numbers and equal contents (layers) are collected in one run.
    runs: list[tuple[list[str], _Node]] = []
    for name, child in named:
        if runs and _continues(runs[-1], name, child):
            runs[-1][0].append(name)
        else:
            runs.append(([name], child))
    for names, child in runs:
        label = names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}, each"
        while child.row is None and len(child.children) == 1 and len(names) == 1:
            [(name, child)] = child.children.items()
            label += f".{name}"
        yield label, child


def _continues(run: tuple[list[str], _Node], name: str, child: _Node) -> bool:
    last = run[0][-1]
    follows = last.isdecimal() and name.isdecimal() and int(name) == int(last) + 1
    return follows and run[1].signature() == child.signature()
