"""Distinct ranks of a layout are found, simulated and matched, transfers and orders too."""

from __future__ import annotations

import pytest
import torch

from kenotron_dist import MeshConfig, all_gather, all_reduce
from kenotron_dist.diagnosis import dry_run, first_divergence
from kenotron_dist.diagnosis.circular_wait import circular_wait
from kenotron_dist.diagnosis.meta_results import MetaResults
from kenotron_dist.diagnosis.transfers import unmatched_transfer
from kenotron_dist.in_flight import Entry, Ticket


def sums(mesh):
    """A program of two sums a step, over all pairs of axes."""
    x = torch.ones(4, device="meta")
    all_gather(x, mesh.world)

    def step():
        for name in ("tp", "dp"):
            all_reduce(x, mesh[name])

    return step


@pytest.mark.parametrize("workers", [1, 2])
def test_the_ends_of_every_line_stand_for_all(workers):
    torch.ones(2, requires_grad=True).sum().backward()  # forks of this process would hang now
    found = dry_run(sums, MeshConfig(pp=3, dp=64, tp=8), workers)
    assert found.places == [0, 1, 7, 8, 504, 511] and found.stage_size == 512
    assert [len(ranks) for ranks in found.stages] == [6] * 3
    assert not found.divergence() and not found.unequal_stages()
    first = found.stages[2][0]
    assert first.counts == (2, 0) and first.sent == {"tp": 28, "dp": 31}
    assert [entry.ticket.axis for entry in first.setup] == ["pp_dp_cp_tp"]


def test_all_ranks_of_short_lines_are_simulated():
    assert dry_run(sums, MeshConfig(dp=4, tp=2)).places == [0, 1, 2, 4, 6, 7]
    assert dry_run(sums, MeshConfig(tp=2)).places == [0, 1]


def odd_out(mesh):
    """Dp rank 1 of tp rank 0 sums something else."""
    x = torch.ones(4 + (mesh.rank == 8), device="meta")
    return lambda: all_reduce(x, mesh["tp"])


def test_a_fault_away_from_the_first_rank_is_matched_along_its_own_lines():
    found = dry_run(odd_out, MeshConfig(dp=64, tp=8))
    assert found.unequal_stages() == [0] and {9, 15} < {*found.places}
    assert "rank 8 alone called all_reduce (sum) of float32 (5,)" in found.divergence()


def test_repeated_operators_return_what_they_return_without_memory():
    def results():
        x = torch.empty(6, 4, dtype=torch.bfloat16, device="meta")
        y = x.t()
        made = [x + y.t(), x * 2.0, x * True, y.contiguous(), y.softmax(0), x.float() @ y.float()]
        made += [torch.cat([x, x], 1), torch.cat([x, x], 0), x[1:], x.sum(1, keepdim=True)]
        n = torch.empty(3, dtype=torch.int64, device="meta")
        made += [n * 1, n * 1.0, n * True]
        made += [x.clone().add_(1), x.to(torch.float64), x.pow(2), x.pow(2.0), *x.split(3)]
        return [(r.shape, r.stride(), r.dtype, r.storage_offset()) for r in made]

    plain, mode = results(), MetaResults()
    with mode:
        assert results() == plain and results() == plain
        view, x = torch.ones(3)[1:], torch.ones(3)
        assert torch.equal(x + x, torch.full((3,), 2.0)) and view._is_view()
        with pytest.raises(RuntimeError, match="broadcast"):
            torch.empty(2, 3, device="meta") + torch.empty(4, 5, device="meta")


def call(operation, channel, number=1, ranks=(0, 1), line=1, dtype="float32", size=24):
    ticket = Ticket(channel, channel.split(":")[0], ranks, number, operation, "a.py", line)
    sides = {"send": ((0, size), (0, 0)), "receive": ((0, 0), (size, 0))}.get(
        operation, (None, None)
    )
    return Entry(ticket, "", dtype, (6,), 0, *sides)


SENDS = [call("send", f"pp:0>1#{tag}", line=tag) for tag in (0, 4, 8)]
RECEIVES = [call("receive", f"pp:0>1#{tag}", line=10 + tag) for tag in (0, 4, 8)]
OTHER = [call("send", "pp:0>2#4", ranks=(0, 2), line=77)]


@pytest.mark.parametrize(
    ("sent", "taken", "words"),
    [
        (SENDS, RECEIVES, ""),
        (SENDS[:2], RECEIVES, "rank 1 called receive of float32 (6,), tag 8, at a.py:18; rank 0 "
         "did not send; its last transfer is send of float32 (6,), tag 4, at a.py:4"),
        (SENDS, RECEIVES[:2], "communication 3 on pp:0>1: rank 0 called send of float32 (6,), "
         "tag 8, at a.py:8; rank 1 did not receive; its last"),
        (SENDS, [], "rank 0 called send of float32 (6,), tag 0, at a.py:0; rank 1 did not receive"),
        ([SENDS[0], *OTHER, SENDS[2]], RECEIVES, "2 on pp:0>1: rank 0 called send of float32 "
         "(6,), tag 8, at a.py:8; rank 1 called receive of float32 (6,), tag 4, at a.py:14"),
        ([*SENDS[:2], *OTHER], RECEIVES, "rank 0 did not send, but called send of float32 (6,), "
         "tag 4, at a.py:77, with rank 2"),
        (SENDS, [RECEIVES[0], RECEIVES[2], RECEIVES[1]], "communication 2 on pp:0>1"),
        ([call("send", "pp:0>1#0", dtype="bfloat16")], RECEIVES[:1], "called send of bfloat16"),
        ([call("send", "pp:0>1#0", size=20)], RECEIVES[:1], "communication 1 on pp:0>1"),
    ],
)  # fmt: skip
def test_each_send_has_its_receive(sent, taken, words):
    text = unmatched_transfer({0: sent, 1: taken})
    assert words in text and bool(words) == bool(text)
    assert not unmatched_transfer({0: sent}) and not unmatched_transfer({1: taken})


def test_collectives_of_two_groups_in_two_orders_wait_for_one_another():
    a, b = (call("all_reduce", name, line=i) for i, name in enumerate(("tp:0,1", "dp:0,1"), 1))
    c = call("barrier", "world:0,1", line=3)
    assert not circular_wait({0: [a, b, c], 1: [a, b, c]}) and not circular_wait({})
    text = circular_wait({0: [c, a, b], 1: [c, b, a]})
    assert text.startswith("ranks wait for one another: rank ")
    assert "rank 0 called all_reduce over tp at a.py:1 before all_reduce over dp at a.py:2" in text
    assert "rank 1 called all_reduce over dp at a.py:2 before all_reduce over tp at a.py:1" in text
    assert first_divergence({0: [a, b], 1: [b, a]}) == circular_wait({0: [a, b], 1: [b, a]})
    three = {0: [a, b], 1: [b, c], 2: [c, a]}
    assert circular_wait(three).count(";") == 2


def test_where_a_rank_departs_is_told_besides_where_it_is_noticed():
    calls = [call("all_reduce", "tp:0,1", number, line=number) for number in (1, 2, 3)]
    skips = [calls[0], calls[1]._replace(ticket=calls[1].ticket._replace(line=3))]
    text = first_divergence({0: calls, 1: skips})
    assert "communication 3 on tp:0,1: rank 1 did not call it" in text
    assert text.endswith(
        "; before that, rank 1 called all_reduce of float32 (6,) at a.py:3, where rank 0 called "
        "all_reduce of float32 (6,) at a.py:2"
    )
