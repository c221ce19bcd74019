"""Global batches: rows of samples as tensors, on the host or on a device.

M micro-batches, B rows of a micro-batch, S sequence.
"""

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import TypeVar

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class MicroBatch:
    """The rows of one micro-batch; all tensors are int64.

    Args:
        tokens_BS: (B, S) ids the model reads.
        labels_BS: (B, S) ids it shall predict; -100 marks a place without target.
        positions_BS: (B, S) places in the document, or in the sequence where samples run on.
        samples_B: (B,) global sample numbers; -1 marks a padded row.
        sources_B: (B,) the source of each row, a place in the names of the data set's sources; -1
            marks a padded row. None in a batch that was not made by a loader.
        documents_BS: (B, S) the document of each token, counted from 0 in its row; -1 is padding.
            None where a row is one document.
        host_positions_BS: the positions that stay on the host when the micro-batch is moved to an
            accelerator: what needs their values reads them here. None on the host. Who replaces
            the positions of a moved micro-batch replaces both.
    """

    tokens_BS: Tensor
    labels_BS: Tensor
    positions_BS: Tensor
    samples_B: Tensor
    sources_B: Tensor | None = None
    documents_BS: Tensor | None = None
    host_positions_BS: Tensor | None = None

    def to(self, device: torch.device | str) -> "MicroBatch":
        """Return the micro-batch with its tensors on a device.

        Raises:
            ValueError: this machine has no such device.
        """
        return _moved(self, device, "positions_BS")


@dataclass(frozen=True, eq=False)
class Batch:
    """One rank's rows of one global batch, cut in micro-batches; all tensors are int64.

    Args:
        tokens_MBS: (M, B, S) ids the model reads.
        labels_MBS: (M, B, S) ids it shall predict; -100 marks a place without target.
        positions_MBS: (M, B, S) places in the document, or in the sequence where samples run on.
        samples_MB: (M, B) global sample numbers; -1 marks a padded row.
        sources_MB: (M, B) the source of each row, see `MicroBatch`.
        documents_MBS: (M, B, S) the document of each token, see `MicroBatch`.
        host_positions_MBS: the positions that stay on the host, see `MicroBatch`.
    """

    tokens_MBS: Tensor
    labels_MBS: Tensor
    positions_MBS: Tensor
    samples_MB: Tensor
    sources_MB: Tensor | None = None
    documents_MBS: Tensor | None = None
    host_positions_MBS: Tensor | None = None

    def __len__(self) -> int:
        """Return M, the number of micro-batches."""
        return self.tokens_MBS.shape[0]

    def __getitem__(self, m: int) -> MicroBatch:
        """Return micro-batch `m`: views; IndexError where there is none."""
        parts = (self.tokens_MBS, self.labels_MBS, self.positions_MBS, self.samples_MB)
        more = (self.sources_MB, self.documents_MBS, self.host_positions_MBS)
        return MicroBatch(
            *(part[m] for part in parts), *(None if part is None else part[m] for part in more)
        )

    def __iter__(self) -> Iterator[MicroBatch]:
        """Yield the micro-batches in order."""
        return (self[m] for m in range(len(self)))

    def to(self, device: torch.device | str) -> "Batch":
        """Return the batch with its tensors on a device, to which their copies are queued.

        Raises:
            ValueError: this machine has no such device.
        """
        return _moved(self, device, "positions_MBS")


Batched = TypeVar("Batched", Batch, MicroBatch)


def _moved(batch: Batched, device: torch.device | str, positions: str) -> Batched:
    """Copy through pinned memory to an accelerator: the copy is queued, this thread continues."""
    parts = {field.name: getattr(batch, field.name) for field in fields(batch)}
    given = {name: part for name, part in parts.items() if part is not None}
    kept = f"host_{positions}"
    on_host = given.pop(kept, given[positions])
    away = torch.device(device).type != "cpu"
    _check_device(torch.device(device))
    if away and torch.device(device).type != "meta":
        given = {name: _pinned(part) for name, part in given.items()}
    moved = {name: part.to(device, non_blocking=away) for name, part in given.items()}
    return replace(batch, **{**moved, kept: on_host if away and on_host.is_cpu else None})


def _check_device(device: torch.device) -> None:
    """Raise ValueError for an accelerator that this machine has not."""
    if device.type in ("cpu", "meta"):
        return
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    there = 0 if accelerator is None else torch.accelerator.device_count()
    if accelerator is None or accelerator.type != device.type or (device.index or 0) >= there:
        seen = f"{there} of type {accelerator.type}" if accelerator is not None else "none"
        raise ValueError(
            f"cannot move a batch to {str(device)!r}: torch {torch.__version__} sees {seen}: give "
            "'cpu', or a device of this machine"
        )


def _pinned(x: Tensor) -> Tensor:
    return x.pin_memory() if x.device.type == "cpu" else x
