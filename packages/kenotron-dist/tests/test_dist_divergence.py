"""A rank that communicates what others do not is named, with its line and theirs."""

import dist_faults
import pytest

from kenotron_dist import RankError
from kenotron_dist.diagnosis import first_divergence
from kenotron_dist.diagnosis.divergence import divergence
from kenotron_dist.in_flight import Entry, Ticket
from kenotron_dist.testing import on_fake_ranks, on_ranks

RANKS = {2: 1, 4: 1, 8: 5}
"""Number of ranks, and the faulty one."""


def check_lines(text, fault, bad):
    """Both lines are named, and the rank."""
    assert f"rank {bad} " in text or f"rank {bad}: " in text or f", {bad}" in text
    for who in ("one", "others"):
        assert f"dist_faults.py:{dist_faults.line(f'{fault}: {who}')}" in text, text


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("fault", dist_faults.FAULTS)
def test_what_ranks_record_names_the_fault(fault, ranks):
    bad = RANKS[ranks]
    records = on_fake_ranks(dist_faults.recorded, fault, bad, tp=ranks)
    text = first_divergence(dict(enumerate(records)))
    assert text.startswith("ranks diverge at communication ")
    if fault.__name__.endswith(("at_the_end", "before_its_like")):
        others = [rank for rank in range(ranks) if rank != bad]
        silent = [bad] if fault.__name__.startswith("skipped") else others
        assert f": rank{'s' if len(silent) > 1 else ''} {', '.join(map(str, silent))} did" in text
    else:
        check_lines(text, fault.__name__, bad)
    if fault is not dist_faults.wrong_transfer:  # without its sender there is no transfer
        good = on_fake_ranks(dist_faults.recorded, fault, -1, tp=ranks)
        assert not first_divergence(dict(enumerate(good)))


@pytest.mark.gloo(reason="after a fault NCCL's communicator of the world is of no use any more")
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("fault", dist_faults.MET)
@pytest.mark.by_turns(6)
def test_real_ranks_are_compared_before_they_start(fault, ranks):
    with pytest.raises(RankError) as told:
        on_ranks(dist_faults.compared, fault, RANKS[ranks], tp=ranks, seconds=20)
    assert told.value.kind == "Diverged", told.value
    check_lines(told.value.reason, fault.__name__, RANKS[ranks])


def call(operation="all_reduce", shape=(4,), line=1, dtype="float32", ranks=range(2), **counts):
    ticket = Ticket("tp", "tp", tuple(ranks), 3, operation, "a.py", line)
    return Entry(ticket, "", dtype, shape, 0, **counts)


def test_the_odd_one_is_blamed_where_most_agree():
    calls = {rank: call(ranks=range(12)) for rank in range(12)} | {7: call(shape=(5,), line=2)}
    assert divergence("tp:0..11", 3, calls) == (
        "ranks diverge at communication 3 on tp:0..11: rank 7 alone called all_reduce of float32 "
        "(5,) at a.py:2; ranks 0, 1, 2, 3, 4, 5, 6, 8, ... 11: 11 in all called all_reduce of "
        "float32 (4,) at a.py:1"
    )
    assert "alone" not in divergence("tp", 3, {0: call(), 1: call(shape=(5,))})
    assert "alone" not in divergence("tp", 3, {rank: call(shape=(rank % 2,)) for rank in range(4)})


def test_lines_alone_are_no_divergence_nor_are_shapes_of_a_transfer():
    assert not divergence("tp", 1, {0: call(), 1: call(line=9)})
    sent = call("send", (2, 3), gives=(0, 24), takes=(0, 0))
    taken = call("receive", (6,), gives=(0, 0), takes=(24, 0))
    assert not divergence("pp:0>1#0", 1, {0: sent, 1: taken})
    wrong = {0: sent, 1: taken._replace(dtype="bfloat16")}
    assert "rank 1 called receive of bfloat16" in divergence("pp:0>1#0", 1, wrong)
    more = {0: sent, 1: taken._replace(takes=(20, 0))}
    assert "rank 0 gives 24 bytes to rank 1, which expects 20" in divergence("pp:0>1#0", 1, more)


def test_without_calls_nothing_diverges():
    assert not first_divergence({}) and not first_divergence({0: [], 1: []})
