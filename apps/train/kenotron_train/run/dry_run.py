"""``--dry-run``: one step of every distinct rank of a layout, without processes, data or GPUs."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import groupby
from textwrap import wrap

import torch

import kenotron_engine
from kenotron_config import Config
from kenotron_cost import CostPlan, MeasuredModel, cost_plan, mesh_sizes
from kenotron_data import Batch
from kenotron_dist import Mesh, usable_cores
from kenotron_dist.diagnosis import Diverged, DryRun, dry_run
from kenotron_engine import DomainObjective, ModelPlan, training_step
from kenotron_models import OneKernel, TransformersSpec, communicating_alike
from kenotron_train.assemble import plan_of
from kenotron_train.progress import fresh_state
from kenotron_train.run.placements import described_placements
from kenotron_train.run.preview import cannot_run, missing_paths

MOST_WORKERS = 4
"""Processes that share the ranks."""
FEW_RANKS = 8
"""Ranks for which no further process is started."""
WIDTH = 100
"""Columns of the report."""
DATA = ("data_stages.", "tokenizer.")
"""Beginnings of the keys of paths that a dry run does not need."""


def dry_run_of(config: Config, workers: int | None = None) -> str:
    """Match one step of all ranks of a config's layout, and describe it.

    The step has the largest batch and the longest samples of the training. Nothing is read but
    the config, and nothing is written.

    Args:
        config: of the run.
        workers: processes that share the ranks; None: as many as there are cores, at most 4.

    Returns:
        A table of stages, and which ranks stand for which.

    Raises:
        ValueError: the config cannot be run, or names first weights or a checkpoint that do not
            exist; one line each.
        Diverged: ranks would communicate differently; names both calls with their lines.
    """
    missing = missing_paths(config)
    problems = cannot_run(config) + [line for line in missing if not line.startswith(DATA)]
    if problems:
        raise ValueError("\n".join(problems))
    sizes, plan = mesh_sizes(config.parallelism), plan_of(config)
    if workers is None:
        few = sizes.world_size <= FEW_RANKS
        workers = 1 if few else min(MOST_WORKERS, usable_cores())
    # None of them changes a communication; a graph needs a GPU.
    plan = replace(plan, compile=False, cuda_graph=False)
    if isinstance(plan.spec, TransformersSpec):
        plan = replace(plan, spec=_without_values(plan.spec))
    found = dry_run(partial(prepared, config, plan), sizes, workers)
    if text := found.divergence():
        raise Diverged(text)
    unread = [f"Not needed: {line}" for line in missing if line.startswith(DATA)]
    cost = cost_plan(config)
    types = described_placements(MeasuredModel(cost).layouts(cost), sizes, WIDTH)
    return "\n".join([*_described(found, cost), *[""] * bool(types), *types, *unread])


def _without_values(spec: TransformersSpec) -> TransformersSpec:
    """Return the same model for tensors without values; ValueError where it needs values."""
    try:
        return communicating_alike(spec)
    except ValueError as error:
        raise ValueError(
            "model.model_config: --dry-run computes on tensors without values, and a "
            f"{json.loads(spec.config_json)['model_type']} cannot be computed so: {error}. Run "
            "`kenotron verify`, which makes steps of this layout with a narrow copy on CPUs; "
            "--check describes what each rank holds"
        ) from None


def prepared(config: Config, plan: ModelPlan, mesh: Mesh) -> Callable[[], object]:
    """Build the training of one rank; return a function that makes its step. Collective."""
    optimizer = replace(config.optimizer, offload=False)  # its copies are not communicated
    training = kenotron_engine.build_training(
        plan,
        optimizer,
        mesh,
        config.tokens.train_steps,
        bucket_mb=config.model.ddp_bucket_cap_mb,
    )
    batch, doremi = _batch(cost_plan(config)).to(mesh.device), config.doremi
    objective = None
    if doremi is not None and doremi.is_proxy:
        objective = DomainObjective(
            names=doremi.names,
            factors=(1.0,) * len(doremi.names),
            reference_MBS=torch.empty_like(batch.tokens_MBS, dtype=torch.float32),
            z_loss=plan.spec.z_loss,
        )
    state = fresh_state(optimizer, plan.dtype, doremi)
    step = partial(training_step, training, batch, 1, state=state, objective=objective)
    return step if not isinstance(plan.spec, TransformersSpec) else partial(_in_one_kernel, step)


def _in_one_kernel(step: Callable[[], object]) -> None:
    with OneKernel(norms=False):
        step()


def _batch(cost: CostPlan) -> Batch:
    """Rows (M, B, S) without values, each of one document."""
    shape = cost.microbatches, cost.micro_batch_size, cost.sequence
    tokens = torch.empty(shape, dtype=torch.int64, device="meta")
    samples = torch.empty(shape[:2], dtype=torch.int64, device="meta")
    positions = torch.arange(cost.sequence).expand(shape)
    return Batch(tokens, tokens, positions, samples, sources_MB=samples)


def _described(found: DryRun, cost: CostPlan) -> list[str]:
    """Lines of a report of ranks that agree."""
    ranks, simulated = found.config.world_size, found.config.pp * len(found.places)
    lines = [
        f"Dry run of {ranks:,} ranks, {cost.parallelism.described}: agreed",
        f"One step of {cost.microbatches:,} micro-batches a data rank, each "
        f"{cost.micro_batch_size:,} x {cost.sequence:,} tokens, on meta tensors: no data is read",
        "",
        f"{'stage':>7}{'simulated':>11}{'stand for':>11}{'collectives':>13}{'transfers':>11}"
        "  GB that a rank sends in the step",
    ]
    rows = [_row(found, stage) for stage in range(found.config.pp)]
    for row, stages in groupby(range(len(rows)), rows.__getitem__):
        first, *others = stages
        name = f"{first}-{others[-1]}" if others else str(first)
        lines.append(f"{name:>7}{row}")
    return [*lines, "", *_represented(found, ranks, simulated)]


def _row(found: DryRun, stage: int) -> str:
    """Everything of a stage's line but its number; bytes are those of its first rank."""
    first = found.stages[stage][0]
    collectives, transfers = first.counts
    by_axis = sorted(first.sent.items(), key=lambda each: -each[1])
    sent = ", ".join(f"{axis}~{size / 1e9:.3g}" for axis, size in by_axis if size)
    lines = wrap(sent, 43) or [""]  # "~": a blank at which no line ends
    counts = f"{len(found.places):>11}{found.stage_size:>11,}{collectives:>13,}{transfers:>11,}  "
    return f"\n{' ' * (7 + len(counts))}".join([counts + lines[0], *lines[1:]]).replace("~", " ")


def _represented(found: DryRun, ranks: int, simulated: int) -> list[str]:
    """Lines about the ranks that were not simulated."""
    said = "All simulated ranks of a stage make equal calls (operation, axis, dtype, shape)."
    if unequal := found.unequal_stages():
        numbers = ", ".join(map(str, unequal))
        said = f"Simulated ranks of a stage make different calls, which match, in stages {numbers}."
    if simulated == ranks:
        return wrap(said, WIDTH)
    places = ", ".join(map(str, found.places))
    text = (
        f"Simulated: {simulated:,} of {ranks:,} ranks, in each stage those at places {places}: the "
        "first, second and last rank of each line of ranks that communicate, and all ranks of "
        "short lines. The others are taken to call what these call: code that treats one of them "
        f"differently is not seen. {said}"
    )
    return wrap(text, WIDTH)
