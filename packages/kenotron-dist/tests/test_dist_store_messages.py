"""StoreMessages between ranks: from any thread, without anybody waiting who does not ask."""

import threading
import time

import pytest

from kenotron_dist import Mesh, StoreMessages, all_reduce, spawn


def tell_and_hear(mesh):
    """Every rank's thread leaves a note and reads all, while the ranks communicate."""
    import torch

    notes, other = StoreMessages(mesh, "x"), StoreMessages(mesh, "x")
    heard = []

    def run():
        notes.post(f"{mesh.rank}", {"rank": mesh.rank, "text": "é" * 100_000})
        heard.append([notes.wait(str(rank))["rank"] for rank in range(mesh.world.size)])

    thread = threading.Thread(target=run)
    thread.start()
    sums = [float(all_reduce(torch.ones(1000), mesh.world)[0]) for _ in range(20)]
    thread.join(20)
    assert not thread.is_alive()
    return heard[0], set(sums), other.read("0")


def test_threads_hear_one_another_while_ranks_communicate():
    for heard, sums, other in spawn(tell_and_hear, dp=3):
        assert heard == [0, 1, 2]
        assert sums == {3.0}
        assert other is None  # a second wall of the same name is another one


def test_a_note_is_there_until_it_is_erased():
    notes = StoreMessages(Mesh.connect(), "x")
    assert notes.read("a") is None
    notes.post("a", [1, {"b": None}])
    assert notes.wait("a") == notes.read("a") == [1, {"b": None}]
    notes.erase("a")
    notes.erase("a")
    assert notes.read("a") is None
    with pytest.raises(TypeError, match="not JSON serializable"):
        notes.post("a", {1, 2})


def erase_and_ask(mesh):
    notes = StoreMessages(mesh, "y")
    if mesh.rank == 0:
        notes.post("a", 1)
        notes.erase("a")
        notes.post("done", True)
    assert notes.wait("done")
    return notes.read("a")


def test_an_erased_note_is_gone_on_all_ranks():
    assert spawn(erase_and_ask, tp=2) == [None, None]


def test_who_gives_up_hears_nothing():
    begun = time.monotonic()
    given_up = time.monotonic() + 0.2
    assert StoreMessages(Mesh.connect(), "x").wait("a", lambda: time.monotonic() > given_up) is None
    assert time.monotonic() - begun < 2
