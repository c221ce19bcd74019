"""Seconds that a rank works on a micro-batch, by what they are for, and those of what it sends."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial

from kenotron_cost.cost_plan import CostPlan
from kenotron_cost.machine_file import Machine
from kenotron_cost.measured import MeasuredModel
from kenotron_models import Recompute
from kenotron_models.block_costs import KernelWork, Messages, TransformersBlock, block_flops

BACKWARD_OF_ATTENTION = 2.5
"""Operations of attention's backward for one of its forward: scores are computed again."""
Parts = defaultdict[str, float]
"""Seconds by what they are for."""
parts_of = partial(Parts, float)


@dataclass
class WorkSeconds:
    """Seconds on a rank, by what they are for."""

    forward: Parts = field(default_factory=parts_of)
    inputs: Parts = field(default_factory=parts_of)
    """Of gradients of inputs, recomputation included."""
    weights: Parts = field(default_factory=parts_of)

    def add(self, other: WorkSeconds, times: float = 1) -> None:
        """Add other work, so many times."""
        for mine, more in zip(self.parts, other.parts, strict=True):
            add_parts(mine, more, times)

    @property
    def parts(self) -> tuple[Parts, Parts, Parts]:
        """Forward, gradients of inputs, gradients of weights."""
        return self.forward, self.inputs, self.weights

    @cached_property
    def seconds(self) -> tuple[float, float, float]:
        """Sums of ``parts``, when all work is added."""
        forward, inputs, weights = (sum(each.values()) for each in self.parts)
        return forward, inputs, weights

    @property
    def total(self) -> float:
        """Seconds of forward and backward."""
        return sum(self.seconds)


def add_parts(to: Parts, more: Mapping[str, float], times: float = 1) -> None:
    """Add seconds to others, so many times."""
    for what, seconds in more.items():
        to[what] += seconds * times


def block_work(
    machine: Machine, measured: MeasuredModel, plan: CostPlan, kind: int, again: Recompute
) -> WorkSeconds:
    """Return the work of a block.

    Args:
        machine: the machine.
        measured: the model.
        plan: the layout.
        kind: of the block.
        again: what it computes again.
    """
    sizes, width = plan.parallelism, plan.spec.hidden_size
    block = measured.of_kind[kind][0]
    given = width, plan.micro_batch_size, plan.sequence
    counts = [
        measured.uneven(plan, kind, lambda x, what=what: block_flops(x, *given, causal=True)[what])
        for what in range(2)
    ]
    share = sizes.tp * sizes.cp * machine["peak_flops"]
    products = counts[0] / share / machine["product_efficiency"]
    attention = counts[1] / share / machine["attention_efficiency"]
    forward, backward = measured.kernels(plan, kind, "none")
    repeated = measured.kernels(plan, kind, again)[1]
    memory, memory_backward = _moved(machine, forward), _moved(machine, backward)
    scores = BACKWARD_OF_ATTENTION * attention
    work = WorkSeconds(
        parts_of(products=products, attention=attention, memory=memory),
        parts_of(products=products, attention=scores, memory=memory_backward),
        parts_of(products=products),
    )
    parts = () if isinstance(block, TransformersBlock) else block.parts
    costs = [part.cost(width) for part in parts]
    of_mixer = costs[0] / max(1, sum(costs)) if costs else 0.0
    work.inputs["recompute"] = (
        max(0.0, _moved(machine, repeated) - memory_backward)
        + {
            "none": 0.0,
            "selective": 0.0,
            "full": products + attention,
            "mixer": attention + of_mixer * products,
            "feed_forward": (1 - of_mixer) * products,
        }[again]
    )
    before = measured.sent(plan, kind, "none")
    for axis, sent in measured.sent(plan, kind, again).items():
        most = measured.load(plan, kind) if axis == "ep" else 1.0  # arrives at one rank
        there = seconds_of_sending(machine, most * before[axis] / 2, axis, plan)
        back = seconds_of_sending(machine, most * sent, axis, plan) - there
        for to, seconds, way in ((work.forward, there, forward), (work.inputs, back, repeated)):
            seconds += way.calls.get(axis, 0) * machine["latency"]
            if axis == "tp" and sizes.tp_linear_async_communication:  # hidden behind products
                seconds = max(0.0, seconds - products)
            to[axis] += seconds / sizes.ep_chunks if axis == "ep" else seconds
    return work


def head_work(machine: Machine, plan: CostPlan) -> WorkSeconds:
    """Return the work of the output layer and the loss."""
    tokens = plan.micro_batch_size * plan.row_tokens
    columns = plan.spec.vocab_size / plan.parallelism.tp
    rate = machine["peak_flops"] * machine["product_efficiency"]
    products = 2 * tokens * plan.spec.hidden_size * columns / rate
    moved = 2 * tokens * columns * (4 + plan.dtype.itemsize) / machine["memory_bandwidth"]
    both = parts_of(products=products, memory=moved)
    return WorkSeconds(both, both, parts_of(products=products))


def sending_work(
    machine: Machine, plan: CostPlan, forward: Messages, backward: Messages
) -> WorkSeconds:
    """Return the time of messages over tp that nothing is computed next to."""
    there, back = (
        seconds_of_sending(machine, each.sent, "tp", plan) + each.calls * machine["latency"]
        for each in (forward, backward)
    )
    return WorkSeconds(parts_of(tp=there), parts_of(tp=back))


def _moved(machine: Machine, work: KernelWork) -> float:
    """Return the seconds of kernels for what they read and write, and for being started."""
    moved = work.nbytes / machine["memory_bandwidth"]
    return moved + work.kernels * machine["kernel_seconds"]


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
