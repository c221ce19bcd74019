"""Ranks on the nodes of a job: how many on each, and what a user should know of them."""

from __future__ import annotations

from kenotron_config import ParallelismConfig


def ranks_of_job(nodes: int, gpus_per_node: int | None) -> int | None:
    """Return the processes that `parallelism.dp: auto` follows in a job; None: not known."""
    return nodes * (gpus_per_node or 0) or None


def ranks_per_node(nodes: int, gpus_per_node: int | None, sizes: ParallelismConfig) -> int:
    """Return the number of ranks of each node.

    Args:
        nodes: nodes that train together.
        gpus_per_node: GPUs of each, one a rank; 0: on CPUs; None: as many as there are ranks.
        sizes: of the mesh.

    Raises:
        ValueError: the ranks do not fit the nodes.
    """
    world, shown = sizes.world_size, f"{sizes.described} = {sizes.world_size} processes"
    if not gpus_per_node:
        if world % nodes:
            known = ", ".join(str(n) for n in range(1, world + 1) if world % n == 0)
            raise ValueError(
                f"--nodes {nodes}: {shown} cannot be divided among so many nodes evenly: "
                f"choose --nodes from {known}, or change parallelism.dp, pp, cp or tp"
            )
        return world // nodes
    total, rest = nodes * gpus_per_node, world // sizes.dp
    if world != total:
        fixes = ["change parallelism.dp, pp, cp or tp"]
        if total % rest == 0:
            fixes = [f"--set parallelism.dp={total // rest}"]
        if world % gpus_per_node == 0:
            fixes.append(f"--nodes {world // gpus_per_node}")
        raise ValueError(
            f"{shown}, one a GPU, but --nodes {nodes} with --gpus-per-node "
            f"{gpus_per_node} have {total} GPUs: {', or '.join(fixes)}"
        )
    return gpus_per_node


def ranks_on_nodes(world: int, nodes: int) -> str:
    """Return how many processes run on how many nodes, in words."""
    processes = f"{world} process" + "es" * (world > 1)
    return f"{processes} on {nodes} node" + "s" * (nodes > 1)


def placement_warning(ranks: int, tp: int) -> str:
    """Return a warning of a tp group whose ranks are on several nodes; empty if there is none."""
    if ranks % tp == 0:
        return ""
    return (
        f"Warning: with tp {tp} and {ranks} on each node, processes of one tp group are on "
        "different nodes, which is slow"
    )
