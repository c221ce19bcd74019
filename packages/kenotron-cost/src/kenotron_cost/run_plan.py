"""The plan of a run: its own layout, what makes it fit, and the best of all legal ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from kenotron_config import Config
from kenotron_cost.cost_plan import check_measured, cost_plan
from kenotron_cost.knobs import check_search
from kenotron_cost.layouts import (
    CP_OF_TRANSFORMERS,
    Refused,
    legal_layouts,
    nearest_legal,
    own_layout,
)
from kenotron_cost.machine_file import Machine
from kenotron_cost.problems import problems_of
from kenotron_cost.recomputed import recomputed
from kenotron_cost.remedies import beyond, remedies
from kenotron_cost.search import (
    Estimate,
    Found,
    Objective,
    Planner,
    check_objective,
)
from kenotron_models import TransformersSpec


@dataclass(frozen=True)
class PlannedRun:
    """The whole training that a plan is for."""

    samples: int
    """Of the largest global batch."""
    sequence: int
    """Tokens of the longest samples."""
    tokens: int
    """Of all steps."""
    price: float | None = None
    """Of a device and hour, in any currency."""
    imbalance: float = 1.0
    """Tokens of the fullest rank's experts, as a multiple of an even load's."""


@dataclass
class Planned:
    """Everything that a plan says."""

    training: PlannedRun
    planner: Planner
    objective: Objective
    own: Estimate | None = None
    """The layout of the config; None where another number of ranks was asked for."""
    remedies: list[str] = field(default_factory=list)
    """Changes of one key with which it fits, and their cost; where none fits, of the layout that
    lacks least."""
    ranks: int = 0
    found: Found | None = None
    refused: Refused = field(default_factory=Refused)

    @property
    def fitting(self) -> list[Estimate]:
        """Layouts of the search that fit, the best first."""
        return [each for each in self.found.best if each.fits] if self.found else []

    @property
    def chosen(self) -> Estimate | None:
        """The best layout that fits: of the search, or the config's own one; None: none does."""
        if self.found is not None:
            return next(iter(self.fitting), None)
        return self.own if self.own and self.own.fits else None


def plan_of_run(
    config: Config,
    machine: Machine,
    room: float,
    ranks: int | None,
    objective: Objective = "time",
    price: float | None = None,
    imbalance: float = 1.0,
    search: Sequence[str] = (),
) -> Planned:
    """Plan a run.

    Args:
        config: the run.
        machine: where it runs.
        room: bytes of a device's memory.
        ranks: search all layouts of so many; None: only the config's own one.
        objective: order of the layouts.
        price: of a device and hour.
        imbalance: tokens of the fullest rank's experts, as a multiple of an even load's.
        search: further keys that the search changes; see ``SEARCH_KEYS``.

    Raises:
        ValueError: the config cannot be run, its model is one of transformers in one piece or on
            ranks of cp, it allows no value of a key of ``search``, no layout is legal, or an
            argument is out of its range.
    """
    _check_arguments(room, ranks, objective, price)
    if problems := problems_of(config):
        raise ValueError("\n".join(problems))
    plan = cost_plan(config)
    if isinstance(plan.spec, TransformersSpec):
        check_measured(plan.spec)
        if plan.parallelism.cp > 1:
            raise ValueError(CP_OF_TRANSFORMERS)
    if search and ranks is None:
        raise ValueError(f"--search {','.join(search)}: it goes with --ranks or --gpus")
    check_search(config, search)
    stages = range(len(config.data_stages))
    training = PlannedRun(
        max(map(config.batches.full, stages)),
        plan.sequence,
        sum(config.batches.samples(stage) * config.sequence_of(stage) for stage in stages),
        price,
        imbalance,
    )
    planner = Planner(plan, machine, room, imbalance)
    planned = Planned(training, planner, objective)
    if ranks in (None, config.world_size):
        planned.own = planner.estimate(own_layout(config), plan, recomputed(plan))
        if not planned.own.fits:
            planned.remedies = [*remedies(config, planner, planned.own)]
    if ranks is not None:
        legal = [*legal_layouts(config, ranks, planned.refused, search, machine.devices)]
        if not legal:
            raise ValueError(_none_legal(config, ranks, planned.refused))
        planned.ranks, planned.found = ranks, planner.search(legal, objective)
        if not planned.fitting and not planned.remedies and planned.found.best:
            planned.remedies = [*beyond(config, planner, planned.found.best[0])]
    return planned


def _check_arguments(
    room: float, ranks: int | None, objective: Objective, price: float | None
) -> None:
    """Raise ValueError for arguments of ``plan_of_run`` that are out of their range."""
    check_objective(objective)
    for name, value in {"--memory": room, "--price": price, "--ranks": ranks}.items():
        if value is not None and not value > 0:
            raise ValueError(f"{name}: {value} was given; it must be above 0")
    if objective == "price" and price is None:
        raise ValueError("--objective price: give --price, of a device and hour")


def _none_legal(config: Config, ranks: int, refused: Refused) -> str:
    """Return why there is no legal layout, and the nearest number of ranks that has one."""
    lines = [f"--ranks {ranks}: no layout is legal"]
    lines += [f"{times:,} x {reason}" for reason, times in refused.reasons.most_common(5)]
    near = nearest_legal(config, ranks)
    lines += [] if near is None else [f"the nearest number that has one: --ranks {near}"]
    return "\n".join(lines)
