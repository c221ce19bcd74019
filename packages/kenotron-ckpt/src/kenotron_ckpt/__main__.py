"""``python -m kenotron_ckpt inspect PATH``: what is in a checkpoint."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import torch

from kenotron_ckpt.folder import read_manifest, resolve
from kenotron_ckpt.index import Manifest
from kenotron_ckpt.loading import verify_files


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status (0; 1 when the checkpoint cannot be read)."""
    parser = argparse.ArgumentParser(prog="python -m kenotron_ckpt", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    inspect = commands.add_parser("inspect", help="list the records of a checkpoint")
    inspect.add_argument("path", help="a step folder, or a run folder (its latest checkpoint)")
    inspect.add_argument("--verify", action="store_true", help="compare all checksums")
    chosen = parser.parse_args(arguments)
    try:
        print(resolve(chosen.path))
        print(describe(read_manifest(chosen.path)))
        damaged = verify_files(chosen.path) if chosen.verify else []
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    for sentence in damaged:
        print(sentence, file=sys.stderr)
    if chosen.verify and not damaged:
        print("checksums: all as written")
    return 1 if damaged else 0


def describe(manifest: Manifest) -> str:
    """The table of records, under the step and the mesh that wrote them."""
    rows = [("record", "shape", "dtype", "pieces", "bytes")]
    total = 0
    for name, record in manifest.records.items():
        size = record.numel * getattr(torch, record.dtype).itemsize
        total += size
        shape = "x".join(map(str, record.shape)) or "scalar"
        rows.append((name, shape, record.dtype, str(len(record.pieces)), f"{size:,}"))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    table = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
    mesh = " ".join(f"{axis}={size}" for axis, size in manifest.mesh.items())
    libraries = " ".join(f"{name}={number}" for name, number in manifest.libraries.items())
    totals = f"{len(manifest.records)} records, {total:,} bytes in {len(manifest.files)} files"
    head = [f"step {manifest.step}", f"written on {mesh} by {libraries}", totals, ""]
    return "\n".join([*head, *table])


if __name__ == "__main__":
    sys.exit(main())
