"""One stream of samples for every layout, number of workers and place of a resume."""

import hashlib
import time

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kenotron_data import (
    Concatenated,
    Cursor,
    Loader,
    Mixture,
    Nanoset,
    PackedDocuments,
    PackedTokens,
    RandomTokens,
    TokenFile,
    TokenFolder,
    TokenWriter,
    WorkedAhead,
    hold_out,
    hold_out_each,
    validation_batches,
    write_pack_index,
)

torch.set_num_threads(1)
FIELDS = ("tokens_MBS", "labels_MBS", "positions_MBS", "samples_MB", "sources_MB", "documents_MBS")
GLOBAL = 24


def write(path, documents, token_bytes=2):
    with TokenWriter(path, token_bytes, "numbers") as writer:
        writer.add(documents)
    return path


@pytest.fixture(scope="module")
def mixture(tmp_path_factory):
    """Three sources of different kinds, from files."""
    root = tmp_path_factory.mktemp("mixture")
    rng = np.random.default_rng(0)
    for folder in ("a", "b", "c"):
        for number in range(3):
            lengths = rng.integers(0, 40, size=30)
            documents = [rng.integers(1, 60_000, size=n) for n in lengths]
            write(root / folder / f"{number}.ds", documents)
    for file in TokenFolder(root / "c").files:
        write_pack_index(file, 8)
    sources = {
        "a": PackedTokens(TokenFolder(root / "a"), 8, separate_documents=True),
        "b": Nanoset(TokenFolder(root / "b"), 8),
        "c": PackedDocuments(TokenFolder(root / "c"), 8),
    }
    return Mixture(sources, {"a": 5, "b": 2, "c": 3})


def global_rows(parts, name):
    return torch.cat([getattr(part, name).flatten(0, 1) for part in parts])


def stream_hash(data, layout, steps, cursor=Cursor(), **options):
    """Hash of the global batches that the ranks of a layout read together."""
    dp, m, b = layout
    sizes = {"dp_size": dp, "microbatches": m, "micro_batch_size": b, "cursor": cursor}
    ranks = [Loader(data, dp_rank=rank, **sizes, **options) for rank in range(dp)]
    digest = hashlib.sha256()
    for _ in range(steps):
        parts = [next(rank) for rank in ranks]
        for name in FIELDS:
            digest.update(global_rows(parts, name).numpy().tobytes())
    (stands,) = {rank.cursor for rank in ranks}
    for rank in ranks:
        rank.close()
    return digest.hexdigest(), stands


@pytest.mark.parametrize("workers", [0, 1, 4])
@pytest.mark.parametrize("dp", [1, 2, 3, 4, 8])
def test_the_stream_does_not_depend_on_layout_and_workers(mixture, dp, workers):
    want = stream_hash(mixture, (1, 1, GLOBAL), 12, workers=0)
    own = GLOBAL // dp
    for m in {1, own} | ({own // 3} if own % 3 == 0 else set()):
        assert stream_hash(mixture, (dp, m, own // m), 12, workers=workers) == want


def test_processes_change_no_number(mixture):
    want = stream_hash(mixture, (1, 1, GLOBAL), 6, workers=0)
    options = {"workers": 2, "worker_kind": "process"}
    assert stream_hash(mixture, (1, 2, GLOBAL // 2), 6, **options) == want


LAYOUTS = [(1, 1, 24), (2, 3, 4), (3, 2, 4), (4, 6, 1), (8, 1, 3)]


@settings(max_examples=40, deadline=None)
@given(
    at=st.integers(0, 60),
    old=st.sampled_from(LAYOUTS),
    new=st.sampled_from(LAYOUTS),
    workers=st.sampled_from([0, 1, 4]),
)
def test_a_run_resumes_at_any_step_with_another_layout(mixture, at, old, new, workers):
    _, cursor = stream_hash(mixture, old, at, workers=workers) if at else (None, Cursor())
    assert cursor == Cursor(0, at * GLOBAL // len(mixture), at * GLOBAL)
    steps = stream_hash(mixture, old, 4, cursor, workers=0)
    assert stream_hash(mixture, new, 4, cursor, workers=workers) == steps


def test_stages_may_differ_in_batch_and_sequence_length():
    tokens = np.arange(1000, dtype=np.uint16)
    with Loader(PackedTokens(tokens, 4), micro_batch_size=2, microbatches=3) as first:
        for _ in range(5):
            assert next(first).tokens_MBS.shape == (3, 2, 4)
    second = PackedTokens(tokens, 10)
    stage = Cursor(stage=1)
    with Loader(second, micro_batch_size=5, microbatches=2, cursor=stage) as loader:
        assert next(loader).tokens_MBS.shape == (2, 5, 10)
        cursor = loader.cursor
        assert cursor == Cursor(1, 0, 10)
        want = next(loader).tokens_MBS.view(-1, 10)
    with Loader(second, micro_batch_size=2, microbatches=1, cursor=cursor) as smaller:
        assert torch.cat([next(smaller).tokens_MBS.view(-1, 10) for _ in range(5)]).equal(want)


def test_rows_of_several_sources_keep_the_places_that_each_of_them_says(mixture):
    indices = np.linspace(0, len(mixture) - 1, 60).astype(np.int64)
    together, of = mixture.rows(indices).positions(), mixture.source_of(indices)
    assert set(of.tolist()) == {0, 1, 2}
    for place, index in zip(together, indices, strict=True):
        assert place.tolist() == mixture.rows(index[None]).positions()[0].tolist()
    assert (np.diff(together[of == 0]) < 0).any()  # documents begin in the middle of rows


def test_a_place_far_away_is_found_in_less_than_a_millisecond():
    data = RandomTokens(100, 8, seed=0)
    cursor = Cursor(0, 0, 10**12 - 100)
    times = []
    for _ in range(30):
        begin = time.perf_counter()
        next(Loader(data, micro_batch_size=4, microbatches=1, cursor=cursor, prefetch=0))
        times.append(time.perf_counter() - begin)
    assert min(times) < 1e-3


def test_documents_of_packed_tokens_are_those_of_the_files(tmp_path):
    write(tmp_path / "a.ds", [[10, 11, 12], [], [20, 21]])
    write(tmp_path / "b.ds", [[30], [40, 41, 42, 43]])
    data = PackedTokens(TokenFolder(tmp_path), 4, separate_documents=True)
    rows = data.rows(np.array([1, 0]))
    assert rows.tokens.tolist() == [[21, 30, 40, 41, 42], [10, 11, 12, 20, 21]]
    assert rows.documents.tolist() == [[0, 1, 2, 2, 2], [0, 0, 0, 1, 1]]
    assert rows.positions().tolist() == [[0, 0, 0, 1], [0, 1, 2, 0]]
    assert rows.kept_labels().tolist() == [[False, False, True, True], [True, True, False, True]]
    assert data.sample(1).tolist() == [21, 30, 40, 41, 42]
    assert data.describe(1).endswith("a.ds', document 2, token 4")
    run_on = PackedTokens(TokenFolder(tmp_path), 4).rows(np.array([1]))
    assert run_on.documents is None
    assert run_on.kept_labels() is None


@settings(max_examples=100, deadline=None)
@given(
    files=st.lists(st.lists(st.integers(0, 7), min_size=1, max_size=6).filter(any), min_size=1,
                   max_size=4),
    s=st.integers(1, 12),
)  # fmt: skip
def test_any_window_of_a_folder_is_that_of_the_whole_stream(files, s, tmp_path_factory):
    folder = tmp_path_factory.mktemp("folder")
    token, document, tokens, documents = 0, 0, [], []
    for number, lengths in enumerate(files):
        made = []
        for n in lengths:
            made.append(list(range(token, token + n)))
            documents += [document] * n
            token, document = token + n, document + 1
        write(folder / f"{number}.ds", made)
        tokens += sum(made, [])
    if len(tokens) < s + 1:
        return
    data = PackedTokens(TokenFolder(folder), s, separate_documents=True)
    rows = data.rows(np.arange(len(data)))
    for i, (got, of) in enumerate(zip(rows.tokens, rows.documents, strict=True)):
        assert got.tolist() == tokens[i * s : i * s + s + 1]
        want = np.array(documents[i * s : i * s + s + 1])
        assert of.tolist() == np.unique(want, return_inverse=True)[1].tolist()


def test_samples_of_a_nanoset_stay_in_their_file(tmp_path):
    write(tmp_path / "a.ds", [np.arange(8)])
    write(tmp_path / "b.ds", [np.arange(100, 102)])
    write(tmp_path / "c.ds", [np.arange(200, 206)])
    data = Nanoset(TokenFolder(tmp_path), 2)
    samples = [data.sample(i).tolist() for i in range(len(data))]
    assert samples == [[0, 1, 2], [3, 4, 5], [200, 201, 202], [203, 204, 205]]
    assert data.rows(np.array([3, 0])).tokens.tolist() == [samples[3], samples[0]]
    with pytest.raises(IndexError, match="there is no sample 4 in a dataset of 4"):
        data.rows(np.array([0, 4]))
    with pytest.raises(ValueError, match=r"b\.ds': no file holds the 3 tokens"):
        Nanoset(TokenFile(tmp_path / "b.ds"), 2)


def test_a_corrupt_index_is_found_when_it_is_read(tmp_path):
    path = write(tmp_path / "a.ds", [[1, 2], [3, 4], [5, 6, 7]])
    np.array([2, 1, 7], dtype="<u8").tofile(f"{path}.index")
    data = PackedTokens(TokenFile(path), 6, separate_documents=True)
    with pytest.raises(ValueError, match=r"a\.ds': its index is corrupt: the ends of documents do"):
        data.rows(np.array([0]))


@pytest.mark.parametrize("options", [{"workers": 0}, {"workers": 1}, {"workers": 3}])
def test_a_token_outside_the_vocabulary_is_named_with_file_and_document(tmp_path, options):
    write(tmp_path / "a.ds", [[1, 2, 3], [4, 50_000, 5, 6, 7]])
    data = Concatenated({"web": PackedTokens(TokenFolder(tmp_path), 3)})
    sizes = {"micro_batch_size": 2, "microbatches": 1}
    sentence = r"token 50000 at place 1 of sample 1 \(source 'web': sample 1 \(.*a\.ds', document 1"
    with (
        pytest.raises(ValueError, match=sentence),
        Loader(data, **sizes, vocab_size=50_000, **options) as loader,
    ):
        next(loader)
    with Loader(data, **sizes, vocab_size=50_001, **options) as loader:
        next(loader)
    with pytest.raises(ValueError, match=sentence):
        next(validation_batches(data, **sizes, vocab_size=50_000))


class Failing:
    """Sample 3 cannot be read."""

    def __len__(self):
        return 8

    def sample(self, i):
        if i == 3:
            raise OSError("the disk is gone")
        return np.arange(4) - 1

    def describe(self, i):
        return f"'file {i}.txt', document {i + 10}"


@pytest.mark.parametrize("kind", ["thread", "process"])
@pytest.mark.parametrize("workers", [0, 1, 2])
def test_an_error_of_a_worker_names_file_and_document(workers, kind):
    options = {"workers": workers, "worker_kind": kind}
    with Loader(Failing(), micro_batch_size=8, microbatches=1, **options) as loader:
        for _ in range(2):
            with pytest.raises(OSError, match="the disk is gone") as caught:
                next(loader)
            assert caught.value.__notes__ == ["while reading sample 3 ('file 3.txt', document 13)"]
        assert loader.cursor == Cursor()


def test_a_negative_token_is_named():
    with pytest.raises(ValueError, match=r"token -1 at place 0 of sample \d"):
        next(Loader(Subsets(), micro_batch_size=2, microbatches=1, vocab_size=9))


class Subsets(Failing):
    """All samples can be read."""

    def sample(self, i):
        return np.arange(4) - 1


def test_workers_are_bounded_and_in_order():
    begun = []

    def work(i):
        begun.append(i)
        time.sleep(0.001 * (i % 3))
        return i

    items = WorkedAhead(work, iter(range(100)), workers=4, depth=6)
    for i in range(10):
        assert next(items) == i
        assert len(begun) <= i + 7
    items.close()
    assert list(items) == []
    assert list(WorkedAhead(work, iter(range(7)), workers=2, depth=3)) == list(range(7))


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"workers": -1}, "number of workers must be at least 1, but -1 was given"),
        ({"worker_kind": "fiber"}, "worker_kind must be 'thread' or 'process', but 'fiber'"),
    ],
)
def test_wrong_workers_are_named(options, sentence):
    with pytest.raises(ValueError, match=sentence):
        Loader(Failing(), micro_batch_size=1, microbatches=1, **options)
    with pytest.raises(ValueError, match="depth of prefetching must be at least 1"):
        WorkedAhead(int, iter([]), workers=1, depth=0)


def test_held_out_samples_are_in_no_batch_of_the_training(mixture):
    sources = dict(zip(mixture.sources, mixture.datasets, strict=True))
    training, held = hold_out_each(sources, {"a": 0.2, "c": 0.5})
    assert [*training] == ["a", "b", "c"]
    assert [*held] == ["a", "c"]
    for name, data in held.items():
        assert len(training[name]) + len(data) == len(sources[name])
        assert data.sample(0).tolist() == sources[name].sample(len(training[name])).tolist()
        assert data.describe(0).endswith(sources[name].describe(len(training[name])) + ")")
    with pytest.raises(ValueError, match=r"names \['x'\], but the sources are \['a', 'b', 'c'\]"):
        hold_out_each(sources, {"x": 0.1})


@pytest.mark.parametrize("layout", [(1, 1, 4), (2, 3, 2), (3, 1, 5)])
def test_validation_batches_are_tagged_so_losses_can_be_summed_per_source(mixture, layout):
    sources = dict(zip(mixture.sources, mixture.datasets, strict=True))
    _, held = hold_out_each(sources, 0.3)
    data = Concatenated(held)
    dp, m, b = layout
    sums = np.zeros((2, len(data.sources)), dtype=np.int64)
    for rank in range(dp):
        sizes = {"dp_size": dp, "dp_rank": rank, "microbatches": m, "micro_batch_size": b}
        for batch in validation_batches(data, **sizes):
            for micro in batch:
                targets = (micro.labels_BS != -100).sum(1)
                assert (targets[micro.sources_B == -1] == 0).all()
                for source in range(len(data.sources)):
                    own = micro.sources_B == source
                    sums[:, source] += [int(targets[own].sum()), int(own.sum())]
    for source, part in enumerate(held.values()):
        kept = part.rows(np.arange(len(part))).kept_labels()
        want = len(part) * 8 if kept is None else int(kept.sum())
        assert sums[:, source].tolist() == [want, len(part)]


def test_what_cannot_be_held_out_is_named():
    data = RandomTokens(9, 3, 0, samples=10)
    training, held = hold_out(data, 0.01)
    assert (len(training), len(held)) == (9, 1)
    assert hold_out(data, 0)[1] is None
    with pytest.raises(ValueError, match="source 'a': a dataset of 10 samples has none to train"):
        hold_out_each({"a": data}, 0.99)
    with pytest.raises(ValueError, match="less than 1, not 1"):
        hold_out(data, 1)
