"""A first config of one's own: what ``new`` writes trains as no config does."""

from __future__ import annotations

from pathlib import Path

import pytest

from kenotron_train.cli import main
from kenotron_train.config_file import DEFAULT_CONFIG, load_config


def test_a_new_config_is_that_of_a_run_without_a_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "my own.yaml"
    assert main(["new", str(file)]) == 0
    assert f"train with: python apps/train --config-file '{file}'" in capsys.readouterr().out
    assert load_config(file, []) == load_config(DEFAULT_CONFIG, [])


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("there.yaml", "is there: give another name, or remove it"),
        ("my.txt", "is no name of a config: give one that ends with .yaml"),
        ("no/my.yml", "cannot be written: No such file or directory"),
    ],
)
def test_nothing_else_is_written(
    name: str, sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "there.yaml").write_text("mine")
    assert main(["new", str(tmp_path / name)]) == 1
    assert capsys.readouterr().err == f"error: {tmp_path / name} {sentence}\n"
    assert [each.read_text() for each in tmp_path.iterdir()] == ["mine"]
