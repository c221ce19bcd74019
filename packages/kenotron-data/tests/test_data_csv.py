"""A table of text is read by its columns, row by row."""

import gzip
import pickle

import numpy as np
import pytest

from kenotron_data.config import PretrainDatasetsConfig, SFTDatasetsConfig
from kenotron_data.csv_rows import CsvRows
from kenotron_data.hub import cached_tokens
from kenotron_data.sft import supervised
from kenotron_data.source_files import file_pieces
from kenotron_data.tokenizer import ByteTokens

TABLE = '\ufeffid,text\r\n1,alpha\r\n2,"beta, and\r\n""gamma"""\r\n\r\n3,\r\n'
BETA = 'beta, and\r\n"gamma"'


def read(path, *columns, **more):
    (piece,) = file_pieces(path, columns, **more)
    return list(piece)


def test_rows_of_a_table_by_hand(tmp_path):
    path = tmp_path / "a.csv"
    path.write_bytes(TABLE.encode())
    assert read(path, "text") == [(2, ("alpha",)), (4, (BETA,)), (6, ("",))]
    assert read(path, "text", "id", optional=("tools",))[0] == (2, ("alpha", "1", None))
    (piece,) = file_pieces(path, ("text",))
    assert piece.count() == 3 and list(piece.first(2).first(9)) == read(path, "text")[:2]
    assert piece.cut(1) == [piece] and pickle.loads(pickle.dumps(piece)) == piece
    assert piece.describe(4) == f"{str(path)!r}, line 4" and piece.size == len(TABLE.encode())
    assert piece.identity() != CsvRows(path=path, columns=("id",)).identity()
    with gzip.open(tmp_path / "b.TSV.gz", "wt") as file:
        file.write("text\tid\nalpha, beta\t1\n")
    assert read(tmp_path / "b.TSV.gz", "text") == [(2, ("alpha, beta",))]
    assert [str(piece.path)[-5:] for piece in file_pieces(tmp_path)] == ["a.csv", "SV.gz"]


def test_a_table_is_trained_on_by_its_column(tmp_path):
    path = tmp_path / "a.csv"
    long = "x" * 200_000  # longer than what Python's reader takes by default
    path.write_text(f"id,text\n1,alpha\n2,{long}\n", encoding="utf-8")
    config = PretrainDatasetsConfig(hf_dataset_or_datasets=str(path))
    tokens = cached_tokens(config, ByteTokens(), tmp_path / "cache")
    assert tokens.documents == 2
    assert np.array_equal(tokens.document(0), [*b"alpha", 256])
    assert np.array_equal(tokens.document(1), [*long.encode(), 256])
    path.write_text("prompt,completion\nab,cd\n", encoding="utf-8")
    data = supervised(SFTDatasetsConfig(hf_dataset_or_datasets=str(path)), ByteTokens(), 8)
    assert data.sample(0).tolist() == [*b"abcd", 256, 0, 0, 0, 0]


@pytest.mark.parametrize(
    "data, words",
    [
        (b"id,body\n1,a\n", "there is no column 'text'; its first line names 'id', 'body'"),
        (b"", "there is no column 'text'; its first line names none; text_column_name chooses"),
        (b"text,id,text\n1,a,b\n", "its first line names 'text' twice"),
        (b"id,text\n1,a\n2,b,c\n", "line 3: this row has 3 values, the first line 2: quote"),
        (b'id,text\n1,"a"b\n', "this is no table"),
        (b"id,text\n1,\xff\n", "is not UTF-8 text"),
    ],
)
def test_what_is_wrong_with_a_table_is_named(tmp_path, data, words):
    path = tmp_path / "a.csv"
    path.write_bytes(data)
    with pytest.raises(ValueError, match=rf"a\.csv'.*{words}"):
        read(path, "text")


def test_a_corrupt_archive_of_a_table_is_named(tmp_path):
    path = tmp_path / "a.csv.gz"
    path.write_bytes(gzip.compress(b"text\nalpha\n")[:-6])
    with pytest.raises(ValueError, match=r"a\.csv\.gz': the gzip file is corrupt"):
        read(path, "text")
