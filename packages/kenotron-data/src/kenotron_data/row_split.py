"""The rows of a global batch that a rank reads, and their shape as a batch.

M micro-batches, B rows of a micro-batch, S sequence; R = M * B rows of one rank in one batch.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from kenotron_data.batch import Batch
from kenotron_data.row_samples import PAD, Dataset, Int64Array, Rows, read_rows, source_of

IGNORED = -100
PADDING = -1

TargetMask = Callable[[Tensor, int], Any]
"""(R,) int64 sample numbers and S -> (R, S) bool, tensor or array: where a label is kept."""
Microbatches: TypeAlias = int | Callable[[int], int]
"""M of each step, or of the step that follows so many samples of the stage."""
BatchRows: TypeAlias = int | Callable[[int], int] | None
"""Rows of each global batch, or of the one that follows so many samples; None: dp_size * M * B."""


@dataclass(frozen=True, kw_only=True)
class RowSplit:
    """Cut of a global batch: ranks own consecutive rows, and so do micro-batches.

    Args:
        micro_batch_size: B.
        microbatches: M, or a function of the samples before the batch.
        dp_rank: this rank along the data axis.
        dp_size: ranks of the data axis.
        batch: rows of the global batch. Where there are fewer than ranks have room for, the last
            places of the last ranks are padding.

    Raises:
        ValueError: a size is not positive, or the rank is not in [0, dp_size).
    """

    micro_batch_size: int
    microbatches: Microbatches
    dp_rank: int = 0
    dp_size: int = 1
    batch: BatchRows = None

    def __post_init__(self) -> None:
        """Check the sizes."""
        for name in ("micro_batch_size", "microbatches", "dp_size"):
            if isinstance(getattr(self, name), int) and getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, but {getattr(self, name)} was given")
        if not 0 <= self.dp_rank < self.dp_size:
            raise ValueError(f"dp_rank {self.dp_rank} is not a rank of dp_size {self.dp_size}")

    def at(self, consumed: int) -> "RowSplit":
        """Return the cut, with numbers, of the batch that follows so many samples.

        Raises:
            ValueError: the batch has more rows than the ranks have room for.
        """
        count, batch = self.microbatches, self.batch
        if not isinstance(count, int):
            count = count(consumed)
        if callable(batch):
            batch = batch(consumed)
        found = replace(self, microbatches=count, batch=batch)
        if batch is not None and not 0 < batch <= found.own * self.dp_size:
            raise ValueError(
                f"a global batch of {batch} rows was given, and {self.dp_size} ranks have room for "
                f"{count} micro-batches of {self.micro_batch_size}: give 1 to "
                f"{found.own * self.dp_size} rows, or more micro-batches"
            )
        return found

    @property
    def own(self) -> int:
        """R, this rank's rows of a global batch; M must be a number."""
        assert isinstance(self.microbatches, int)
        return self.microbatches * self.micro_batch_size

    @property
    def global_batch(self) -> int:
        """Rows of the global batch, without padding; the batch must be a number."""
        assert not callable(self.batch)
        return self.dp_size * self.own if self.batch is None else self.batch

    def rows(self, first: int, batches: int = 1) -> Int64Array:
        """Return this rank's global sample numbers in batches from sample `first` on.

        Returns:
            (batches * R,) int64, -1 for padding; for one batch (R,).
        """
        starts = first + np.arange(batches, dtype=np.int64) * self.global_batch
        places = self.dp_rank * self.own + np.arange(self.own)
        return np.where(places < self.global_batch, starts[:, None] + places, PADDING).ravel()

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
            sources_R: the source of each row; of no meaning in rows of padding.
            target_mask: keeps some labels, see `TargetMask`.

        Raises:
            ValueError: the mask has another type than bool, or another shape than (R, S).
        """
        padded_R = samples_R == PADDING
        rows = _without_padding(rows, padded_R)
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
            sources_MB=torch.from_numpy(np.where(padded_R, PADDING, sources_R)).view(shape),
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
    return split.assemble(rows, samples_R, source_of(dataset, indices_R), target_mask)


def _without_padding(rows: Rows, padded_R: np.ndarray) -> Rows:
    """Blank the rows that only fill a batch."""
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
