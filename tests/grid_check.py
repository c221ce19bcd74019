"""Judging a row of the grid: against one process, and against itself, resumed elsewhere."""

from __future__ import annotations

import math
import re
import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from grid import AXES, ENGINES, GLOBAL_BATCH, SHARDS, Row, factorisations
from grid_run import Measured, Weights, measure, saved_after
from parity import farthest

BOUND = 1e-5
"""Largest relative deviation of an fp32 row's losses, norms and tensors from one process."""
GRADIENT_FLOOR = 1e-7
"""A gradient may deviate by this share of the norm of all of them, however small it is."""
WEIGHT_FLOOR = 0.02
"""A weight may deviate by this share of all the way that the learning rates let it go: Adam divides
a gradient by its size, and where that is nearly nothing, rounding decides the way."""
HALF = 1.5
"""How far a bf16 row may be from one process in bf16, in units of how far that one is from fp32:
losses and norms where they are farthest, all gradients and all weights by the norm of what differs.
Two roundings that know nothing of each other differ by 1.4."""
LONG = 10
"""In more steps than this, one turn of the loss may multiply rounding by ten. One process is then
run in bf16 twice, gradients added in fp32 and in bf16: the one that is farther from fp32 counts."""
HALF_OF_ONE = 2.5
"""The same for the gradient of each tensor alone: some have 8 elements, where chance is large. One
that is rounded well by chance may be off as others of its name are, as a share of its size."""
KEPT = ("optimizer.master.", "optimizer.average.")
"""Begin the names of weights in fp32, and of their averages."""


@dataclass(frozen=True)
class Result:
    """A row's verdict, and its deviations in units of what is allowed: above 1 is too far."""

    row: str
    loss: float
    """Of every step, and of the held-out samples after the last."""
    norm: float
    gradient: float
    """Of the tensor that is farthest off."""
    weight: float
    """The same of the weights after the last step."""
    elsewhere: str
    """Where the run went on from a checkpoint."""
    resumed: float | None
    """The largest deviation there; None where not a bit may differ from the row."""
    faults: tuple[str, ...] = ()
    """What is not as it must be."""


Reference = Callable[[Row], Measured]
"""One process's numbers for a row of no layout."""


def judge(row: Row, folder: Path, steps: int, reference: Reference, most: int) -> Result:
    """Run the row, resume it on at most ``most`` ranks, and compare."""
    want = reference(row.model)
    exact, ways = None, [want]
    if row.dtype == "bf16":
        exact = reference(replace(row, dtype="fp32").model)
        if steps > LONG:
            ways = [reference(replace(row, accumulate=way).model) for way in AXES["accumulate"]]
    got = measure(row, folder, str(row), steps)
    other = elsewhere(row, most)
    checkpoint = folder / str(row) / str(saved_after(steps))
    again = measure(other, folder, f"{row}-resumed", steps, checkpoint)
    resumed, again = len(again.losses), continued(got, again)
    off, off_again = (deviations(run, want, exact, ways) for run in (got, again))
    faults = [f"first value of {name}" for name in unequal(got.first, want.first)]
    faults += [f"no gradient of {name}" for name in want.gradients if name not in got.gradients]
    faults += ["learning rates"] * (got.rates != want.rates)
    faults += ["steps when resumed"] * (resumed != steps - saved_after(steps))
    faults += _too_far("", off) + _too_far("resumed: ", off_again)
    bitwise = other.sizes[1:] == row.sizes[1:] and (other.cp, other.way) == (row.cp, row.way)
    bitwise = bitwise and other.adds_first == row.adds_first
    if bitwise:
        faults += [f"bits of {what} when resumed" for what in changed(again, got)]
    worst = [max(v for k, v in off.items() if k.startswith(kind)) for kind in KINDS]
    there = None if bitwise else max(off_again.values())
    if len(faults) > MENTIONED:
        faults[MENTIONED:] = [f"and {len(faults) - MENTIONED} more"]
    return Result(str(row), *worst, str(other), there, tuple(faults))


MENTIONED = 6
"""Faults of a row that are told one by one."""
KINDS = ("loss", "norm", "gradient", "weight")
OTHER_CP = {2: 4, 4: 2}
"""How many ranks of cp a row of eight ranks goes on with."""


def _other_ep(row: Row, ranks: int) -> int:
    """Another ep for a row with one, where so many ranks of a stage allow it."""
    fitting = [ep for ep in (4, 2, 1) if ranks % ep == 0] if row.ep > 1 else [1]
    return next((ep for ep in fitting if ep != row.ep), fitting[0])


def _other_zero(row: Row, choice: int) -> int:
    """Another stage of ZeRO, one that adds gradients in the same order."""
    others = [zero for zero in SHARDS["zero"] if zero != row.zero]
    alike = [zero for zero in others if replace(row, zero=zero).adds_first == row.adds_first]
    return alike[choice % len(alike)]


def elsewhere(row: Row, most: int) -> Row:
    """Another way to go on with a row's run, of at most ``most`` ranks.

    Half of the rows change only what must not change a bit: the cut of the layers, their schedule,
    ZeRO, what is computed again. The others change dp or tp, too, and have no cp. Rows of eight
    ranks that have cp change it, too: 2 to 4, 4 to 2, and 8 to none.
    """
    choice = zlib.crc32(str(row).encode())
    recut = row.ranks == 8 and row.cp > 1
    cp = OTHER_CP.get(row.cp, 1) if recut else 1
    room = 2 * row.sizes[1] * row.sizes[2] * row.cp <= most and not recut
    keeps = (row.sizes[1:] == (1, 1) and row.cp == 1) or (room and choice % 2 == 0)
    possible = [
        sizes
        for ranks in (1, 2, 4, 8)
        for sizes in factorisations(ranks)
        if ranks * (row.cp if keeps else cp) <= most
        and sizes != row.sizes
        and GLOBAL_BATCH % (sizes[1] * row.micro) == 0
    ]
    keeps = keeps and any(sizes[1:] == row.sizes[1:] for sizes in possible)  # dp 3 has none
    fitting = [sizes for sizes in possible if (sizes[1:] == row.sizes[1:]) == keeps]
    pp, dp, tp = sizes = fitting[choice // 2 % len(fitting)]
    others = [kind for kind in AXES["recompute"] if kind != row.recompute]
    return replace(
        row,
        sizes=sizes,
        engine="1f1b" if pp == 1 else ENGINES[choice // 8 % (2 if pp > 2 else len(ENGINES))],
        mode=row.mode if keeps else "plain" if tp == 1 else AXES["mode"][choice // 64 % 4],
        zero=_other_zero(row, choice // 1024),
        recompute=others[choice // 512 % 2],
        cp=row.cp if keeps else cp,
        ep=row.ep if keeps else _other_ep(row, sizes[1] * sizes[2] * cp),
        way=row.way if keeps or recut else "ring",
        order=row.order if keeps or recut else "zigzag",
    )


def deviations(
    got: Measured, want: Measured, exact: Measured | None, ways: list[Measured]
) -> dict[str, float]:
    """How far ``got`` is from one process, in units of what is allowed, by what was compared.

    Where ``got`` is in bf16, ``exact`` is that process in fp32, and ``ways`` are bf16 runs of it. A
    run that was resumed has no gradients.
    """
    found = {}
    for kind, series in (("loss", _losses), ("norm", lambda run: run.norms)):
        far = [HALF * farthest(series(way), series(exact)) for way in ways if exact is not None]
        found[kind] = farthest(series(got), series(want)) / max(far, default=BOUND)
    masters = [name for name in want.last if name.startswith(KEPT)]
    gradients = list(got.gradients)
    if exact is not None:
        found["weights"] = _together(got.last, want.last, exact.last, masters) / HALF
        if gradients:
            sets = got.gradients, want.gradients, exact.gradients
            found["gradients"] = _together(*sets, gradients) / HALF
            found |= {f"gradient of {n}": _alone(*sets, n) / HALF_OF_ONE for n in gradients}
        return found
    floor = GRADIENT_FLOOR * _size(want.gradients, list(want.gradients))
    for name in gradients:
        found[f"gradient of {name}"] = _off(got.gradients[name], want.gradients[name], floor)
    for name in masters:
        floor = WEIGHT_FLOOR * sum(want.rates)
        found[f"weight {name.split('.', 1)[1]}"] = _off(got.last[name], want.last[name], floor)
    return found


def departures(
    got: Measured,
    want: Measured,
    exact: Measured | None = None,
    updated: float = 1.0,
    gradients: float = 1.0,
) -> list[str]:
    """What of a run deviates from one process, and how far; ``exact`` as in ``deviations``.

    ``updated``: what follows from weights that were updated may be so many times as far off in
    fp32: all but the first gradients, for which ``gradients`` says so.
    """
    missing = want.gradients.keys() - got.gradients.keys() if got.gradients else ()
    faults = [f"no gradient of {name}" for name in sorted(missing)]
    found = deviations(got, want, exact, [want])
    for what in found if exact is None else ():
        found[what] /= gradients if what.startswith("gradient") else updated
    return faults + _too_far("", found)


def continued(got: Measured, again: Measured) -> Measured:
    """A run up to its checkpoint, and from there on as it was resumed: one curve."""
    kept = len(got.losses) - len(again.losses)
    series = {
        name: getattr(got, name)[:kept] + getattr(again, name)
        for name in ("losses", "norms", "rates")
    }
    return replace(again, **series)


def _losses(run: Measured) -> list[float]:
    return [*run.losses, run.validation]


def _off(got: np.ndarray, want: np.ndarray, floor: float) -> float:
    """Largest deviation of an element, in units of what is allowed."""
    return float(np.abs(got - want).max() / max(BOUND * np.abs(want).max(), floor))


def _together(got: Weights, want: Weights, exact: Weights, names: list[str]) -> float:
    """Norm of ``got - want`` over all these tensors, in units of that of ``want - exact``."""
    return _distance(got, want, names) / _distance(want, exact, names)


def _alone(got: Weights, want: Weights, exact: Weights, name: str) -> float:
    """The same of one tensor, or by the share of its size that those of its name are from exact."""
    alike = [other for other in want if _kind(other) == _kind(name) and np.any(exact[other])]
    far = [_distance(want, exact, [other]) / _size(exact, [other]) for other in alike]
    share = math.sqrt(sum(each * each for each in far) / max(len(far), 1)) * _size(exact, [name])
    return _distance(got, want, [name]) / max(share, _distance(want, exact, [name]))


def _kind(name: str) -> str:
    """A tensor's name without its layer."""
    return re.sub(r"\d+", "", name)


def _distance(got: Weights, want: Weights, names: list[str]) -> float:
    return _size({name: got[name] - want[name] for name in names}, names)


def _size(tensors: Weights, names: list[str]) -> float:
    return math.sqrt(sum(np.square(tensors[n], dtype=np.float64).sum() for n in names))


def _too_far(where: str, off: dict[str, float]) -> list[str]:
    return [
        f"{where}{what}: {ratio:.2f} of what is allowed"
        for what, ratio in off.items()
        if not ratio <= 1
    ]


def unequal(got: Weights, want: Weights) -> list[str]:
    """Names of what is not there on both sides, or not the same bits."""
    names = [*got, *(name for name in want if name not in got)]
    return [
        name
        for name in names
        if name not in got or name not in want or not np.array_equal(got[name], want[name])
    ]


def changed(again: Measured, got: Measured) -> list[str]:
    """What differs in a bit between a run and itself, resumed."""
    series = {"losses": "losses", "norms": "norms", "rates": "learning rates"}
    found = [said for name, said in series.items() if getattr(again, name) != getattr(got, name)]
    found += ["validation"] * (again.validation != got.validation)
    return found + unequal(again.last, got.last)
