"""What the environment and URLs hold in secret reaches no file of a run, no tracker and no log."""

from __future__ import annotations

import json
from pathlib import Path

import runs

from kenotron_ckpt import read_manifest
from kenotron_config import DEFAULT_CONFIG
from kenotron_train.assemble import data_plan
from kenotron_train.cli import main
from kenotron_train.config_file import parse_config
from kenotron_train.data.data_settings import reading_of
from kenotron_train.run.preview import preview

SECRET = "hunter2-from-the-environment"
URL = "s3://me:hunter3@host/bucket"


def secret_config(monkeypatch, *overrides):
    monkeypatch.setenv("KENOTRON_SECRET", SECRET)
    text = DEFAULT_CONFIG.read_text(encoding="utf-8").replace(
        "hf_dataset_or_datasets: python-stdlib", "hf_dataset_or_datasets: !env KENOTRON_SECRET"
    )
    assert "!env" in text
    overrides = ("general.run=!env KENOTRON_SECRET", *overrides)
    return parse_config(text, "c.yaml", overrides)


def test_the_tag_stays_in_what_a_run_shows(monkeypatch):
    config = secret_config(monkeypatch, f"s3_upload.upload_s3_path={URL}")
    for shown in (preview(config), json.dumps(reading_of(data_plan(config)))):
        assert SECRET not in shown and "hunter3" not in shown
        assert "!env KENOTRON_SECRET" in shown.replace("'", "")


def test_a_job_of_slurm_keeps_no_credentials(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    flags = ["slurm", "--dry-run", "--nodes", "1", "--set", f"s3_upload.upload_s3_path={URL}"]
    assert main(flags) == 1
    said = capsys.readouterr().err
    assert "s3_upload.upload_s3_path: a URL with credentials was given" in said
    assert "write !env NAME in the config" in said and "hunter3" not in said


def test_a_run_writes_its_variables_by_name(tmp_path: Path, monkeypatch):
    folder = tmp_path / SECRET
    folder.mkdir()
    (folder / "a.txt").write_text("def f(x):\n    return x\n" * 400)
    monkeypatch.setenv("KENOTRON_SECRET", str(folder / "a.txt"))
    flags = {"tokens__train_steps": 2, "tokens__limit_val_batches": 0}
    more = [
        "--set", "data_stages.0.data.dataset.hf_dataset_or_datasets=!env KENOTRON_SECRET",
        "--set", "logging.trackers=[tensorboard]",
    ]  # fmt: skip
    done = runs.train(tmp_path, *runs.arguments(tmp_path, **flags), *more)
    assert done.returncode == 0, done.stderr
    run = tmp_path / "checkpoints"
    assert "!env 'KENOTRON_SECRET'" in (run / "2/config.yaml").read_text()
    state = read_manifest(run).state["reading"]["data_stages"][0]
    assert state["dataset"]["hf_dataset_or_datasets"] == "!env KENOTRON_SECRET"
    files = [*run.glob("[0-9]*/*"), *run.glob("*.*"), *run.glob("tensorboard/*")]
    with_it = [
        each.name for each in files if each.is_file() and SECRET.encode() in each.read_bytes()
    ]
    assert with_it == []
    assert SECRET not in done.stdout + done.stderr


def test_the_error_of_a_store_has_no_password(tmp_path: Path) -> None:
    url = "memory://me:hunter3@bucket/run"
    done = runs.train(tmp_path, *runs.arguments(tmp_path, s3_upload__upload_s3_path=url))
    assert done.returncode != 0
    assert "/me:***@bucket/run" in done.stderr and "hunter3" not in done.stdout + done.stderr
