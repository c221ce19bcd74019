"""Rows of files come in order, cut anyhow; what is wrong with one is said with file and row."""

import gzip
import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from kenotron_data.json_lines import JsonLines
from kenotron_data.source_files import file_pieces
from kenotron_data.tables import ParquetRows
from kenotron_data.text_pieces import first_rows, grouped


def texts(pieces):
    return [text for piece in pieces for _, (text,) in piece]


@settings(max_examples=80, deadline=None)
@given(
    rows=st.lists(st.text(max_size=8), max_size=12),
    size=st.integers(1, 60),
    ends=st.lists(st.sampled_from(["\n", "\r\n", "\n\n", "\n  \n"]), min_size=12, max_size=12),
    last=st.booleans(),
    mark=st.booleans(),
)
def test_json_lines_cut_anywhere_give_each_row_once(rows, size, ends, last, mark, tmp_path_factory):
    path = tmp_path_factory.mktemp("json") / "a.jsonl"
    text = "".join(
        json.dumps({"text": row}, ensure_ascii=False) + end
        for row, end in zip(rows, ends, strict=False)
    )
    path.write_bytes(
        (b"\xef\xbb\xbf" if mark else b"") + (text if last else text.rstrip()).encode()
    )
    whole = JsonLines(path=path, columns=("text",))
    pieces = whole.cut(size)
    assert texts([whole]) == texts(pieces) == rows
    assert [whole.count(), sum(piece.count() for piece in pieces)] == [len(rows)] * 2
    assert texts(first_rows(pieces, 3)) == rows[:3]
    assert sum(piece.size for piece in pieces) == path.stat().st_size


def test_compressed_lines_are_read_whole(tmp_path, jsonl):
    data = jsonl([{"text": str(i)} for i in range(9)]).read_bytes()
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(data))
    frames = [zstandard.compress(data[:40]), zstandard.compress(data[40:])]
    (tmp_path / "a.jsonl.zst").write_bytes(b"".join(frames))
    for name in ("a.jsonl.gz", "a.jsonl.zst"):
        pieces = grouped(file_pieces(tmp_path / name), 10)[0]
        assert texts(pieces) == [str(i) for i in range(9)]
        assert texts(first_rows(pieces, 4)) == ["0", "1", "2", "3"]


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_truncated_and_corrupt_compressed_files_are_named(tmp_path, suffix):
    data = b'{"text": "x"}\n' * 999
    packed = gzip.compress(data) if suffix == ".gz" else zstandard.compress(data)
    path = tmp_path / f"a.jsonl{suffix}"
    for wrong in (packed[:-3], b"no archive", packed[:20] + b"\xff" * 20 + packed[40:]):
        path.write_bytes(wrong)
        with pytest.raises(ValueError, match=rf"a\.jsonl\{suffix}': the (gzip|zstd) file is"):
            texts(file_pieces(path))


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('{"text": "b"', "line 3: this is no JSON"),
        ("[1]", "line 3: this is a JSON list; each line must be"),
        ('{"body": "b"}', "line 3: there is no column 'text'; the line has 'body'"),
        ("[" * 100_000, "line 3: this is no JSON"),
        ("{}", "line 3: there is no column 'text'; the line has none"),
    ],
)
def test_a_wrong_line_is_named(tmp_path, line, words):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "a"}\n\n' + line + "\n")
    for size in (10**6, 5):  # also where the line is in a piece that begins later
        with pytest.raises(ValueError) as caught:
            texts(file_pieces(path)[0].cut(size))
        assert f"a.jsonl', {words}" in str(caught.value)


def table(path, rows, groups=3):
    columns = {"n": range(rows), "text": [f"t{i}" for i in range(rows)]}
    pa.parquet.write_table(pa.table(columns), path, row_group_size=groups)
    return path


def test_parquet_is_cut_between_row_groups(tmp_path):
    whole = ParquetRows(path=table(tmp_path / "a.parquet", 10), columns=("text",))
    expected = [f"t{i}" for i in range(10)]
    pieces = whole.cut(1)
    assert len(pieces) == 4
    assert texts(pieces) == texts([whole]) == texts(whole.cut(10**6)) == expected
    assert [place for piece in pieces for place, _ in piece] == list(range(10))
    assert texts(first_rows(pieces, 5)) == expected[:5]
    assert pieces[2].describe(7) == f"{str(whole.path)!r}, row 7"
    both = ParquetRows(path=whole.path, columns=("text", "n"))
    assert next(iter(both)) == (0, ("t0", 0))


def test_wrong_parquet_is_named(tmp_path):
    path = table(tmp_path / "a.parquet", 4)
    with pytest.raises(ValueError, match=r"a\.parquet': there is no column 'body'; .* 'n', 'text'"):
        texts(file_pieces(path, ["body"]))
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(ValueError, match=r"a\.parquet': this is no parquet file"):
        texts(file_pieces(path))


def test_a_folder_gives_tables_before_text_and_keeps_their_order(tmp_path, jsonl):
    (tmp_path / "README.md").write_text("no data")
    (tmp_path / "empty.txt").write_text("")
    assert texts(file_pieces(tmp_path)) == ["no data"]
    jsonl([{"text": "2"}], "b/x.json")
    jsonl([{"text": "1"}], "a/y.jsonl")
    table(tmp_path / "c.parquet", 1)
    jsonl([{"text": "no"}], ".hidden/y.jsonl")
    assert texts(file_pieces(tmp_path)) == ["1", "2", "t0"]
    assert texts(file_pieces(tmp_path, glob_pattern="*/y.*")) == ["1"]
    with pytest.raises(ValueError, match=r"holds no data that match '\*\.gz'"):
        file_pieces(tmp_path, glob_pattern="*.gz")
    with pytest.raises(FileNotFoundError, match="no data at"):
        file_pieces(tmp_path / "nowhere")


def test_splits_are_words_of_paths(tmp_path, jsonl):
    for name in ("train-0.jsonl", "sub/test_0.jsonl", "dev.jsonl", "contest.jsonl"):
        jsonl([{"text": name}], name)
    found = {s: texts(file_pieces(tmp_path, split=s)) for s in ("train", "test", "validation")}
    assert found == {
        "train": ["train-0.jsonl"],
        "test": ["sub/test_0.jsonl"],
        "validation": ["dev.jsonl"],
    }
    with pytest.raises(ValueError, match="has no split 'test': one file"):
        file_pieces(tmp_path / "dev.jsonl", split="test")
    for name in ("train-0.jsonl", "dev.jsonl", "sub/test_0.jsonl"):
        (tmp_path / name).unlink()
    assert texts(file_pieces(tmp_path, split="train")) == ["contest.jsonl"]
    with pytest.raises(ValueError, match="has no split 'test'; its files name: train"):
        file_pieces(tmp_path, split="test")


def test_an_identity_follows_the_data(tmp_path, jsonl):
    path = jsonl([{"text": "a"}])
    first = [piece.identity() for piece in file_pieces(path)]
    assert first == [piece.identity() for piece in file_pieces(path)]
    assert first != [piece.identity() for piece in file_pieces(path, ["body"])]
    jsonl([{"text": "b"}, {"text": "c"}])
    assert first != [piece.identity() for piece in file_pieces(path)]


def test_small_files_share_a_part(tmp_path):
    rng = np.random.default_rng(0)
    for number in range(20):
        (tmp_path / f"{number:02}.txt").write_text("x" * int(rng.integers(1, 50)))
    groups = grouped(file_pieces(tmp_path), 60)
    assert texts([piece for group in groups for piece in group]) == texts(file_pieces(tmp_path))
    assert len(groups) < 20
    assert all(sum(piece.size for piece in group) <= 60 for group in groups)
