"""``python apps/train report RUN_DIR ...``: pictures of runs, for people."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from kenotron_command import framed
from kenotron_command.charts import WITHOUT_MATPLOTLIB, can_draw
from kenotron_train.called import parser_of
from kenotron_train.log.printing import fail, say
from kenotron_train.report.curves import read_runs, summary
from kenotron_train.report.evaluation_tables import last_figures, with_evaluations
from kenotron_train.report.page import AXES, report_html, write_picture


def report_main(argv: Sequence[str]) -> int:
    """Write report.html and report.png; the exit status."""
    arguments = report_parser().parse_args(argv)
    return framed(lambda: _draw(arguments), OSError, ValueError, ModuleNotFoundError, report=fail)


def _draw(arguments: argparse.Namespace) -> int:
    folder = Path(arguments.output or _folder_of(arguments.runs[0]))
    runs = [
        with_evaluations(run, Path(_folder_of(name)))
        for run, name in zip(read_runs(arguments.runs), arguments.runs, strict=True)
    ]
    _show(summary(runs))
    if table := last_figures(runs):
        _show([list(column) for column in zip(*table, strict=True)])
    if not can_draw():
        raise ModuleNotFoundError(f"the figures stand above; {WITHOUT_MATPLOTLIB}")
    folder.mkdir(parents=True, exist_ok=True)
    page = folder / "report.html"
    fresh = page.with_name("new.report.html")
    fresh.write_text(report_html(runs, arguments.x), encoding="utf-8")
    fresh.replace(page)
    write_picture(folder / "report.png", runs, arguments.x)
    say(f"Written: {page} and {folder / 'report.png'}")
    return 0


def _folder_of(run: str) -> Path:
    path = Path(run)
    return path.parent if path.is_file() else path


def _show(table: list[list[str]]) -> None:
    """One block a run: the table is wider than a terminal."""
    titles, *runs = table
    shown = Table(*(name for name, *_ in table), box=None, pad_edge=False)
    shown.columns[0].header = ""
    for place, title in enumerate(titles[1:], 1):
        shown.add_row(title, *(run[place] for run in runs))
    console = Console(highlight=False)
    with console.capture() as captured:
        console.print(shown)
    say(captured.get().removesuffix("\n"))


def report_parser() -> argparse.ArgumentParser:
    """The flags of ``report``."""
    parser = parser_of(
        "report",
        "Draw loss, learning rate, throughput, memory, evaluations and the load of "
        "experts of one run, or of several to compare them, to report.html and report.png. Needs "
        "matplotlib.",
    )
    parser.add_argument(
        "runs", nargs="+", metavar="RUN_DIR", help="a checkpoints_path with metrics.jsonl in it"
    )
    parser.add_argument("--output", metavar="FOLDER", help="default: the first RUN_DIR")
    parser.add_argument("--x", choices=list(AXES), default="step", help="what is drawn along x")
    return parser
