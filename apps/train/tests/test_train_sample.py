"""Commands that a run without a config file ends with: a shell finds what they name."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from kenotron_train.run import sample
from kenotron_train.run.sample import next_commands

REPOSITORY = Path(__file__).parents[3]
RUN = "it's my run"


def programs_and_folders(folder: Path, step: int) -> list[tuple[str, str, str]]:
    """First words of each command, and what it reads."""
    generating, reporting = (shlex.split(line) for line in next_commands(folder, step))
    assert generating[2:3] + generating[4:] == ["--ckpt-path", "--prompt", "class "]
    assert reporting[2:3] == ["report"] and len(reporting) == 4
    return [(*words[:2], words[3]) for words in (generating, reporting)]


@pytest.mark.parametrize("named", ["relative", "absolute"])
@pytest.mark.parametrize("start", ["repository", "a folder's child"])
def test_the_paths_exist_where_the_run_began(
    start: str, named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = REPOSITORY if start == "repository" else tmp_path / start
    here.mkdir(exist_ok=True)
    monkeypatch.chdir(here)
    (tmp_path / RUN / "150").mkdir(parents=True)
    folder = tmp_path / RUN if named == "absolute" else Path("..") / RUN
    if start == "repository" and named == "relative":
        folder = (tmp_path / RUN).relative_to("/")
        folder = Path(*[".."] * (len(here.parts) - 1)) / folder
    for (python, program, read), name in zip(
        programs_and_folders(folder, 150), ("generate", "train"), strict=True
    ):
        assert python == "python"
        assert Path(program).resolve() == REPOSITORY / "apps" / name
        assert Path(program, "__main__.py").is_file()
        assert Path(read).is_dir() and RUN in read


def test_a_clone_in_a_folder_with_a_quote(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    apps = tmp_path / "a friend's clone/apps"
    for name in ("generate", "train"):
        (apps / name).mkdir(parents=True)
        (apps / name / "__main__.py").touch()
    monkeypatch.setattr(sample, "__file__", str(apps / "train/kenotron_train/run/sample.py"))
    monkeypatch.chdir(tmp_path)
    found = programs_and_folders(Path("run"), 2)
    assert [Path(program).resolve() for _, program, _ in found] == [
        apps / "generate",
        apps / "train",
    ]
    assert [read for *_, read in found] == ["run/2", "run"]


def test_without_a_clone_they_are_the_installed_programs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sample, "__file__", str(tmp_path / "a/b/c/sample.py"))
    exporting, _ = next_commands(tmp_path, 1, adapter=True)
    assert "adapter-to-peft --ckpt" in exporting and exporting.endswith("--out my-adapter")
    words = [shlex.split(line)[0] for line in next_commands(tmp_path, 1)]
    assert words == ["kenotron-generate", "kenotron-train"]
