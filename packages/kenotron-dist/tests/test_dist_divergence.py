"""A rank that communicates what others do not is named, with its line and theirs, in seconds."""

import time

import dist_faults
import pytest

from kenotron_dist.testing import on_ranks

RUNS = {2: (1, False), 4: (1, True), 8: (5, False)}
"""Number of ranks: the faulty one; whether torch checks calls too, which blocks at once."""


@pytest.fixture(scope="module")
def found():
    """What all ranks raised, by the number of ranks and fault."""
    known = {}

    def run(ranks):
        if ranks not in known:
            known[ranks] = on_ranks(dist_faults.with_faults, *RUNS[ranks], tp=ranks)
        return known[ranks]

    return run


@pytest.mark.gloo(reason="after a fault NCCL's communicator of the world is of no use any more")
@pytest.mark.parametrize("ranks", RUNS)
@pytest.mark.parametrize("fault", [fault.__name__ for fault in dist_faults.FAULTS])
@pytest.mark.by_turns(12)
def test_a_fault_is_attributed_to_its_rank_and_line(fault, ranks, found):
    bad, _ = RUNS[ranks]
    ended = {rank: each[fault] for rank, each in enumerate(found(ranks))}
    texts = {text for text, _ in ended.values() if text}
    assert len(texts) == 1, texts
    [text] = texts
    assert f"rank {bad} " in text
    for who in ("one", "others"):
        assert f"dist_faults.py:{dist_faults.line(f'{fault}: {who}')}" in text
    assert max(seconds for _, seconds in ended.values()) < 10
    silent = [rank for rank, (said, _) in ended.items() if not said]
    if fault == "skipped_at_the_end":
        assert silent == [bad]  # it has finished
    else:
        assert not silent


@pytest.mark.parametrize("finishes", [False, True])
@pytest.mark.parametrize("ranks", [2, 4])
def test_a_group_that_one_rank_alone_makes_is_found(ranks, finishes):
    began = time.monotonic()
    texts = on_ranks(dist_faults.group_alone, 1, finishes, tp=ranks)
    assert time.monotonic() - began < 20
    assert "rank 1 " in texts[1] and "new_group at dist_faults.py:" in texts[1]
    assert f"dist_faults.py:{dist_faults.line('group_alone: one')}" in texts[1]
    if finishes:
        assert "finished" in texts[1] and not any(texts[:1] + texts[2:])
    else:
        assert f"dist_faults.py:{dist_faults.line('group_alone: others')}" in texts[1]
        assert len({*texts}) == 1
