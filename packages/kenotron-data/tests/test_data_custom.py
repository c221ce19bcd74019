"""A user's own data: functions and indexables are shuffled, iterables are read once."""

import logging

import numpy as np
import pytest
import torch

from kenotron_data import (
    Cursor,
    CustomSamples,
    IterableLoader,
    Loader,
    PackedTokens,
    custom_loader,
)

SIZES = {"micro_batch_size": 2, "microbatches": 2}


def sample(i):
    return [i, i + 1, i + 2]


@pytest.mark.parametrize(
    "source",
    [
        sample,
        [sample(i) for i in range(9)],
        [torch.tensor(sample(i)) for i in range(9)],
        [{"input_ids": np.array(sample(i), dtype=np.uint16)} for i in range(9)],
    ],
)
def test_functions_and_indexables_are_read_as_a_data_set(source):
    want = np.array([sample(i) for i in range(9)])
    with custom_loader(source, samples=9, **SIZES, seed=3) as loader:
        batches = [next(loader) for _ in range(9)]
        assert loader.cursor == Cursor(0, 4, 36)
    seen = torch.cat([batch.tokens_MBS[..., 0].flatten() for batch in batches]).tolist()
    assert sorted(seen[:9]) == sorted(seen[9:18]) == list(range(9))
    assert seen[:9] != seen[9:18]
    assert batches[0].labels_MBS.view(-1, 2).tolist() == want[seen[:4], 1:].tolist()
    with custom_loader(source, samples=9, **SIZES, seed=3, cursor=Cursor(0, 3, 28)) as resumed:
        assert next(resumed).tokens_MBS.equal(batches[7].tokens_MBS)


def test_a_data_set_is_taken_as_it_is():
    data = PackedTokens(np.arange(30), 4)
    with custom_loader(data, **SIZES) as ours, Loader(data, **SIZES) as plain:
        assert next(ours).tokens_MBS.equal(next(plain).tokens_MBS)


class Endless:
    def __iter__(self):
        return (sample(i) for i in range(10**9))


class Skipping(Endless):
    """As the streaming data sets of Hugging Face."""

    def skip(self, n):
        return (sample(i) for i in range(n, 10**9))


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("layout", [(1, 2, 3), (2, 1, 3), (3, 2, 1), (6, 1, 1)])
def test_an_iterable_is_one_stream_for_every_layout(layout, prefetch):
    dp, m, b = layout
    sizes = {"dp_size": dp, "microbatches": m, "micro_batch_size": b, "prefetch": prefetch}
    for source in (Endless(), [sample(i) for i in range(13)].__iter__):
        made = source if isinstance(source, Endless) else None
        ranks = [
            custom_loader(made or source(), dp_rank=rank, **sizes)
            for rank in range(dp)
        ]  # fmt: skip
        assert all(isinstance(rank, IterableLoader) for rank in ranks)
        for step in range(2):
            parts = [next(rank).tokens_MBS.flatten(0, 1) for rank in ranks]
            assert torch.cat(parts)[:, 0].tolist() == list(range(6 * step, 6 * step + 6))
            assert {rank.cursor for rank in ranks} == {Cursor(0, 0, 6 * step + 6)}
        for rank in ranks:
            if made is None:
                for _ in range(2):  # the thirteenth fills no batch
                    with pytest.raises(StopIteration):
                        next(rank)
            rank.close()
            rank.close()


@pytest.mark.parametrize(
    ("source", "words"),
    [(Endless(), "neither index nor skip(): 8 samples are read again"), (Skipping(), "skip(8)")],
)
def test_a_resumed_iterable_is_replayed_or_skipped_and_says_so(source, words, caplog):
    with (
        caplog.at_level(logging.WARNING),
        custom_loader(source, **SIZES, cursor=Cursor(1, 0, 8), prefetch=0) as loader,
    ):
        assert next(loader).tokens_MBS[..., 0].flatten().tolist() == [8, 9, 10, 11]
        assert loader.cursor == Cursor(1, 0, 12)
    assert words in caplog.text


def test_a_fresh_iterable_says_nothing(caplog):
    with custom_loader(Endless(), **SIZES) as loader:
        next(loader)
    assert not caplog.text


def failing():
    yield sample(0)
    raise OSError("the line is dead")


@pytest.mark.parametrize("prefetch", [0, 1])
def test_an_error_of_an_iterable_is_no_end(prefetch):
    with custom_loader(failing(), **SIZES, prefetch=prefetch) as loader:
        with pytest.raises(OSError, match="the line is dead") as caught:
            next(loader)
        assert caught.value.__notes__ == ["while reading sample 1 (source 'custom')"]
        for _ in range(2):
            with pytest.raises(ValueError, match="an error ended this loader's source"):
                next(loader)
        assert loader.cursor == Cursor()


def test_a_source_that_is_shorter_than_the_cursor_is_named():
    with pytest.raises(ValueError, match="source 'mine' ends after 3 samples, but the"):
        next(custom_loader(iter([sample(0)] * 3), **SIZES, cursor=Cursor(0, 0, 8), name="mine"))
    with pytest.raises(ValueError, match="says epoch 1, but source 'custom' has no index"):
        custom_loader(Endless(), **SIZES, cursor=Cursor(0, 1, 8))


@pytest.mark.parametrize(
    "item", [[1.5, 2.5], [[1, 2]], [3], "text", {"ids": [1, 2]}, [[1], [2, 3]]]
)
def test_what_is_no_sample_is_named(item):
    for source in ([item] * 4, iter([item] * 4)):
        with custom_loader(source, **SIZES, name="mine") as loader:
            with pytest.raises(ValueError, match="a sample is .*integer ids") as caught:
                next(loader)
            assert "(source 'mine')" in caught.value.__notes__[0]


def test_wrong_sources_are_named():
    with pytest.raises(ValueError, match="source 'custom' has no known number of samples: give"):
        custom_loader(sample, **SIZES)
    with pytest.raises(ValueError, match="give the samples of an epoch, at least 1"):
        custom_loader(sample, samples=0, **SIZES)
    with pytest.raises(ValueError, match="int is no function of an index, not indexable and not"):
        custom_loader(3, **SIZES)
    with pytest.raises(ValueError, match="object is neither callable nor indexable"):
        CustomSamples(object(), samples=3)
    with pytest.raises(ValueError, match="prefetch must be 0 or more batches, but -1"):
        custom_loader(Endless(), **SIZES, prefetch=-1)
