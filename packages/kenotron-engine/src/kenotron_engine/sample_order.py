"""The reproducible mode: one sample in each micro-batch, and sums in the order of the global batch.

Shapes: M micro-batches of B rows, G rows of the global batch, k numbers of a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace

import torch
from torch import Tensor

from kenotron_data import Batch
from kenotron_dist import Mesh, all_reduce
from kenotron_engine.model_plan import ModelPlan
from kenotron_models import TransformersSpec, whole_row_part
from kenotron_optim import OptimizerConfig, unordered_settings


def check_sample_order(
    plan: ModelPlan, optim: OptimizerConfig, mesh: Mesh, *, own_layers: bool
) -> None:
    """Raise ValueError for what a reproducible plan cannot have: bits that differ between layouts.

    ``own_layers``: whether the layers are not those of ``plan.spec``.
    """
    if not plan.reproducible:
        return
    spec, axes = plan.spec, mesh.sizes
    given = {
        "layers that are not of the plan's spec": own_layers,
        "layers of transformers": isinstance(spec, TransformersSpec),
        "compile": plan.compile,
        "cuda_graph": plan.cuda_graph,
        "float16": plan.dtype == torch.float16,
        f"device {mesh.device}": mesh.device.type not in ("cpu", "meta", "cuda"),
        f"cp = {axes['cp']} and virtual_chunks = {plan.virtual_chunks}": bool(
            plan.virtual_chunks % axes["cp"]
        ),
        **(_chunks_given(plan) if plan.virtual_chunks > 1 else {}),
        f"tp = {axes['tp']} and virtual_shards = {plan.virtual_shards}": bool(
            plan.virtual_shards % axes["tp"]
        ),
    }
    found = [name for name, is_given in given.items() if is_given]
    lines = [f"reproducible: true was given with {each}: leave one of them out" for each in found]
    if lines := [*lines, *unordered_settings(optim)]:
        raise ValueError("\n".join(lines))


def _chunks_given(plan: ModelPlan) -> dict[str, bool]:
    """Name what virtual chunks are not combined with, and whether it is given."""
    chunks, spec = plan.virtual_chunks, plan.spec
    named = f"virtual_chunks = {chunks}"
    return {
        f"{named}, which is no power of two": bool(chunks & (chunks - 1)),
        f"{named} and {whole_row_part(spec)}": bool(whole_row_part(spec)),
    }


def check_whole_samples(plan: ModelPlan, what: str) -> None:
    """Raise ValueError where samples are computed in chunks, and ``what`` needs whole ones."""
    if plan.virtual_chunks > 1:
        raise ValueError(
            f"virtual_chunks = {plan.virtual_chunks}: {what} are not computed in chunks of a "
            "sample: set it to 1 (general.reproducible_max_cp)"
        )


def one_by_one(batch: Batch) -> Batch:
    """Return the batch with each of its rows (M, B) as a micro-batch: (M * B, 1)."""
    parts = {field.name: getattr(batch, field.name) for field in fields(batch)}
    given = {name: x.flatten(0, 1)[:, None] for name, x in parts.items() if x is not None}
    return replace(batch, **given)


def rows_of_all(
    mesh: Mesh, found: Sequence[Tensor], rows: int, numbers: int, chunks: int = 1
) -> Tensor:
    """Return the numbers of all rows of the global batch, in its order: (G, k) fp64, on every rank.

    Args:
        mesh: the ranks; collective over pp, dp and cp.
        found: (k,) of each row of this data rank, on its last stage; empty on others. Those of
            virtual chunks of a row follow one another.
        rows: G / dp.
        numbers: k.
        chunks: virtual chunks of a row on all ranks of cp; G counts each, with those of all rows
            after those of the chunks before, as in ``kenotron_optim.sample_leaves``.
    """
    data, part = mesh["dp"], mesh["cp"]
    shape = part.size, chunks // part.size, data.size, rows, numbers
    whole = torch.zeros(shape, dtype=torch.float64, device=mesh.device)
    if found:
        own = torch.stack(list(found)).view(rows, -1, numbers).transpose(0, 1)
        whole[part.rank, :, data.rank] = own
    return all_reduce(whole, mesh["pp", "dp", "cp"]).flatten(0, 3)  # others add zeros


def sum_of_rows(rows: Tensor) -> Tensor:
    """Sum of (G, k) over rows, in the tree of ``kenotron_dist.tree_sum``: (k,)."""
    while len(rows) > 1:
        even = len(rows) // 2 * 2
        rows = torch.cat([rows[:even:2] + rows[1:even:2], rows[even:]])
    return rows[0]
