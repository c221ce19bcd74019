"""Runs that give the same bits every time: ``general.is_deterministic``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

_WITHOUT = "does not have a deterministic implementation"
"""torch's words for an operation that has none; errors of other ranks have them, too."""


@contextmanager
def deterministic_algorithms(wanted: bool, key: str = "deterministic") -> Iterator[None]:
    """Let torch and cuDNN compute with deterministic algorithms only; no-op unless ``wanted``.

    ``key`` of the section general asks for it.

    cuBLAS takes its part from the environment, before CUDA starts: see ``kenotron_dist.start``.

    Raises:
        ValueError: an operation has no deterministic version.
    """
    if not wanted:
        yield
        return
    cudnn = torch.backends.cudnn
    before = torch.are_deterministic_algorithms_enabled(), cudnn.deterministic, cudnn.benchmark
    torch.use_deterministic_algorithms(True)
    cudnn.deterministic, cudnn.benchmark = True, False
    try:
        yield
    except RuntimeError as error:
        if _WITHOUT not in str(error):
            raise
        raise ValueError(
            f"general.{key}: true was given, but {str(error).partition('. ')[0]}; set "
            f"general.{key} to false, or compute without that operation"
        ) from error
    finally:
        torch.use_deterministic_algorithms(before[0])
        cudnn.deterministic, cudnn.benchmark = before[1:]
