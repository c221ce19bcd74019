"""The reproducible mode on rows of the grid: each has the bits of one process.

That process computes micro-batches of one sample. Losses, norms, the held-out loss, gradients by
name, weights and moments are compared with ``==``, of a run and of its resumption elsewhere.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import grid_check
import grid_run
from grid import OF_THE_MODEL, Row
from grid_check import changed, continued, unequal
from grid_run import Measured, measure, saved_after

from kenotron_models import virtual_shards, whole_row_part

STEPS = 3
BATCH = 6
"""Samples of a step, no power of two, or the least common multiple with dp."""
MODE = "with general.reproducible: true"
OF_THE_BITS = ("attention", "order")
"""Settings that have bits of their own in the mode."""
Keys = Mapping[str, str]
Reference = Callable[[Row, Keys], Measured]
"""Measures a row of one process with further keys of its config."""


def batch_of(row: Row) -> int:
    """Samples of a step of the row in the mode: dp divides them."""
    return math.lcm(BATCH, row.axes["dp"])


def keys(row: Row, first: Row | None = None) -> dict[str, str]:
    """Keys of the config with which a row has the mode.

    Args:
        row: the layout.
        first: the row whose bits are compared: it decides the batch, the virtual shards and the
            virtual chunks; None: the row itself.
    """
    first = first or row
    batch = batch_of(first)
    chunks = 4 if first.cp == 2 else first.cp  # a rank of cp has one, or two
    passes = max(n for n in range(1, row.micro + 1) if batch // row.axes["dp"] % n == 0)
    shards = _most_shards(first)
    found = {
        "general.reproducible": "true",
        "general.reproducible_max_tp": str(shards),
        "general.reproducible_max_cp": str(chunks),
        "optimizer.accumulate_grad_in_fp32": "true",  # the mode has no other sums
        "tokens.micro_batch_size": str(batch // row.axes["dp"] // passes),
        "tokens.batch_accumulation_per_replica": str(passes),
    }
    if row.extra == "ramp":
        third = batch // 3
        ramp = f"{{start: {third}, increment: {third}, samples: {2 * third}}}"
        found["tokens.batch_ramp"] = ramp
    return found


def _most_shards(first: Row) -> int:
    """Virtual shards of a row, if the model has as many: one where cp alone cuts samples."""
    tp = first.axes["tp"]
    return 8 if tp > 2 else 1 if first.cp > tp == 1 else 2


def alone(row: Row) -> Row:
    """The row of one process: the same numbers, attention and order of tokens."""
    names = {name: getattr(row, name) for name in (*OF_THE_MODEL, *OF_THE_BITS)}
    return Row(**names, micro=batch_of(row))


def refusal(row: Row) -> str:
    """Keys of the config that the mode refuses of the row, as the config says; empty: none."""
    try:
        grid_run.configure(row, Path("unread"), "run", STEPS, None, keys(row))
    except ValueError as error:
        lines = [line.removeprefix("--set: ") for line in str(error).splitlines()]
        if not all(MODE in line for line in lines):
            raise
        return ", ".join(dict.fromkeys(line.partition(":")[0] for line in lines))
    return ""


def elsewhere(row: Row, most: int) -> Row:
    """Another layout, on which the row's run is resumed: one that the mode has.

    It is that of the grid without an axis that would change the bits or that the model lacks.
    """
    found, given = grid_check.elsewhere(row, most), keys(row)
    spec = grid_run.model_of(row).decoder
    pp, dp, tp = found.sizes
    if virtual_shards(spec, int(given["general.reproducible_max_tp"])) % tp:
        tp = 1
    cp = found.cp if row.cp % found.cp == 0 and not whole_row_part(spec) else 1
    sizes = (pp, math.gcd(dp, batch_of(row)), tp)
    ep = found.ep if sizes[1] * tp * cp % found.ep == 0 else 1
    mode = found.mode if tp > 1 else "plain"
    return replace(found, sizes=sizes, cp=cp, ep=ep, mode=mode, order=row.order)


def judge(
    row: Row,
    folder: Path,
    reference: Reference,
    most: int,
    *,
    name: str = "",
    numbers: Keys = MappingProxyType({}),
    ways: Keys = MappingProxyType({}),
) -> list[str]:
    """Name what differs in a bit from one process: of the row's run, then of its resumption.

    Args:
        row: one that the mode does not refuse.
        folder: with the documents; runs write there.
        reference: measures one process.
        most: ranks of the resumption, at most.
        name: of the run's folder; empty: the row's.
        numbers: further keys of all runs.
        ways: further keys of the row alone.
    """
    name = name or f"{row}-bits"
    one, other = alone(row), elsewhere(row, most)
    want = reference(one, {**keys(one, row), **numbers})
    got = measure(row, folder, name, STEPS, keys={**keys(row), **numbers, **ways})
    assert got.gradients, "the first step has gradients"
    found = differing(got, want)
    checkpoint = folder / name / str(saved_after(STEPS))
    given = {**keys(other, row), **numbers}
    again = measure(other, folder, f"{name}-resumed", STEPS, checkpoint, given)
    if len(again.losses) != STEPS - saved_after(STEPS):
        found.append("steps when resumed")
    return found + [f"resumed on {other}: {e}" for e in changed(continued(got, again), want)]


def differing(got: Measured, want: Measured) -> list[str]:
    """Name what is not the same bits."""
    found = [f"gradient of {name}" for name in unequal(got.gradients, want.gradients)]
    return found + [f"first {n}" for n in unequal(got.first, want.first)] + changed(got, want)
