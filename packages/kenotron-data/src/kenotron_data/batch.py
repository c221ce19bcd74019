"""What a step trains on: rows of samples as tensors, and which rows a rank reads.

M micro-batches, B rows of a micro-batch, S sequence; R = M * B rows of one rank in one batch.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kenotron_data.pack import Dataset, Int64Array

IGNORED = -100
PADDING = -1

TargetMask = Callable[[Tensor, int], Any]
"""(R,) int64 sample numbers and S -> (R, S) bool, tensor or array: where a label is kept."""


@dataclass(frozen=True, eq=False)
class MicroBatch:
    """The rows of one micro-batch; all tensors are int64.

    Args:
        tokens_BS: (B, S) ids the model reads.
        labels_BS: (B, S) ids it shall predict; -100 marks a place without target.
        positions_BS: (B, S) places in the sequence.
        samples_B: (B,) global sample numbers; -1 marks a padded row.
    """

    tokens_BS: Tensor
    labels_BS: Tensor
    positions_BS: Tensor
    samples_B: Tensor

    def to(self, device: torch.device | str) -> "MicroBatch":
        """Return the micro-batch with its tensors on a device."""
        parts = (self.tokens_BS, self.labels_BS, self.positions_BS, self.samples_B)
        return MicroBatch(*(part.to(device) for part in parts))


@dataclass(frozen=True, eq=False)
class Batch:
    """One rank's rows of one global batch, cut in micro-batches; all tensors are int64.

    Args:
        tokens_MBS: (M, B, S) ids the model reads.
        labels_MBS: (M, B, S) ids it shall predict; -100 marks a place without target.
        positions_MBS: (M, B, S) places in the sequence.
        samples_MB: (M, B) global sample numbers; -1 marks a padded row.
    """

    tokens_MBS: Tensor
    labels_MBS: Tensor
    positions_MBS: Tensor
    samples_MB: Tensor

    def __len__(self) -> int:
        """Return M, the number of micro-batches."""
        return self.tokens_MBS.shape[0]

    def __getitem__(self, m: int) -> MicroBatch:
        """Return micro-batch `m`: views; IndexError where there is none."""
        parts = (self.tokens_MBS, self.labels_MBS, self.positions_MBS, self.samples_MB)
        return MicroBatch(*(part[m] for part in parts))

    def __iter__(self) -> Iterator[MicroBatch]:
        """Yield the micro-batches in order."""
        return (self[m] for m in range(len(self)))

    def to(self, device: torch.device | str) -> "Batch":
        """Return the batch with its tensors on a device."""
        parts = (self.tokens_MBS, self.labels_MBS, self.positions_MBS, self.samples_MB)
        return Batch(*(part.to(device) for part in parts))


@dataclass(frozen=True, kw_only=True)
class RowSplit:
    """How a global batch is cut: ranks own consecutive rows, and so do micro-batches.

    Args:
        micro_batch_size: B.
        microbatches: M.
        dp_rank: this rank along the data axis.
        dp_size: ranks of the data axis.

    Raises:
        ValueError: a size is not positive, or the rank is not in [0, dp_size).
    """

    micro_batch_size: int
    microbatches: int
    dp_rank: int = 0
    dp_size: int = 1

    def __post_init__(self) -> None:
        """Check the sizes."""
        for name in ("micro_batch_size", "microbatches", "dp_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, but {getattr(self, name)} was given")
        if not 0 <= self.dp_rank < self.dp_size:
            raise ValueError(f"dp_rank {self.dp_rank} is not a rank of dp_size {self.dp_size}")

    @property
    def global_batch(self) -> int:
        """Rows of the global batch."""
        return self.dp_size * self.microbatches * self.micro_batch_size

    def rows(self, first: int) -> Int64Array:
        """Return this rank's (R,) global sample numbers in the batch that begins with `first`."""
        own = self.microbatches * self.micro_batch_size
        return first + self.dp_rank * own + np.arange(own, dtype=np.int64)

    def assemble(
        self,
        dataset: Dataset,
        samples_R: Int64Array,
        indices_R: Int64Array,
        target_mask: TargetMask | None = None,
    ) -> Batch:
        """Read rows of a dataset and shape them as a batch.

        Args:
            dataset: where the rows come from.
            samples_R: global sample numbers.
            indices_R: indices in the dataset; -1 makes a row of zeros without targets.
            target_mask: keeps some labels, see `TargetMask`.

        Raises:
            ValueError: samples differ in length, or the mask has another shape than (R, S).
        """
        real_R = indices_R != PADDING
        rows = [dataset.sample(int(i)) for i in indices_R[real_R]]
        if not rows:  # a batch of padding takes its length from any sample
            rows, real_R = [dataset.sample(0)], np.zeros_like(real_R)
        _check_lengths(rows, indices_R[real_R])
        table = np.zeros((len(real_R), len(rows[0])), dtype=np.int64)
        if real_R.any():
            table[real_R] = np.stack(rows)
        data_RS = torch.from_numpy(table)
        samples = torch.from_numpy(np.where(real_R, samples_R, PADDING))
        keep_RS = torch.from_numpy(real_R)[:, None].expand(-1, table.shape[1] - 1)
        if target_mask is not None:
            keep_RS = keep_RS & _checked_mask(target_mask, samples, keep_RS.shape)
        shape = (self.microbatches, self.micro_batch_size)
        positions_S = torch.arange(table.shape[1] - 1)
        return Batch(
            tokens_MBS=data_RS[:, :-1].contiguous().view(*shape, -1),
            labels_MBS=data_RS[:, 1:].masked_fill(~keep_RS, IGNORED).view(*shape, -1),
            positions_MBS=positions_S.repeat(*shape, 1),
            samples_MB=samples.view(shape),
        )


def _check_lengths(rows: list[Int64Array], indices: Int64Array) -> None:
    for row, i in zip(rows, indices, strict=False):
        if row.ndim != 1 or row.shape != rows[0].shape or len(row) < 2:
            raise ValueError(
                f"sample {i} has shape {row.shape}: every sample of a dataset must be (S + 1,) "
                f"tokens of one length, and another has shape {rows[0].shape}"
            )


def _checked_mask(target_mask: TargetMask, samples_R: Tensor, shape: torch.Size) -> Tensor:
    mask = torch.as_tensor(target_mask(samples_R, shape[1]))
    if mask.dtype != torch.bool or mask.shape != shape:
        raise ValueError(
            f"target_mask returned {mask.dtype} of shape {tuple(mask.shape)}, needed is "
            f"torch.bool of shape {tuple(shape)}: one value per row and place"
        )
    return mask
