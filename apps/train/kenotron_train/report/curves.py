"""Figures of runs from metrics.jsonl, as curves and as a table that compares them."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

from kenotron_command import short
from kenotron_command.charts import Points
from kenotron_train.evaluate.results import LARGEST
from kenotron_train.log.metrics_file import RECOVERY, RECOVERY_SECONDS, read_journal
from kenotron_train.report.run_about import About, about_run

MOST_POINTS = 1000
"""Points of a drawn curve; of longer runs means of neighbours are drawn."""


@dataclass(frozen=True)
class Panel:
    """One picture of a report."""

    title: str
    keys: tuple[str, ...]
    """Figures drawn in it; the second and later ones dashed."""
    dashed: str = ""
    """Name of the dashed ones."""
    from_zero: bool = False
    """True where the axis begins at 0, so that small changes look small."""

    def headline(self, runs: Sequence[ReportedRun]) -> str:
        """The title, with what is dashed where any run has it."""
        has = any(run.points(key) for run in runs for key in self.keys[1:])
        return f"{self.title} (dashed: {self.dashed})" if has else self.title


PANELS = (
    Panel("loss, nats a token", ("lm_loss", "validation_loss"), "validation"),
    Panel("norm of the gradient", ("grad_norm",)),
    Panel("learning rate", ("lr",)),
    Panel("throughput, tokens a second", ("tokens_per_sec",), from_zero=True),
    Panel(
        "memory of the first rank, GB",
        ("memory_gb", "memory_reserved_gb", "memory_device_gb"),
        "reserved, on the device",
        from_zero=True,
    ),
)
WORST_LOAD, LEAST_ENTROPY, UNUSED = "experts_load", "experts_entropy", "experts_unused"
"""Figures of the experts of all layers, which ``read_runs`` adds to steps."""
COUNTED = ("losses", "lost_steps", *RECOVERY_SECONDS)
"""Numbers of a recovery, seconds last."""
EXPERT_PANELS = (
    Panel("largest load of an expert over the mean, least even layer", (WORST_LOAD,)),
    Panel("entropy of the loads of experts, least even layer (1: all equal)", (LEAST_ENTROPY,)),
)
"""Pictures of runs with experts."""


@dataclass(frozen=True)
class ReportedRun:
    """A run folder and its steps."""

    name: str
    steps: list[dict[str, Any]]
    about: About = About()

    def points(self, key: str, x: str = "step", most: int = MOST_POINTS) -> Points:
        """(x, figure) of all steps that have both, thinned to ``most``.

        ``a/b`` is the figure ``b`` of the mapping ``a``, as in trackers.
        """
        found = [
            (float(step[x]), float(figure))
            for step in self.steps
            if _is_number(figure := _figure(step, key)) and _is_number(step.get(x))
        ]
        size = -(-len(found) // most)
        return [_middle(found[i : i + size]) for i in range(0, len(found), size)] if found else []

    @property
    def expert_layers(self) -> list[str]:
        """Names of the layers with experts in the last step, in order; empty: there are none."""
        return list(_loads(self.steps[-1]))


def read_runs(folders: Sequence[str]) -> list[ReportedRun]:
    """The runs in these folders (or metrics.jsonl files), under different names.

    Raises FileNotFoundError when there is no metrics.jsonl, ValueError when it holds no step.
    """
    found = []
    for folder, name in zip(folders, _names(folders), strict=True):
        path = Path(folder)
        path = path if path.is_file() else path / "metrics.jsonl"
        if not path.is_file():
            raise FileNotFoundError(
                f"{folder} has no metrics.jsonl: give a run's checkpoints_path, or the file"
            )
        steps = read_journal(path)
        if not steps:
            raise ValueError(f"{path} holds no step: the run has not made one yet")
        layers = [step | _of_all_layers(step) for step in steps]
        found.append(ReportedRun(name, layers, about_run(path)))
    return found


def summary(runs: Sequence[ReportedRun]) -> list[list[str]]:
    """A table: a line of titles, then one for each run; ``-`` where a figure is not known."""
    titles = [
        "run", "steps", "tokens", "last loss", "best validation", "tokens/s (median)",
        "MFU (median)", "peak memory GB", "hours in steps", "waiting for data", "blocked by saves",
        "communication", "sent a step (median)",
    ]  # fmt: skip
    lines = [_line(run) for run in runs]
    if any(_recoveries(run) for run in runs):
        titles += ["lost processes", "steps made again", "goodput"]
        lines = [line + _goodput(run) for line, run in zip(lines, runs, strict=True)]
    if any(_named_ranks(run) for run in runs):
        titles.append("rank that others wait for (share of steps)")
        lines = [[*line, _slowest(run)] for line, run in zip(lines, runs, strict=True)]
    if any(run.expert_layers for run in runs):
        titles += ["last expert load max/mean", "last entropy of loads", "last unused experts"]
        lines = [line + _experts(run) for line, run in zip(lines, runs, strict=True)]
    return [titles, *lines]


def _line(run: ReportedRun) -> list[str]:
    seconds = _values(run, "step_time_s")
    losses, held_out = _values(run, "lm_loss"), _values(run, "validation_loss")
    speeds, shares = _values(run, "tokens_per_sec"), _values(run, "mfu")
    tokens, memory = _values(run, "consumed_tokens"), _values(run, "memory_gb")
    return [
        run.name,
        str(run.steps[-1]["step"]),
        short(tokens[-1]) if tokens else "-",
        f"{losses[-1]:.4f}" if losses else "-",
        f"{min(held_out):.4f}" if held_out else "-",
        short(statistics.median(speeds)) if speeds else "-",
        f"{statistics.median(shares):.1%}" if shares else "-",
        f"{max(memory):.2f}" if memory else "-",
        f"{sum(seconds) / 3600:.3g}" if seconds else "-",
        _share(run, "data_wait_s", seconds),
        _share(run, "save_blocked_s", seconds + _outside(run)),
        _share(run, "communication_s", seconds),
        _sent(run),
    ]


def _recoveries(run: ReportedRun) -> list[dict[str, float]]:
    """List what first steps after the loss of a process have of it, see ``run.elastic``."""
    found = [step.get(RECOVERY) for step in run.steps]
    return [
        {name: each[name] for name in COUNTED}
        for each in found
        if isinstance(each, dict) and all(_is_number(each.get(name)) for name in COUNTED)
    ]


def _goodput(run: ReportedRun) -> list[str]:
    """Losses, steps that were made again, and the share of the seconds in steps that were kept."""
    found = _recoveries(run)
    losses, steps, *seconds = (sum(each[name] for each in found) for name in COUNTED)
    kept = sum(_values(run, "step_time_s"))
    share = f"{kept / (kept + sum(seconds)):.1%}" if kept else "-"
    return [f"{losses:.0f}", f"{steps:.0f}", share]


def _named_ranks(run: ReportedRun) -> list[tuple[str, float]]:
    """List ranks that others waited for, as metrics.jsonl names them, with the share of a step."""
    found = [each for step in run.steps if isinstance(each := step.get("slowest_rank"), dict)]
    return [
        (
            f"{each.get('rank')} on {each.get('host')} ({each.get('phase')})",
            (each["own_s"] - each["others_s"]) / each["step_s"],
        )
        for each in found
        if all(_is_number(each.get(key)) for key in ("own_s", "others_s", "step_s"))
        and each["step_s"] > 0
    ]


def _slowest(run: ReportedRun) -> str:
    """Name the rank for which others waited longest in all, and the mean share of these steps."""
    shares: dict[str, list[float]] = {}
    for name, share in _named_ranks(run):
        shares.setdefault(name, []).append(share)
    if not shares:
        return "-"
    name = max(shares, key=lambda each: sum(shares[each]))
    return f"{name}: {statistics.fmean(shares[name]):.0%}"


def _experts(run: ReportedRun) -> list[str]:
    """Load and entropy of the least even layer, and experts without tokens, in the last step."""
    if not (loads := _loads(run.steps[-1])):
        return ["-", "-", "-"]
    most = max(loads, key=lambda name: loads[name]["max_over_mean"])
    least = min(loads, key=lambda name: loads[name]["entropy"])
    return [
        f"{loads[most]['max_over_mean']:.2f} in {most}",
        f"{loads[least]['entropy']:.3f} in {least}",
        f"{run.steps[-1][UNUSED]:.0f}",
    ]


def _loads(step: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Figures of each layer with experts that has all of them."""
    found, keys = step.get("experts"), ("max_over_mean", "entropy", "unused")
    layers = found.items() if isinstance(found, dict) else ()
    return {
        name: load
        for name, load in layers
        if isinstance(load, dict) and all(_is_number(load.get(key)) for key in keys)
    }


def _of_all_layers(step: dict[str, Any]) -> dict[str, float]:
    """The figures that ``EXPERT_PANELS`` draw; nothing without experts."""
    if not (loads := _loads(step).values()):
        return {}
    return {
        WORST_LOAD: max(load["max_over_mean"] for load in loads),
        LEAST_ENTROPY: min(load["entropy"] for load in loads),
        UNUSED: sum(load["unused"] for load in loads),
    }


def _figure(step: dict[str, Any], key: str) -> object:
    found: object = step
    for part in key.split("/"):
        found = found.get(part) if isinstance(found, dict) else None
    return found


def _sent(run: ReportedRun) -> str:
    """Bytes that left the first rank in a step, by axis: ``dp 1.2MB, tp 3.4MB``."""
    steps = [step["communication_bytes"] for step in run.steps if _has_bytes(step)]
    axes = sorted({axis for step in steps for axis in step})
    middle = {axis: statistics.median(step.get(axis, 0) for step in steps) for axis in axes}
    return ", ".join(f"{axis} {short(value)}B" for axis, value in middle.items()) or "-"


def _has_bytes(step: dict[str, Any]) -> bool:
    found = step.get("communication_bytes")
    return isinstance(found, dict) and all(map(_is_number, found.values()))


def _share(run: ReportedRun, key: str, seconds: list[float]) -> str:
    values = _values(run, key)
    return f"{sum(values) / sum(seconds):.1%}" if values and sum(seconds) else "-"


def _outside(run: ReportedRun) -> list[float]:
    """Seconds of saves that are no part of a step; of old files, which do not have them, of all."""
    return _values(run, "save_after_s") or _values(run, "save_blocked_s")


def _values(run: ReportedRun, key: str) -> list[float]:
    return [float(step[key]) for step in run.steps if _is_number(step.get(key))]


def _is_number(value: object) -> TypeGuard[float]:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and abs(value) < LARGEST


def _middle(points: Points) -> tuple[float, float]:
    """The last x, and the mean, of neighbours."""
    return points[-1][0], statistics.fmean(y for _, y in points)


def _names(folders: Sequence[str]) -> list[str]:
    """The shortest ends of the paths that differ."""
    paths = [Path(folder).resolve() for folder in folders]
    parts = [(path.parent if path.is_file() else path).parts for path in paths]
    for length in range(1, max(map(len, parts), default=0) + 1):
        names = ["/".join(part[-length:]) for part in parts]
        if len(set(names)) == len(names):
            return names
    return [f"{Path(*part)} ({i})" for i, part in enumerate(parts, 1)]  # one folder twice
