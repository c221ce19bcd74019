"""Turn an hour on one GPU into a table.

Each item runs in a process of its own with a timeout, and appends one JSON line to
DIR/PART.jsonl as soon as it has ended: a dead CUDA context ends one item, not the day. An item that
fails is recorded with the last lines of its traceback. Nothing has to be installed: the packages
of this repository are found where they are.

    python tests/gpu_day.py probe --out DIR     one part, within its minutes
    python tests/gpu_day.py all --out DIR       all parts, one after the other
    python tests/gpu_day.py all --out DIR --dry toy sizes on the CPU, no number means anything
    python tests/gpu_day.py table DIR           write tests/GPU.md from the records in DIR
"""

from __future__ import annotations

import argparse
import importlib
import os
import shutil
import signal
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import NoReturn

ROOT = Path(__file__).resolve().parent.parent
TABLE = ROOT / "tests" / "GPU.md"
FOLDERS = [ROOT / "tests" / "gpu", ROOT / "tests", *sorted(ROOT.glob("packages/*/src"))]
FOLDERS += [folder for folder in sorted(ROOT.glob("apps/*")) if folder.is_dir()]
DRY_WORKERS = 2
"""Items of a dry run at the same time."""
USAGE, FAILED = 2, 1


def find_packages() -> None:
    """Let this process, and all that it starts, import the packages of this repository."""
    paths = [str(folder) for folder in FOLDERS]
    sys.path[:0] = paths
    before = os.environ.get("PYTHONPATH", "")
    os.environ["PYTHONPATH"] = os.pathsep.join([*paths, *filter(None, [before])])


class _Parser(argparse.ArgumentParser):
    """An error is one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(USAGE, f"gpu_day.py: {message}\n")


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    import gpu_parts

    parts = "\n".join(
        f"  {name:8} {part.minutes:>3g} min  {part.text}" for name, part in gpu_parts.PARTS.items()
    )
    parser = _Parser(
        prog="gpu_day.py",
        description=__doc__,
        epilog=(
            f"parts, the most valuable first:\n{parts}\n\n"
            "A record has part, item, status (ok, failed, timeout, not run), seconds, result, and\n"
            "error or reason; the first line of a run has hardware, versions, commit, date and\n"
            "packages. Without git the commit is read from $KENOTRON_COMMIT or the file COMMIT.\n"
            "Several ranks share the GPU: leave the others of the machine alone.\n\n"
            "exit status: 0: every item ran or has a reason; 1: an item failed or timed out;\n"
            "2: bad arguments, DIR cannot be written, or there is no GPU and no --dry"
        ),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("part", metavar="PART", help=f"{', '.join(gpu_parts.PARTS)}, all, or table")
    parser.add_argument("folder", metavar="DIR", nargs="?", type=Path, help="of table: the records")
    parser.add_argument("--out", metavar="DIR", type=Path, help="where the records go")
    parser.add_argument("--dry", action="store_true", help="toy sizes on the CPU")
    parser.add_argument(
        "--minutes", type=float, help="limit of each part, instead of its own (see below)"
    )
    parser.add_argument(
        "--only", metavar="TEXT", default="", help="only items whose name contains TEXT"
    )
    parser.add_argument(
        "--fresh",
        action="store_true",
        help="a new interpreter for each item (seconds each), where forks cannot use the GPU",
    )
    parser.add_argument(
        "--workers",
        metavar="N",
        type=int,
        default=0,
        help="items at the same time, for parts that measure no time (1; a dry run: 2)",
    )
    parser.add_argument("--to", type=Path, default=TABLE, help="of table: the file (tests/GPU.md)")
    found = parser.parse_args(given)
    known = [*gpu_parts.PARTS, "all", "table", "tiny-step"]
    if found.part not in known:
        parser.error(f"unknown part {found.part!r}: choose one of {', '.join(known[:-1])}")
    if found.part == "table" and found.folder is None:
        parser.error("table needs the folder with the records: gpu_day.py table DIR")
    if found.part in [*gpu_parts.PARTS, "all"] and found.out is None:
        parser.error("--out DIR is missing: name the folder for the records")
    if found.part != "table" and found.folder is not None:
        parser.error(f"unexpected argument {str(found.folder)!r}: {found.part} takes --out DIR")
    if found.workers < 0:
        parser.error(f"--workers {found.workers} is negative: give how many items run at once")
    if found.minutes is not None and not found.minutes > 0:
        parser.error(f"--minutes {found.minutes:g} is not positive: give the limit of each part")
    return found


def main(given: list[str] | None = None) -> int:
    """Do what the command line asks for; the exit status."""
    find_packages()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    asked = arguments(given)
    if asked.part == "table":
        return make_table(asked.folder, asked.to)
    if asked.part == "tiny-step":
        return tiny_step()
    problem = unwritable(asked.out)
    if problem:
        return refuse(problem)
    return run(asked)


def run(asked: argparse.Namespace) -> int:
    """Run the parts that were asked for."""
    import gpu_about
    import gpu_parts
    import gpu_runner
    from gpu_items import Setting

    # The device is asked in a child: a process that has touched CUDA cannot be forked.
    if not asked.dry and not gpu_runner.call_apart(gpu_about.gpu_name, fresh=asked.fresh):
        return refuse("there is no GPU here: add --dry for toy sizes on the CPU")
    about = gpu_runner.call_apart(partial(gpu_about.describe, ROOT), fresh=asked.fresh)
    missing = [name for name, version in about["packages"].items() if version is None]
    print(f"commit {about['commit']}; not at hand: {', '.join(missing) or 'nothing'}", flush=True)
    names = list(gpu_parts.PARTS) if asked.part == "all" else [asked.part]
    if asked.dry:
        importlib.import_module("torch._dynamo")  # recompute loads it: once, not in each process
    # Items have folders of their own for temporary files; what is compiled is kept for all.
    cache = Path(tempfile.gettempdir()) / "gpu-day-compiled"
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache))
    scratch = Path(tempfile.mkdtemp(prefix="gpu-day-"))
    setting = Setting("cpu" if asked.dry else "cuda", asked.dry, scratch)
    statuses = []
    try:
        for name in names:
            part = gpu_parts.PARTS[name]
            file = asked.out / f"{name}.jsonl"
            gpu_runner.append(
                file, {"part": name, "dry": asked.dry, "argv": sys.argv[1:], "header": about}
            )

            def record(entry: dict, file: Path = file) -> None:
                gpu_runner.append(file, entry)
                told = entry.get("reason") or entry.get("error", "").rpartition("\n")[2]
                line = f"{entry['part']:8}{entry['item']:50}{entry['status']:8}"
                print(f"{line}{entry['seconds']:7.1f} s  {told}".rstrip(), flush=True)
                for who, ratio in ratios(entry).items():
                    print(f"{'':8}{who}: {ratio}", flush=True)

            records = gpu_runner.run_part(
                name,
                [each for each in part.items if asked.only in each.name],
                setting,
                record,
                seconds=60 * (asked.minutes or (60 if asked.dry else part.minutes)),
                workers=asked.workers or (DRY_WORKERS if asked.dry else 1),
                fresh=part.module if asked.fresh else "",
            )
            statuses += [entry["status"] for entry in records]
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return FAILED if {"failed", "timeout"} & set(statuses) else 0


def ratios(entry: dict) -> dict[str, float]:
    """Return the times of contestants over that of the first, where an item has some."""
    rows = {name: row for name, row in entry.get("result", {}).items() if isinstance(row, dict)}
    key = "time / time of the first"
    return {f"{name}, {key}": row[key] for name, row in rows.items() if key in row}


def make_table(folder: Path, target: Path) -> int:
    """Write the table; the exit status."""
    import gpu_table

    if not folder.is_dir():
        return refuse(f"{folder} is not a folder: name the one that --out named")
    try:
        if target == TABLE and not gpu_table.measured(folder):
            return refuse(f"{folder} holds nothing measured on a GPU: {TABLE.name} stays as it is")
        count = gpu_table.write_table(folder, target)
    except (ValueError, OSError) as error:
        return refuse(str(error))
    print(f"{target}: {count} items measured on a GPU")
    return 0


def tiny_step() -> int:
    """One training step on the GPU, in this process: what compute-sanitizer looks at."""
    import gpu_right
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    print(f"tiny step done: loss {gpu_right.tiny_step(device)}")
    return 0


def unwritable(folder: Path) -> str:
    """Return why ``folder`` cannot be written; empty when it can. Makes the folder."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return ""
    except OSError as error:
        return f"{folder} cannot be written: {error.strerror or error}"


def refuse(text: str) -> int:
    """Write one line to stderr; the exit status."""
    print(f"gpu_day.py: {text}", file=sys.stderr)
    return USAGE


if __name__ == "__main__":
    sys.exit(main())
