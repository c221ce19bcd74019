"""Tables of cases for folders of tokens and for shares: layouts, lengths, batches, resuming."""

import hashlib
import itertools

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

from kenotron_data import (
    Concatenated,
    Cursor,
    CustomSamples,
    Loader,
    Mixture,
    Nanoset,
    TokenFolder,
    TokenWriter,
    hold_out_each,
    validation_batches,
)

WEIGHTS = {"a": 0.6, "b": 0.3, "c": 0.1}
DP = (1, 2, 3, 4)
ROWS = 12
"""Rows of a global batch: every dp above divides it."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Three folders of two files; tokens tell folder and place."""
    root = tmp_path_factory.mktemp("folders")
    for number, name in enumerate(WEIGHTS):
        for part in range(2):
            with TokenWriter(root / name / f"{part}.ds", 2, "made-up") as writer:
                start = 20_000 * number + 7 * part
                writer.add([((start + np.arange(30_000)) % 60_000).astype(np.uint16)])
    return root


def mixture(folders, sequence):
    sources = {name: Nanoset(TokenFolder(folders / name), sequence) for name in WEIGHTS}
    return Mixture(sources, WEIGHTS)


def loader(data, dp_rank, dp_size, consumed=0, **options):
    epoch = consumed // len(data)
    return Loader(
        data, micro_batch_size=ROWS // dp_size, microbatches=1, dp_rank=dp_rank, dp_size=dp_size,
        cursor=Cursor(0, epoch, consumed), **options,
    )  # fmt: skip


def hashed(batch):
    parts = (batch.tokens_MBS, batch.labels_MBS, batch.positions_MBS)
    return hashlib.sha256(b"".join(part.numpy().tobytes() for part in parts)).hexdigest()


@pytest.mark.parametrize("sequence", [512, 8192])
@pytest.mark.parametrize("steps", [500, 10_000])
def test_shares_over_a_whole_training_are_the_weights(folders, sequence, steps):
    data = mixture(folders, sequence)
    assert len(data) == 3 * 2 * (30_000 // (sequence + 1))
    order = data.order(np.arange(steps * ROWS), 42, 0)
    counts = np.bincount(data.source_of(order), minlength=3)
    for count, weight in zip(counts, WEIGHTS.values(), strict=True):
        assert abs(count - weight * steps * ROWS) < 1 + steps * ROWS / 65_536
    assert np.array_equal(order, mixture(folders, sequence).order(np.arange(len(order)), 42, 0))


@pytest.mark.parametrize("dp", DP)
@pytest.mark.parametrize("sequence", [512, 8192])
def test_batches_are_equal_on_equal_ranks_and_differ_over_data_ranks(folders, sequence, dp):
    seen = []
    for rank in range(dp):
        with (
            loader(mixture(folders, sequence), rank, dp) as one,
            loader(mixture(folders, sequence), rank, dp) as twin,  # another tp or pp rank
        ):
            for a, b in itertools.islice(zip(one, twin, strict=True), 3):
                assert a.tokens_MBS.shape == (1, ROWS // dp, sequence)
                assert torch.equal(a.tokens_MBS[..., 1:], a.labels_MBS[..., :-1])
                assert hashed(a) == hashed(b)
                seen.append(hashed(a))
    assert len(set(seen)) == 3 * dp


@pytest.mark.parametrize("dp", DP)
@pytest.mark.parametrize("skipped", [20, 5555])
def test_the_first_batch_after_skipping_is_the_next_one(folders, skipped, dp):
    data = mixture(folders, 512)
    places = np.arange(skipped * ROWS, (skipped + 1) * ROWS)
    wanted = [data.sample(i) for i in data.order(places, 42, 0).tolist()]
    for rank in range(dp):
        with loader(data, rank, dp, skipped * ROWS, prefetch=0) as resumed:
            batch = next(resumed)
        rows = wanted[rank * ROWS // dp : (rank + 1) * ROWS // dp]
        assert batch.tokens_MBS[0].tolist() == [row[:-1].tolist() for row in rows]
    if skipped < 100:
        with loader(data, 0, dp) as whole, loader(data, 0, dp, skipped * ROWS) as resumed:
            for _ in range(skipped):
                next(whole)
            assert hashed(next(whole)) == hashed(next(resumed))


@pytest.mark.parametrize("micro", [1, 5, 32])
@pytest.mark.parametrize("dp", [1, 2, 4, 8])
@pytest.mark.parametrize("shared", [True, False])
def test_every_batch_has_its_shares_and_no_sample_twice(micro, dp, shared):
    """Shares of one's own, or (without) those of the sources' sizes: .1, .2 and .7."""
    sizes = {"a": 1000, "b": 2000, "c": 7000}
    # Sample i of a source is (number of the source, i, i).
    sources = {
        name: CustomSamples(lambda i, number=number: [number, i, i], samples=size)
        for number, (name, size) in enumerate(sizes.items())
    }
    data = Mixture(sources, {"a": 0.5, "b": 0.2, "c": 0.3} if shared else None)
    shares = np.array(list(data.shares.values()))
    assert shares.sum() == 1 and (shares > 0).all()
    if not shared:
        assert shares == pytest.approx([0.1, 0.2, 0.7], abs=1e-4)
    sizes_of = {"micro_batch_size": micro, "microbatches": 1, "dp_size": dp, "prefetch": 0}
    loaders = [Loader(data, dp_rank=rank, **sizes_of) for rank in range(dp)]
    again = [Loader(data, dp_rank=rank, **sizes_of) for rank in range(dp)]
    seen: set[tuple[int, int]] = set()
    for _ in range(3):
        batches = [next(one) for one in loaders]
        rows = torch.cat([batch.tokens_MBS[0] for batch in batches]).tolist()
        assert rows == torch.cat([next(one).tokens_MBS[0] for one in again]).tolist()
        assert len(rows) == micro * dp
        counts = np.bincount([source for source, _ in rows], minlength=3)
        assert (abs(counts - shares * len(rows)) < 2).all()
        if len(rows) * shares.min() >= 2:
            assert counts.all()
        keys = {(source, i) for source, i in rows}
        assert len(keys) == len(rows) and not keys & seen
        seen |= keys


def test_the_index_of_samples_of_several_sources_is_theirs_in_a_row():
    parts = {
        name: CustomSamples([[number, i, 0] for i in range(size)])
        for number, (name, size) in enumerate({"a": 3, "b": 1, "c": 4}.items())
    }
    data = Concatenated(parts)
    pairs = [tuple(data.sample(i)[:2].tolist()) for i in range(len(data))]
    assert pairs == [(0, 0), (0, 1), (0, 2), (1, 0), (2, 0), (2, 1), (2, 2), (2, 3)]
    assert data.source_of(np.arange(8)).tolist() == [0, 0, 0, 1, 2, 2, 2, 2]


def test_losses_of_sources_add_up_to_the_loss_over_all_on_any_layout():
    parts = {
        name: CustomSamples([[(7 * i + j * (n + 1)) % 11 for j in range(9)] for i in range(20)])
        for n, name in enumerate("ab")
    }
    _, held = hold_out_each(parts, 0.3)
    table = torch.randn(11, 11, generator=torch.Generator().manual_seed(0))
    found = []
    for dp in (1, 2, 4):
        sums, counts = torch.zeros(2, dtype=torch.float64), torch.zeros(2)
        for rank in range(dp):
            for batch in validation_batches(
                Concatenated(held), micro_batch_size=4 // dp, microbatches=2, dp_rank=rank,
                dp_size=dp,
            ):  # fmt: skip
                losses = cross_entropy(
                    table[batch.tokens_MBS].movedim(-1, 1), batch.labels_MBS, reduction="none"
                )
                for number in (0, 1):
                    rows = batch.sources_MB == number
                    sums[number] += losses[rows].double().sum()
                    counts[number] += (batch.labels_MBS[rows] != -100).sum()
        found.append((sums / counts).tolist())
        assert counts.tolist() == [6 * 8, 6 * 8]
    assert found[1] == pytest.approx(found[0])
    assert found[2] == pytest.approx(found[0])
