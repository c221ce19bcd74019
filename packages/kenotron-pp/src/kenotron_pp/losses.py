"""Auxiliary losses: layers add them to the one at the end of the model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn

from kenotron_dist import Axis, Handle, broadcast


class Losses(NamedTuple):
    """Losses that a run computed: fp32 scalars, the same on every rank."""

    total: Tensor
    main: Tensor
    """Sum of the loss function's results."""
    auxiliary: Tensor
    """Sum of what layers added."""


class SharedLoss:
    """The loss on its way from the rank that has the last layer to all others.

    Over gloo it leaves while backwards still run. NCCL would wait on the device: there it leaves
    at the end.
    """

    def __init__(self, axis: Axis, source: int) -> None:
        self._axis, self._source = axis, source
        # Where transfers are counted, a collective that waits for one would never end.
        self._early = axis.size > 1 and axis.backend == "gloo" and not axis.counts_transfers
        self._handle: Handle | None = None

    def begin(self) -> None:
        """Before the first action: be ready for it."""
        if self._early and self._axis.rank != self._source:
            self.leave(torch.zeros(()))

    def leave(self, loss: Tensor) -> None:
        """Send the sum of all micro-batches, a scalar, as soon as it is known."""
        if self._early:
            own = loss.float()
            self._handle = broadcast(own, self._axis, self._source, async_op=True)

    def arrive(self, loss: Tensor) -> Tensor:
        """The fp32 loss, a scalar, the same everywhere; ``loss`` counts where the last layer is."""
        if self._handle is not None:
            return self._handle.wait()
        return broadcast(loss.float(), self._axis, self._source)


class AuxiliaryLosses:
    """Collects scalars while a chunk runs forward.

    A layer that declares ``adds_loss = True`` has an attribute ``auxiliary_losses``, None at first.
    While a pipeline runs there is one of these, and the layer calls ``add``.
    """

    def __init__(self) -> None:
        self._scalars: list[Tensor] | None = None

    def add(self, scalar: Tensor) -> None:
        """Add ``scalar`` (0-d, scaled like the main loss) to the loss of this micro-batch.

        Once per micro-batch: what a layer adds while it is computed again for a backward is known
        already and is passed over. Raises ValueError for anything but a scalar.
        """
        if scalar.ndim:
            raise ValueError(
                f"an auxiliary loss has shape {list(scalar.shape)}: add a scalar, such as its sum"
            )
        if self._scalars is not None:
            self._scalars.append(scalar)

    def open(self) -> None:
        """From now on collect."""
        self._scalars = []

    def close(self) -> list[Tensor]:
        """Everything added since ``open``; later additions are passed over."""
        scalars, self._scalars = self._scalars or [], None
        return scalars


def adding(layers: Iterable[nn.Module]) -> Iterator[nn.Module]:
    """The submodules of ``layers``, themselves included, that declare ``adds_loss``."""
    return (each for layer in layers for each in layer.modules() if getattr(each, "adds_loss", 0))


def check_scalar(loss: object) -> None:
    """Raise ValueError for what a loss function returns unless it is a scalar tensor."""
    if not isinstance(loss, Tensor) or loss.ndim:
        found = f"a tensor {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        raise ValueError(
            f"loss_fn returned {found}: return a scalar tensor, the loss of the micro-batch, such "
            "as losses.sum() / count of the whole batch"
        )
