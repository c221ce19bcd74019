"""The store at which the ranks of a launched world meet, and what they must agree on there."""

from __future__ import annotations

import errno
import os
import socket
from datetime import timedelta

import torch.distributed as dist

from kenotron_dist.environment import World


def open_store(world: World, meet: timedelta, timeout: timedelta) -> dist.Store:
    """Open the store of a launched world, under a prefix of its restart count.

    Args:
        world: what the launcher's variables say of this process.
        meet: how long the store may take to answer.
        timeout: that of later operations.

    Raises:
        ValueError: ranks were started with different world sizes, or two processes as one rank.
        ConnectionError: the port is in use, or the master cannot be reached.
    """
    if world.world_size == 1:
        return dist.HashStore()
    tcp = _tcp_store(world, meet)
    tcp.set_timeout(timeout)
    store = dist.PrefixStore(f"kenotron/{world.restart_count}", tcp)
    _check_owner(world, store)
    size = store.compare_set("world-size", "", str(world.world_size)).decode()
    if size != str(world.world_size):
        raise ValueError(
            f"rank {world.rank} was started in a world of {world.world_size} ranks, another one "
            f"in a world of {size}: start all of them with the same number"
        )
    return store


def _tcp_store(world: World, timeout: timedelta) -> dist.TCPStore:
    address, port = world.master_address, world.master_port
    hosts = world.rank == 0 and not world.agent_store
    listener = None
    if world.is_local and not world.agent_store:
        address = address if address == "::1" else "127.0.0.1"
    try:
        if hosts and world.is_local:  # else torch listens on all interfaces
            family = socket.AF_INET6 if address == "::1" else socket.AF_INET
            listener = socket.create_server((address, port), family=family).detach()
        return dist.TCPStore(
            address,
            port,
            is_master=hosts,
            timeout=timeout,
            wait_for_workers=False,
            master_listen_fd=listener,
        )
    except (RuntimeError, OSError) as error:
        in_use = getattr(error, "errno", None) == errno.EADDRINUSE or "EADDRINUSE" in str(error)
        if hosts and in_use:
            raise ConnectionError(
                f"rank 0 cannot open port {port}, which is in use on {address}: set MASTER_PORT "
                "to a free port, the same on all ranks"
            ) from error
        raise ConnectionError(
            f"rank {world.rank} cannot reach the store at {address}, port {port}, within "
            f"{timeout.total_seconds():g} s: see that rank 0 runs there and that MASTER_ADDR and "
            "MASTER_PORT are the same on all ranks and open between the hosts"
        ) from error


def check_backend(world: World, store: dist.Store, backend: str, gpus: int) -> None:
    """Refuse ranks that would talk past one another: a host with too few GPUs chose the CPU."""
    own = f"{backend}, chosen on {socket.gethostname()} with {gpus} GPUs"
    own += f" for {world.local_world_size} ranks"
    first = store.compare_set("backend", "", own).decode()
    if first.partition(",")[0] != backend:
        raise ValueError(
            f"rank {world.rank} would talk over {own}, and another rank over {first}: each rank of "
            "each host needs a GPU, or none may see any (CUDA_VISIBLE_DEVICES=)"
        )


def _check_owner(world: World, store: dist.Store) -> None:
    """Every rank signs; a rank signed by another process is a stale store or a double rank."""
    me = f"process {os.getpid()} on {socket.gethostname()}"
    owner = store.compare_set(f"owner/{world.rank}", "", me).decode()
    if owner != me:
        raise ValueError(
            f"rank {world.rank} is taken by {owner}, and {me} claims it too: two processes were "
            "given one rank, or torchrun changed the number of ranks without a restart count "
            "(set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 before it starts)"
        )
