"""Tokenised files hold the documents one after the other, whatever made them and was killed."""

import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from tokenizers import Tokenizer

from kenotron_data import TokenFolder, TokenWriter
from kenotron_data.source_files import file_pieces
from kenotron_data.tokenise import part_groups, tokenise
from kenotron_data.tokenizer import (
    ByteTokens,
    SlowTokens,
    open_tokenizer,
    without_end,
    wrap_tokenizer,
)
from kenotron_data.train_bpe import train_bpe

ROWS = [{"text": f"alpha {'beta ' * (i % 7)}été\n{i}" if i % 5 else ""} for i in range(60)]


def one_by_one(bpe_file, rows, end="<|endoftext|>"):
    plain = Tokenizer.from_file(str(bpe_file))
    plain.no_truncation()
    plain.no_padding()
    ends = [] if end is None else [plain.token_to_id(end)]
    return [plain.encode(row["text"]).ids + ends for row in rows]


def lists(folder):
    return [document.tolist() for document in TokenFolder(folder)]


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def leave(*lines):
    """Nothing that a run works with is left behind."""
    return [name for name in lines if name.endswith((".partial", ".lock", ".old", ".empty"))]


@pytest.mark.parametrize("size", [None, 200, 1])
def test_the_stream_is_that_of_documents_one_by_one(tmp_path, bpe_file, jsonl, size):
    sources = [file_pieces(jsonl(ROWS)), file_pieces(jsonl(ROWS[:3], "b.jsonl"))]
    made = tokenise(part_groups(sources, size), open_tokenizer(str(bpe_file)), tmp_path / "out")
    expected = one_by_one(bpe_file, ROWS + ROWS[:3])
    assert lists(made.folder) == expected
    assert (made.documents, made.tokens) == (63, sum(map(len, expected)))
    assert made.parts == made.made
    assert TokenFolder(made.folder).tokenizer == str(bpe_file)
    assert leave(*os.listdir(tmp_path), *os.listdir(made.folder)) == []


def test_workers_change_no_byte(tmp_path, bpe_file, jsonl):
    groups = part_groups([file_pieces(jsonl(ROWS))], 300)
    tokenizer = open_tokenizer(str(bpe_file))
    for workers in (1, 2, 3):
        tokenise(groups, tokenizer, tmp_path / str(workers), workers=workers)
    first = contents(tmp_path / "1")
    assert len(first) > 10
    assert first == contents(tmp_path / "2") == contents(tmp_path / "3")


def test_without_an_end_documents_run_on_and_empty_parts_have_no_file(tmp_path, bpe_file, jsonl):
    rows = [{"text": ""}] * 20 + ROWS
    groups = part_groups([file_pieces(jsonl(rows))], 40)
    tokenizer = open_tokenizer(str(bpe_file), end_of_document=False)
    made = tokenise(groups, tokenizer, tmp_path / "out")
    expected = one_by_one(bpe_file, rows, end=None)
    assert np.concatenate(list(TokenFolder(made.folder))).tolist() == sum(expected, [])
    assert made.parts > len(list(made.folder.glob("*.ds")))
    assert tokenise(groups, tokenizer, tmp_path / "out").made == 0
    assert leave(*os.listdir(made.folder)) == []


def test_bytes_and_a_trained_bpe(tmp_path, jsonl):
    groups = part_groups([file_pieces(jsonl(ROWS))], 500)
    made = tokenise(groups, open_tokenizer("bytes"), tmp_path / "bytes")
    assert lists(made.folder) == [[*row["text"].encode(), 256] for row in ROWS]
    parts = [part for source in groups for part in source]
    assert train_bpe(parts, 270, tmp_path / "bpe.json") == 270
    first = (tmp_path / "bpe.json").read_bytes()
    train_bpe(parts, 270, tmp_path / "bpe.json")
    assert first == (tmp_path / "bpe.json").read_bytes()
    tokenizer = open_tokenizer(str(tmp_path / "bpe.json"))
    assert (tokenizer.end, tokenizer.vocab_size) == (0, 270)
    made = tokenise(groups, tokenizer, tmp_path / "bpe")
    texts = Tokenizer.from_file(str(tmp_path / "bpe.json")).decode_batch(lists(made.folder))
    assert texts == [row["text"] for row in ROWS]
    with pytest.raises(ValueError, match="at least 257 ids"):
        train_bpe(parts, 256, tmp_path / "no.json")


def test_a_trained_bpe_reads_a_share_of_each_part(tmp_path, jsonl):
    groups = part_groups([file_pieces(jsonl([{"text": c * 50} for c in "abcdefgh"]))], 63)
    train_bpe(groups[0], 300, tmp_path / "bpe.json", most_bytes=80)
    vocabulary = Tokenizer.from_file(str(tmp_path / "bpe.json")).get_vocab()
    assert all(c * 4 in vocabulary for c in "abcdefgh")
    assert not any(c * 16 in vocabulary for c in "abcdefgh")


def test_tokenizers_of_transformers_fast_and_slow(bpe_file, chat_folder):
    from transformers import AutoTokenizer, ByT5Tokenizer

    texts = [row["text"] for row in ROWS]
    fast = AutoTokenizer.from_pretrained(chat_folder)
    expected = fast(texts, add_special_tokens=False)["input_ids"]
    found = wrap_tokenizer(fast, end_of_document=False).encode(texts)
    assert [ids.tolist() for ids in found] == expected
    opened = open_tokenizer(str(chat_folder))
    assert [ids.tolist() for ids in opened.encode(texts)] == [
        [*ids, fast.eos_token_id] for ids in expected
    ]
    assert [i.tolist() for i in without_end(opened).encode(texts)] == expected
    assert without_end(opened).fingerprint != opened.fingerprint
    slow = wrap_tokenizer(ByT5Tokenizer())
    assert isinstance(slow, SlowTokens)
    assert slow.encode(["é"])[0].tolist() == [*(byte + 3 for byte in "é".encode()), 1]
    assert open_tokenizer(str(bpe_file)).fingerprint != opened.fingerprint


def test_the_end_of_a_tokenizer_file_is_found_or_asked_for(tmp_path, bpe_file):
    tokenizer = Tokenizer.from_file(str(bpe_file))
    assert open_tokenizer(str(bpe_file)).end == tokenizer.token_to_id("<|endoftext|>")
    im_end = tokenizer.token_to_id("<|im_end|>")
    assert open_tokenizer(str(bpe_file), eos_token="<|im_end|>").end == im_end
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": {"content": "<|im_end|>"}}')
    (tmp_path / "tokenizer.json").write_bytes(bpe_file.read_bytes())
    assert open_tokenizer(str(tmp_path / "tokenizer.json")).end == im_end
    text = bpe_file.read_text().replace("<|endoftext|>", "<|over|>")
    (tmp_path / "other.json").write_text(text)
    (tmp_path / "tokenizer_config.json").unlink()
    with pytest.raises(ValueError, match=r"names no token that ends a document: .*--no-eos"):
        open_tokenizer(str(tmp_path / "other.json"))


def test_wrong_tokenizers_are_named(tmp_path, bpe_file, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (tmp_path / "no.json").write_text("{}")
    for name, more, words in (
        (tmp_path / "nowhere.json", {}, "there is no such file"),
        (tmp_path / "no.json", {}, "this is no file of the library tokenizers"),
        (tmp_path / "folder", {}, "transformers cannot open it"),
        (bpe_file, {"eos_token": "<x>"}, "'<x>' is not in the vocabulary"),
        ("bytes", {"eos_token": "<x>"}, "byte tokens end a document with id 256"),
    ):
        with pytest.raises(ValueError, match=words):
            open_tokenizer(str(name), **more)


def test_a_row_without_text_is_named(tmp_path, bpe_file, jsonl):
    tokenizer = open_tokenizer(str(bpe_file))
    for value, words in ((None, "NoneType None"), (3, "int 3"), ("\ud800", "cannot be tokenised")):
        path = jsonl([*ROWS, {"text": value}, {"text": "fine"}])
        groups = part_groups([file_pieces(path)], 10**6)
        with pytest.raises(ValueError, match=rf"a\.jsonl', line 61: .*{words}"):
            tokenise(groups, tokenizer, tmp_path / "out")
        assert sorted(os.listdir(tmp_path)) == ["a.jsonl"]


def test_an_error_in_a_worker_is_the_same_and_leaves_what_can_go_on(tmp_path, jsonl):
    groups = part_groups([file_pieces(jsonl([*ROWS, {"text": 3}]))], 200)
    with pytest.raises(ValueError, match=r"a\.jsonl', line 61: the text is int 3, not a string"):
        tokenise(groups, ByteTokens(), tmp_path / "out", workers=2)
    assert not (tmp_path / "out").exists()
    assert list((tmp_path / "out.partial").glob("*.ds"))


def test_a_token_too_large_for_its_bytes_is_named(tmp_path, jsonl):
    tokenizer = Tokenizer.from_str(
        '{"version": "1.0", "added_tokens": [], "pre_tokenizer": {"type": "Whitespace"}, "model": '
        '{"type": "WordLevel", "vocab": {"a": 0, "b": 70000}, "unk_token": "a"}}'
    )
    wide = wrap_tokenizer(tokenizer, name="wide", end_of_document=False)
    groups = part_groups([file_pieces(jsonl([{"text": "a"}, {"text": "a b"}]))])
    with pytest.raises(ValueError, match=r"line 2: token 70000 does not fit in 2 bytes"):
        tokenise(groups, wide, tmp_path / "out", token_bytes=2)
    made = tokenise(groups, wide, tmp_path / "out")
    assert lists(made.folder) == [[0], [0, 70000]]
    assert TokenFolder(made.folder).token_bytes == 4


def test_a_stopped_run_goes_on_with_what_is_not_made(tmp_path, jsonl, monkeypatch):
    groups = part_groups([file_pieces(jsonl(ROWS))], 300)
    tokenise(groups, ByteTokens(), tmp_path / "whole")

    def add(self, documents, added=TokenWriter.add):
        if self.path.name == "000_00003.ds":
            raise KeyboardInterrupt
        added(self, documents)

    monkeypatch.setattr(TokenWriter, "add", add)
    with pytest.raises(KeyboardInterrupt):
        tokenise(groups, ByteTokens(), tmp_path / "out")
    assert not (tmp_path / "out").exists()
    monkeypatch.undo()
    stamps = {p.name: p.stat().st_mtime_ns for p in (tmp_path / "out.partial").glob("*.ds")}
    assert sorted(stamps) == ["000_00000.ds", "000_00001.ds", "000_00002.ds"]
    calls = []
    made = tokenise(groups, ByteTokens(), tmp_path / "out", progress=lambda m, n: calls.append(m))
    assert made.made == made.parts - 3 == sum(not call.made_before for call in calls)
    assert {name: (made.folder / name).stat().st_mtime_ns for name in stamps} == stamps
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_a_run_stopped_at_its_very_end_goes_on(tmp_path, jsonl):
    groups = part_groups([file_pieces(jsonl(ROWS))], 300)
    made = tokenise(groups, ByteTokens(), tmp_path / "out")
    (tmp_path / "out").rename(tmp_path / "out.partial")  # all is made but the folder's name
    again = tokenise(groups, ByteTokens(), tmp_path / "out")
    assert (again.made, again.tokens, again.documents) == (0, made.tokens, made.documents)


def test_a_folder_of_something_else_is_left_alone(tmp_path, jsonl):
    groups = part_groups([file_pieces(jsonl(ROWS))])
    out = tmp_path / "out"
    tokenise(groups, ByteTokens(), out)
    before = contents(out)
    with pytest.raises(FileExistsError, match="another end_of_document"):
        tokenise(groups, ByteTokens(end=None), out)
    jsonl(ROWS[:5])
    others = part_groups([file_pieces(tmp_path / "a.jsonl")])
    with pytest.raises(FileExistsError, match="made of other data"):
        tokenise(others, ByteTokens(), out)
    assert contents(out) == before
    tokenise(others, ByteTokens(), out, overwrite=True)
    assert len(lists(out)) == 5
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "letter").write_text("dear")
    with pytest.raises(FileExistsError, match="holds something else"):
        tokenise(others, ByteTokens(), tmp_path / "mine")
    out.rename(tmp_path / "out.partial")
    with pytest.raises(FileExistsError, match="was left by a run that was stopped"):
        tokenise(others, ByteTokens(end=None), out)


def test_no_text_and_wrong_numbers_are_named(tmp_path, jsonl):
    groups = part_groups([file_pieces(jsonl([{"text": ""}]))])
    with pytest.raises(ValueError, match="hold no text: no token was made"):
        tokenise(groups, ByteTokens(end=None), tmp_path / "out")
    assert sorted(os.listdir(tmp_path)) == ["a.jsonl"]
    for more in ({"workers": 0}, {"token_bytes": 3}):
        with pytest.raises(ValueError, match="workers must be|token_bytes must be"):
            tokenise(groups, ByteTokens(), tmp_path / "out", **more)
    with pytest.raises(ValueError, match="must be positive"):
        part_groups([], 0)


def lines_of(folder):
    return {path.name for path in folder.glob("*.ds")}


def test_a_killed_run_and_its_workers_end_and_another_goes_on(tmp_path, jsonl):
    path = jsonl([{"text": "some words of no meaning " * 200}] * 5_000)
    out, partial = tmp_path / "out", tmp_path / "out.partial"
    command = [sys.executable, "-m", "kenotron_data", "tokenize", str(path), "--quiet"]
    command += ["--output-folder", str(out), "--tokenizer-name-or-path", "bytes"]
    command += ["--part-size", "1", "--workers"]
    process = subprocess.Popen([*command, "2"])
    limit = time.monotonic() + 60
    while not lines_of(partial) and time.monotonic() < limit:
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    before = lines_of(partial)
    assert before and not out.exists()
    while _workers_of(str(tmp_path)) and time.monotonic() < limit:
        time.sleep(0.05)
    before = lines_of(partial)
    done = subprocess.run([*command, "1"], capture_output=True, text=True, check=True)
    assert f"({len(before)} were there)" in done.stdout
    folder = TokenFolder(out)
    assert (folder.documents, len(folder)) == (5_000, 5_000 * (200 * 25 + 1))
    assert leave(*os.listdir(out)) == []


def _workers_of(text):
    """Processes that have a file below a folder open."""
    found = []
    for process in filter(str.isdecimal, os.listdir("/proc")):
        folder = f"/proc/{process}/fd"
        try:
            links = [os.readlink(f"{folder}/{number}") for number in os.listdir(folder)]
        except OSError:
            continue
        found += [process] if any(link.startswith(text) for link in links) else []
    return found
