"""A plan on the terminal, 100 columns wide, and as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from textwrap import wrap
from typing import Any

import torch

from kenotron_command import short
from kenotron_cost import (
    NOT_COUNTED,
    Estimate,
    Found,
    Machine,
    PlannedRun,
    Refused,
    described_parts,
)
from kenotron_engine import tflops_per_rank
from kenotron_models import TransformersSpec, expert_count, training_flops

GB = 1e9
WIDTH = 100
SHOWN_REASONS = 12
NOT_TIMED = (
    "latency of what attention sends over cp, products that are slow because they are small, "
    "reading data, saves, evaluations, sums over tied matrices and norms"
)
"""Time that no number here has."""


def figures(estimate: Estimate, machine: Machine, training: PlannedRun) -> dict[str, Any]:
    """Return everything that is known of a layout, as JSON has it."""
    seconds, ranks = estimate.time.seconds, estimate.layout.ranks
    batch = training.samples * training.sequence
    rate = tflops_per_rank(
        estimate.plan.spec, training.samples, training.sequence, seconds=seconds, ranks=ranks
    )
    hours = training.tokens / batch * seconds / 3600
    found: dict[str, Any] = {
        "layout": asdict(estimate.layout) | {"ranks": ranks},
        "fits": estimate.fits,
        "memory": {
            "gb": estimate.memory.total / GB,
            "of_gb": estimate.room / GB,
            "instant": estimate.memory.instant,
            "pp_rank": estimate.memory.rank,
            "gb_by_class": {what: n / GB for what, n in estimate.memory.bytes_of.items()},
            "activations_gb_by_layer": {kind: n / GB for kind, n in estimate.memory.layers.items()},
        },
        "step_seconds": seconds,
        "seconds_by_part": estimate.time.parts,
        "bubble": estimate.time.bubble,
        "sent_gb_by_axis": {axis: n / GB for axis, n in estimate.sent.items()},
        "tokens_per_second": batch / seconds,
        "mfu": rate * 1e12 / machine["peak_flops"],
        "days": hours / 24,
        "megawatt_hours": hours * ranks * machine["watts"] / 1e6,
        "times": estimate.proof,
    }
    if training.price is not None:
        found["price"] = hours * ranks * training.price
    return found


def own_lines(estimate: Estimate, machine: Machine, training: PlannedRun) -> list[str]:
    """Describe the layout of a config."""
    found, memory = figures(estimate, machine, training), estimate.memory
    fits = "fits" if estimate.fits else "does not fit"
    gap = abs(estimate.room - memory.total) / GB
    classes = sorted(memory.bytes_of.items(), key=lambda each: -each[1])
    by_class = ", ".join(f"{what} {_gb(size)}" for what, size in classes)
    layers = ", ".join(f"{kind} {_gb(size)}" for kind, size in memory.layers.items())
    sent = ", ".join(f"{axis} {_gb(size)}" for axis, size in estimate.sent.items() if size)
    parts = described_parts(estimate.time.parts, 5)
    lines = [
        f"{estimate.plan.parallelism.described}, {estimate.layout.engine}, ZeRO "
        f"{estimate.layout.zero}, recompute {estimate.layout.recompute}, micro-batches of "
        f"{estimate.layout.micro_batch}: {fits}, {memory.total / GB:.3g} of "
        f"{estimate.room / GB:.3g} GB ({gap:.3g} {'free' if estimate.fits else 'missing'})",
        f"Largest instant: {memory.instant}, on pp rank {memory.rank}. In GB: {by_class}",
        f"Activations by kind of layer, in GB: {layers or 'unknown'}",
        f"Step {found['step_seconds']:.3g} s ({found['times']}): {parts}; bubble of the pipeline "
        f"{estimate.time.bubble:.1%}; {short(found['tokens_per_second'])} tokens/s, MFU "
        f"{found['mfu']:.1%}",
        f"A rank sends in a step, in GB: {sent or 'nothing'}; transfers of pp are not among them",
        f"Whole training: {found['days']:,.3g} days, {short(found['megawatt_hours'])} MWh of the "
        f"devices alone{_price(found)} ({machine.proof('watts')})",
    ]
    return [part for line in lines for part in wrap(line, WIDTH, subsequent_indent="  ")]


def _gb(size: float) -> str:
    """Return gigabytes with three digits, or all of them before the point."""
    return f"{size / GB:,.0f}" if size >= 1000 * GB else f"{size / GB:.3g}"


def _price(found: dict[str, Any]) -> str:
    return f", {short(found['price'])} at the given price" if "price" in found else ""


HEADER = (
    f"{'':>2} {'dp':>5}{'pp':>4}{'cp':>4}{'tp':>4}{'ep':>4} {'order':<12}{'mb':>3}{'ZeRO':>5} "
    f"{'recompute':<10}{'GB':>6}{'step s':>9}{'MFU':>6}  limits"
)


def best_lines(found: Found, machine: Machine, training: PlannedRun) -> list[str]:
    """Return a table of the best layouts, each with the largest shares of its step."""
    lines = [HEADER]
    for number, each in enumerate(found.best, 1):
        of, layout = figures(each, machine, training), each.layout
        # Products are the work itself: what limits a layout is the largest share of the rest.
        parts = {what: part for what, part in each.time.parts.items() if what != "products"}
        limit = max(parts, key=lambda what: parts[what])
        lines.append(
            f"{number:>2} {layout.dp:>5}{layout.pp:>4}{layout.cp:>4}{layout.tp:>4}{layout.ep:>4} "
            f"{layout.engine if layout.pp > 1 else '-':<12}{layout.micro_batch:>3}"
            f"{layout.zero:>5} {layout.recompute:<10}{each.memory.total / GB:>6.1f}"
            f"{of['step_seconds']:>9.3g}{of['mfu']:>6.0%}  "
            f"{limit} {parts[limit] / each.time.seconds:.0%}"
        )
        if layout.knobs:
            text = ", ".join(f"{key}={json.dumps(value)}" for key, value in layout.knobs)
            lines += wrap(text, WIDTH, initial_indent="     ", subsequent_indent="     ")
    return lines


def refused_lines(refused: Refused) -> list[str]:
    """Return the reasons of layouts that the config's own rules refuse."""
    lines = []
    for reason, times in refused.reasons.most_common(SHOWN_REASONS):
        lines += wrap(f"{times:,} x {reason}", WIDTH, initial_indent="  ", subsequent_indent="    ")
    if rest := len(refused.reasons) - SHOWN_REASONS:
        lines += [f"  and {rest} more reasons (--json has all)"] if rest > 0 else []
    return lines


def note_lines(estimate: Estimate, machine: Machine, training: PlannedRun) -> list[str]:
    """Say what is counted and what is not, and name the source of every number of the machine."""
    flops = training_flops(estimate.plan.spec, training.samples, training.sequence)
    notes: Sequence[str] = (
        f"MFU: {short(flops)} operations of a step (forward and backward, whole square of scores) "
        f"/ seconds / ranks / {short(machine['peak_flops'])}",
        f"Memory that is not counted: {NOT_COUNTED}",
        f"Time that is not counted: {NOT_TIMED}",
        f"Machine: {machine.name}, {machine.date}. "
        + "; ".join(line for line in machine.sources()),
    )
    if expert_count(estimate.plan.spec) > 1:
        load = "an even load (change it with --imbalance)"
        if isinstance(estimate.plan.spec, TransformersSpec):
            load = "an even load; of models of transformers --imbalance changes nothing"
        elif training.imbalance != 1:
            load = f"{training.imbalance:g} times an even load's tokens on the fullest rank"
        notes = (*notes, f"Experts: {load}")
    elif training.imbalance != 1:
        notes = (
            *notes,
            f"Experts: there are none; --imbalance {training.imbalance:g} changes nothing",
        )
    if estimate.plan.dtype != getattr(torch, machine.dtype):
        given = str(estimate.plan.dtype).removeprefix("torch.")
        line = (
            f"model.dtype is {given}: products are timed at the machine's rate for {machine.dtype}"
        )
        notes = (*notes, line)
    return [part for note in notes for part in wrap(note, WIDTH, subsequent_indent="  ")]
