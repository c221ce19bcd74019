"""The key of one start: fresh, the same on all ranks, and not that of an answer from before."""

import threading

import pytest
import torch.distributed as dist
from test_dist_launch import variables

from kenotron_dist import resolve
from kenotron_dist.run_nonce import fresh_key
from kenotron_dist.signed_store import SignedStore

KEY = "a key of this job"


def agree(store, ranks=3):
    """The key of every rank, each of which is a thread."""
    keys = {}

    def run(rank):
        keys[rank] = fresh_key(resolve(variables(rank, ranks, 1)), store, KEY, 20)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [keys[rank] for rank in range(ranks)]


def test_ranks_have_one_key_that_no_other_start_has():
    keys = {tuple(agree(dist.HashStore())) for _ in range(2)}
    assert len(keys) == 2 and all(len({*each, KEY}) == 2 for each in keys)


def test_an_answer_of_another_start_is_refused():
    store, world = dist.HashStore(), resolve(variables(1, 2, 1))
    SignedStore(store, "kenotron-nonce", KEY.encode()).set("answer/1", "challenge nonce")
    words = "rank 1: the answer of rank 0 in the store is that of another start: see who can"
    with pytest.raises(ConnectionError, match=words):
        fresh_key(world, store, KEY, 5)


@pytest.mark.parametrize(
    ("rank", "waits"),
    [(0, "rank 1 has written no signed challenge"), (1, "rank 0 has written no signed answer")],
)
def test_a_rank_that_says_nothing_is_named(rank, waits):
    with pytest.raises(ConnectionError, match=f"{waits} into the store within 0.1 s: see what it"):
        fresh_key(resolve(variables(rank, 2, 1)), dist.HashStore(), KEY, 0.1)
