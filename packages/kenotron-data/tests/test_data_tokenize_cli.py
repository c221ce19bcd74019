"""`python -m kenotron_data tokenize`: what it makes, says and refuses."""

import os
import subprocess
import sys

import pytest

from kenotron_data import TokenFolder

ROWS = [{"text": f"alpha beta {i}", "body": "été"} for i in range(30)]


def run(*arguments, cwd):
    command = [sys.executable, "-m", "kenotron_data", "tokenize", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd)


def texts(folder):
    return [bytes(d[d < 256].tolist()).decode() for d in TokenFolder(folder)]


def test_two_sources_with_the_names_of_the_field(tmp_path, jsonl):
    jsonl(ROWS)
    (tmp_path / "b.txt").write_text("more")
    done = run(
        *("--tokenizer-name-or-path", "bytes", "--output-folder", "out", "--n-tasks", "2"),
        *("--text-column", "body", "--dataset", "b.txt", "--part-size", "0.0005", "a.jsonl"),
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert texts(tmp_path / "out") == ["été"] * 30 + ["more"]
    assert "31 documents, 185 tokens" in done.stdout
    assert "100 %" in done.stderr
    assert sorted(os.listdir(tmp_path)) == ["a.jsonl", "b.txt", "out"]


def test_a_bpe_is_trained_once(tmp_path, jsonl):
    jsonl(ROWS)
    arguments = ("a.jsonl", "--train-bpe", "280", "--output-folder", "out", "--workers", "1")
    first, second = (run(*arguments, "--quiet", cwd=tmp_path) for _ in range(2))
    assert first.returncode == second.returncode == 0, first.stderr + second.stderr
    assert "30 documents" in first.stdout and "(1 were there)" in second.stdout
    assert first.stderr == ""
    assert TokenFolder(tmp_path / "out").tokenizer == "out.tokenizer.json"
    assert TokenFolder(tmp_path / "out").documents == 30
    other = run(*arguments[:2], "281", *arguments[3:], cwd=tmp_path)
    assert other.returncode == 1
    assert "'out.tokenizer.json' exists and was not trained on this text" in other.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["a.jsonl", "--column", "title"], "a.jsonl', line 1: there is no column 'title'"),
        (["broken.jsonl"], "broken.jsonl', line 2: this is no JSON"),
        (["nowhere.jsonl/x/y"], "no data at 'nowhere.jsonl/x/y'"),
        (["a.jsonl", "--tokenizer-name-or-path", "x.json"], "'x.json': there is no such file"),
        (["a.jsonl", "--train-bpe", "300"], "give either --tokenizer-name-or-path or --train-bpe"),
        (["."], "the output folder 'out' lies in the source '.'"),
    ],
)
def test_bad_input_ends_with_a_sentence(tmp_path, jsonl, arguments, words):
    jsonl(ROWS)
    (tmp_path / "broken.jsonl").write_text('{"text": "a"}\n{"text"\n')
    before = sorted(os.listdir(tmp_path))
    if "--tokenizer-name-or-path" not in arguments:
        arguments = [*arguments, "--tokenizer-name-or-path", "bytes"]
    done = run(*arguments, "--output-folder", "out", "--workers", "1", cwd=tmp_path)
    assert done.returncode == 1
    assert done.stderr.startswith("error: ") and words in done.stderr
    assert "Traceback" not in done.stderr and done.stdout == ""
    assert sorted(os.listdir(tmp_path)) == before
