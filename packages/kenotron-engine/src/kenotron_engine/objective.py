"""Objective of a training: the loss of a micro-batch, its divisor, and its reports.

Shapes: M micro-batches, B rows of a micro-batch, S sequence, n tokens of a row on this rank,
T = B * n, V vocabulary, r reports, c numbers of a row; ``/t`` is divided by tp size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from kenotron_data import Batch
from kenotron_dist import Mesh, all_reduce
from kenotron_engine.model_on_mesh import ModelOnMesh
from kenotron_engine.sequence import NO_TARGET, Share
from kenotron_models import DecoderSpec
from kenotron_tp import cross_entropy


class Parts(NamedTuple):
    """The loss of a micro-batch on this rank of cp, equal on all ranks of tp."""

    total: Tensor
    """Scalar that is differentiated, a part of a sum over micro-batches and ranks."""
    reports: Sequence[Tensor] = ()
    """(r) scalars without gradient that are added up likewise, as ``Objective.reports`` names."""
    rows: Tensor | None = None
    """(B, c) numbers of its rows, added up over cp; with ``Objective.columns``."""


MicroLoss = Callable[[Tensor, int], Parts]
"""Its arguments are the input (T, D) of the head, or the logits (T, V/t) of a head that is not
ours, and the number of the micro-batch."""
SumLoss = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""Of the input or logits as in ``MicroLoss``, and their labels: the loss and the z-loss in it."""


class Objective(Protocol):
    """Function that a training minimises; a value, the same on every rank.

    Each of its losses is a sum over the tokens or rows of the global batch, divided by a number
    that is known before the first forward. So neither micro-batches nor the layout change it.
    """

    @property
    def reports(self) -> tuple[str, ...]:
        """Names of the sums that are reported besides the loss."""
        ...

    @property
    def columns(self) -> int:
        """Numbers that are reported of each row of the global batch; 0: none."""
        ...

    def counts(self, batch: Batch, mesh: Mesh) -> Tensor:
        """Count what divides the loss, and the tokens of the global batch but padding.

        Args:
            batch: whole rows, which all ranks of cp read.
            mesh: the ranks; collective over dp.

        Returns:
            (2,) int64, on the device.
        """
        ...

    def loss(self, model: ModelOnMesh, share: Share, count: Tensor) -> MicroLoss:
        """Return the loss of each micro-batch of a step, divided by ``count`` (scalar)."""
        ...

    def reported(self, loss: Tensor, reports: Tensor) -> Tensor:
        """Return the loss (scalar) without parts that are not reported; ``reports`` (r,)."""
        ...

    def outcome(
        self, loss: float, reports: Sequence[float], rows: Sequence[float]
    ) -> tuple[float, dict[str, Any]]:
        """Return what a step reports: its loss, and further figures by name.

        Args:
            loss: as ``reported`` returned it.
            reports: (r) sums over the global batch.
            rows: G * (1 + c) numbers: of each row of the global batch its domain, then its own.
        """
        ...


def objective_of(spec: DecoderSpec) -> Objective:
    """Return the prediction of the next token, with the z-loss and modules that a model has."""
    main = NextToken(spec.z_loss)
    return FurtherToken(main, spec.mtp_weight) if spec.mtp_weight else main


def global_counts(batch: Batch, mesh: Mesh) -> Tensor:
    """Targets of the global batch, by which every loss is divided, and its tokens but padding.

    (2,) int64 on the device. ``batch`` has whole rows, which all ranks of cp read. Collective over
    dp.
    """
    targets = (batch.labels_MBS != NO_TARGET).sum()
    real = (batch.samples_MB >= 0)[..., None].expand_as(batch.tokens_MBS)
    if batch.documents_MBS is not None:
        real = real & (batch.documents_MBS >= 0)
    own = torch.stack([targets, real.sum()]).to(mesh.device)
    return all_reduce(own, mesh["dp"])


def token_losses(model: ModelOnMesh, x: Tensor, labels: Tensor) -> Tensor:
    """Cross entropy of every token, (T,), 0 without target; x as in ``MicroLoss``, T labels."""
    return losses_and_z(model, x, labels, 0.0)[0]


def losses_and_z(
    model: ModelOnMesh, x: Tensor, labels: Tensor, z_loss: float
) -> tuple[Tensor, Tensor]:
    """Loss of every token (T,) and the z-loss in it, which has no gradient of its own.

    Both are 0 without target. ``x`` and ``labels`` as in ``token_losses``.
    """
    return cross_entropy(x, labels.flatten(), model.mesh["tp"], z_loss=z_loss, **_head_of(model))


def sum_over(model: ModelOnMesh, count: Tensor, z_loss: float = 0.0) -> SumLoss:
    """Return what adds up the losses of all tokens and divides them by ``count`` (scalar)."""
    tp, times = model.mesh["tp"], 1 / count.double()

    def found(x: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        of_head = _head_of(model)  # in the reproducible mode a use of its own in each loss
        return cross_entropy(
            x, labels.flatten(), tp, reduction="sum", times=times, z_loss=z_loss, **of_head
        )

    return found


def _head_of(model: ModelOnMesh) -> dict[str, Any]:
    """Return what makes logits of the loss's input: nothing where that is logits."""
    head, vocab_size = model.model.head, model.plan.spec.vocab_size
    if head is None:
        return {"vocab_size": vocab_size}
    return {
        "vocab_size": vocab_size,
        "weight": head.weight,
        "cap": head.cap,
        "sequence_parallel": head.sequence_parallel,
        "shards": model.plan.virtual_shards,
    }


@dataclass(frozen=True)
class NextToken:
    """Cross entropy of the next token, a mean over the targets of the global batch."""

    z_loss: float = 0.0
    """Weight of the z-loss, which is differentiated and not reported."""

    columns = 0

    @property
    def reports(self) -> tuple[str, ...]:
        """See ``Objective``."""
        return ("z_loss",) if self.z_loss else ()

    def counts(self, batch: Batch, mesh: Mesh) -> Tensor:
        """See ``global_counts``."""
        return global_counts(batch, mesh)

    def loss(self, model: ModelOnMesh, share: Share, count: Tensor) -> MicroLoss:
        """See ``Objective``; ``count`` is a scalar."""
        added = sum_over(model, count, self.z_loss)

        def loss(x: Tensor, microbatch: int) -> Parts:
            total, z = added(x, share.micros[microbatch].labels_BS)
            return Parts(total, (z,) if self.z_loss else ())

        return loss

    def reported(self, loss: Tensor, reports: Tensor) -> Tensor:
        """See ``Objective``; a scalar and (r,)."""
        return loss - reports[0] if self.z_loss else loss

    def outcome(
        self, loss: float, reports: Sequence[float], rows: Sequence[float]
    ) -> tuple[float, dict[str, Any]]:
        """See ``Objective``."""
        return loss, {}


@dataclass(frozen=True)
class FurtherToken:
    """Adds the gradient of the module that predicts the token after the next to an objective.

    Its cross entropy has the head of the model and the number that divides the main loss. It adds a
    gradient to the loss, and 0 to its value.
    """

    main: Objective
    weight: float
    """Of its gradient."""

    columns = 0

    @property
    def reports(self) -> tuple[str, ...]:
        """See ``Objective``."""
        return (*self.main.reports, "mtp_loss")

    def counts(self, batch: Batch, mesh: Mesh) -> Tensor:
        """See ``Objective``."""
        return self.main.counts(batch, mesh)

    def loss(self, model: ModelOnMesh, share: Share, count: Tensor) -> MicroLoss:
        """Return the loss of head inputs (2T, D): those of the main stream, then of the module.

        Where ``share`` has no labels of the module, inputs are (T, D). ``count`` is a scalar.
        """
        if not share.further:
            return self.main.loss(model, share, count)

        def losses(of: ModelOnMesh) -> tuple[MicroLoss, SumLoss]:
            return self.main.loss(of, share, count), sum_over(of, count)

        known = losses(model)

        def loss(x: Tensor, microbatch: int) -> Parts:
            (own, ahead), one = x.chunk(2), model.with_one_use()
            main, added = known if one is model else losses(one)
            total, reports, _ = main(own, microbatch)
            further, _ = added(ahead, share.further[microbatch])
            value = further.detach()
            return Parts(total + self.weight * (further - value), (*reports, value))

        return loss

    def reported(self, loss: Tensor, reports: Tensor) -> Tensor:
        """See ``Objective``; a scalar and (r,)."""
        return self.main.reported(loss, reports)

    def outcome(
        self, loss: float, reports: Sequence[float], rows: Sequence[float]
    ) -> tuple[float, dict[str, Any]]:
        """See ``Objective``."""
        loss, figures = self.main.outcome(loss, reports, rows)
        return loss, figures | {"mtp_loss": reports[-1]}
