"""``kenotron-train`` and ``python apps/train`` are one program."""

from __future__ import annotations

import importlib
import re
import runpy
import tomllib

import pytest
import runs

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
    monkeypatch.setattr(program, "main", lambda: 85)
    monkeypatch.setattr(program, "shutdown", lambda: left.append(True))
    with pytest.raises(SystemExit) as ended:
        start()
    assert left == [True] and ended.value.code == 85


def test_extras_are_shown_as_they_install_from_the_repository() -> None:
    known = tomllib.loads((runs.APP / "pyproject.toml").read_text())["project"]
    texts = [*runs.APP.glob("docs/*.md"), *runs.APP.glob("*.md")]
    texts += runs.APP.glob("kenotron_train/*.py")
    form = re.compile(r"(\S*)\[([a-z0-9,]+)\]'")
    shown = [named for path in texts for named in form.findall(path.read_text())]
    ours = [(where, extras) for where, extras in shown if "train" in where]
    assert len(ours) >= 4 and {where for where, _ in ours} == {"'./apps/train"}
    for _, extras in ours:
        assert set(extras.split(",")) <= set(known["optional-dependencies"])
