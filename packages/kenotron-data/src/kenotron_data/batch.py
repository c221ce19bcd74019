"""Global batches: rows of samples as tensors, and the rows that a rank reads.

M micro-batches, B rows of a micro-batch, S sequence; R = M * B rows of one rank in one batch.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from typing import Any, TypeAlias, TypeVar

import numpy as np
import torch
from torch import Tensor

from kenotron_data.row_samples import PAD, Dataset, Int64Array, Rows, read_rows, source_of

IGNORED = -100
PADDING = -1

TargetMask = Callable[[Tensor, int], Any]
"""(R,) int64 sample numbers and S -> (R, S) bool, tensor or array: where a label is kept."""
Microbatches: TypeAlias = int | Callable[[int], int]
"""M of each step, or of the step that follows so many samples of the stage."""


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


@dataclass(frozen=True, kw_only=True)
class RowSplit:
    """Cut of a global batch: ranks own consecutive rows, and so do micro-batches.

    Args:
        micro_batch_size: B.
        microbatches: M, or a function of the samples before the batch.
        dp_rank: this rank along the data axis.
        dp_size: ranks of the data axis.

    Raises:
        ValueError: a size is not positive, or the rank is not in [0, dp_size).
    """

    micro_batch_size: int
    microbatches: Microbatches
    dp_rank: int = 0
    dp_size: int = 1

    def __post_init__(self) -> None:
        """Check the sizes."""
        for name in ("micro_batch_size", "microbatches", "dp_size"):
            if isinstance(getattr(self, name), int) and getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, but {getattr(self, name)} was given")
        if not 0 <= self.dp_rank < self.dp_size:
            raise ValueError(f"dp_rank {self.dp_rank} is not a rank of dp_size {self.dp_size}")

    def at(self, consumed: int) -> "RowSplit":
        """Return the cut, with M as a number, of the batch that follows so many samples."""
        if isinstance(self.microbatches, int):
            return self
        return replace(self, microbatches=self.microbatches(consumed))

    @property
    def own(self) -> int:
        """R, this rank's rows of a global batch; M must be a number."""
        assert isinstance(self.microbatches, int)
        return self.microbatches * self.micro_batch_size

    @property
    def global_batch(self) -> int:
        """Rows of the global batch."""
        return self.dp_size * self.own

    def rows(self, first: int, batches: int = 1) -> Int64Array:
        """Return this rank's global sample numbers in batches from sample `first` on.

        Returns:
            (batches * R,) int64; for one batch (R,).
        """
        starts = first + np.arange(batches, dtype=np.int64) * self.global_batch
        return (starts[:, None] + self.dp_rank * self.own + np.arange(self.own)).ravel()

    def assemble(
        self,
        rows: Rows,
        samples_R: Int64Array,
        sources_R: Int64Array,
        target_mask: TargetMask | None = None,
    ) -> Batch:
        """Shape rows of a data set as a batch.

        Args:
            rows: this rank's R rows.
            samples_R: global sample numbers; -1 makes a row of zeros without targets.
            sources_R: the source of each row.
            target_mask: keeps some labels, see `TargetMask`.

        Raises:
            ValueError: the mask has another type than bool, or another shape than (R, S).
        """
        rows = _without_padding(rows, samples_R)
        shape = (-1, self.micro_batch_size)
        samples = torch.from_numpy(samples_R)
        count, width = rows.tokens.shape
        # One block: the system is asked for memory once, and it is not given back each time.
        block = np.empty((3 + (rows.documents is not None), count, width - 1), dtype=np.int64)
        tokens, labels, positions, *more = block
        tokens[:], labels[:] = rows.tokens[:, :-1], rows.tokens[:, 1:]
        rows.write_positions(positions)
        if rows.documents is not None:
            more[0][:] = rows.documents[:, :-1]
        keep = rows.kept_labels()
        if target_mask is not None:
            wanted = _checked_mask(target_mask, samples, labels.shape)
            keep = wanted if keep is None else keep & wanted
        if keep is not None:
            np.putmask(labels, ~keep, IGNORED)
        parts = torch.from_numpy(block).view(len(block), *shape, width - 1).unbind()
        return Batch(
            *parts[:3],
            samples_MB=samples.view(shape),
            sources_MB=torch.from_numpy(sources_R).view(shape),
            documents_MBS=parts[3] if more else None,
        )


def read_batch(
    dataset: Dataset,
    split: RowSplit,
    samples_R: Int64Array,
    indices_R: Int64Array,
    target_mask: TargetMask | None = None,
    vocab_size: int | None = None,
) -> Batch:
    """Read rows of a data set and shape them as a batch.

    Args:
        dataset: where the rows come from.
        split: how they are shaped.
        samples_R: global sample numbers; -1 makes a row of padding.
        indices_R: indices in the data set; of no meaning in rows of padding.
        target_mask: keeps some labels, see `TargetMask`.
        vocab_size: see `read_rows`.

    Raises:
        ValueError: see `read_rows` and `RowSplit.assemble`.
    """
    # A batch of padding takes its length from any sample, and so do single rows of padding.
    indices_R = np.where(samples_R == PADDING, 0, indices_R)
    rows = read_rows(dataset, indices_R, vocab_size)
    sources_R = np.where(samples_R == PADDING, PADDING, source_of(dataset, indices_R))
    return split.assemble(rows, samples_R, sources_R, target_mask)


def _without_padding(rows: Rows, samples_R: Int64Array) -> Rows:
    """Blank the rows that only fill a batch."""
    padded_R = samples_R == PADDING
    if not padded_R.any():
        return rows
    tokens, targets = rows.tokens.copy(), rows.targets
    tokens[padded_R] = 0
    targets = np.ones(tokens.shape, dtype=np.bool_) if targets is None else targets.copy()
    targets[padded_R] = False
    documents = rows.documents
    if documents is not None:
        documents = documents.copy()
        documents[padded_R] = PAD
    return Rows(tokens, documents, targets, rows.places)


def _checked_mask(
    target_mask: TargetMask, samples_R: Tensor, shape: tuple[int, ...]
) -> np.ndarray[Any, np.dtype[np.bool_]]:
    mask = torch.as_tensor(target_mask(samples_R, shape[1]))
    if mask.dtype != torch.bool or mask.shape != shape:
        raise ValueError(
            f"target_mask returned {mask.dtype} of shape {tuple(mask.shape)}, needed is "
            f"torch.bool of shape {tuple(shape)}: one value per row and place"
        )
    return mask.cpu().numpy()
