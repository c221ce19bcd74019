"""Measurements of a rank for a machine file: products, attention, memory, kernels, links."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from statistics import median

import torch
import torch.nn.functional as F
from torch import Tensor

from kenotron_cost.work import BACKWARD_OF_ATTENTION
from kenotron_dist import (
    Axis,
    Mesh,
    all_gather,
    all_reduce,
    barrier,
    broadcast_object,
    reduce_scatter,
)
from kenotron_models import Build, Context
from kenotron_models.block_costs import Kernels
from kenotron_models.families import LlamaConfig
from kenotron_models.layers import Block
from kenotron_tp import matmul

__all__ = [
    "attention_rate",
    "kernel_seconds",
    "links",
    "memory_bandwidth",
    "own_memory",
    "products",
    "sharing",
]
LEAST = 5
"""Repetitions at least; their median counts, as a training is interrupted as often."""
LINK_BYTES = 4 << 20
BETWEEN = 512
"""Width of the product before a collective."""
TURNS = 9
"""Turns of all ranks and one."""
ALIVE = 8
"""Rounds of kernels whose results are in use at once."""
SMALL = LlamaConfig(
    hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
    num_key_value_heads=2, vocab_size=32, max_position_embeddings=8,
)  # fmt: skip
"""A model whose step takes as long as its kernels take to be started."""


def products(
    mesh: Mesh, dtype: torch.dtype, width: int, tokens: int, seconds: float
) -> dict[str, tuple[float, float]]:
    """Return operations a second of products by their sizes, ``tokens x inputs x outputs``.

    They are those of a layer of so many features: inputs and outputs of one and of four widths. The
    first rate is that of the forward alone, the second that of forward and backward, in which the
    gradient of the weight is added to that of the micro-batch before.
    """
    found, shapes = {}, ((width, width), (width, 4 * width), (4 * width, width))
    for inputs, outputs in shapes:
        x = torch.randn(tokens, inputs, device=mesh.device).to(dtype).requires_grad_()
        weight = torch.randn(outputs, inputs, device=mesh.device).to(dtype).requires_grad_()
        grad = torch.randn(tokens, outputs, device=mesh.device).to(dtype)
        calls = (
            lambda x=x, weight=weight: matmul(x.detach(), weight.detach()),
            lambda x=x, weight=weight, grad=grad: _both_ways(x, weight, grad),
        )
        first, both = (_median(mesh, seconds / len(shapes) / 2, each) for each in calls)
        work = 2 * tokens * inputs * outputs
        found[f"{tokens} x {inputs} x {outputs}"] = work / first, 3 * work / both
    return found


def _both_ways(x: Tensor, weight: Tensor, grad: Tensor) -> None:
    """Compute x (T, I) times weight (O, I), and the gradients of both for ``grad`` (T, O)."""
    x.grad = None
    matmul(x, weight).backward(grad)


def attention_rate(mesh: Mesh, dtype: torch.dtype, sequence: int, seconds: float) -> float:
    """Return operations a second of causal attention over (1, 8, S, 64), forward and backward."""
    heads, features = 8, 64
    given = (torch.randn(1, heads, sequence, features, device=mesh.device) for _ in range(3))
    q, k, v = (each.to(dtype).requires_grad_() for each in given)

    def work() -> None:
        F.scaled_dot_product_attention(q, k, v, is_causal=True).sum().backward()

    seen = sequence * (sequence + 1) // 2
    forward = 2 * 2 * heads * features * seen
    return (1 + BACKWARD_OF_ATTENTION) * forward / _median(mesh, seconds, work)


def memory_bandwidth(mesh: Mesh, dtype: torch.dtype, elements: int, seconds: float) -> float:
    """Return bytes a second of kernels of each element: gated units, sums, casts.

    Results are in use until all of them are made, as those of a forward are: what is new memory for
    a forward is new here, too.
    """
    gate, up = (torch.randn(elements, device=mesh.device).to(dtype) for _ in range(2))

    def work() -> None:
        made = list[Tensor]()
        for _ in range(ALIVE):
            unit = F.silu(gate)
            both = unit * up
            wide = (both + gate).float()
            made += [unit, both, wide, (wide * wide).to(dtype)]

    with Kernels() as counted:
        work()
    return counted.nbytes / _median(mesh, seconds, work)


def kernel_seconds(mesh: Mesh, dtype: torch.dtype, seconds: float) -> float:
    """Return the seconds of a kernel of a block that has next to nothing to compute."""
    spec = SMALL.decoder
    build = Build(Axis.solo("tp"), device=mesh.device, dtype=dtype)
    layer = Block(spec.blocks[0], spec.hidden_size, build)
    tokens = SMALL.max_position_embeddings
    places = torch.arange(tokens, device=mesh.device)[None]
    x = torch.randn(tokens, spec.hidden_size, device=mesh.device).to(dtype).requires_grad_()

    def work() -> None:
        context = Context(places, torch.zeros(1, dtype=torch.long, device=mesh.device))
        layer(x, context).sum().backward()

    with Kernels() as counted:
        work()
    return _median(mesh, seconds, work) / counted.kernels


def links(mesh: Mesh, seconds: float) -> tuple[float, float]:
    """Return bytes a second that a rank sends in collectives, and seconds of the shortest ones.

    They are those of a step: sums of which each rank has all or a part, and gathers. Collective
    over the mesh, of two ranks at least.
    """
    size, times = mesh.world.size, list[float]()
    parts = (2, 1, 1)  # that a rank sends, of the bytes of a collective over all others
    for elements in (LINK_BYTES // 4 // size * size, size):
        x = torch.ones(elements, device=mesh.device)
        own = x[: elements // size].clone()
        calls = (
            lambda x=x: all_reduce(x, mesh.world),
            lambda x=x: reduce_scatter(x, mesh.world),
            lambda own=own: all_gather(own, mesh.world),
        )
        times.append(sum(_together(mesh, seconds / len(calls), each) for each in calls))
    sent = sum(parts) * (size - 1) * (LINK_BYTES // 4 // size) * 4
    latency = times[1] / len(parts)
    return sent / max(times[0] - times[1], times[0] / 10), latency


def sharing(mesh: Mesh, dtype: torch.dtype, width: int, seconds: float) -> float:
    """Return how many times longer a product takes while all ranks compute than on one rank alone.

    It is 1 where every rank has a device of its own. Collective over the mesh.
    """
    if mesh.world.size == 1:
        return 1.0
    x, ratios = torch.randn(width, width, device=mesh.device).to(dtype), list[float]()
    for _ in range(TURNS):
        barrier(mesh.world)
        every = _median(mesh, seconds / 2 / TURNS, lambda: matmul(x, x))
        barrier(mesh.world)
        if mesh.rank == 0:
            ratios.append(every / _median(mesh, seconds / 2 / TURNS, lambda: matmul(x, x)))
    barrier(mesh.world)
    return max(1.0, broadcast_object(median(ratios or [1.0]), mesh.world))


def _together(mesh: Mesh, seconds: float, work: Callable[[], object]) -> float:
    """Return the median seconds of a collective that all ranks begin after a product.

    So a rank waits for the slower ones, and for a thread that was idle, as it does in a step.
    """
    found, x = list[float](), torch.ones(BETWEEN, BETWEEN, device=mesh.device)
    for _ in range(4 * LEAST + round(20 * seconds)):  # as many on every rank
        barrier(mesh.world)
        matmul(x, x)
        begun = _settled(mesh)
        work()
        found.append(_settled(mesh) - begun)
    return median(found[1:])


def own_memory(mesh: Mesh) -> tuple[float, float]:
    """Return bytes of memory for a rank, and those in use that are no tensors of this process."""
    if mesh.device.type != "cpu":
        module = torch.get_device_module(mesh.device)
        free, total = module.mem_get_info(mesh.device)
        return total, total - free - module.memory_reserved(mesh.device)
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with open("/proc/self/statm", encoding="ascii") as file:
        resident = int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return pages / mesh.world.size, resident


def _median(mesh: Mesh, seconds: float, work: Callable[[], object]) -> float:
    """Return the median seconds of a call; the first two, which prepare, are not counted."""
    for _ in range(2):
        work()
    end, times = _settled(mesh) + seconds, list[float]()
    while len(times) < LEAST or times and time.perf_counter() < end:
        begun = _settled(mesh)
        work()
        times.append(_settled(mesh) - begun)
    return median(times)


def _settled(mesh: Mesh) -> float:
    """Return the time when the device has done its work."""
    if mesh.device.type != "cpu":
        torch.accelerator.synchronize(mesh.device)
    return time.perf_counter()
