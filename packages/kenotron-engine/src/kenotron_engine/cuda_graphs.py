"""Forward and backward of a micro-batch as one CUDA graph: the host launches one thing, not 1,000.

A graph repeats the kernels of one run on the same memory. So its inputs are copied into tensors
that stay, its gradients are added to buffers that stay, and nothing in it may depend on the host:
no dropout (its key changes), no other rank, no auxiliary losses (read on the host).

Shapes: M micro-batches, B rows of a micro-batch, S sequence.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from kenotron_data import Batch
from kenotron_optim import GradAccumulator

WARM_UP = 2
"""Runs before the capture, in which kernels are loaded, chosen and compiled."""
Run = Callable[[Batch, Tensor], tuple[Tensor, list[Tensor]]]
"""(batch of one micro-batch, number that losses are divided by) -> its loss, and its reports as one
tensor, or none. Runs forward and backward."""


class Graph(Protocol):
    """Recorder of the kernels of a run."""

    def capture(self, run: Callable[[], None]) -> None:
        """Run it ``WARM_UP`` times, then once more while recording."""
        ...

    def replay(self) -> None:
        """Queue the recorded kernels again."""
        ...


class CudaGraph:
    """``torch.cuda.CUDAGraph``; other threads of the process may use the device meanwhile."""

    def __init__(self) -> None:
        self._graph = torch.cuda.CUDAGraph()

    def capture(self, run: Callable[[], None]) -> None:
        """Warm up on a stream of its own, as torch asks for, then record."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARM_UP):
                run()
        torch.cuda.current_stream().wait_stream(stream)
        with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
            run()

    def replay(self) -> None:
        """Queue the recorded kernels again."""
        self._graph.replay()


@dataclass(frozen=True)
class _Captured:
    """A graph and the tensors that it reads and fills."""

    graph: Graph
    batch: Batch
    """Of one micro-batch."""
    count: Tensor
    loss: Tensor
    reports: list[Tensor]


class MicroBatchGraphs:
    """One graph for each shape of a micro-batch.

    Args:
        grads: adds up the gradients.
        modules: all layers; hooks on them would not run, so a step with hooks is not graphed.
        make: makes an empty graph.
    """

    def __init__(
        self, grads: GradAccumulator, modules: nn.Module, make: Callable[[], Graph] = CudaGraph
    ) -> None:
        self._grads, self._modules, self._make = grads, modules, make
        self._captured: dict[Any, _Captured] = {}

    @property
    def usable(self) -> bool:
        """True where no hook wants to see activations in this step."""
        return not any(
            module._forward_hooks or module._forward_pre_hooks for module in self._modules.modules()
        )

    def run(self, batch: Batch, count: Tensor, run: Run) -> tuple[Tensor, list[Tensor]]:
        """Forward and backward of all micro-batches.

        Args:
            batch: (M, B, S).
            count: scalar that losses are divided by.
            run: what is captured, once for each shape.

        Returns:
            The sum of their losses, on the device, and the reports of each, where there are some.

        Raises:
            ValueError: rows have several documents, whose lengths a graph cannot follow.
        """
        if batch.documents_MBS is not None:
            raise ValueError(
                "cuda_graph: true, but rows hold several documents, whose lengths change "
                "from step to step: set cuda_graph to false"
            )
        key = batch.tokens_MBS.shape[1:]
        if key not in self._captured:
            self._captured[key] = self._capture(batch, count, run)
        captured = self._captured[key]
        captured.count.copy_(count)
        self._grads.start(zeroed=True)
        total, reports = torch.zeros_like(captured.loss), list[Tensor]()
        for m in range(len(batch)):
            _fill(captured.batch, batch, m)
            captured.graph.replay()
            total += captured.loss
            reports += [each.clone() for each in captured.reports]
        self._grads.replayed(len(batch))
        return total, reports

    def _capture(self, batch: Batch, count: Tensor, run: Run) -> _Captured:
        """Record a run over copies of the first micro-batch; what it adds up is thrown away."""
        parts = {name: part[:1].clone() for name, part in _parts(batch).items()}
        static = Batch(**parts)
        divisor, found = count.clone(), list[tuple[Tensor, list[Tensor]]]()
        self._grads.start(zeroed=True)  # hooks add, they do not overwrite

        def body() -> None:
            found[:] = [run(static, divisor)]

        graph = self._make()
        graph.capture(body)
        return _Captured(graph, static, divisor, *found[0])


def _parts(batch: Batch) -> dict[str, Tensor]:
    """Its tensors by field."""
    parts = {field.name: getattr(batch, field.name) for field in fields(batch)}
    return {name: part for name, part in parts.items() if part is not None}


def _fill(static: Batch, batch: Batch, m: int) -> None:
    """Copy micro-batch ``m`` into the tensors that a graph reads."""
    given = _parts(batch)
    for name, part in _parts(static).items():
        part.copy_(given[name][m : m + 1])
