"""Losses of a global batch by domain, and the loss that weighs domains (DoReMi).

Sums are exact where layouts could differ: each row is summed in fp64, rows of all ranks are
gathered, and the host adds those of a domain with one rounding. So neither data ranks, stages nor
micro-batches change them.

Shapes: M micro-batches, B rows of a micro-batch, S sequence, n tokens of a row on this rank,
T = B * n, G rows of the global batch, k domains.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kenotron_cp import cut_sequence
from kenotron_data import Batch, MicroBatch
from kenotron_dist import Mesh, all_gather, all_reduce, broadcast
from kenotron_engine.objective import losses_and_z
from kenotron_engine.sequence import NO_TARGET
from kenotron_engine.training import Training

COLUMNS = 4
"""Numbers of a row: its domain, its targets, and sums of cross entropy and of excess over them."""


@dataclass(frozen=True)
class DomainBatch:
    """What a step needs to weigh the losses of its batch by domain."""

    factors: tuple[float, ...]
    """(k,) what the losses of each domain are multiplied with: its weight over its share of the
    samples. Constants: they have no gradient."""
    reference_MBS: Tensor
    """(M, B, S) fp32, losses of the reference model on this rank's rows; of no meaning where a
    token has no target."""


@dataclass(frozen=True)
class DomainLosses:
    """Losses of a global batch by domain; the same on every rank."""

    loss: float
    """Mean cross entropy over all targets, in nats a token."""
    dro_loss: float
    """The loss that was differentiated: of weighted tokens, divided by the number of targets."""
    losses: tuple[float | None, ...]
    """(k,) mean cross entropy of each domain; None where the batch has no target of it."""
    excess: tuple[float | None, ...]
    """(k,) mean of max(loss - loss of the reference, 0) over the targets of each domain."""
    samples: tuple[int, ...]
    """(k,) rows of each domain."""

    @property
    def is_finite(self) -> bool:
        """Whether no domain has a loss of nan or inf."""
        seen = (*self.losses, *self.excess)
        return all(math.isfinite(each) for each in seen if each is not None)


def weighted_loss_fn(
    training: Training,
    micros: Sequence[MicroBatch],
    domains: DomainBatch,
    count: Tensor,
    extra: list[Tensor],
    rows_MB3: Tensor,
) -> Callable[[Tensor, int], Tensor]:
    """Return the loss of a micro-batch, each token times its domain's factor, over ``count``.

    Args:
        training: the model; its ``sequence`` module has cut ``micros``.
        micros: this rank's tokens of its micro-batches.
        domains: factors and losses of the reference, of whole rows.
        count: targets of the global batch, a scalar.
        extra: gets the z-loss of each micro-batch, where the model has one.
        rows_MB3: gets what ``COLUMNS`` lists but the domain of each row, of this rank's tokens.

    Returns:
        A function of the head's input (T, D), as ``loss_fn`` returns it.
    """
    axis, layout = training.mesh["cp"], training.plan.cp_mode.layout
    factors_k = torch.tensor(domains.factors, dtype=torch.float64)
    if training.mesh.device.type == "cuda":  # a copy from pinned memory waits for nothing
        factors_k = factors_k.pin_memory()
    factors_k = factors_k.to(training.mesh.device, non_blocking=True)
    z_loss = training.plan.spec.z_loss

    def loss(x: Tensor, microbatch: int) -> Tensor:
        micro = micros[microbatch]
        labels = micro.labels_BS
        total, z = losses_and_z(training, x, labels, z_loss)
        reference = cut_sequence(domains.reference_MBS[microbatch], axis, layout=layout)
        plain = (total.detach() - z.detach()).view_as(labels)  # (B, n)
        _write_rows(rows_MB3[microbatch], plain, reference, labels != NO_TARGET)
        assert micro.sources_B is not None, "loaders tag every row"
        weight_B1 = factors_k[micro.sources_B.clamp_min(0)].to(total.dtype)[:, None]
        divisor = count.to(total.dtype)
        if z_loss:
            extra.append((z.detach().view_as(labels) * weight_B1).sum() / divisor)
        return (total.view_as(labels) * weight_B1).sum() / divisor

    return loss


def _write_rows(rows_B3: Tensor, losses: Tensor, reference: Tensor, targets: Tensor) -> None:
    """Write targets, cross entropy and excess of the rows (B, n) of a micro-batch."""
    excess = (losses - reference).clamp_min(0) * targets
    rows_B3[:, 0] = targets.sum(-1)
    rows_B3[:, 1] = (losses * targets).double().sum(-1)
    rows_B3[:, 2] = excess.double().sum(-1)


def global_rows(batch: Batch, rows_MB3: Tensor, mesh: Mesh) -> Tensor:
    """Return ``COLUMNS`` numbers of each row of the global batch: (G, 4) fp64, on every rank.

    ``rows_MB3``: see ``weighted_loss_fn``; zeros on ranks without the last layer. Collective over
    the mesh.
    """
    assert batch.sources_MB is not None, "loaders tag every row"
    own = all_reduce(all_reduce(rows_MB3, mesh["cp"]), mesh["pp"]).flatten(0, 1)
    tagged = torch.cat([batch.sources_MB.flatten()[:, None].double(), own], dim=1)
    # One rank's for all: what is decided from them cannot differ between ranks.
    return broadcast(all_gather(tagged, mesh["dp"]), mesh.world)


def domain_losses(flat: Sequence[float], factors: Sequence[float]) -> DomainLosses:
    """Add up the rows of a global batch by domain.

    Args:
        flat: the numbers of ``global_rows``, row by row.
        factors: (k,) those of the batch.
    """
    rows = [flat[i : i + COLUMNS] for i in range(0, len(flat), COLUMNS)]
    by_domain = [[row for row in rows if row[0] == domain] for domain in range(len(factors))]
    sums = [[_exact(each[c] for each in found) for c in range(1, COLUMNS)] for found in by_domain]
    targets = [each[0] for each in sums]
    everything = _exact(targets)
    weighted = [factor * each[1] for factor, each in zip(factors, sums, strict=True)]

    def mean(column: int) -> tuple[float | None, ...]:
        return tuple(each[column] / each[0] if each[0] else None for each in sums)

    return DomainLosses(
        loss=_exact(each[1] for each in sums) / everything if everything else math.nan,
        dro_loss=_exact(weighted) / everything if everything else math.nan,
        losses=mean(1),
        excess=mean(2),
        samples=tuple(map(len, by_domain)),
    )


def _exact(values: Iterable[float]) -> float:
    """Sum with one rounding, in any order; nan where a value is not finite."""
    found = list(values)
    return math.fsum(found) if all(map(math.isfinite, found)) else math.nan
