"""Scans by kernels of ``mamba-ssm`` and ``flash-linear-attention``, where they are installed.

A mixer's ``kernel`` chooses: ``plain`` (this package's own scan) or ``library``. A kernel computes
whole rows of which the output alone is read. Rows that continue a state (generation) or that are
cut over cp are computed by the plain scan, whose last state has a gradient. No kernel has run on a
GPU in this repository's tests: they check what libraries are asked for, with stand-ins.

Shapes: R rows, L tokens of a row; C channels, N features of a state; H heads of P features, G
groups of heads; K features of a key, V of a value.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from typing import Any, Literal

import torch
from torch import Tensor

from kenotron_models.delta_rule import Delta
from kenotron_models.selective_scan import Constants

ScanKernel = Literal["plain", "library"]
"""Implementation of a scan."""
PACKAGES = {
    "mamba": ("mamba_ssm", "mamba-ssm"),
    "mamba2": ("mamba_ssm", "mamba-ssm"),
    "gated_delta": ("fla", "flash-linear-attention"),
}
"""Packages that mixers import, and the names under which they are installed."""
DOCUMENTS = ("mamba2",)
"""Mixers whose kernel can begin again inside a row."""


@functools.cache
def installed(module: str) -> bool:
    """Return True where a library can be imported; looked up once."""
    return importlib.util.find_spec(module) is not None


def check_kernel(mixer: str, kernel: ScanKernel, *, documents: bool) -> None:
    """Raise ValueError for a kernel that does not exist, is not installed, or has no documents.

    Args:
        mixer: name of the kind.
        kernel: what was chosen.
        documents: whether its state begins again with each document.
    """
    if kernel == "plain":
        return
    module, package = PACKAGES[mixer]
    if kernel != "library":
        raise ValueError(f"kernel of {mixer}: {kernel!r} was given; it must be plain or library")
    if documents and mixer not in DOCUMENTS:
        raise ValueError(
            f"kernel of {mixer}: library was given with separate documents, which {package} does "
            "not begin again; choose plain, or let documents be one text"
        )
    if not installed(module):
        raise ValueError(
            f"kernel of {mixer}: library was given and {module} is not installed; install "
            f"{package} (pip install {package}), or choose plain"
        )


def check_device(mixer: str, x: Tensor) -> None:
    """Raise ValueError for tensors, of any shape, that are not on a CUDA device."""
    if not x.is_cuda:
        raise ValueError(
            f"kernel of {mixer}: library was given and tensors are on {x.device.type}; it needs a "
            "CUDA device: choose plain"
        )


def selective_scan_kernel(
    x: Tensor, step: Tensor, b: Tensor, c: Tensor, constants: Constants
) -> Tensor:
    """Compute Mamba's outputs (R, L, C) by ``mamba_ssm``; arguments as for ``selective_scan``."""
    check_device("mamba", x)
    library: Any = importlib.import_module("mamba_ssm.ops.selective_scan_interface")
    rows = [each.mT.contiguous() for each in (x, step, b, c)]  # tokens last
    y = library.selective_scan_fn(
        *rows[:2], constants.a.float(), *rows[2:], D=constants.skip.float(),
        delta_bias=constants.bias.float(), delta_softplus=True,
    )  # fmt: skip
    return y.mT.to(x.dtype)


def structured_scan_kernel(
    x: Tensor,
    step: Tensor,
    b: Tensor,
    c: Tensor,
    constants: Constants,
    *,
    limits: tuple[float, float],
    goes_on: Tensor | None,
    chunk: int,
) -> Tensor:
    """Compute Mamba-2's outputs (R, L, H, P) by ``mamba_ssm``; see ``structured_scan``."""
    check_device("mamba2", x)
    library: Any = importlib.import_module("mamba_ssm.ops.triton.ssd_combined")
    document = None if goes_on is None else (~goes_on).cumsum(1).to(torch.int32)  # (R, L)
    return library.mamba_chunk_scan_combined(
        x, step, constants.a.float(), b, c, chunk, D=constants.skip.float(),
        dt_bias=constants.bias.float(), dt_softplus=True, dt_limit=limits, seq_idx=document,
    )  # fmt: skip


def delta_rule_kernel(x: Delta) -> Tensor:
    """Compute outputs (R, L, H, V) of the gated delta rule by ``fla``; see ``delta_rule``."""
    check_device("gated_delta", x.q)
    library: Any = importlib.import_module("fla.ops.gated_delta_rule")
    q, k = (each.to(x.v.dtype) for each in (x.q, x.k))
    y, _ = library.chunk_gated_delta_rule(
        q, k, x.v, g=x.log_decay.float(), beta=x.share.to(x.v.dtype), scale=1.0,
        output_final_state=False, use_qk_l2norm_in_kernel=False,
    )  # fmt: skip
    return y
