"""Loss on held-out samples, in all and of each source."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from kenotron_cp import join_sequence
from kenotron_data import Batch, MicroBatch
from kenotron_dist import all_reduce
from kenotron_engine.model_on_mesh import ModelOnMesh
from kenotron_engine.objective import token_losses
from kenotron_engine.sample_order import one_by_one, rows_of_all
from kenotron_engine.sequence import NO_TARGET, Share
from kenotron_models import split_chunks


@dataclass(frozen=True)
class Validation:
    """Mean cross entropy over the targets of held-out samples; the same on every rank."""

    loss: float
    """Over all targets, in nats a token."""
    sources: dict[str, float] = field(default_factory=dict)
    """Over those of each source."""
    averaged: float | None = None
    """That of the averaged weights over all targets; None: there are none."""

    @property
    def perplexity(self) -> float:
        """exp(loss); inf where that is no float any more."""
        return perplexity(self.loss)


def perplexity(loss: float) -> float:
    """exp(loss); inf where that is no float any more."""
    return math.exp(loss) if not loss > 700 else math.inf


def evaluate(model: ModelOnMesh, batches: Iterable[Batch], names: tuple[str, ...]) -> Validation:
    """Mean cross entropy over the targets of all ``batches``, in all and of each source.

    ``names`` are those of the sources that rows are tagged with. Collective over the mesh.
    """
    mesh, in_order = model.mesh, model.plan.reproducible
    total = torch.zeros(len(names), 2, dtype=torch.float64, device=mesh.device)
    for on_host in batches:
        batch = (one_by_one(on_host) if in_order else on_host).to(mesh.device)
        share, found = model.share_of(batch), list[Tensor]()
        add = found.extend if in_order else partial(_add, total)
        parts = [_row_sums(of, own.micros, add) for of, own in model.own_chunks(share)]
        loss = parts[0] if model.plan.virtual_chunks == 1 else partial(_each_chunk, parts)
        model.model.pipeline.evaluate(share.inputs, loss, share.contexts)
        if in_order:
            _add(total, rows_of_all(mesh, found, len(batch), 3, model.plan.virtual_chunks))
    # Only ranks with the last layer have seen a loss.
    total = total if in_order else all_reduce(total, mesh["pp", "dp", "cp"])
    losses, counts = total.unbind(-1)
    each = {
        name: float(loss / count)
        for name, loss, count in zip(names, losses, counts, strict=True)
        if count
    }
    return Validation(float(losses.sum() / counts.sum()), each)


def batch_losses(model: ModelOnMesh, batch: Batch) -> Tensor:
    """Return the cross entropy of every token of this data rank's rows: (R, S) fp32, R = M * B.

    The same on every rank but those of dp; 0 without target. Nothing is dropped, and no gradient
    is kept. Collective over pp, cp and tp.
    """
    mesh, plan = model.mesh, model.plan
    batch = one_by_one(batch) if plan.reproducible else batch
    share = model.share_of(batch.to(mesh.device))
    own = torch.zeros(
        len(batch), *share.micros[0].tokens_BS.shape, dtype=torch.float32, device=mesh.device
    )

    parts = model.own_chunks(share)

    def loss(hidden: Tensor, microbatch: int) -> Tensor:
        chunks = split_chunks(hidden, len(parts)) if len(parts) > 1 else (hidden,)
        each = zip(parts, chunks, strict=True)
        own[microbatch] = torch.cat([_token_losses(*of, x, microbatch) for of, x in each], 1)
        return own[microbatch].sum()

    model.model.pipeline.evaluate(share.inputs, loss, share.contexts)
    # Only ranks with the last layer have seen a loss; zeros of the others change no bit.
    rows = all_reduce(own, mesh["pp"]).flatten(0, 1)
    sequence = batch.tokens_MBS.shape[-1]
    if plan.virtual_chunks == 1:
        return join_sequence(rows, mesh["cp"], sequence, layout=plan.cp_mode.layout)
    cut, whole = share.contexts[0].cut, rows.new_zeros(len(rows), sequence)
    assert cut is not None  # rows with chunks are cut
    real = cut.places_S < sequence
    whole[:, cut.places_S[real]] = rows[:, real]
    return all_reduce(whole, mesh["cp"])  # others add zeros


def _token_losses(model: ModelOnMesh, share: Share, x: Tensor, microbatch: int) -> Tensor:
    """Losses (B, n) of a micro-batch's tokens, or of a virtual chunk of them."""
    labels = share.micros[microbatch].labels_BS
    return token_losses(model, x, labels).view_as(labels)


def _row_sums(
    model: ModelOnMesh, batch: list[MicroBatch], add: Callable[[Tensor], object]
) -> Callable[[Tensor, int], Tensor]:
    """A loss that hands over of each row its sum, its targets and its source: (B, 3) fp64."""

    def loss(hidden: Tensor, microbatch: int) -> Tensor:
        micro = batch[microbatch]
        labels = micro.labels_BS
        per_row = token_losses(model, hidden, labels).view_as(labels).double().sum(-1)
        sources = micro.sources_B
        assert sources is not None, "validation_batches tags every row"
        targets = (labels != NO_TARGET).sum(-1).double()
        add(torch.stack([per_row, targets, sources.double()], -1))
        return per_row.sum()

    return loss


def _each_chunk(
    parts: Sequence[Callable[[Tensor, int], Tensor]], hidden: Tensor, microbatch: int
) -> Tensor:
    """Sum the losses (a scalar each) of the virtual chunks of ``hidden`` (T, D)."""
    chunks = zip(parts, split_chunks(hidden, len(parts)), strict=True)
    return torch.stack([loss(own, microbatch) for loss, own in chunks]).sum()


def _add(total: Tensor, rows: Tensor) -> None:
    """Add rows (B, 3) to the sums and numbers of targets of each source (K, 2), in order."""
    sources = rows[:, 2].long()
    total.index_add_(0, sources.clamp_min(0), rows[:, :2] * (sources >= 0)[:, None])
