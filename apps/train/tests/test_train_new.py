"""Folders to begin with: what ``new`` writes checks itself, far from the repository."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

import pytest
import runs

from kenotron_config import DEFAULT_CONFIG
from kenotron_train.cli import main
from kenotron_train.new_folder import TEMPLATES


@pytest.mark.parametrize("template", TEMPLATES)
def test_a_new_folder_checks_itself(
    template: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "of/my own"
    assert main(["new", str(folder), "--template", template]) == 0
    check = TEMPLATES[template]
    said = capsys.readouterr().out
    assert said == f"wrote {folder}; check it: cd {shlex.quote(str(folder))} && {check}\n"
    readme = (folder / "README.md").read_text()
    assert f"\n{check} " in readme
    program, *rest = shlex.split(check)
    start = ["-m", "kenotron_command", *rest] if program == "kenotron" else rest
    done = runs.start(sys.executable, *start, cwd=folder, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_new_config_is_that_of_a_run_without_a_file(tmp_path: Path) -> None:
    assert main(["new", str(tmp_path), "--template", "config"]) == 0  # an empty folder will do
    assert (tmp_path / "config.yaml").read_text() == DEFAULT_CONFIG.read_text()


def test_nothing_of_ones_own_is_written_over(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine").write_text("mine")
    for place in (tmp_path, tmp_path / "mine"):
        assert main(["new", str(place)]) == 1
        sentence = f"error: {place} is there and not empty: give another name, or empty it\n"
        assert capsys.readouterr().err == sentence
    assert [each.read_text() for each in tmp_path.iterdir()] == ["mine"]


def test_an_unknown_template_is_refused_with_the_list(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["new", str(tmp_path / "a"), "--template", "modl"])
    assert ended.value.code == 2 and not (tmp_path / "a").exists()
    said = capsys.readouterr().err
    assert "invalid choice: 'modl'" in said and all(f"'{each}'" in said for each in TEMPLATES)
