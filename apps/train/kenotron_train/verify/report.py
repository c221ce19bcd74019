"""Result of a comparison of a layout with one process, for people and for programs."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from kenotron_command import or_null
from kenotron_config import ParallelismConfig, TokensConfig
from kenotron_engine import GRADIENT_FLOOR, GRADIENT_TOLERANCE
from kenotron_train.log.printing import say
from kenotron_train.verify.measured import Check, Findings

SHOWN = 4
"""Further tensors that depart which are named."""
RULES = {
    "gradients": "{0:g} of its largest element, or {1:g} of the norm of all gradients",
    "updated weights": "{0:g} of its largest change, and a float32 rounding for each step",
}
"""Allowed deviations where numbers may be added up in another order."""


@dataclass(frozen=True)
class Verdict:
    """All that was compared."""

    name: str
    """Of the config."""
    before: ParallelismConfig
    """Of the config."""
    after: ParallelismConfig
    tokens: TokensConfig
    """Of the copy, as `after`."""
    allowed: float
    """Largest relative deviation."""
    changes: list[tuple[str, str, str]]
    """(key, in the config, in the copy)"""
    outcome: Findings

    @property
    def not_compared(self) -> list[str]:
        """Axes of the config that the copy has no more, for want of ranks."""
        return [
            name
            for name in ("dp", "pp", "cp", "tp", "ep")
            if getattr(self.before, name) > 1 == getattr(self.after, name)
        ]

    @property
    def passed(self) -> bool:
        """True where every check passed."""
        return self.outcome.passed


def show(verdict: Verdict, seconds: float) -> None:
    """Print what was made smaller, every check, and the verdict last."""
    console = Console(highlight=False, markup=False)
    with console.capture() as captured:
        _print(verdict, console)
    say(f"{captured.get()}{seconds:.0f} s")


def _print(verdict: Verdict, console: Console) -> None:
    console.print(f"A small copy of {verdict.name}, with synthetic tokens:")
    table = _table("key", "config", "copy")
    for key, old, new in verdict.changes:
        table.add_row(".".join(key.split(".")[-2:]), old, new)
    console.print(table)
    console.print("Every other key of parallelism, model and optimizer is as it is there.\n")
    for line in [*_dropped(verdict), _runs(verdict.after, verdict.tokens)]:
        console.print(line, soft_wrap=True)
    console.print()
    outcome = verdict.outcome
    if outcome.checks:
        console.print(_checks(outcome.checks))
        console.print()
    if outcome.plain:
        console.print("The same layout against transformers' own model in plain torch:")
        console.print(_checks(outcome.plain))
        console.print()
        console.print(_curve(outcome.curve))
        console.print()
    for line in _conclusion(verdict):
        console.print(line)


def _runs(sizes: ParallelismConfig, tokens: TokensConfig) -> str:
    steps, count = tokens.train_steps, sizes.world_size
    samples = sizes.dp * tokens.micro_batch_size * tokens.batch_accumulation_per_replica
    return (
        f"{count} process{'es' * (count > 1)} ({sizes.described}) against one: "
        f"{steps} step{'s' * (steps > 1)} of {samples} samples of {tokens.sequence_length} "
        "tokens"
    )


def write_json(path: Path, verdict: Verdict) -> None:
    """Write the same for programs; deviations that are not finite are null. Raises OSError."""
    found: dict[str, Any] = {
        "config": verdict.name,
        "passed": verdict.passed,
        "layout": verdict.after.grid,
        "not_compared": verdict.not_compared,
        "changes": [{"key": key, "config": old, "copy": new} for key, old, new in verdict.changes],
        "checks": [_plain(check) for check in verdict.outcome.checks],
        "transformers": _of_transformers(verdict.outcome),
        "broken": verdict.outcome.broken or None,
    }
    path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def _of_transformers(outcome: Findings) -> dict[str, Any] | None:
    """Return the comparison with transformers' own model; None: there is none."""
    if not outcome.plain:
        return None
    ours, theirs = ([or_null(pair[i]) for pair in outcome.curve] for i in (0, 1))
    checks = [_plain(check) for check in outcome.plain]
    return {"checks": checks, "losses": {"layout": ours, "transformers": theirs}}


def _plain(check: Check) -> dict[str, Any]:
    return {
        "step": check.step,
        "what": check.what,
        "passed": check.passed,
        "deviation": or_null(check.deviation),
        "bound": or_null(check.bound),
        "worst": check.worst or None,
        "departures": [
            {"name": each.name, "deviation": or_null(each.deviation), "bound": or_null(each.bound)}
            for each in check.departures
        ],
    }


def _table(first: str, *titles: str) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column(first, no_wrap=True)
    for title in titles:
        table.add_column(title, overflow="fold")
    return table


def _checks(checks: list[Check]) -> Table:
    table = _table("step", "compared", "measured", "allowed", "", "worst")
    for check in checks:
        table.add_row(
            str(check.step or ""),
            check.what,
            f"{check.deviation:.1e}" if check.deviation else "0",
            f"{check.bound:.1e}" if check.bound else "bitwise",
            "" if check.passed else "FAIL",
            check.worst if check.deviation else "",
        )
    return table


def _curve(losses: list[tuple[float, float]]) -> Table:
    table = _table("step", "loss of the layout", "of transformers")
    for step, (ours, theirs) in enumerate(losses, start=1):
        table.add_row(str(step), f"{ours:.6f}", f"{theirs:.6f}")
    return table


def _dropped(verdict: Verdict) -> list[str]:
    """List what is not compared."""
    if verdict.before.world_size == 1:
        return ["The config asks for one process: nothing is cut."]
    lost = ", ".join(verdict.not_compared)
    return [f"Not compared, for want of --ranks: {lost}"] if lost else []


def _conclusion(verdict: Verdict) -> list[str]:
    layout, outcome = verdict.after.described, verdict.outcome
    if outcome.broken:
        return [f"FAIL: the layout {layout} does not run: {outcome.broken}"]
    against = {"one process": outcome.checks, "transformers' own model": outcome.plain}
    for other, checks in against.items():
        if failed := [check for check in checks if not check.passed]:
            return _failure(verdict, failed, other)
    lost = " and ".join(verdict.not_compared)
    lines = [f"PASS: {layout} computes what one process computes"]
    lines += ["and what transformers' own model computes in plain torch"] * bool(outcome.plain)
    return [*lines, f"{lost} of the config: not compared, see --ranks"] if lost else lines


def _failure(verdict: Verdict, failed: list[Check], other: str) -> list[str]:
    """Name the tensors and numbers that depart from those of another training."""
    # The tensors of the first failed check that has some: later ones follow from them.
    tensors = next((check for check in failed if check.departures), None)
    lines = [] if tensors is None else _departures(tensors, verdict.allowed or GRADIENT_TOLERANCE)
    step = f"at step {failed[0].step}" if failed[0].step else "before the first step"
    said = ", ".join(f"{check.what} ({check.deviation:.1e})" for check in failed)
    layout = verdict.after.described
    return [*lines, f"FAIL: {layout} departs from {other} {step}: {said}"]


def _departures(check: Check, relative: float) -> list[str]:
    """The first tensor that departs, in the order of the model, and what comes after it."""
    (first, *more), rule = check.departures, RULES.get(check.what, "")
    rule = f"{first.bound:.1e}: {rule.format(relative, GRADIENT_FLOOR * relative)}"
    lines = [
        f"First of the {check.what} that depart: {first.name}, by {first.deviation:.1e}",
        f"allowed there: {rule if first.bound else '0, nothing is added up in another order'}",
    ]
    if more:
        names = ", ".join(each.name for each in more[:SHOWN])
        rest = f" and {len(more) - SHOWN} more, the last of them {more[-1].name}"
        lines.append(f"then {names}" + (rest if len(more) > SHOWN else ""))
    return lines
