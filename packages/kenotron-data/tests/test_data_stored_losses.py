"""Losses of tokens in a file: every bit comes back, and a file that is not whole is named."""

import errno
import json
from pathlib import Path

import numpy as np
import pytest

from kenotron_data import LossWriter, StoredLosses

S = 5


@pytest.fixture
def path(tmp_path):
    return tmp_path / "losses" / "stage-0.losses"


def losses(rows, first=0):
    return np.sin(np.arange(first * S, (first + rows) * S, dtype=np.float32)).reshape(rows, S)


def write(path, rows, begin=0):
    with LossWriter(path, S, {"seed": 3}, begin) as writer:
        writer.add(losses(rows, begin))
        writer.finish()


def test_every_bit_comes_back_in_order_and_more_can_be_added(path):
    write(path, 4)
    write(path, 3, begin=4)
    found = StoredLosses(path)
    assert (found.samples, found.sequence, found.about) == (7, S, {"seed": 3})
    assert (found.rows(2, 5) == losses(5, 2)).all() and found.rows(0, 1).dtype == np.float32


def test_what_was_not_finished_does_not_count(path):
    write(path, 4)
    with LossWriter(path, S, {}, begin=4) as writer:
        writer.add(losses(2))
    assert StoredLosses(path).samples == 4
    with LossWriter(path, S, {}):
        pass
    with pytest.raises(FileNotFoundError):
        StoredLosses(path)


def test_what_was_added_a_minute_ago_counts(path, monkeypatch):
    monkeypatch.setattr("kenotron_data.stored_losses.KEPT_EVERY", 0.0)
    with LossWriter(path, S, {"seed": 3}) as writer:
        writer.add(losses(2))
        assert StoredLosses(path).samples == 2
    write(path, 1, begin=2)
    assert (StoredLosses(path).rows(0, 3) == losses(3)).all()


def test_two_writers_leave_no_hole_and_a_reader_keeps_its_file(path):
    write(path, 4)
    reader = StoredLosses(path)
    with LossWriter(path, S, {}) as first, LossWriter(path, S, {}) as second:
        assert (reader.rows(0, 4) == losses(4)).all()
        first.add(losses(3))
        second.add(losses(1))
        first.finish()
    with pytest.raises(ValueError, match="has 20 bytes, but 3 samples of 5 tokens need 60"):
        StoredLosses(path)


def test_what_is_missing_is_named(path):
    write(path, 4)
    with pytest.raises(ValueError, match=r"has losses of 4 samples, but samples \[3, 5\) are need"):
        StoredLosses(path).rows(3, 2)
    with LossWriter(path, S, {}, 4) as writer:
        with pytest.raises(ValueError, match=r"shape \(2, 4\) were given; .* has 5 losses of each"):
            writer.add(np.zeros((2, 4)))
    with path.open("r+b") as file:
        file.truncate(70)
    with pytest.raises(ValueError, match="has 70 bytes, but 4 samples of 5 tokens need 80: it is"):
        StoredLosses(path)
    description = path.with_name("stage-0.losses.json")
    for text in ("{", "[]", json.dumps({"format": 1, "samples": 4})):
        description.write_text(text)
        with pytest.raises(ValueError, match=r"stage-0.losses.json is damaged \(.*\): write"):
            StoredLosses(path)
    description.write_text(json.dumps({"format": 2}))
    with pytest.raises(ValueError, match="has format 2, but this release reads 1: write the loss"):
        StoredLosses(path)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="Linux's device that is always full")
def test_a_full_disk_names_the_file_and_is_the_error_that_is_raised(path):
    with pytest.raises(OSError) as caught, LossWriter(path, S, {}) as writer:
        writer._file.close()
        writer._file = open("/dev/full", "wb")
        writer.add(np.ones((2, S), np.float32))
        writer.finish()
    assert caught.value.errno == errno.ENOSPC and caught.value.filename == str(path)
