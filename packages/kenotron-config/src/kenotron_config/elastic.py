"""Sizes that follow from others: dp from the processes that are there, micro-batches from a batch.

They are filled in before anything is built, so that a config has numbers alone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from kenotron_config.batch_sizes import room_for
from kenotron_config.config import Config
from kenotron_config.yaml_build import Report, shown

AUTO = "auto"


def with_sizes(data: dict[str, Any], world: int | None, report: Report) -> dict[str, Any]:
    """Return a config with `parallelism.dp` and `tokens.batch_accumulation_per_replica` as numbers.

    Args:
        data: the config; it is not changed.
        world: processes that are there; None: those of one data rank.
        report: called for every problem.
    """
    parallelism, tokens = data.get("parallelism"), data.get("tokens")
    if not isinstance(parallelism, dict) or not isinstance(tokens, dict):
        return data
    batch = tokens.get("global_batch_size")
    resumes = parallelism.get("dp_auto") is True and world is not None
    if parallelism.get("dp") == AUTO or resumes:
        if batch is None:
            report(
                "parallelism.dp",
                "auto was given; then the batch must not change with dp: give "
                "tokens.global_batch_size, the samples of one update",
            )
            return {**data, "parallelism": {**parallelism, "dp": 1}}
        try:
            dp = _data_ranks(parallelism, world)
        except ValueError as error:
            report("parallelism.dp", str(error))
            dp = 1
        parallelism = {**parallelism, "dp": dp, "dp_auto": True}
        tokens = {key: each for key, each in tokens.items() if key != _FOLLOWS}
    if batch is not None and tokens.get(_FOLLOWS) in (None, AUTO):
        tokens = {**tokens, _FOLLOWS: _room(batch, parallelism, tokens)}
    return {**data, "parallelism": parallelism, "tokens": tokens}


_FOLLOWS = "batch_accumulation_per_replica"


def for_processes(config: Config, world: int) -> Config:
    """Return the config of another number of processes, where `parallelism.dp` is auto.

    Raises:
        ValueError: the processes are too few, or the config is not one for so many data ranks.
    """
    try:
        dp = _data_ranks(vars(config.parallelism), world)
    except ValueError as error:
        raise ValueError(f"parallelism.dp: {error}") from None
    rows = dp * config.tokens.micro_batch_size
    count = room_for(config.global_batch_size, rows)
    return replace(
        config,
        parallelism=replace(config.parallelism, dp=dp),
        tokens=replace(config.tokens, batch_accumulation_per_replica=count),
    )


def _data_ranks(parallelism: Mapping[str, Any], world: int | None) -> int:
    """Return the most data ranks that the processes are enough for, of which ep takes a part.

    Raises:
        ValueError: there are too few.
    """
    sizes = {name: parallelism.get(name) for name in ("pp", "cp", "tp")}
    if not all(isinstance(size, int) and size > 0 for size in sizes.values() if size is not None):
        return 1  # which is reported elsewhere
    replica = math.prod(size or 1 for size in sizes.values())
    world = replica if world is None else world
    stage, ep = replica // (sizes["pp"] or 1), parallelism.get("ep")
    step = ep // math.gcd(ep, stage) if isinstance(ep, int) and ep > 0 else 1
    if (dp := world // replica // step * step) < 1:
        words = " x ".join(f"{name} {size}" for name, size in sizes.items() if size)
        least = f"{words} = {replica} processes"
        if step > 1:
            least = f"{words} with ep {ep}: {step * replica} processes"
        raise ValueError(f"auto was given, with {shown(world)} processes; one is {least}")
    return dp


def _room(batch: Any, parallelism: Mapping[str, Any], tokens: Mapping[str, Any]) -> int:
    """Return the micro-batches of a rank that have room for a batch; 1 where sizes are wrong."""
    dp, micro = parallelism.get("dp"), tokens.get("micro_batch_size")
    sizes = [each for each in (batch, dp, micro) if isinstance(each, int) and each > 0]
    return room_for(sizes[0], sizes[1] * sizes[2]) if len(sizes) == 3 else 1
