"""Working ahead changes no number and no cursor, and the thread always ends."""

import gc
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from kenotron_data import Cursor, Loader, PackedTokens, Prefetched

SIZES = {"micro_batch_size": 2, "microbatches": 2}


class Counting:
    """Ten samples; counts what was read and may fail at some."""

    def __init__(self, fails=()):
        self.read = 0
        self.fails = set(fails)

    def __len__(self):
        return 10

    def sample(self, i):
        self.read += 1
        if self.read in self.fails:
            raise OSError(f"disk lost at read {self.read}")
        return np.full(5, i, dtype=np.int64)


def threads():
    return [thread for thread in threading.enumerate() if thread.name == "kenotron-data"]


def wait_until(condition):
    end = time.monotonic() + 10
    while not condition() and time.monotonic() < end:
        time.sleep(0.005)
    assert condition()


@pytest.mark.parametrize("depth", [1, 2, 5])
def test_the_depth_changes_no_number(depth):
    data = PackedTokens(np.arange(100, dtype=np.uint16), 4)
    with Loader(data, **SIZES, prefetch=0) as plain, Loader(data, **SIZES, prefetch=depth) as ahead:
        for _ in range(20):
            assert next(plain).tokens_MBS.equal(next(ahead).tokens_MBS)
            assert plain.cursor == ahead.cursor


def test_the_cursor_counts_what_the_user_took():
    data = Counting()
    with Loader(data, **SIZES, prefetch=3) as loader:
        next(loader)
        wait_until(lambda: data.read >= 16)
        assert loader.cursor == Cursor(0, 0, 4)
        time.sleep(0.05)
        assert data.read <= 20  # taken, three waiting, one in hand
    assert not threads()
    assert loader.cursor == Cursor(0, 0, 4)


def test_an_error_appears_in_next_and_the_batch_can_be_tried_again():
    with Loader(Counting(), **SIZES, prefetch=0) as plain:
        want = [next(plain) for _ in range(4)]
    data = Counting(fails=[10])
    with Loader(data, **SIZES) as loader:
        for batch in want[:2]:
            assert next(loader).tokens_MBS.equal(batch.tokens_MBS)
        with pytest.raises(OSError, match="disk lost at read 10"):
            next(loader)
        assert not threads()
        assert loader.cursor == Cursor(0, 0, 8)
        for batch in want[2:]:
            assert next(loader).tokens_MBS.equal(batch.tokens_MBS)


def test_closing_ends_the_thread_and_the_loader():
    loader = Loader(Counting(), **SIZES)
    assert not threads()
    next(loader)
    assert len(threads()) == 1
    loader.close()
    loader.close()
    assert not threads()
    with pytest.raises(ValueError, match="this loader is closed: make a new one from its cursor"):
        next(loader)


def test_a_forgotten_loader_ends_its_thread():
    loader = Loader(Counting(), **SIZES)
    next(loader)
    del loader
    gc.collect()
    wait_until(lambda: not threads())


def test_a_program_that_forgets_to_close_ends_in_silence():
    program = (
        "import numpy as np; from kenotron_data import *\n"
        "loader = Loader(RandomTokens(9, 4, 0), micro_batch_size=2, microbatches=2)\n"
        "next(loader); print('done')"
    )
    command = [sys.executable, "-W", "error", "-c", program]
    run = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (run.returncode, run.stdout, run.stderr) == (0, "done\n", "")


def test_a_finite_source_ends():
    items = Prefetched(iter(range(5)), depth=2)
    assert list(items) == [0, 1, 2, 3, 4]
    assert list(items) == []
    assert not threads()


def test_wrong_depths_are_named():
    with pytest.raises(ValueError, match="prefetch must be 0 or more batches, but -1 was given"):
        Loader(Counting(), **SIZES, prefetch=-1)
    with pytest.raises(ValueError, match="depth of prefetching must be at least 1, but 0 was"):
        Prefetched(iter([]), depth=0)
