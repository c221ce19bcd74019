"""Folders of many token files: none is mapped before it is read, and few stay mapped."""

from pathlib import Path

import numpy as np
import pytest

import kenotron_data.token_folder as token_folder
from kenotron_data import TokenFolder, TokenWriter
from kenotron_data.stream import TokenStream

FILES, LENGTH = 30, 50


def mapped(folder):
    """How often the process has a file of the folder mapped."""
    return Path("/proc/self/maps").read_text().count(str(folder))


@pytest.fixture
def folder(tmp_path):
    for number in range(FILES):
        with TokenWriter(tmp_path / f"{number:03d}.ds", 2) as writer:
            begin = number * LENGTH
            writer.add([np.arange(begin, begin + 20), np.arange(begin + 20, begin + LENGTH)])
    return tmp_path


def read_all(folder):
    """Read every token in three ways."""
    files = TokenFolder(folder)
    stream = TokenStream(files)
    starts = np.arange(0, FILES * LENGTH - 7, 7, dtype=np.int64)
    want = starts[:, None] + np.arange(7)
    assert (stream.windows(starts, 7) == want).all()
    documents, places = stream.documents(starts, 7)
    assert documents.max() == 1 and places.max() == 6
    assert np.concatenate(list(files)).tolist() == list(range(FILES * LENGTH))
    assert files.document(3).tolist() == list(range(LENGTH + 20, 2 * LENGTH))
    assert stream.describe(LENGTH + 21).endswith("document 1, token 21")
    return files


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="Linux's list of mappings")
def test_a_file_is_mapped_when_it_is_read(folder):
    files = TokenFolder(folder)
    stream = TokenStream(files)
    assert (len(files), files.documents, len(stream)) == (FILES * LENGTH, 2 * FILES, len(files))
    assert mapped(folder) == 0
    stream.windows(np.array([3 * LENGTH]), 5)
    assert mapped(folder) == 1


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="Linux's list of mappings")
def test_of_many_files_none_stays_mapped(folder, monkeypatch):
    few = read_all(folder)
    assert mapped(folder) == 2 * FILES and all(file.keep for file in few.files)
    del few
    monkeypatch.setattr(token_folder, "MOST_KEPT", FILES - 1)
    many = read_all(folder)
    assert mapped(folder) == 0 and not any(file.keep for file in many.files)
