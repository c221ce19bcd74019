"""Losses of a global batch by domain, and the loss that weighs domains (DoReMi).

Sums are exact where layouts could differ: each row is summed in fp64, rows of all ranks are
gathered, and the host adds those of a domain with one rounding. So neither data ranks, stages nor
micro-batches change them.

Shapes: M micro-batches, B rows of a micro-batch, S sequence, n tokens of a row on this rank,
T = B * n, G rows of the global batch, k domains.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kenotron_cp import cut_sequence
from kenotron_dist import to_device
from kenotron_engine.model_on_mesh import ModelOnMesh
from kenotron_engine.objective import MicroLoss, NextToken, Parts, losses_and_z
from kenotron_engine.sequence import NO_TARGET, Share
from kenotron_models import Context

COLUMNS = 4
"""Numbers of a row: its domain, its targets, and sums of cross entropy and of excess over them."""


@dataclass(frozen=True, kw_only=True)
class DomainObjective(NextToken):
    """Cross entropy of the next token, each token's times the factor of its domain (DoReMi).

    A value of one step, whose reference it has.
    """

    names: tuple[str, ...]
    """(k,) of the domains, in the order of the data's sources."""
    factors: tuple[float, ...]
    """(k,) what the losses of each domain are multiplied with: its weight over its share of the
    samples. Constants: they have no gradient."""
    reference_MBS: Tensor
    """(M, B, S) fp32, losses of the reference model on this rank's rows; of no meaning where a
    token has no target."""

    columns = COLUMNS - 1

    def loss(self, model: ModelOnMesh, share: Share, count: Tensor) -> MicroLoss:
        """See ``Objective``; ``count`` is a scalar, ``share`` of the rows of ``reference_MBS``."""
        axis, layout, chunk = model.mesh["cp"], model.plan.cp_mode.layout, model.model.chunk
        factors_k = to_device(torch.tensor(self.factors, dtype=torch.float64), model.mesh.device)
        reference_RS = self.reference_MBS.flatten(0, 1)

        def loss(x: Tensor, microbatch: int) -> Parts:
            micro = share.micros[microbatch]
            labels = micro.labels_BS
            total, z = losses_and_z(model, x, labels, self.z_loss)
            first = microbatch * len(labels)  # reproducible micro-batches have one row
            own = reference_RS[first : first + len(labels)]
            if chunk is None:
                reference = cut_sequence(own, axis, layout=layout)
            else:
                reference = _of_chunk(own, share.contexts[microbatch], chunk)
            plain = (total.detach() - z.detach()).view_as(labels)  # (B, n)
            rows = _rows(plain, reference, labels != NO_TARGET)
            assert micro.sources_B is not None, "loaders tag every row"
            weight_B1 = factors_k[micro.sources_B.clamp_min(0)].to(total.dtype)[:, None]
            divisor = count.to(total.dtype)
            reports = []
            if self.z_loss:
                reports.append((z.detach().view_as(labels) * weight_B1).sum() / divisor)
            return Parts((total.view_as(labels) * weight_B1).sum() / divisor, reports, rows)

        return loss

    def outcome(
        self, loss: float, reports: Sequence[float], rows: Sequence[float]
    ) -> tuple[float, dict[str, Any]]:
        """Return the mean cross entropy, and losses by domain (see ``domain_losses``)."""
        return domain_losses(rows, self.names, self.factors)


def _of_chunk(rows_BS: Tensor, context: Context, chunk: int) -> Tensor:
    """Return the tokens (B, n) of a virtual chunk; padding, which has no target, has any value."""
    assert context.cut is not None
    places = context.cut.places_S.chunk(context.chunks)[chunk].clamp(max=rows_BS.shape[1] - 1)
    return rows_BS[:, to_device(places, rows_BS.device)]


def _rows(losses: Tensor, reference: Tensor, targets: Tensor) -> Tensor:
    """Targets, cross entropy and excess (B, 3) of the rows (B, n) of a micro-batch, fp64."""
    excess = (losses - reference).clamp_min(0) * targets
    sums = (targets.sum(-1).double(), (losses * targets).double().sum(-1), excess.double().sum(-1))
    return torch.stack(sums, dim=-1)


def domain_losses(
    flat: Sequence[float], names: Sequence[str], factors: Sequence[float]
) -> tuple[float, dict[str, Any]]:
    """Add up the rows of a global batch by domain.

    Args:
        flat: ``COLUMNS`` numbers of each row, row by row.
        names: (k,) of the domains.
        factors: (k,) those of the batch.

    Returns:
        The mean cross entropy over all targets, in nats a token; and by name:
        dro_loss: the loss that was differentiated, of weighted tokens, over the number of targets;
        domain_losses: mean cross entropy of each domain, None where the batch has no target of it;
        domain_excess: mean of max(loss - loss of the reference, 0) over its targets, likewise;
        domain_samples: its rows.
    """
    rows = [flat[i : i + COLUMNS] for i in range(0, len(flat), COLUMNS)]
    by_domain = [[row for row in rows if row[0] == domain] for domain in range(len(factors))]
    sums = [[_exact(each[c] for each in found) for c in range(1, COLUMNS)] for found in by_domain]
    targets = [each[0] for each in sums]
    everything = _exact(targets)
    weighted = [factor * each[1] for factor, each in zip(factors, sums, strict=True)]

    def mean(column: int) -> dict[str, float | None]:
        return {
            name: each[column] / each[0] if each[0] else None
            for name, each in zip(names, sums, strict=True)
        }

    loss = _exact(each[1] for each in sums) / everything if everything else math.nan
    return loss, {
        "dro_loss": _exact(weighted) / everything if everything else math.nan,
        "domain_losses": mean(1),
        "domain_excess": mean(2),
        "domain_samples": dict(zip(names, map(len, by_domain), strict=True)),
    }


def _exact(values: Iterable[float]) -> float:
    """Sum with one rounding, in any order; nan where a value is not finite."""
    found = list(values)
    return math.fsum(found) if all(map(math.isfinite, found)) else math.nan
