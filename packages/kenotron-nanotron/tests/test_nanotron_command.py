"""``python -m kenotron_nanotron`` imports a checkpoint, or says in one sentence why it does not."""

import subprocess
import sys

import nanotron_cases
import pytest

from kenotron_ckpt import read_manifest
from kenotron_nanotron.__main__ import main


@pytest.mark.smoke
def test_the_command_imports_a_checkpoint(tmp_path):
    nanotron_cases.write(tmp_path / "theirs", tp=2, optimizer=nanotron_cases.STEPS)
    paths = [str(tmp_path / "theirs"), str(tmp_path / "ours")]
    command = [sys.executable, "-m", "kenotron_nanotron", *paths]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [
        f"{tmp_path / 'ours/6'}: step 6, 15 records",
        "  the schedule of the learning rate and random states were not read",
        "  no optimizer state: resume with checkpoints.load_optimizer: false",
    ]
    assert main([*paths, "--optimizer"]) == 0
    assert "optimizer.exp_avg.head.weight" in read_manifest(paths[1]).records


def test_bad_input_is_one_sentence(tmp_path, capsys):
    assert main([str(tmp_path / "no\x1b[31mne"), str(tmp_path / "out")]) == 1
    said = capsys.readouterr().err
    assert (
        said.startswith("error: no checkpoint of Nanotron at ")
        and "there is no such folder" in said
    )
    assert "\x1b" not in said and len(said.splitlines()) == 1
    with pytest.raises(SystemExit) as stopped:
        main([str(tmp_path)])
    assert stopped.value.code == 2
