"""The same numbers on every layout: losses, gradient norms and every gradient against one process.

Run with ``-s`` to see the measured deviations.
"""

from __future__ import annotations

from pathlib import Path

import parity
import pytest
from parity import BOUND, Layout, Trace

from kenotron_dist import spawn

PRELOAD = ("torch._dynamo", "kenotron_train.loop")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("parity")
    parity.write_text(path)
    return path


@pytest.fixture(scope="module")
def reference(folder: Path) -> dict[bool, Trace]:
    """One process, untied and tied."""
    return {tied: run(Layout(tied=tied), folder) for tied in (False, True)}


def run(layout: Layout, folder: Path, steps: int = 20, fault: str | None = None) -> Trace:
    """The trace of a layout; all its ranks must report the same numbers."""
    config = parity.configure(layout, folder, steps)
    function, extra = (parity.trace, ()) if fault is None else (parity.planted, (fault,))
    sizes = {"pp": layout.pp, "dp": layout.dp, "tp": layout.tp}
    traces = spawn(function, config, *extra, **sizes, preload=PRELOAD)
    if fault is None:
        assert all(trace == traces[0] for trace in traces), "ranks report different numbers"
    return traces[0]


def check(layout: Layout, got: Trace, want: Trace) -> None:
    """Losses and norms within the bound; bitwise where only the placement of layers changes."""
    losses = parity.deviation(got.losses, want.losses)
    norms = parity.deviation(got.norms, want.norms)
    print(f"\n{layout!s:34} {len(got.losses):2} steps: loss {losses:.1e} norm {norms:.1e}", end="")
    if layout.dp == layout.tp == 1:
        steps = len(got.losses)
        assert (got.losses, got.norms) == (want.losses[:steps], want.norms[:steps])
    assert losses <= BOUND and norms <= BOUND


def layouts(ranks: int) -> list[Layout]:
    """Every factorisation, tied and untied; the four modes of tp in turn."""
    found = []
    for pp, dp, tp in parity.factorisations(ranks):
        for tied in (False, True):
            sequence_parallel = tp > 1 and tied == (pp == 1)
            overlap = tp > 1 and tied
            found.append(Layout(pp, dp, tp, tied, sequence_parallel, overlap))
    return found


def test_the_reference_learns_and_clips_in_some_steps_only(reference: dict[bool, Trace]) -> None:
    for trace in reference.values():
        assert trace.losses[-1] < trace.losses[0] - 0.5
        clipped = [norm > 2.5 for norm in trace.norms]
        assert any(clipped) and not all(clipped)


@pytest.mark.parametrize("layout", [*layouts(2), *layouts(4)], ids=str)
def test_two_and_four_ranks(layout: Layout, folder: Path, reference: dict[bool, Trace]) -> None:
    check(layout, run(layout, folder), reference[layout.tied])


@pytest.mark.parametrize("layout", layouts(8), ids=str)
def test_eight_ranks(
    layout: Layout, folder: Path, reference: dict[bool, Trace], full_grid: bool
) -> None:
    check(layout, run(layout, folder, 20 if full_grid else 5), reference[layout.tied])


@pytest.mark.parametrize(
    "layout",
    [
        Layout(pp=2, tied=True, engine="afab"),
        Layout(pp=4, engine="afab"),
        Layout(tp=2, sequence_parallel=True),
        Layout(tp=2, tied=True),
        Layout(tp=4, sequence_parallel=True),
    ],
    ids=str,
)
def test_the_other_schedule_and_the_other_modes(
    layout: Layout, folder: Path, reference: dict[bool, Trace]
) -> None:
    check(layout, run(layout, folder, 10), reference[layout.tied])


@pytest.mark.parametrize("sizes", [(1, 2, 1), (1, 4, 1), (2, 2, 1), (1, 2, 2)], ids=str)
def test_zero_0_and_1_are_bitwise_equal(sizes: tuple[int, int, int], folder: Path) -> None:
    one, two = (run(Layout(*sizes, tied=True, zero=zero), folder, 8) for zero in (0, 1))
    assert one == two


@pytest.mark.parametrize("dp,tp", [(2, 1), (1, 2)])
def test_cutting_layers_changes_no_bit_beside_other_axes(dp: int, tp: int, folder: Path) -> None:
    one, two = (run(Layout(pp, dp, tp, tied=True), folder, 5) for pp in (1, 2))
    assert one == two


@pytest.mark.parametrize(
    "layout",
    [
        Layout(pp=4, tied=True),
        Layout(dp=4),
        Layout(tp=4, tied=True, sequence_parallel=True, overlap=True),
        Layout(tp=4, overlap=True),
        Layout(pp=2, dp=2, tp=2, tied=True, sequence_parallel=True),
    ],
    ids=str,
)
def test_every_gradient_by_name(layout: Layout, folder: Path) -> None:
    def measure(of: Layout) -> tuple[float, dict]:
        config = parity.configure(of, folder)
        sizes = {"pp": of.pp, "dp": of.dp, "tp": of.tp}
        ranks = spawn(parity.gradients, config, **sizes, preload=PRELOAD)
        return ranks[0][0], parity.assemble(ranks)

    (_, got), (_, want) = measure(layout), measure(Layout(tied=layout.tied))
    deviations = parity.gradient_deviations(got, want)
    worst = max(deviations, key=lambda name: deviations[name])
    print(f"\n{layout}: {worst} at {deviations[worst]:.2f} of what is allowed", end="")
    assert deviations[worst] <= 1


@pytest.mark.parametrize(
    "fault,layout",
    [
        ("wrong loss scale", Layout(dp=2)),
        ("padded vocabulary gets probability", Layout(tp=2)),
        ("norm counts replicas", Layout(tp=2)),
    ],
)
def test_a_planted_bug_is_seen(
    fault: str, layout: Layout, folder: Path, reference: dict[bool, Trace]
) -> None:
    check(layout, run(layout, folder, 3), reference[False])
    with pytest.raises(AssertionError):
        check(layout, run(layout, folder, 3, fault), reference[False])
