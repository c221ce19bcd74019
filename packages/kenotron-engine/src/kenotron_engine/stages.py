"""Cut of a model into the stages of a pipeline."""

from __future__ import annotations

from collections.abc import Sequence

from kenotron_pp import NamedLayers, Schedule, Stages


def stages_of(
    layers: NamedLayers,
    costs: Sequence[float] | None,
    starts: Sequence[int],
    n_ranks: int,
    schedule: Schedule,
) -> Stages:
    """Return which layers each stage of the pipeline has.

    Args:
        layers: all layers of a model by name, in order.
        costs: relative cost of each layer, by which stages are balanced; None: all are equal.
        starts: blocks (``layers.{i}``) that begin a further stage; empty: costs decide. A pipeline
            of one stage is not cut.
        n_ranks: ranks of pp.
        schedule: says how many stages a rank has.

    Raises:
        ValueError: the starts make another number of stages than there are.
    """
    n_stages = n_ranks * schedule.chunks
    if not starts or n_stages == 1:
        return Stages.balanced(layers, costs or [1.0] * len(layers), n_ranks, schedule)
    if len(starts) + 1 != n_stages:
        raise ValueError(
            f"layers: {len(starts) + 1} parts between '|' were given; the pipeline has {n_stages} "
            f"stages (pp {n_ranks} x {schedule.chunks} parts a rank): give as many parts, or no "
            "'|', and costs decide"
        )
    return Stages.at(layers, [f"layers.{i}" for i in starts], schedule)
