"""Layouts of a config over N ranks: which there are, and why others cannot be."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Literal, get_args

from kenotron_config import Config
from kenotron_cost.cost_plan import CostPlan, cost_plan
from kenotron_cost.knobs import Knobs, check_names, knobs_of, with_knobs
from kenotron_models import Recompute, expert_count
from kenotron_models.families import TransformersConfig

Engine = Literal["1f1b", "interleaved", "zb-h1", "zb-v", "afab"]
ENGINES: tuple[Engine, ...] = ("1f1b", "interleaved", "zb-h1", "zb-v", "afab")
"""Orders of the pipeline that are tried."""
RECOMPUTES: tuple[Recompute, ...] = ("none", "selective", "full")
"""Recomputation that is tried in every block, the fastest first."""
MICRO_BATCHES = (1, 2, 4, 8, 16)
CP_OF_TRANSFORMERS = (
    "parallelism.cp: what attention of transformers' layers sends over cp is not counted; plan it "
    "with cp 1"
)


@dataclass(frozen=True, order=True)
class PlannedLayout:
    """Everything that a search changes of a config."""

    dp: int
    pp: int
    cp: int
    tp: int
    ep: int = 1
    engine: Engine = "1f1b"
    micro_batch: int = 1
    zero: int = 1
    recompute: Recompute | Literal["mixed"] = "none"
    """mixed: as the config says, not the same in all layers."""
    knobs: Knobs = ()
    """Other keys, where the search has them."""

    @property
    def grid(self) -> tuple[int, int, int, int, int, str]:
        """Sizes of the axes, and the order of the pipeline."""
        return self.dp, self.pp, self.cp, self.tp, self.ep, self.engine

    @property
    def ranks(self) -> int:
        """Number of processes."""
        return self.dp * self.pp * self.cp * self.tp


@dataclass
class Refused:
    """Layouts that the config's own checks refuse."""

    reasons: Counter[str] = field(default_factory=Counter)
    """How often each rule is broken; its text is that of the first layout that breaks it."""
    _texts: dict[str, str] = field(default_factory=dict)

    def add(self, error: ValueError) -> None:
        """Count the reasons of one layout."""
        for line in str(error).splitlines():
            rule = re.sub(r"\d[\d,]*", "#", line)
            self.reasons[self._texts.setdefault(rule, line)] += 1


def own_layout(config: Config) -> PlannedLayout:
    """Return the layout that a config has."""
    sizes = config.parallelism
    mixed = sizes.recompute_memory_gb is not None or sizes.recompute_layers is not None
    return PlannedLayout(
        sizes.dp, sizes.pp, sizes.cp, sizes.tp, sizes.ep, sizes.pp_engine,
        config.tokens.micro_batch_size, config.optimizer.zero_stage,
        "mixed" if mixed else sizes.recompute_of(0),
    )  # fmt: skip


def with_layout(config: Config, layout: PlannedLayout) -> Config:
    """Return a config on another layout, with the same global batches.

    Where the config has no tp, tp cuts activations between layers, too (REDUCE_SCATTER), but not
    those of transformers' layers.

    Raises:
        ValueError: the config's own checks refuse it; one line for each problem. Or it cuts samples
            of a model of transformers over cp.
    """
    sizes, tokens = config.parallelism, config.tokens
    if layout.micro_batch < 1:
        raise ValueError(f"micro_batch: {layout.micro_batch} was given; it must be at least 1")
    if layout.recompute not in (known := (*get_args(Recompute), "mixed")):
        given = layout.recompute
        raise ValueError(f"recompute: {given!r} was given; give one of {', '.join(known)}")
    rows = layout.dp * layout.micro_batch
    before = sizes.dp * tokens.micro_batch_size
    foreign = isinstance(config.model.model_config, TransformersConfig)
    if foreign and layout.cp > 1:
        raise ValueError(CP_OF_TRANSFORMERS)
    parallelism = replace(
        sizes,
        **{axis: getattr(layout, axis) for axis in ("dp", "pp", "cp", "tp", "ep")},
        dp_auto=False,
        leave_out_slow=None,
        pp_engine=layout.engine,
        pp_chunks=sizes.pp_chunks if layout.engine == sizes.pp_engine else None,
        tp_mode=sizes.tp_mode if sizes.tp > 1 or foreign else "REDUCE_SCATTER",
    )
    if layout.recompute != "mixed":
        parallelism = replace(
            parallelism,
            recompute=layout.recompute,
            recompute_layer=False,
            recompute_layers=None,
            recompute_memory_gb=None,
        )
    batch = tokens.global_batch_size
    count = _steps(batch or before * tokens.batch_accumulation_per_replica, rows)
    stages = tuple(
        stage
        if (own := stage.batch_accumulation_per_replica) is None
        else replace(stage, batch_accumulation_per_replica=_steps(before * own, rows))
        for stage in config.data_stages
    )
    found = replace(
        config,
        parallelism=parallelism,
        tokens=replace(
            tokens, micro_batch_size=layout.micro_batch, batch_accumulation_per_replica=count
        ),
        data_stages=stages,
        optimizer=replace(
            config.optimizer,
            zero_stage=layout.zero,
            regather=config.optimizer.regather if layout.zero == 3 else "layer",
        ),
    )
    return with_knobs(found, layout.knobs)


def _steps(samples: int, rows: int) -> int:
    """Return the micro-batches of a data rank. Raises ValueError where they are no whole number."""
    if samples % rows:
        raise ValueError(
            f"tokens: dp x micro_batch_size ({rows}) does not divide the global batch of {samples} "
            "samples, which a plan keeps"
        )
    return samples // rows


def legal_layouts(
    config: Config,
    ranks: int,
    refused: Refused,
    search: Sequence[str] = (),
    devices: int = 8,
) -> Iterator[tuple[PlannedLayout, CostPlan]]:
    """Yield every legal layout over N ranks, without recomputation and with ZeRO stage 1.

    Each is checked by the config's own rules with the order 1f1b; other orders are checked once
    for each number of stages.

    Args:
        config: the run.
        ranks: N.
        refused: gets what the rules say of the others.
        search: further keys; see ``SEARCH_KEYS``.
        devices: of a node.

    Raises:
        ValueError: N is below 1, or a key of ``search`` is not known.
    """
    if ranks < 1:
        raise ValueError(f"ranks: {ranks} was given; it must be at least 1")
    check_names(search)
    experts = expert_count(config.decoder)
    engines: dict[int, list[Engine]] = {}
    for pp, cp, tp in _factors(ranks, 3):
        rows = ranks // (pp * cp * tp)
        # What is left of the ranks is dp; ep takes its ranks from dp, cp and tp, so it must divide
        # them.
        layouts = [
            PlannedLayout(rows, pp, cp, tp, ep, zero=int(rows * cp > 1))
            for ep in divisors(experts)
            if (rows * cp * tp) % ep == 0
        ]
        layouts = [
            replace(each, knobs=knobs)
            for each in layouts
            for knobs in knobs_of(search, rows, devices // (cp * tp))
        ]
        for layout in layouts:
            try:
                first = with_layout(config, layout)
            except ValueError as error:
                refused.add(error)
                continue
            # Whether an order of the pipeline is legal follows from the number of stages: asked
            # once.
            if pp not in engines:
                engines[pp] = [*_engines(config, layout, refused)]
            yield from _variants(config, first, layout, engines[pp])


def _variants(
    config: Config, first: Config, layout: PlannedLayout, engines: list[Engine]
) -> Iterator[tuple[PlannedLayout, CostPlan]]:
    """Yield a legal layout with every order of the pipeline and every size of micro-batches."""
    plan = cost_plan(first)
    sizes = plan.parallelism
    orders = [
        (
            engine,
            sizes
            if engine == sizes.pp_engine
            else replace(sizes, pp_engine=engine, pp_chunks=None),
        )
        for engine in engines
    ]
    for size in MICRO_BATCHES:
        if plan.microbatches % size:
            continue
        many = plan.microbatches // size
        for engine, parallelism in orders:
            cut = replace(plan, parallelism=parallelism, micro_batch_size=size, microbatches=many)
            yield replace(layout, engine=engine, micro_batch=size), cut


def _engines(config: Config, layout: PlannedLayout, refused: Refused) -> Iterator[Engine]:
    """Yield the orders of the pipeline that a number of stages allows."""
    for engine in ENGINES if layout.pp > 1 else ENGINES[:1]:
        try:
            with_layout(config, replace(layout, engine=engine))
        except ValueError as error:
            refused.add(error)
        else:
            yield engine


def nearest_legal(config: Config, ranks: int) -> int | None:
    """Return the number of ranks nearest to N that has a legal layout; None where none is near.

    A size of an axis that is not legal alone is legal in no layout.
    """

    @cache
    def legal(dp: int, pp: int, cp: int, tp: int) -> bool:
        try:
            with_layout(config, PlannedLayout(dp, pp, cp, tp, zero=int(dp * cp > 1)))
        except ValueError:
            return False
        return True

    def has_one(number: int) -> bool:
        found = ((number // (pp * cp * tp), pp, cp, tp) for pp, cp, tp in _factors(number, 3))
        return any(
            legal(dp, 1, 1, 1) and legal(1, pp, 1, 1) and legal(1, 1, 1, tp)
            and legal(1, 1, cp, tp) and legal(dp, pp, cp, tp)
            for dp, pp, cp, tp in found
        )  # fmt: skip

    # From N outwards; of two numbers that are equally near, the smaller one first.
    near = (each for off in range(1, ranks) for each in (ranks - off, ranks + off))
    return next(filter(has_one, near), None)


@cache
def divisors(number: int) -> tuple[int, ...]:
    """Return all divisors of a number, in order."""
    small = [each for each in range(1, math.isqrt(number) + 1) if number % each == 0]
    return *small, *(number // each for each in reversed(small) if each * each != number)


def _factors(number: int, count: int) -> Iterator[tuple[int, ...]]:
    """Yield tuples of numbers whose product divides a number."""
    if count == 0:
        yield ()
        return
    for each in divisors(number):
        for rest in _factors(number // each, count - 1):
            yield (each, *rest)
