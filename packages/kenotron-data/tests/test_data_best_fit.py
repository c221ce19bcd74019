"""Packing cuts no document that fits, loses no token and puts no label on padding."""

import pickle
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kenotron_data import (
    Loader,
    PackedDocuments,
    TokenFile,
    TokenFolder,
    TokenWriter,
    write_pack_index,
)
from kenotron_data.best_fit import best_fit


def write(path, documents):
    with TokenWriter(path, 4, "numbers") as writer:
        writer.add(documents)
    return TokenFile(path)


def numbered(lengths):
    """Documents whose tokens are all different, from 1 on."""
    ends = np.cumsum([0, *lengths]) + 1
    return [np.arange(a, b) for a, b in zip(ends, ends[1:], strict=False)]


def plain_best_fit(lengths, capacity):
    """Best-fit decreasing, one piece after the other: the rooms that are left."""
    rooms = []
    for length in sorted(lengths, reverse=True):
        fitting = [room for room in rooms if room >= length]
        tight = min(fitting, default=None)
        if tight is not None:
            rooms.remove(tight)
        rooms.append((capacity if tight is None else tight) - length)
    return Counter(rooms)


@settings(max_examples=300, deadline=None)
@given(capacity=st.integers(1, 30), data=st.data())
def test_the_bins_are_those_of_one_after_the_other(capacity, data):
    lengths = np.array(data.draw(st.lists(st.integers(1, capacity), min_size=1, max_size=60)))
    used = np.bincount(best_fit(lengths, capacity), weights=lengths).astype(int)
    assert used.max() <= capacity
    assert Counter((capacity - used).tolist()) == plain_best_fit(lengths.tolist(), capacity)


@settings(max_examples=80, deadline=None)
@given(
    files=st.lists(
        st.lists(st.integers(0, 20), min_size=1, max_size=15).filter(any), min_size=1, max_size=3
    ),
    s=st.integers(1, 9),
)
def test_every_label_comes_once_and_fitting_documents_are_whole(files, s, tmp_path_factory):
    folder = tmp_path_factory.mktemp("packed")
    all_documents = numbered(sum(files, []))
    places = iter(all_documents)
    for number, lengths in enumerate(files):
        write_pack_index(write(folder / f"{number}.ds", [next(places) for _ in lengths]), s)
    data = PackedDocuments(TokenFolder(folder), s)
    loader = Loader(data, micro_batch_size=len(data), microbatches=1, prefetch=0)
    batch = next(loader)
    labels = batch.labels_MBS[batch.labels_MBS != -100]
    want = [token for document in all_documents for token in document[1:].tolist()]
    assert sorted(labels.tolist()) == want
    rows = data.rows(np.arange(len(data)))
    found = set()
    for tokens, documents in zip(rows.tokens, rows.documents, strict=True):
        assert (tokens[documents == -1] == 0).all()
        assert (tokens[documents != -1] > 0).all()
        for number in range(documents.max() + 1):
            found.add(tuple(tokens[documents == number].tolist()))
    for document in all_documents:
        if 0 < len(document) <= s + 1:
            assert tuple(document.tolist()) in found
    read = batch.documents_MBS[0].numpy()
    same = read[:, 1:] == read[:, :-1]
    positions = batch.positions_MBS[0].numpy()
    assert (positions[:, 0] == 0).all()
    assert (positions[:, 1:] == np.where(same, positions[:, :-1] + 1, 0)).all()


def test_a_small_case_by_hand(tmp_path):
    file = write(tmp_path / "a.ds", [[1, 2], [3, 4, 5], [6], [7, 8, 9, 10, 11, 12]])
    write_pack_index(file, 3)
    rows = PackedDocuments(file, 3).rows(np.arange(4))
    assert rows.tokens.tolist() == [[7, 8, 9, 10], [3, 4, 5, 6], [10, 11, 12, 0], [1, 2, 0, 0]]
    assert rows.documents.tolist() == [[0] * 4, [0, 0, 0, 1], [0, 0, 0, -1], [0, 0, -1, -1]]


def test_documents_may_run_on(tmp_path):
    file = write(tmp_path / "a.ds", [[1, 2], [3, 4]])
    write_pack_index(file, 5)
    apart = PackedDocuments(file, 5).rows(np.array([0]))
    assert apart.documents.tolist() == [[0, 0, 1, 1, -1, -1]]
    assert apart.kept_labels().tolist() == [[True, False, True, False, False]]
    assert apart.positions().tolist() == [[0, 1, 0, 1, 0]]
    run_on = PackedDocuments(file, 5, separate_documents=False).rows(np.array([0]))
    assert run_on.kept_labels().tolist() == [[True, True, True, False, False]]
    assert run_on.positions().tolist() == [[0, 1, 2, 3, 0]]


def test_an_index_is_found_again_and_named_where_it_does_not_fit(tmp_path):
    file = write(tmp_path / "a.ds", numbered([3, 4, 5]))
    with pytest.raises(FileNotFoundError, match="was not packed for sequence_length 8: call write"):
        PackedDocuments(file, 8)
    path = write_pack_index(file, 8)
    assert path.name == "a.ds.pack8"
    data = PackedDocuments(file, 8)
    again = pickle.loads(pickle.dumps(data))
    assert again.sample(0).tolist() == data.sample(0).tolist()
    assert data.describe(0).endswith("a.ds', document 1 and what is packed with it")
    with pytest.raises(IndexError, match="there is no sample 9"):
        data.sample(9)
    whole = path.read_bytes()
    for harmed, sentence in (
        (whole[:-8], "are not what its header says"),
        (whole[:20], "no pack index, or a truncated one"),
        (b"x" * len(whole), "no pack index"),
    ):
        path.write_bytes(harmed)
        with pytest.raises(ValueError, match=sentence):
            PackedDocuments(file, 8)
    path.write_bytes(whole)
    (tmp_path / "b").mkdir()
    other = write(tmp_path / "b" / "a.ds", numbered([3, 4, 6]))
    (tmp_path / "b" / "a.ds.pack8").write_bytes(whole)
    with pytest.raises(ValueError, match="packs 12 tokens in 3 documents .* has 13 in 3: make it"):
        PackedDocuments(other, 8)


def test_a_corrupt_piece_is_found_when_it_is_read(tmp_path):
    file = write(tmp_path / "a.ds", numbered([3, 4]))
    path = write_pack_index(file, 8)
    words = np.fromfile(path, dtype="<u8")
    words[-1] = 100
    words.tofile(path)
    with pytest.raises(ValueError, match=r"a\.ds': its pack index is corrupt: a piece lies"):
        PackedDocuments(file, 8).sample(0)


def test_what_cannot_be_packed_is_named(tmp_path):
    np.arange(5, dtype=np.uint32).tofile(tmp_path / "a.bin")
    with pytest.raises(ValueError, match="has no index of its documents: nothing can be packed"):
        write_pack_index(TokenFile(tmp_path / "a.bin", 4), 3)
    with pytest.raises(ValueError, match="sequence_length must be at least 1, but 0"):
        write_pack_index(write(tmp_path / "a.ds", [[1]]), 0)
