"""Seconds of what ranks send, inside a node and between nodes."""

from __future__ import annotations

from kenotron_train.cost.cost_plan import CostPlan
from kenotron_train.plan.machine_file import Machine


def seconds_of_sending(machine: Machine, sent: float, axis: str, plan: CostPlan) -> float:
    """Return the seconds in which a rank sends bytes over an axis.

    Args:
        machine: whose bandwidths count.
        sent: bytes.
        axis: tp, cp, ep, dp or edp.
        plan: how ranks lie on the nodes.
    """
    sizes, node = plan.parallelism, machine.devices
    stage = sizes.dp * sizes.cp * sizes.tp
    size, stride = {
        "tp": (sizes.tp, 1),
        "cp": (sizes.cp, sizes.tp),
        "ep": (sizes.ep, 1),
        "dp": (sizes.dp * sizes.cp, sizes.tp),
        "edp": (stage // sizes.ep, sizes.ep),
    }[axis]
    inside = machine["node_bandwidth"]
    if size * stride <= node:
        return sent / inside
    neighbours = max(1, node // stride)
    network = machine["network_bandwidth"]
    if axis == "ep":  # all to all: what is for other nodes takes the network
        outside = (size - neighbours) / (size - 1)
        return sent * max(outside / network, (1 - outside) / inside)
    return sent / min(inside, network * neighbours)  # rings through all adapters of a node
