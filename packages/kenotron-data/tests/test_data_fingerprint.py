"""Fingerprints: the same for the same tokens wherever they are, another one for others."""

import shutil

import numpy as np
import pytest

from kenotron_data import (
    Concatenated,
    CustomSamples,
    Fingerprint,
    Mixture,
    Nanoset,
    PackedTokens,
    RandomTokens,
    Subset,
    SupervisedExamples,
    TokenFolder,
    TokenWriter,
    fingerprint,
)
from kenotron_data.fingerprints import BLOCK, BLOCKS, WHOLE, _add_stream


def folder(path, files, token_bytes=2):
    path.mkdir(parents=True)
    for number, tokens in enumerate(files):
        with TokenWriter(path / f"{number:03}.ds", token_bytes=token_bytes) as writer:
            writer.add([np.asarray(tokens)])
    return path


@pytest.fixture
def tokens():
    return np.random.default_rng(0).integers(0, 500, 4000)


def test_where_and_how_tokens_are_kept_does_not_count(tmp_path, tokens):
    first = folder(tmp_path / "a", [tokens[:1500], tokens[1500:]])
    wide = folder(tmp_path / "b", [tokens[:1500], tokens[1500:]], token_bytes=4)
    moved = shutil.copytree(first, tmp_path / "elsewhere" / "c")
    found = {fingerprint(Nanoset(TokenFolder(path), 32)) for path in (first, wide, moved)}
    assert len(found) == 1 and found.pop().tokens == 4000
    one = folder(tmp_path / "one", [tokens])
    streams = [TokenFolder(first), TokenFolder(one), tokens.astype(np.uint16), tokens]
    assert len({fingerprint(PackedTokens(stream, 32)) for stream in streams}) == 1
    # Windows of a Nanoset end with their file: other samples.
    assert len({fingerprint(Nanoset(TokenFolder(path), 32)) for path in (first, one)}) == 2


def test_every_token_of_a_small_data_set_counts(tokens):
    before = fingerprint(PackedTokens(tokens, 32))
    for place in (0, 1, 1999, 3999):
        other = tokens.copy()
        other[place] += 1
        found = fingerprint(PackedTokens(other, 32))
        assert found.checksum != before.checksum
        said = before.difference(found)
        assert said == "both have 124 samples and 4,000 tokens, but the tokens are others"
    said = before.difference(fingerprint(PackedTokens(tokens[:-1000], 32)))
    assert said == "124 samples and 4,000 tokens, then 93 samples and 3,000 tokens"


def test_of_a_large_one_some_blocks_are_read():
    reads = []

    class Large:
        """A stream of 10**13 tokens."""

        def __len__(self):
            return 10**13

        def windows(self, starts, width):
            reads.append((starts.tolist(), width))
            return np.zeros((len(starts), width), dtype=np.uint16)

    class Hash:
        def update(self, data):
            assert len(data) <= 4 * BLOCK * BLOCKS

    assert _add_stream(Hash(), Large(), 1) == 10**13
    [(starts, width)] = reads
    assert len(starts) == BLOCKS and width == BLOCK
    assert starts[0] == 0 and starts[-1] == 10**13 - BLOCK and sorted(starts) == starts
    _add_stream(Hash(), Large(), 100)  # one of a hundred sources
    assert len(reads[1][0]) == 2
    data = np.zeros(WHOLE + 1, dtype=np.uint16)
    before = fingerprint(PackedTokens(data, 1024))
    for place in (0, 500, WHOLE):
        data[place] = 1
        assert fingerprint(PackedTokens(data, 1024)) != before
        data[place] = 0


def test_data_sets_made_of_others(tokens):
    a, b = PackedTokens(tokens[:2000], 32), PackedTokens(tokens[2000:], 32)
    made = [
        Concatenated({"a": a, "b": b}),
        Concatenated({"b": b, "a": a}),
        Mixture({"a": a, "b": b}),
        Mixture({"a": a, "b": b}, {"a": 1, "b": 3}),
        Subset(a, 0, 50),
        Subset(a, 1, 51),
    ]
    found = [fingerprint(each) for each in made]
    assert len({each.checksum for each in found}) == len(made)
    assert [each.tokens for each in found] == [4000] * 4 + [2000] * 2
    named = fingerprint(Concatenated({"x/a": a, "y/b": b}))
    assert named == found[0]  # names are paths, which may change


def test_synthetic_and_own_data():
    assert fingerprint(RandomTokens(100, 8, 1)) == fingerprint(RandomTokens(100, 8, 1))
    assert fingerprint(RandomTokens(100, 8, 1)) != fingerprint(RandomTokens(100, 8, 2))
    asked = []

    def own(i):
        asked.append(i)
        if i == 999:
            raise OSError("no such sample")
        return [i, i + 1, i + 2]

    found = fingerprint(CustomSamples(own, samples=1000))
    assert (found.samples, found.tokens) == (1000, 2000)
    assert len(asked) <= 16 and asked[0] == 0 and asked[-1] == 999
    other = fingerprint(CustomSamples(lambda i: [i, i + 1, i + 3], samples=1000))
    assert other != found


def test_examples_count_with_what_is_learned():
    class Rows(list):
        def describe(self, place):
            return f"row {place}"

    class Encoder:
        columns = ("text",)

        def __init__(self, learned):
            self.learned = learned

        def encode(self, rows):
            return [
                [(np.array([1, 2, 3], dtype=np.uint32), np.array([False, *self.learned]))]
                for _ in rows
            ]

    rows = Rows([(0, ("a",)), (1, ("b",))])
    found = [
        fingerprint(SupervisedExamples([rows], Encoder(learned), 8))
        for learned in ([True, True], [False, True], [True, True])
    ]
    assert found[0] == found[2] != found[1] and found[0].tokens == 6


def test_it_survives_json_and_another_method_is_not_compared():
    found = fingerprint(RandomTokens(100, 8, 1))
    assert Fingerprint.from_dict(found.to_dict()) == found
    later = Fingerprint(1, 1, "x", method=found.method + 1)
    assert found.difference(later) == ""
    with pytest.raises(ValueError, match="no fingerprint of data: {'samples': 1}"):
        Fingerprint.from_dict({"samples": 1})
