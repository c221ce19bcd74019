"""The same batches on every layout, in every epoch each sample once, and exact resume."""

import json
from itertools import islice

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kenotron_data import (
    Cursor,
    IterableLoader,
    Loader,
    PackedTokens,
    RandomTokens,
    validation_batches,
)
from kenotron_data.config import BatchRampConfig

torch.set_num_threads(1)

FIELDS = ("tokens_MBS", "labels_MBS", "positions_MBS", "samples_MB")


def numbered(n: int, s: int = 3) -> PackedTokens:
    """n samples whose first token, divided by s, is their index."""
    return PackedTokens(np.arange(n * s + 1, dtype=np.uint32), s)


def loaders(data, layout, **more):
    dp, m, b = layout
    sizes = {"micro_batch_size": b, "microbatches": m, "dp_size": dp, "prefetch": 0}
    return [Loader(data, **{**sizes, "dp_rank": rank, **more}) for rank in range(dp)]


def global_rows(parts, name):
    """One global batch from its ranks' parts, row by row."""
    return torch.cat([getattr(part, name).flatten(0, 1) for part in parts])


def indices(batch, s=3):
    return (batch.tokens_MBS[:, :, 0] // s).flatten().tolist()


def odd_mask(samples, s):
    return (samples[:, None] + torch.arange(s)) % 3 != 0


LAYOUTS = [(1, 1, 12), (1, 12, 1), (12, 1, 1), (2, 3, 2), (3, 2, 2), (2, 2, 3), (4, 3, 1)]


@pytest.mark.smoke
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_global_batch_does_not_depend_on_the_layout(layout):
    data = numbered(29)
    (plain,) = loaders(data, (1, 1, 12), target_mask=odd_mask)
    ranks = loaders(data, layout, target_mask=odd_mask)
    for _ in range(8):
        want, parts = next(plain), [next(rank) for rank in ranks]
        for name in FIELDS:
            assert global_rows(parts, name).equal(global_rows([want], name))
        assert {rank.cursor for rank in ranks} == {plain.cursor}
        assert all(len(part) == layout[1] for part in parts)


def test_a_batch_is_what_the_contract_says():
    (loader,) = loaders(numbered(10), (1, 2, 4))
    batch = next(loader)
    assert batch.tokens_MBS.shape == batch.labels_MBS.shape == batch.positions_MBS.shape
    assert batch.tokens_MBS.shape == (2, 4, 3)
    assert batch.samples_MB.tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert all(getattr(batch, name).dtype == torch.int64 for name in FIELDS)
    assert all(getattr(batch, name).is_contiguous() for name in FIELDS)
    assert batch.labels_MBS[..., :-1].equal(batch.tokens_MBS[..., 1:])
    assert batch.labels_MBS.equal(batch.tokens_MBS + 1)
    assert batch.positions_MBS.flatten(0, 1).tolist() == [[0, 1, 2]] * 8
    micro = batch[1]
    assert micro.tokens_BS.equal(batch.tokens_MBS[1])
    assert micro.labels_BS.equal(batch.labels_MBS[1])
    assert micro.positions_BS.equal(batch.positions_MBS[1])
    assert micro.samples_B.tolist() == [4, 5, 6, 7]
    assert len(list(batch)) == len(batch) == 2
    assert batch.to("cpu").tokens_MBS.equal(batch.tokens_MBS)
    assert micro.to("cpu").samples_B.equal(micro.samples_B)
    with pytest.raises(IndexError):
        batch[2]


@settings(max_examples=60, deadline=None)
@given(n=st.integers(1, 40), g=st.integers(1, 17), seed=st.integers(0, 99))
def test_each_sample_comes_once_per_epoch_also_where_it_ends_inside_a_batch(n, g, seed):
    (loader,) = loaders(numbered(n), (1, g, 1), seed=seed)
    seen = [i for batch in islice(loader, 3 * n // g + 1) for i in indices(batch)]
    for epoch in range(len(seen) // n):
        assert sorted(seen[epoch * n : (epoch + 1) * n]) == list(range(n))


def test_epochs_seeds_and_stages_differ():
    def order(seed=0, **cursor):
        (loader,) = loaders(numbered(50), (1, 50, 1), seed=seed, cursor=Cursor(**cursor))
        return tuple(indices(next(loader)))

    orders = {order(), order(seed=1), order(stage=1), order(epoch=1, consumed=50)}
    assert len(orders) == 4
    assert tuple(range(50)) not in orders


@settings(max_examples=60, deadline=None)
@given(n=st.integers(1, 30), before=st.integers(0, 9), ahead=st.integers(0, 3), data=st.data())
def test_a_saved_cursor_continues_exactly_on_any_layout(n, before, ahead, data):
    old, new = (data.draw(st.sampled_from([(1, 6, 1), (2, 1, 3), (3, 2, 1)])) for _ in range(2))
    ranks = loaders(numbered(n), old, prefetch=ahead, cursor=Cursor(stage=1))
    for _ in range(before):
        parts = [next(rank) for rank in ranks]
    saved = json.dumps(ranks[-1].cursor.to_dict())
    assert ranks[0].cursor == Cursor(1, before * 6 // n, before * 6)
    cursor = Cursor.from_dict(json.loads(saved))
    resumed = loaders(numbered(n), new, prefetch=ahead, cursor=cursor)
    for _ in range(3):
        parts, again = [next(rank) for rank in ranks], [next(rank) for rank in resumed]
        for name in FIELDS:
            assert global_rows(parts, name).equal(global_rows(again, name))
    for loader in ranks + resumed:
        loader.close()


def test_the_global_batch_may_change_at_a_cursor():
    data = numbered(40)
    (whole,) = loaders(data, (1, 40, 1))
    (first,) = loaders(data, (1, 6, 1))
    seen = indices(next(first))
    (second,) = loaders(data, (1, 2, 17), cursor=first.cursor)
    assert seen + indices(next(second)) == indices(next(whole))
    assert second.cursor == Cursor(0, 1, 40)


def test_endless_random_tokens_load():
    (loader,) = loaders(RandomTokens(100, 8, seed=0), (1, 2, 2))
    assert not next(loader).tokens_MBS.equal(next(loader).tokens_MBS)


def test_a_numpy_mask_works_and_removes_labels_only():
    (plain,), (masked,) = (
        loaders(numbered(9), (1, 2, 2), target_mask=mask)
        for mask in (None, lambda samples, s: np.tile([True, False, True], (len(samples), 1)))
    )
    want, got = next(plain), next(masked)
    assert got.tokens_MBS.equal(want.tokens_MBS)
    assert (got.labels_MBS[..., 1] == -100).all()
    assert got.labels_MBS[..., ::2].equal(want.labels_MBS[..., ::2])


@pytest.mark.parametrize("layout", [(1, 1, 1), (1, 2, 2), (2, 2, 1), (3, 2, 4), (4, 1, 3)])
def test_validation_reads_every_sample_once_in_order(layout):
    dp, m, b = layout
    data = numbered(10)
    sizes = {"micro_batch_size": b, "microbatches": m, "dp_size": dp}
    ranks = [list(validation_batches(data, **sizes, dp_rank=rank)) for rank in range(dp)]
    g = dp * m * b
    assert {len(batches) for batches in ranks} == {-(-10 // g)}
    rows, labels = [], []
    for parts in zip(*ranks, strict=True):
        assert all(part.tokens_MBS.shape == (m, b, 3) for part in parts)
        rows += global_rows(parts, "samples_MB").tolist()
        labels += global_rows(parts, "labels_MBS").tolist()
    assert rows == list(range(10)) + [-1] * (-10 % g)
    assert labels[:10] == [data.sample(i)[1:].tolist() for i in range(10)]
    assert labels[10:] == [[-100] * 3] * (-10 % g)


def test_validation_takes_a_mask_too():
    sizes = {"micro_batch_size": 2, "microbatches": 2}
    (batch,) = validation_batches(numbered(3), **sizes, target_mask=odd_mask)
    assert (batch.labels_MBS.flatten(0, 1) != -100).sum(1).tolist() == [2, 2, 2, 0]


SIZES = {"micro_batch_size": 2, "microbatches": 2}


@pytest.mark.parametrize("make", [Loader, validation_batches])
def test_wrong_sizes_are_named(make):
    for name in ("micro_batch_size", "microbatches", "dp_size"):
        with pytest.raises(ValueError, match=f"{name} must be at least 1, but 0 was given"):
            make(numbered(3), **{**SIZES, name: 0})
    for rank in (-1, 2):
        with pytest.raises(ValueError, match=f"dp_rank {rank} is not a rank of dp_size 2"):
            make(numbered(3), **SIZES, dp_rank=rank, dp_size=2)
    with pytest.raises(ValueError, match="the dataset holds no samples: at least 1 is needed"):
        make([], **SIZES)


def test_a_cursor_of_another_dataset_is_named():
    with pytest.raises(ValueError, match="says epoch 1 after 40 samples, but with a dataset of 7"):
        Loader(numbered(7), **SIZES, cursor=Cursor(0, 1, 40))


@pytest.mark.parametrize("value", [-1, 1.5, True, "1"])
def test_a_wrong_cursor_is_named(value):
    with pytest.raises(ValueError, match=f"consumed must be an integer .* not {value!r}"):
        Cursor(consumed=value)


@pytest.mark.parametrize("values", [{}, {"stage": 0, "epoch": 0, "consumed": 0, "step": 1}])
def test_a_saved_cursor_with_wrong_keys_is_named(values):
    with pytest.raises(ValueError, match=r"keys \['stage', 'epoch', 'consumed'\], but these were"):
        Cursor.from_dict(values)


def test_a_wrong_mask_is_named():
    for mask in (lambda samples, s: torch.ones(len(samples), s), lambda samples, s: [True]):
        (loader,) = loaders(numbered(9), (1, 2, 2), target_mask=mask)
        with pytest.raises(ValueError, match=r"needed is torch.bool of shape \(4, 3\)"):
            next(loader)


class Ragged:
    """Samples whose length is what `shape` says for their index."""

    def __init__(self, *shapes):
        self.shapes = shapes

    def __len__(self):
        return len(self.shapes)

    def sample(self, i):
        return np.zeros(self.shapes[i], dtype=np.int64)


@pytest.mark.parametrize("shapes", [((4,), (5,)), ((1,), (1,)), ((2, 2), (2, 2))])
def test_samples_of_wrong_shapes_are_named(shapes):
    sizes = {"micro_batch_size": 2, "microbatches": 1}
    with pytest.raises(ValueError, match=r"every sample of a dataset must be \(S \+ 1,\) tokens"):
        next(validation_batches(Ragged(*shapes), **sizes))


RAMP = BatchRampConfig(start=4, increment=4, samples=30)


@pytest.mark.parametrize("layout", [(1, 1), (2, 2), (4, 1), (1, 4)])
def test_a_growing_batch_depends_on_samples_alone(layout):
    """Sizes of the global batch, and resuming within the ramp, on any layout."""
    dp, b = layout
    data, full = numbered(29), 12

    def microbatches(consumed):
        return RAMP.size(consumed, full) // (dp * b)

    ranks = loaders(data, (dp, microbatches, b))
    (plain,) = loaders(data, (1, lambda consumed: RAMP.size(consumed, full), 1))
    sizes, cursors = [], []
    for _ in range(9):
        cursors.append(plain.cursor)
        sizes.append(ranks[0].global_batch)
        want, parts = next(plain), [next(rank) for rank in ranks]
        for name in FIELDS:
            assert global_rows(parts, name).equal(global_rows([want], name))
        assert {rank.cursor for rank in ranks} == {plain.cursor}
    assert sizes == [4, 4, 4, 4, 8, 8, 12, 12, 12]  # 8 from the 15th sample on, 12 from the 30th
    for place, cursor in enumerate(cursors):
        (again,) = loaders(data, (1, microbatches, dp * b), cursor=cursor, prefetch=2)
        with again:
            assert [len(next(again).samples_MB.flatten()) for _ in sizes[place:]] == sizes[place:]


def test_a_ramp_of_an_iterable():
    samples = [[i, i, i] for i in range(40)]
    loader = IterableLoader(
        samples, micro_batch_size=2, microbatches=lambda n: RAMP.size(n, 12) // 2, prefetch=0
    )
    assert [len(batch) * 2 for batch in loader] == [4, 4, 4, 4, 8, 8]
    assert loader.cursor.consumed == 32


@pytest.mark.parametrize(("start", "increment", "full"), [(4, 4, 12), (3, 5, 17), (6, 1, 6)])
def test_a_ramp_ends_at_the_full_size(start, increment, full):
    ramp = BatchRampConfig(start=start, increment=increment, samples=100)
    sizes = [ramp.size(n, full) for n in range(120)]
    assert sizes[0] == start and sizes == sorted(sizes)
    assert set(sizes[100:]) == {full} and max(sizes) == full


def test_a_ramp_of_nothing_is_refused():
    with pytest.raises(ValueError, match="increment: 0 was given; it must be at least 1"):
        BatchRampConfig(start=4, increment=0, samples=30)


def room(rows: int, dp: int, b: int) -> int:
    """Micro-batches that have room for so many rows on so many ranks."""
    return -(-rows // (dp * b))


@pytest.mark.parametrize("dp", [1, 2, 3, 5])
@pytest.mark.parametrize("b", [1, 2, 4])
@pytest.mark.parametrize("grows", [False, True])
@pytest.mark.parametrize("indexed", [False, True])
def test_a_batch_that_ranks_cannot_share_evenly_ends_in_padding(dp, b, grows, indexed):
    data, full = numbered(29), 7

    def size(consumed: int) -> int:
        return full if not grows else min(full, 2 + consumed // 4)

    def made(dp: int, rank: int, b: int) -> Loader | IterableLoader:
        sizes = {"dp_size": dp, "dp_rank": rank, "micro_batch_size": b, "prefetch": 0}
        sizes |= {"microbatches": lambda n: room(size(n), dp, b), "batch": size if grows else full}
        if indexed:
            return Loader(data, target_mask=odd_mask, **sizes)
        return IterableLoader([data.sample(i) for i in range(29)], target_mask=odd_mask, **sizes)

    plain, ranks = made(1, 0, 1), [made(dp, rank, b) for rank in range(dp)]
    for _ in range(4):
        rows = plain.global_batch
        want, parts = next(plain), [next(rank) for rank in ranks]
        assert {len(part) for part in parts} == {room(rows, dp, b)}
        for name in FIELDS:
            assert global_rows(parts, name)[:rows].equal(global_rows([want], name))
        padding = [global_rows(parts, name)[rows:] for name in FIELDS]
        assert all(
            part.eq(-1).all() for part in (padding[3], global_rows(parts, "sources_MB")[rows:])
        )
        assert padding[0].eq(0).all() and padding[1].eq(-100).all()
        assert {rank.cursor for rank in ranks} == {plain.cursor}


@pytest.mark.parametrize("batch", [0, 9])
def test_a_batch_without_room_is_named(batch):
    (loader,) = loaders(numbered(29), (1, 2, 4), batch=batch)
    with pytest.raises(ValueError, match=f"batch of {batch} rows was given, and 1 ranks have room"):
        next(loader)
