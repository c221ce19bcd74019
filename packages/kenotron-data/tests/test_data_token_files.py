"""Token files keep every token and every document, and what is wrong with one is said."""

import os
import pickle
import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kenotron_data import TokenFile, TokenFolder, TokenWriter, tokenizer_of_folder
from kenotron_data.token_file import TokenMetadata

DOCUMENTS = [[5, 6, 7], [], [8], [65_535, 0]]


def write(path, documents=DOCUMENTS, token_bytes=2, name="gpt2"):
    with TokenWriter(path, token_bytes, name) as writer:
        writer.add(documents)
    return path


def lists(documents):
    return [document.tolist() for document in documents]


def test_the_bytes_are_the_layout_of_datatrove(tmp_path):
    path = write(tmp_path / "a.ds")
    assert path.read_bytes() == struct.pack("<6H", 5, 6, 7, 8, 65_535, 0)
    assert (tmp_path / "a.ds.index").read_bytes() == struct.pack("<4Q", 3, 3, 4, 6)
    assert (tmp_path / "a.ds.metadata").read_bytes() == b"gpt2|2\n6\n6.00 T"
    assert sorted(os.listdir(tmp_path)) == ["a.ds", "a.ds.index", "a.ds.metadata"]


@pytest.mark.parametrize(
    ("tokens", "text"),
    [(0, "0.00 T"), (5, "5.00 T"), (999, "999 T"), (1000, "1.00 kT"), (12_345, "12.3 kT")]
    + [(99_950, "100 kT"), (999_999, "1.00 MT"), (1_234_567, "1.23 MT"), (10**10, "10.0 GT")],
)
def test_the_number_for_people_is_that_of_datatrove(tokens, text):
    assert TokenMetadata("a|b", 4, tokens).to_text() == f"a|b|4\n{tokens}\n{text}"


def test_an_unknown_tokenizer_is_written_as_datatrove_does(tmp_path):
    path = write(tmp_path / "a.ds", name="")
    assert (tmp_path / "a.ds.metadata").read_text().startswith("Unknown Tokenizer|2|2\n")
    assert TokenFile(path).tokenizer == ""


@settings(max_examples=60, deadline=None)
@given(
    documents=st.lists(st.lists(st.integers(0, 2**32 - 1), max_size=6), min_size=1, max_size=8),
    cuts=st.lists(st.integers(0, 8), max_size=3),
    suffix=st.sampled_from([".ds", ".bin"]),
)
def test_documents_come_back(documents, cuts, suffix, tmp_path_factory):
    path = tmp_path_factory.mktemp("tokens") / f"a{suffix}"
    writer = TokenWriter(path, 4, "x|y")
    bounds = [0, *sorted(cuts), len(documents)]
    for start, stop in zip(bounds, bounds[1:], strict=False):
        writer.add(np.array(d, dtype=np.uint32) for d in documents[start:stop])
    if not any(documents):
        with pytest.raises(ValueError, match="no token was added"):
            writer.close()
        assert not list(path.parent.iterdir())
        return
    writer.close()
    file = TokenFile(path)
    assert lists(file) == documents
    assert file.tokens.tolist() == sum(documents, [])
    assert (file.tokenizer, file.token_bytes, file.documents) == ("x|y", 4, len(documents))
    places = [number for number, document in enumerate(documents) for _ in document]
    assert [file.document_at(i) for i in range(len(file))] == places
    file.verify(2**32)


def test_more_than_a_block_is_written_whole(tmp_path):
    documents = [np.full(700_000, n, dtype=np.uint16) for n in range(4)]
    file = TokenFile(write(tmp_path / "a.ds", documents))
    assert [(len(d), int(d.min()), int(d.max())) for d in file] == [
        (700_000, n, n) for n in range(4)
    ]


def test_what_is_read_cannot_be_changed_and_holds_no_descriptor(tmp_path):
    path = write(tmp_path / "a.ds")
    before = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0
    files = [TokenFile(path) for _ in range(20)]
    if before:
        assert len(os.listdir("/proc/self/fd")) == before
    with pytest.raises(ValueError, match="read-only"):
        files[0].tokens[0] = 1


def test_a_pickled_file_is_mapped_anew(tmp_path):
    file = TokenFile(write(tmp_path / "a.ds", [np.zeros(100_000, dtype=np.uint16)]))
    data = pickle.dumps(file)
    assert len(data) < 1000
    assert len(pickle.loads(data)) == 100_000


def test_a_flat_file_without_a_note_is_one_document(tmp_path):
    np.arange(5, dtype=np.uint32).tofile(tmp_path / "a.bin")
    file = TokenFile(tmp_path / "a.bin", token_bytes=4)
    assert lists(file) == [[0, 1, 2, 3, 4]]
    assert file.documents == 1


def test_the_size_of_a_token_follows_from_the_index(tmp_path):
    path = write(tmp_path / "a.ds", token_bytes=4)
    (tmp_path / "a.ds.metadata").unlink()
    assert TokenFile(path).token_bytes == 4
    (tmp_path / "a.ds.index").unlink()
    with pytest.raises(ValueError, match=r"a\.ds': neither metadata nor an index .* give token_by"):
        TokenFile(path)


def cut(path, size):
    path.write_bytes(path.read_bytes()[:size])


@pytest.mark.parametrize(
    ("harm", "sentence"),
    [
        (lambda p: p.write_bytes(b""), r"a\.ds': the file is empty"),
        (lambda p: cut(p, 11), r"a\.ds': 11 bytes are no whole number of tokens of 2 bytes"),
        (lambda p: cut(p, 10), r"a\.ds': the file holds 5 tokens, but its metadata says 6"),
        (lambda p: cut(p.with_name("a.ds.index"), 31), r"index': 31 bytes are no whole number of"),
        (lambda p: cut(p.with_name("a.ds.index"), 24), r"ends the last of 3 documents at 4"),
        (lambda p: cut(p.with_name("a.ds.index"), 0), r"ends the last of 0 documents at 0"),
        (lambda p: cut(p.with_name("a.ds.metadata"), 0), r"metadata': line 1 must be 'tokenizer"),
        (lambda p: cut(p.with_name("a.ds.metadata"), 6), r"line 2 must be the number of tokens"),
        (
            lambda p: p.with_name("a.ds.metadata").write_text(f"a|2\n{'9' * 5000}\n"),
            r"a\.ds\.metadata': line 2 must be the number of tokens, but it is '9{19}'",
        ),
        (lambda p: p.with_name("a.ds.metadata").write_bytes(b"\xff"), "the metadata is not UTF-8"),
        (lambda p: p.unlink(), r"a\.ds': there is no such file"),
    ],
)
def test_a_harmed_file_is_named_with_the_rule(harm, sentence, tmp_path):
    path = write(tmp_path / "a.ds")
    harm(path)
    with pytest.raises((ValueError, FileNotFoundError), match=sentence):
        TokenFile(path)


@pytest.mark.parametrize("note", ["", "[]", '{"tokens": 6}', '{"dtype": "int8", "tokens": 6}'])
def test_a_harmed_note_is_named(note, tmp_path):
    path = write(tmp_path / "a.bin")
    (tmp_path / "a.bin.json").write_text(note)
    with pytest.raises(ValueError, match=r"a\.bin\.json': a note of tokens is a json object with"):
        TokenFile(path)


def test_a_size_that_contradicts_is_named(tmp_path):
    path = write(tmp_path / "a.ds")
    with pytest.raises(ValueError, match="token_bytes 4 was given, but its metadata says 2"):
        TokenFile(path, token_bytes=4)
    with pytest.raises(ValueError, match="token_bytes must be 2 or 4, but 3 was given"):
        TokenFile(path, token_bytes=3)


def test_a_corrupt_index_and_a_foreign_token_are_found(tmp_path):
    path = write(tmp_path / "a.ds")
    file = TokenFile(path)
    with pytest.raises(ValueError, match=r"document 3: token 65535 at place 4 is outside .* 50000"):
        file.verify(50_000)
    (tmp_path / "a.ds.index").write_bytes(struct.pack("<4Q", 3, 5, 4, 6))
    corrupt = TokenFile(path)
    for read in (corrupt.verify, lambda: corrupt.document(2)):
        with pytest.raises(ValueError, match="index is corrupt: document 2 ends before it starts"):
            read()
    with pytest.raises(IndexError, match="there is no document 4, there are 4"):
        file.document(4)


@pytest.mark.parametrize(
    ("document", "sentence"),
    [
        ([1, 65_536], r"document 1: id 65536 at place 1 is not in \[0, 65536\)"),
        ([-1], r"document 1: id -1 at place 0"),
        ([1.5], "document 1: a document is one dimension of integer ids, but float64"),
        ([[1]], "document 1: a document is one dimension"),
    ],
)
def test_a_document_that_does_not_fit_is_named_and_leaves_nothing(document, sentence, tmp_path):
    with pytest.raises(ValueError, match=sentence):
        write(tmp_path / "a.ds", [[1], document])
    assert not list(tmp_path.iterdir())


def test_a_vocabulary_limits_the_ids(tmp_path):
    writer = TokenWriter(tmp_path / "a.ds", 2, vocab_size=100)
    with pytest.raises(ValueError, match=r"document 1: id 100 at place 0 is not in \[0, 100\)"):
        writer.add([[99], [100]])
    writer.add([[7]])
    writer.close()
    assert lists(TokenFile(tmp_path / "a.ds")) == [[99], [7]]


def test_a_writer_is_atomic(tmp_path):
    writer = TokenWriter(tmp_path / "a.ds", 2)
    writer.add([[1, 2]])
    with pytest.raises(FileNotFoundError, match="holds no"):
        TokenFolder(tmp_path)
    again = TokenWriter(tmp_path / "a.ds", 2)  # what a killed process left is written over
    again.add([[3]])
    again.close()
    again.close()
    assert lists(TokenFile(tmp_path / "a.ds")) == [[3]]
    with pytest.raises(ValueError, match="this writer is closed"):
        again.add([[4]])
    writer.abort()
    assert lists(TokenFile(tmp_path / "a.ds")) == [[3]]
    with pytest.raises(FileExistsError, match=r"a\.ds': the file exists"):
        TokenWriter(tmp_path / "a.ds", 2)


def test_wrong_arguments_of_a_writer_are_named(tmp_path):
    for path, size, name in (("a.txt", 2, ""), ("a.ds", 3, ""), ("a.ds", 2, "a\nb")):
        with pytest.raises(ValueError, match=r"\*\.ds or|must be 2 or 4|more than one line"):
            TokenWriter(tmp_path / path, size, name)


def test_a_folder_is_one_source_in_the_order_of_names(tmp_path):
    write(tmp_path / "b.ds", [[4], [5, 6]])
    write(tmp_path / "a.ds", [[1, 2], [3]])
    write(tmp_path / "sub" / "c.ds", [[7]])
    write(tmp_path / ".hidden.ds", [[9]])
    folder = TokenFolder(tmp_path)
    assert lists(folder) == [[1, 2], [3], [4], [5, 6]]
    assert (len(folder), folder.documents) == (6, 4)
    assert lists([folder.document(3)]) == [[5, 6]]
    assert lists(TokenFolder(tmp_path, recursive=True))[-1] == [7]
    assert pickle.loads(pickle.dumps(folder)).offsets.tolist() == [0, 3, 6]
    with pytest.raises(IndexError, match="there is no document 4"):
        folder.document(4)


def test_files_may_be_shuffled_as_nanotron_does(tmp_path):
    for number in range(5):
        write(tmp_path / f"{number}.ds", [[number]])
    order = np.random.default_rng(42).permutation(5).tolist()
    assert [d.tolist()[0] for d in TokenFolder(tmp_path, shuffle_files=42)] == order


def test_files_of_a_folder_must_be_alike(tmp_path):
    write(tmp_path / "a.ds")
    write(tmp_path / "b.ds", name="llama")
    with pytest.raises(ValueError, match=r"b\.ds': its tokenizer is 'llama', but that of .*a\.ds"):
        TokenFolder(tmp_path)
    with pytest.raises(FileNotFoundError, match="there is no such folder"):
        TokenFolder(tmp_path / "nowhere")


def test_a_folder_says_its_tokenizer_without_being_mapped(tmp_path):
    write(tmp_path / "b.ds", name="later")
    write(tmp_path / "a.ds", name="gpt2").write_bytes(b"")
    assert tokenizer_of_folder(tmp_path) == "gpt2"
    assert tokenizer_of_folder(tmp_path / "none") == ""
    (tmp_path / "a.ds.metadata").write_text("?")
    with pytest.raises(ValueError, match=r"a\.ds\.metadata': line 1 must be 'tokenizer\|2'"):
        tokenizer_of_folder(tmp_path)
