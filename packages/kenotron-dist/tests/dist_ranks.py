"""How these tests start ranks: nothing is loaded twice, and a stuck rank is soon seen."""

from datetime import timedelta

import pytest
import torch

from kenotron_dist import spawn

needs_gpu = pytest.mark.skipif(not torch.accelerator.is_available(), reason="no GPU here")
PRELOAD = ("torch._dynamo", "torch.testing", "numpy", "pytest")


def on_ranks(fn, *args, seconds=60, **sizes):
    """Results of ``fn(mesh, *args)`` on every rank of a mesh of these sizes."""
    return spawn(fn, *args, timeout=timedelta(seconds=seconds), preload=PRELOAD, **sizes)


def on_gpus(fn, *args, seconds=60, **sizes):
    """The same over NCCL, with new tensors on the GPU; ranks share it where there is only one."""
    options = {"timeout": timedelta(seconds=seconds), "preload": PRELOAD, **sizes}
    return spawn(_there, fn, args, device="cuda", share_gpus=True, **options)


def _there(mesh, fn, args):
    with mesh.device:
        return fn(mesh, *args)
