"""Facts of mixers with a state: fields of their specs, and the bytes that they send over cp."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kenotron_cp import Cut
from kenotron_models.build import Build
from kenotron_models.scan_kernels import ScanKernel
from kenotron_models.state_init import FirstSteps


@dataclass(frozen=True, kw_only=True)
class RecurrentSpec:
    """Fields of every mixer with a state; the config of a family has checked its sizes."""

    width: int = 4
    """W of the convolution, in tokens."""
    separate_documents: bool = False
    """State and convolution begin again where positions do not increase by one."""
    steps: FirstSteps = FirstSteps(0.001, 0.1, 1e-4)
    """Initialisation of the biases of steps."""
    kernel: ScanKernel = "plain"
    """Implementation of the scan of whole rows: ``plain``, or ``library``, which needs a GPU and
    the library of the kind: mamba-ssm, or fla for delta rules."""


def sent_by_states(
    rows: int, cut: Cut, floats: int, convolved: tuple[int, int], dtype: torch.dtype
) -> int:
    """Return the bytes that leave a rank of cp forward, and as many backward.

    Args:
        rows: B.
        cut: how rows are cut.
        floats: fp32 numbers of a state and its factor.
        convolved: W - 1, and the channels of the convolution on a tp rank.
        dtype: of activations.
    """
    tokens, channels = min(convolved[0], cut.chunk_length), convolved[1]
    each = tokens * channels * dtype.itemsize + floats * torch.float32.itemsize
    return rows * cut.per_rank * (cut.ranks - 1) * each


def state_dtype(build: Build) -> torch.dtype | None:
    """Return the dtype of the constants of a state-space layer: fp32, or a wider one."""
    if build.dtype is None:
        return None
    return torch.promote_types(build.dtype, torch.float32)
