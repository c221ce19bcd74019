"""The command line: where prompts come from, where texts go, and what is refused."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch

from kenotron_ckpt import Record, StreamedTensor, open_safetensors, read_box, save_streamed
from kenotron_generate.cli import main
from kenotron_generate.load import describe, remark_on
from kenotron_generate.prompts import read_prompts
from kenotron_models import AnyConfig, hf_import
from kenotron_models.hf import hf_tensors, read_hf_config

APP = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write_model(tmp_path_factory.mktemp("model"), "llama", chat=True)


def run(
    *flags: str, text: str | None = None, launcher: tuple[str, ...] = ()
) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *launcher, str(APP), *flags]
    return subprocess.run(
        command, input=text, capture_output=True, text=True, timeout=240, check=False
    )


def plain(model: Path | str, *flags: str) -> list[str]:
    short = ("--max-new-tokens", "6", "--temperature", "0", "--no-chat-template", "--no-check")
    return ["--ckpt-path", str(model), *short, *flags]


@pytest.mark.smoke
def test_a_text_goes_to_standard_output_and_the_rest_elsewhere(model: Path) -> None:
    done = run(*plain(model, "--prompt", "abc"))
    assert done.returncode == 0, done.stderr
    assert done.stdout.removesuffix("\n") == "abc" + tiny.continued(model, "abc", 6)[0]
    assert "6 tokens for 1 prompt in" in done.stderr
    assert "tokens/s" in done.stderr


@pytest.mark.parametrize("sizes", [("--tp", "1"), ("--tp", "2")], ids="-".join)
def test_a_model_folder_is_compared_with_transformers(model: Path, sizes: tuple[str, str]) -> None:
    done = run(*plain(model, "--prompt", "abc", "--check", *sizes))
    assert done.returncode == 0, done.stderr
    assert f"{model}: logits and a gradient are those of transformers to " in done.stderr
    assert done.stdout.removesuffix("\n") == "abc" + tiny.continued(model, "abc", 6)[0]


def test_a_model_that_transformers_computes_otherwise_is_not_continued(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right, described = hf_import.read_hf_config, describe(model)

    def wrong(folder: Path) -> tuple[AnyConfig, dict[str, Any]]:
        config, values = right(folder)
        return replace(config, rms_norm_eps=0.1), values

    monkeypatch.setattr(hf_import, "read_hf_config", wrong)
    with pytest.raises(ValueError, match=r"logits of a text: those of(?s:.)*--no-check reads it"):
        remark_on(described)
    monkeypatch.setattr(hf_import, "MOST", 1000)
    sentence = f"{model}: not compared with transformers for its 4.0e\\+04 parameters \\(kenotron-"
    assert re.match(sentence, remark_on(described))


def test_standard_input_is_read_by_who_starts(model: Path) -> None:
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    want = "abc\nd" + tiny.continued(model, "abc\nd", 6)[0]
    flags = plain(model, "--prompt", "-", "--tp", "2")
    assert run(*flags, text="abc\nd\n").stdout.removesuffix("\n") == want
    done = run(*flags, text="abc\nd\n", launcher=launcher)
    assert done.stdout.removesuffix("\n") == want, done.stderr


def test_standard_input_is_one_of_several_prompts(model: Path, tmp_path: Path) -> None:
    flags = plain(model, "--prompt", "x", "--prompt", "-", "--jsonl", "-", "--top-k", "0")
    first, second = map(json.loads, run(*flags, text="abc\n").stdout.splitlines())
    assert (first["prompt"], second["prompt"]) == ("x", "abc")
    assert second["completion"] == tiny.continued(model, "abc", 6)[0]
    done = run(*plain(model, "--prompt", "-"), text="")
    assert done.returncode == 1 and "standard input is empty" in done.stderr
    command = [sys.executable, str(APP), *plain(model, "--prompt", "-")]
    spoilt = subprocess.run(command, input=b"a\xff", capture_output=True, timeout=240, check=False)
    assert spoilt.returncode == 1 and b"standard input is not UTF-8" in spoilt.stderr
    assert b"Traceback" not in spoilt.stderr


def test_what_is_cut_or_read_as_bytes_is_said(model: Path, tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    shutil.copytree(model, bare, ignore=shutil.ignore_patterns("tokenizer*", "*.jinja"))
    done = run(*plain(bare, "--prompt", "a" * 97))
    assert done.returncode == 0, done.stderr
    assert f"{bare} names no tokenizer: bytes are read" in done.stderr
    assert (
        "prompt 0 has 97 tokens and the model reads 96: it goes on from the last 48" in done.stderr
    )
    done = run(*plain(model, "--prompt", "a" * 60))
    assert "bytes" not in done.stderr and "goes on from" not in done.stderr


def test_a_checkpoint_that_another_program_made_is_read(model: Path, tmp_path: Path) -> None:
    """Of dtype and length of samples the state of an imported one says nothing."""
    config, _ = read_hf_config(model)
    records = open_safetensors(model).records(hf_tensors(config), lambda _: True)

    def read(record: Record) -> torch.Tensor:
        return read_box(model, record, (0,) * len(record.shape), record.shape)

    sources = {
        n: StreamedTensor(r.shape, torch.float32, partial(read, r)) for n, r in records.items()
    }
    save_streamed(tmp_path / "run", 7, sources, {"step": 7, "model_config": asdict(config)})
    words = ("--tokenizer", str(model), "--special-tokens", "--prompt", "abc")
    done = run(*plain(tmp_path / "run", *words))
    assert done.stdout.removesuffix("\n") == "abc" + tiny.continued(model, "abc", 6)[0], done.stderr
    url = f"file://{tmp_path}/run"  # read in place, by both ranks
    there = run(*plain(url, *words, "--tp", "2"))
    assert there.stdout == done.stdout and f"reading {url}/7\n" in there.stderr


def test_the_dtype_of_a_model_folder_is_read_in_all_spellings(model: Path, tmp_path: Path) -> None:
    own = tmp_path / "own"
    shutil.copytree(model, own)
    values = json.loads((own / "config.json").read_text())
    for given, dtype in (("torch.bfloat16", "bfloat16"), ("auto", "float32"), ({}, "float32")):
        (own / "config.json").write_text(json.dumps(values | {"dtype": given}))
        assert describe(own).dtype == dtype
    (own / "config.json").write_text(json.dumps(values | {"dtype": "int8"}))
    with pytest.raises(ValueError, match=f"{own / 'config.json'}: dtype: 'int8' was given"):
        describe(own)


def test_the_tokenizers_own_end_ends_no_text(model: Path, tmp_path: Path) -> None:
    """transformers asks generation_config.json, or else config.json."""
    own = tmp_path / "own"
    shutil.copytree(model, own)
    flags = plain(own, "--prompt", "abc", "--jsonl", str(tmp_path / "out"))
    assert main(flags) == 0
    tokens = json.loads((tmp_path / "out").read_text())["tokens"]
    (own / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": chr(tokens[2])})
    )
    for said, want in [({}, tokens), ({"eos_token_id": tokens[2]}, tokens[:3])]:
        (own / "generation_config.json").write_text(json.dumps(said))
        assert main(flags) == 0
        assert json.loads((tmp_path / "out").read_text())["tokens"] == want


def test_files_of_prompts_and_json_lines(model: Path, tmp_path: Path) -> None:
    (tmp_path / "some.txt").write_text("one\n\ntwo words\n")
    lines = [{"prompt": "x"}, {"messages": [{"role": "user", "content": "y"}]}]
    (tmp_path / "some.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    done = run(*plain(model, "--prompt-file", str(tmp_path / "some.txt")))
    first, nothing, last = (tiny.continued(model, p, 6)[0] for p in ("one", "", "two words"))
    shown = [f"--- 0 (length)\none{first}", f"--- 1 (length)\n{nothing}"]
    assert done.stdout == "\n".join([*shown, f"--- 2 (length)\ntwo words{last}\n"])
    done = run(*plain(model, "--prompt-file", str(tmp_path / "some.jsonl"), "--jsonl", "-"))
    first, second = map(json.loads, done.stdout.splitlines())
    assert first["prompt"] == "x"
    assert second["prompt"] == lines[1]["messages"]
    assert second["prompt_tokens"] == len("[user]y\n[assistant]")
    assert len(second["tokens"]) == 6


def test_only_line_feeds_end_a_line_of_prompts(tmp_path: Path) -> None:
    lines = tmp_path / "p.jsonl"
    lines.write_bytes('\ufeff{"prompt": "a\u2028b\u0085c"}\r\n{"prompt": "d"}\n'.encode())
    assert read_prompts([], str(lines)) == ["a\u2028b\u0085c", "d"]
    lines.write_bytes(b'{"prompt": "a"}\n{"prompt": "\xff"}\n')
    with pytest.raises(ValueError, match=r"p\.jsonl, line 2 is not UTF-8"):
        read_prompts([], str(lines))


def test_a_text_ends_at_a_token_or_at_a_string(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    flags = plain(model, "--prompt", "abc", "--jsonl", str(out), "--max-new-tokens", "40")
    assert main(flags) == 0
    free = json.loads(out.read_text())
    stop = free["completion"][3:5]
    assert main([*flags, "--stop", stop, "--stop", "never there"]) == 0
    cut = json.loads(out.read_text())
    assert cut["finish"] == "stop"
    assert cut["completion"] == free["completion"][: free["completion"].index(stop)]
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": [free["tokens"][4]]}))
    assert main(flags) == 0
    ended = json.loads(out.read_text())
    assert ended["finish"] == "eos"
    assert ended["tokens"] == free["tokens"][: free["tokens"].index(free["tokens"][4]) + 1]
    (model / "generation_config.json").unlink()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--prompt", "\udcff"], "--prompt '\\udcff' is not UTF-8"),
        (["--prompt", "a", "--prompt-file", "b"], "--prompt and --prompt-file b: give one of them"),
        (["--prompt-file", "not-there.txt"], "not-there.txt: there is no such file"),
        (["--jsonl", "nowhere/x.jsonl"], "--jsonl nowhere/x.jsonl: there is no folder nowhere"),
        (["--jsonl", "/"], "--jsonl /: this is a folder"),
        (["--max-new-tokens", "-1"], "--max-new-tokens -1: give a number from 0 on"),
        (["--batch-size", "0"], "--batch-size 0: give a number from 1 on"),
        (["--temperature", "-1"], "temperature -1.0 is not 0 or more"),
        (["--temperature", "1", "--top-k", "-1"], "top_k -1 is not a whole number from 1"),
        (["--temperature", "1", "--top-p", "2"], "top_p 2.0 is not within"),
        (["--repetition-penalty", "0"], "repetition_penalty 0.0 is not a finite number above 0"),
        (["--stop", ""], "--stop '': an empty text ends every other"),
        (["--tp", "-1"], "--tp -1: give a number of ranks"),
        (["--tp", "3"], "cannot split 4 attention heads over 3 tp ranks"),
        (["--tokenizer", "/nowhere"], "tokenizer '/nowhere'"),
        (["--ckpt-path", "/nowhere"], "/nowhere"),
    ],
)
def test_bad_input_is_one_sentence(
    flags: list[str], message: str, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*plain(model), *flags]) == 1
    out, said = capsys.readouterr()
    assert message in said
    assert "Traceback" not in said
    assert not out


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 1 is not JSON"),
        ("[]", "needed is a mapping with either prompt or messages"),
        ('{"prompt": 3}', "prompt is a text; a message has role and content"),
        ('{"messages": []}', "messages is a list of messages, not empty"),
        ('{"messages": [{"role": "user"}]}', "a message has role and content"),
        ("", "has no prompt: give one a line"),
    ],
)
def test_bad_lines_name_their_place(
    line: str, message: str, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "p.jsonl").write_text(line + "\n")
    assert main(plain(model, "--prompt-file", str(tmp_path / "p.jsonl"))) == 1
    said = capsys.readouterr().err
    assert "p.jsonl" in said
    assert message in said


def test_the_program_tells_its_version_and_what_flags_are_by_default(capsys) -> None:
    for flag, words in (("--version", "kenotron-generate "), ("--help", "(default: 0.7)")):
        with pytest.raises(SystemExit):
            main([flag])
        assert words in capsys.readouterr().out
