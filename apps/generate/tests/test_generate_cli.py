"""The command line: where prompts come from, where texts go, and what is refused."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import tiny

from kenotron_generate.cli import main
from kenotron_generate.prompts import read_prompts

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


def plain(model: Path, *flags: str) -> list[str]:
    short = ("--max-new-tokens", "6", "--temperature", "0", "--no-chat-template")
    return ["--ckpt-path", str(model), *short, *flags]


def test_a_text_goes_to_standard_output_and_the_rest_elsewhere(model: Path) -> None:
    done = run(*plain(model, "--prompt", "abc"))
    assert done.returncode == 0, done.stderr
    assert done.stdout.removesuffix("\n") == "abc" + tiny.continued(model, "abc", 6)[0]
    assert "6 tokens for 1 prompt in" in done.stderr
    assert "tokens/s" in done.stderr


def test_standard_input_is_read_by_who_starts(model: Path) -> None:
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    want = "abc\nd" + tiny.continued(model, "abc\nd", 6)[0]
    flags = plain(model, "--prompt", "-", "--tp", "2")
    assert run(*flags, text="abc\nd\n").stdout.removesuffix("\n") == want
    done = run(*flags, text="abc\nd\n", launcher=launcher)
    assert done.stdout.removesuffix("\n") == want, done.stderr


def test_files_of_prompts_and_json_lines(model: Path, tmp_path: Path) -> None:
    (tmp_path / "some.txt").write_text("one\n\ntwo words\n")
    lines = [{"prompt": "x"}, {"messages": [{"role": "user", "content": "y"}]}]
    (tmp_path / "some.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    done = run(*plain(model, "--prompt-file", str(tmp_path / "some.txt")))
    texts = [tiny.continued(model, prompt, 6)[0] for prompt in ("one", "two words")]
    assert done.stdout == (f"--- 0 (length)\none{texts[0]}\n--- 1 (length)\ntwo words{texts[1]}\n")
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
        (["--prompt", ""], "--prompt is empty: give a text to continue"),
        (["--prompt", "a", "--prompt-file", "b"], "--prompt and --prompt-file b: give one of them"),
        (["--prompt-file", "not-there.txt"], "not-there.txt: there is no such file"),
        (["--jsonl", "nowhere/x.jsonl"], "--jsonl nowhere/x.jsonl: there is no folder nowhere"),
        (["--jsonl", "/"], "--jsonl /: this is a folder"),
        (["--max-new-tokens", "-1"], "--max-new-tokens -1: give a number from 0 on"),
        (["--batch-size", "0"], "--batch-size 0: give a number from 1 on"),
        (["--temperature", "-1"], "temperature -1.0 is not 0 or more"),
        (["--temperature", "1", "--top-k", "0"], "top_k 0 is not a whole number from 1"),
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
        ('{"prompt": ""}', "prompt is a text, not empty"),
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
