"""Run the distinct ranks of a layout of any size one by one, without processes, and match them.

Distinct are the first, the second and the last rank of each line of ranks that communicates (all
ranks of a short line) through the first rank of each stage of the pipeline. Where one of them makes
other calls than the first one of its stage, so are those of the lines through it. All other ranks
are represented by these.
"""

from __future__ import annotations

import gc
import multiprocessing
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import cache, partial

from kenotron_dist.diagnosis.comm_recorder import record
from kenotron_dist.diagnosis.divergence import first_divergence
from kenotron_dist.diagnosis.meta_results import MetaResults
from kenotron_dist.diagnosis.transfers import TRANSFERS
from kenotron_dist.grid import MeshConfig, line_through
from kenotron_dist.in_flight import Entry
from kenotron_dist.mesh import Mesh

SHORT = 4
"""Most ranks of a line all of which are simulated."""
Prepare = Callable[[Mesh], Callable[[], object]]
"""Builds what a rank trains on a fake mesh; returns a function that makes one step."""


@dataclass(frozen=True)
class SimulatedRank:
    """Communications of one rank."""

    setup: list[Entry]
    """While groups are made and the model is built."""
    step: list[Entry]
    sent: dict[str, int]
    """Bytes that leave the rank in the step, by axis (``Recorder.bytes_per_axis``)."""

    @property
    def counts(self) -> tuple[int, int]:
        """Collectives and transfers of the step."""
        transfers = sum(entry.ticket.operation in TRANSFERS for entry in self.step)
        return len(self.step) - transfers, transfers

    @property
    def calls(self) -> list[tuple[object, ...]]:
        """Everything of each call but its ranks and its line, to compare ranks of a stage."""
        return [
            (e.ticket.axis, e.ticket.operation, e.how, e.dtype, e.shape)
            for e in (*self.setup, *self.step)
        ]


@dataclass(frozen=True)
class DryRun:
    """Communications of the distinct ranks of a layout."""

    config: MeshConfig
    places: list[int]
    """Ranks of a stage that are simulated, counted from the first one of the stage."""
    stages: list[list[SimulatedRank]]
    """By stage, in the order of ``places``."""

    @property
    def stage_size(self) -> int:
        """Number of ranks of a stage."""
        return self.config.world_size // self.config.pp

    def divergence(self) -> str:
        """Describe in one line the first call that ranks make differently; empty if all agree."""
        return first_divergence(
            {
                stage * self.stage_size + place: each.setup + each.step
                for stage, ranks in enumerate(self.stages)
                for place, each in zip(self.places, ranks, strict=True)
            }
        )

    def unequal_stages(self) -> list[int]:
        """List the stages whose simulated ranks do not all make the same calls."""
        return [
            stage
            for stage, (first, *others) in enumerate(self.stages)
            if any(first.calls != each.calls for each in others)
        ]


def dry_run(prepare: Prepare, config: MeshConfig, workers: int = 1) -> DryRun:
    """Make one step of each distinct rank on meta tensors; nothing is sent.

    Args:
        prepare: called with the mesh of each rank; with several workers it must pickle.
        config: sizes of the axes.
        workers: processes that share the ranks; more than one come from the forkserver of
            ``multiprocessing``, as local ranks do.

    Raises:
        ValueError: the sizes do not fit, or this process is in a world already; what ``prepare``
            and the step raise on a rank.
    """
    size = config.world_size // config.pp
    firsts = [stage * size for stage in range(config.pp)]
    with _simulating(prepare, config, workers) as simulate:
        found, places = dict(zip(firsts, simulate(firsts), strict=True)), [0]
        sources = set(firsts)
        while new := _places_of(found, config, sources) - {*places}:
            rest = [first + place for place in sorted(new) for first in firsts]
            found |= zip(rest, simulate(rest), strict=True)
            places = sorted({*places, *new})
            sources = {r for r in rest if found[r].calls != found[r - r % size].calls}
    return DryRun(config, places, [[found[first + each] for each in places] for first in firsts])


def _places_of(
    found: Mapping[int, SimulatedRank], config: MeshConfig, sources: Set[int]
) -> set[int]:
    """Return the places within a stage of the distinct ranks of lines through some ranks."""
    lines = {
        entry.ticket.ranks
        for rank in sources
        for entry in (*found[rank].setup, *found[rank].step)
        if entry.ticket.operation not in TRANSFERS
    }
    for sizes in (config.sizes, config.expert_sizes):
        lines |= {line_through(sizes, (name,), rank) for name in sizes for rank in sources}
    size = config.world_size // config.pp
    return {rank % size for line in lines for rank in _distinct(line)}


def _distinct(line: Sequence[int]) -> Sequence[int]:
    return line if len(line) <= SHORT else (*line[:2], line[-1])


@contextmanager
def _simulating(
    prepare: Prepare, config: MeshConfig, workers: int
) -> Iterator[Callable[[Sequence[int]], list[SimulatedRank]]]:
    """Give a function that simulates ranks, in this process or in a pool."""
    one = partial(_simulated, prepare, config)
    if workers == 1:
        yield lambda ranks: list(map(one, ranks))
        return
    # Not forks of this process: after a backward pass they would wait for its threads forever.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch._dynamo", __name__])
    with context.Pool(workers, _begin) as pool:
        yield partial(pool.map, one, chunksize=1)


def _begin() -> None:
    """Prepare a worker: Ctrl-C ends the pool, and what is imported is never garbage."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    gc.freeze()


def _simulated(prepare: Prepare, config: MeshConfig, rank: int) -> SimulatedRank:
    mesh = Mesh.connect(**vars(config), backend="fake", rank=rank)
    with closing(mesh), record(mesh) as recorder, _results():
        step = prepare(mesh)
        setup = recorder.cut()
        step()
        entries = recorder.cut()
        return SimulatedRank(setup, entries, recorder.bytes_per_axis(entries))


@cache
def _results() -> MetaResults:
    """One for all ranks of this process, most of which call the same operators."""
    return MetaResults()
