"""Start ranks in tests: nothing is loaded twice, and a stuck rank is soon seen.

For the tests of programs on this package, too:

    def work(mesh):
        return all_reduce(torch.ones(1), mesh["dp"]).item()

    def test_sums():
        assert on_ranks(work, dp=2) == [2.0, 2.0]
"""

from __future__ import annotations

import random
import socket
from collections.abc import Callable, Sequence
from contextlib import closing
from datetime import timedelta
from typing import Any

import torch

from kenotron_dist.grid import MeshConfig
from kenotron_dist.mesh import Mesh
from kenotron_dist.spawn import spawn

__all__ = [
    "free_port",
    "on_fake_ranks",
    "on_nccl",
    "on_ranks",
]

PRELOAD = ("torch._dynamo", "torch.testing", "pytest")
"""Modules that ranks of tests find loaded; torch's own decorators load the first."""


def on_ranks(
    function: Callable[..., Any],
    *args: Any,
    seconds: float = 120.0,
    preload: Sequence[str] = (),
    **options: Any,
) -> list[Any]:
    """Call ``function(mesh, *args)`` on every rank of a mesh of local processes.

    Args:
        function: importable; its arguments and results must pickle.
        args: what it is called with, next to the mesh.
        seconds: how long an operation may wait for a peer.
        preload: further modules that ranks find loaded. The first call in a process decides.
        options: sizes of axes (``dp=2``) and other options of ``spawn``.

    Returns:
        The results in rank order.

    Raises:
        RankError: the first rank that failed, with its cause.
    """
    limit = timedelta(seconds=seconds)
    return spawn(function, *args, timeout=limit, preload=(*PRELOAD, *preload), **options)


def on_nccl(function: Callable[..., Any], *args: Any, **options: Any) -> list[Any]:
    """Call ``on_ranks`` over NCCL where there is a GPU, which ranks may share, else the fake NCCL.

    New tensors of the ranks are on the GPU, and its products are deterministic.
    """
    if torch.accelerator.is_available():
        gpu = {"device": "cuda", "share_gpus": True, "deterministic": True}
        return on_ranks(_there, function, args, **gpu, **options)
    return on_ranks(function, *args, backend="fake_nccl", **options)


def on_fake_ranks(function: Callable[..., Any], *args: Any, **sizes: Any) -> list[Any]:
    """Call ``function(mesh, *args)`` as each rank of a world without processes, one after another.

    Tensors are on meta; see ``Mesh.connect(backend="fake")``.

    Args:
        function: of a mesh.
        args: what it is called with, next to the mesh.
        sizes: of axes (``dp=2``).

    Returns:
        The results in rank order.
    """
    found = []
    for rank in range(MeshConfig(**sizes).world_size):
        with closing(Mesh.connect(**sizes, backend="fake", rank=rank)) as mesh:
            found.append(function(mesh, *args))
    return found


def free_port() -> int:
    """Return a free TCP port of this host.

    It is below those that systems give to connections (Linux: from 32,768), of which tests open
    many: none of them takes it before a rank listens there.
    """
    while True:
        port = random.SystemRandom().randrange(10_000, 32_000)
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
        return port


def _there(mesh: Mesh, function: Callable[..., Any], args: Sequence[Any]) -> Any:
    with mesh.device:
        return function(mesh, *args)
