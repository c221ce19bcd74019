"""How these tests start ranks: nothing is loaded twice, and a stuck rank is soon seen."""

from datetime import timedelta

from kenotron_dist import spawn

PRELOAD = ("torch._dynamo", "torch.testing", "numpy", "pytest")


def on_ranks(fn, *args, seconds=60, **sizes):
    """Results of ``fn(mesh, *args)`` on every rank of a mesh of these sizes."""
    return spawn(fn, *args, timeout=timedelta(seconds=seconds), preload=PRELOAD, **sizes)
