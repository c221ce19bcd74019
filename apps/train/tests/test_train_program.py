"""``kenotron-train`` and ``python apps/train`` are one program."""

from __future__ import annotations

import importlib
import inspect
import re
import runpy
import tomllib
from typing import Any

import pytest
import runs

from kenotron_dist import resolve
from kenotron_train import program


def installed() -> None:
    """What the console script calls."""
    scripts = tomllib.loads((runs.APP / "pyproject.toml").read_text())["project"]["scripts"]
    module, _, name = scripts["kenotron-train"].partition(":")
    getattr(importlib.import_module(module), name)()


@pytest.mark.parametrize(
    "start", [installed, lambda: runpy.run_path(str(runs.APP), run_name="__main__")]
)
def test_both_leave_the_world_before_they_end(start, monkeypatch: pytest.MonkeyPatch) -> None:
    left = []
    monkeypatch.setattr("sys.argv", ["train", "--check"])
    monkeypatch.setattr(program, "main", lambda: 85)
    monkeypatch.setattr(program, "shutdown", lambda: left.append(True))
    with pytest.raises(SystemExit) as ended:
        start()
    assert left == [True] and ended.value.code == 85


def main_of_app() -> dict[str, Any]:
    return runpy.run_path(str(runs.APP), run_name="imported")


@pytest.mark.parametrize(
    ("words", "starts"),
    [
        ([], True),
        (["--set", "tokens.train_steps=2"], True),
        (["verify"], True),
        (["--check"], False),
        (["--config-file", "a.yaml", "--check"], False),
        (["--help"], False),
        (["report", "runs"], False),
        (["slurm", "--nodes", "2"], False),
    ],
)
def test_only_a_command_that_starts_ranks_prepares_them(
    words: list[str], starts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = main_of_app()
    for name in app["LAUNCHED"]:
        monkeypatch.delenv(name, raising=False)
    assert app["starts_ranks"](words) is starts
    for name in app["LAUNCHED"]:
        with monkeypatch.context() as patch:
            patch.setenv(name, "0")
            assert not app["starts_ranks"](words)


def test_the_program_looks_at_every_variable_of_a_launcher() -> None:
    found = re.findall(r'"(\w+)" in environ', inspect.getsource(resolve))
    assert found and sorted(main_of_app()["LAUNCHED"]) == sorted(found)


def test_a_keyboard_interrupt_outside_of_a_run_is_no_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt() -> int:
        raise KeyboardInterrupt

    ended = []
    monkeypatch.setattr(program, "main", interrupt)
    with pytest.raises(SystemExit) as error:
        program.program(end=lambda: ended.append(True))
    assert error.value.code == 130 and ended == [True]
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
