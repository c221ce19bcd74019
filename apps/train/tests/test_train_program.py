"""``kenotron-train`` and ``python apps/train`` are one program."""

from __future__ import annotations

import importlib
import inspect
import re
import runpy
import sys
import tomllib

import pytest
import runs

import kenotron_train
from kenotron_dist import resolve
from kenotron_train import cli, program, start


def installed() -> None:
    """What the console script calls."""
    scripts = tomllib.loads((runs.APP / "pyproject.toml").read_text())["project"]["scripts"]
    module, _, name = scripts["kenotron-train"].partition(":")
    getattr(importlib.import_module(module), name)()


@pytest.mark.parametrize(
    "begin", [installed, lambda: runpy.run_path(str(runs.APP), run_name="__main__")]
)
def test_both_leave_the_world_before_they_end(begin, monkeypatch: pytest.MonkeyPatch) -> None:
    left = []
    monkeypatch.setattr("sys.argv", ["train", "--check"])
    monkeypatch.setattr(program, "main", lambda: 85)
    monkeypatch.setattr(program, "shutdown", lambda: left.append(True))
    with pytest.raises(SystemExit) as ended:
        begin()
    assert left == [True] and ended.value.code == 85


@pytest.mark.parametrize(
    ("words", "starts"),
    [
        ([], True),
        (["--set", "tokens.train_steps=2"], True),
        (["verify"], True),
        (["--check"], False),
        (["--dry-run"], False),
        (["--config-file", "a.yaml", "--check"], False),
        (["--help"], False),
        (["report", "runs"], False),
        (["slurm", "--nodes", "2"], False),
    ],
)
def test_only_a_command_that_starts_ranks_prepares_them(
    words: list[str], starts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in start.LAUNCHED:
        monkeypatch.delenv(name, raising=False)
    assert start.starts_ranks(words) is starts
    for name in start.LAUNCHED:
        with monkeypatch.context() as patch:
            patch.setenv(name, "0")
            assert not start.starts_ranks(words)


def test_the_program_looks_at_every_variable_of_a_launcher() -> None:
    found = re.findall(r'"(\w+)" in environ', inspect.getsource(resolve))
    assert found and sorted(start.LAUNCHED) == sorted(found)


def test_a_keyboard_interrupt_outside_of_a_run_is_no_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt() -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(program, "main", interrupt)
    with pytest.raises(SystemExit) as error:
        program.program()
    assert error.value.code == 130
    assert capsys.readouterr().err == "error: interrupted\n"


def test_extras_are_shown_as_they_install_from_the_repository() -> None:
    known = tomllib.loads((runs.APP / "pyproject.toml").read_text())["project"]
    texts = [*runs.APP.glob("docs/*.md"), *runs.APP.glob("*.md")]
    texts += runs.APP.glob("kenotron_train/**/*.py")
    form = re.compile(r"(\S*)\[([a-z0-9,]+)\]'")
    shown = [named for path in texts for named in form.findall(path.read_text())]
    ours = [(where, extras) for where, extras in shown if "train" in where]
    assert len(ours) >= 4 and {where for where, _ in ours} == {"'./apps/train"}
    for _, extras in ours:
        assert set(extras.split(",")) <= set(known["optional-dependencies"])


def test_the_installed_command_can_be_stopped_before_torch_is_imported() -> None:
    """Its first import is of what handles Ctrl-C and starts the forkserver."""
    words = "import sys, kenotron_train.start; sys.exit('torch' in sys.modules)"
    assert runs.start(sys.executable, "-c", words, cwd=runs.APP).returncode == 0
    with pytest.raises(AttributeError, match="has no attribute 'Trainer'"):
        kenotron_train.Trainer  # noqa: B018


@pytest.mark.parametrize("name", ["kenotron-train", "train"])
def test_the_program_is_called_what_it_was_called(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", [name])
    command = name if name.startswith("kenotron") else "python apps/train"
    for words in (["--help"], ["verify", "--help"]):
        with pytest.raises(SystemExit) as ended:
            cli.main(words)
        assert ended.value.code == 0
        assert capsys.readouterr().out.startswith(f"usage: {' '.join([command, *words[:-1]])} [-h]")
    with pytest.raises(SystemExit):
        cli.main(["--version"])
    assert re.fullmatch(r"kenotron-train \S+, torch \S+\n", capsys.readouterr().out)
