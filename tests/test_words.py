"""The command `kenotron` has the words of all programs, and what their help shows works."""

from __future__ import annotations

import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from kenotron_command import GROUP, LAYOUT, installed_words, main

ROOT = Path(__file__).parents[1]
WORDS = installed_words()


def test_every_word_that_a_program_declares_is_installed() -> None:
    declared = {
        name
        for file in ROOT.glob("*/*/pyproject.toml")
        for name in tomllib.loads(file.read_text())["project"]
        .get("entry-points", {})
        .get(GROUP, {})
    }
    assert declared == {*WORDS} and {"train", "generate", "convert", "plan", "verify"} <= declared


@pytest.mark.parametrize("name", WORDS)
def test_the_example_of_a_word_is_one_that_its_flags_allow(name: str) -> None:
    word = WORDS[name]
    assert word.summary and word.summary[-1] != "." and len(word.summary) <= 72
    start, own, *rest = shlex.split(word.example)
    assert (start, own) == ("kenotron", name)
    word.flags().parse_args(rest)
    assert callable(word.load(word.run))


def test_words_that_take_a_layout_have_the_same_flags_for_it() -> None:
    """An axis that one of them lacks, or explains in another way, is named."""
    axes = {f"--{axis}" for axis in LAYOUT}
    of_words = {
        name: {
            flag: (action.type, action.default, action.metavar, action.help)
            for action in word.flags()._actions
            for flag in axes & {*action.option_strings}
        }
        for name, word in WORDS.items()
    }
    taking = {name: found for name, found in of_words.items() if found}
    assert {*taking} == {"generate", "evaluate"}
    for name, found in taking.items():
        assert axes == found.keys(), name
        for axis, what in LAYOUT.items():
            assert found[f"--{axis}"] == (int, 1, "N", f"{what}; 0: as trained (default: 1)"), name


def test_every_word_has_its_own_name_in_its_help(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "argv", ["kenotron"])
    called = {word: each.flags().prog for word, each in WORDS.items()}
    assert called == {word: f"kenotron {word}" for word in called}


def kenotron(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "kenotron_command", *words]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, timeout=200)


def test_the_list_of_words_imports_no_torch(tmp_path: Path) -> None:
    code = (
        "import sys; from kenotron_command import main; assert main([]) == 0; "
        "assert not {'torch', 'kenotron_train.cli', 'numpy'} & {*sys.modules}"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert all(f"  {name} " in done.stdout for name in WORDS)


def test_a_word_trains_shows_and_refuses(tmp_path: Path) -> None:
    done = kenotron(
        "train", "--set", "tokens.train_steps=2", "--set", "parallelism.tp=1", cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert "iteration: 2 / 2" in done.stdout
    shown = kenotron("inspect", "checkpoints", cwd=tmp_path)
    assert shown.returncode == 0 and "step 2" in shown.stdout, shown.stdout + shown.stderr
    missing = kenotron("inspect", "none", cwd=tmp_path)
    assert missing.returncode == 2 and missing.stderr.startswith("error: no checkpoint at none")
    bad = kenotron("train", "--set", "tokens.train_step=2", cwd=tmp_path)
    assert bad.returncode == 1 and "did you mean" in bad.stderr
    helped = kenotron("verify", "--help", cwd=tmp_path)
    assert helped.stdout.startswith("usage: kenotron verify") and helped.returncode == 0
    assert helped.stdout.endswith(f"example:\n  {WORDS['verify'].example}\n")


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_has_the_flags_of_all_words(
    shell: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["completion", shell]) == 0
    said = capsys.readouterr().out
    for each in ("config-file", "max-new-tokens", "kenotron-to-hf", "output-folder", "json"):
        assert each in said
