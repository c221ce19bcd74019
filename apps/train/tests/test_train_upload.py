"""The app with checkpoints in a remote store: uploads beside the training, resuming in place."""

from __future__ import annotations

import json
import logging
import shutil
import urllib.request
from pathlib import Path

import pytest
import runs
from moto.server import ThreadedMotoServer

from kenotron_ckpt import Uploader, latest_step, read_manifest
from kenotron_config import DEFAULT_CONFIG
from kenotron_dist import Mesh
from kenotron_train.config_file import load_config
from kenotron_train.run.loop import train

BUCKET = "runs"
URL = f"s3://{BUCKET}/tiny"
STEPS = {"tokens__train_steps": 4, "checkpoints__checkpoint_interval": 2}
S5CMD = "s5cmd_numworkers: 8, s5cmd_concurrency: 4, s5cmd_path: /opt/s5cmd"


@pytest.fixture(scope="module")
def server():
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    started = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    started.start()
    yield "http://{}:{}".format(*started.get_host_and_port())
    started.stop()


@pytest.fixture
def s3(server, monkeypatch):
    """An empty bucket; the processes that the test starts know where it is."""
    for name, value in {
        "AWS_ACCESS_KEY_ID": "test-key",
        "AWS_SECRET_ACCESS_KEY": "test-secret",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_ENDPOINT_URL": server,
    }.items():
        monkeypatch.setenv(name, value)
    ask(server, "POST", "moto-api/reset")
    ask(server, "PUT", BUCKET)
    return server


def ask(server, method, path):
    request = urllib.request.Request(f"{server}/{path}", method=method)
    request.add_header("Authorization", "AWS4-HMAC-SHA256 Credential=test-key/x/us-east-1/s3/y")
    with urllib.request.urlopen(request) as reply:
        return reply.read()


def settings(folder: Path, url: str, upload: str, **changes: object) -> list[str]:
    section = f"{{upload_s3_path: '{url}', {upload}}}"
    return runs.arguments(folder, s3_upload=section, **STEPS, **changes)


def train_here(flags: list[str]) -> list[float]:
    """The losses of a run in this process: a new one takes seconds to start."""
    config = load_config(DEFAULT_CONFIG, flags[1::2])
    return [result.loss for result in train(Mesh.connect(), config)]


def test_a_run_goes_on_from_its_copy_as_if_never_stopped(s3, tmp_path, capfd):
    folder = tmp_path / "checkpoints"
    whole = train_here(settings(tmp_path, URL, f"remove_after_upload: true, {S5CMD}"))
    said = capfd.readouterr().out
    assert "Ignored: s3_upload.s5cmd_numworkers: 8 has no effect: the training process" in said
    assert "Ignored: s3_upload.s5cmd_concurrency: 4 has no effect" in said
    assert "Ignored: s3_upload.s5cmd_path: /opt/s5cmd has no effect" in said
    for step in (2, 4):
        assert f"Uploaded checkpoint {URL}/{step} in " in said
        assert not (folder / str(step)).exists()
    assert ask(s3, "GET", f"{BUCKET}/tiny/latest.txt") == b"4"
    shutil.rmtree(folder)

    resume = {"checkpoints__resume_checkpoint_path": f"{URL}/2"}
    rest = train_here(settings(tmp_path, URL, "remove_after_upload: false", **resume))
    said = capfd.readouterr().out
    assert f"Resumed after step 2 from {URL}/2\n" in said
    assert sorted(path.name for path in folder.iterdir() if path.is_dir()) == ["4"]
    assert len(whole) == 4 and rest == whole[2:]
    assert f"Uploaded checkpoint {URL}/4 in " in said  # the same step, saved once more


def test_the_same_command_restarts_a_job_of_two_ranks_without_its_folder(s3, tmp_path, capfd):
    folder = tmp_path / "checkpoints"
    resume = {"checkpoints__resume_checkpoint_path": folder}
    flags = settings(tmp_path, URL, "remove_after_upload: true", **resume)
    train_here([*flags, "--set", "tokens.train_steps=2"])
    assert f"No checkpoint in {folder} yet: the run starts afresh" in capfd.readouterr().out
    shutil.rmtree(folder)
    flags += ["--set", "parallelism.dp=2", "--set", "tokens.micro_batch_size=1"]
    again = runs.train(tmp_path, *flags)
    assert again.returncode == 0, again.stderr
    assert f"Resumed after step 2 from {URL}/2; " in again.stdout
    assert f"Uploaded checkpoint {URL}/4 in " in again.stdout
    assert [step["step"] for step in runs.metrics(tmp_path)] == [3, 4]
    train_here(flags[:-4])
    assert f"Resumed after step 4 from {URL}/4; nothing is left to do" in capfd.readouterr().out


@pytest.mark.parametrize("after", [{"pp": 2}, {"dp": 2, "tp": 2}], ids=["pp2", "dp2 tp2"])
def test_a_resume_on_another_layout_is_the_same_from_a_url(after, tmp_path):
    store, losses = f"file://{tmp_path}/store", []
    begun = settings(tmp_path, store, "read_back: true", parallelism__dp=2)
    done = runs.train(tmp_path, *begun, "--set", "tokens.micro_batch_size=1")
    assert done.returncode == 0, done.stderr
    layout = {f"parallelism__{axis}": size for axis, size in after.items()}
    for name, place in (("a", tmp_path / "checkpoints/2"), ("b", f"{store}/2"), ("c", store)):
        (tmp_path / name).mkdir()
        if name == "c":  # a run folder: its newest checkpoint is damaged
            shard = next((tmp_path / "store/4").glob("shard-*"))
            data = shard.read_bytes()
            shard.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
        resume = {"checkpoints__resume_checkpoint_path": place, "tokens__micro_batch_size": 1}
        flags = runs.arguments(tmp_path / name, **STEPS, **resume, **layout)
        done = runs.train(tmp_path / name, *flags)
        assert done.returncode == 0, done.stderr
        assert f"Resumed after step 2 from {place}" in done.stdout
        assert ("; passed over " in done.stdout) == (name == "c")
        losses.append([(row["step"], row["lm_loss"]) for row in runs.metrics(tmp_path / name)])
        assert sorted(p.name for p in (tmp_path / name / "checkpoints").glob("[0-9]*")) == ["4"]
    assert losses[0] == losses[1] == losses[2] and [step for step, _ in losses[0]] == [3, 4]


def test_a_run_that_ended_before_its_first_own_checkpoint_resumes_from_the_store(tmp_path, capfd):
    store, folder = f"file://{tmp_path}/store", tmp_path / "checkpoints"
    resume = {"checkpoints__resume_checkpoint_path": folder}
    flags = settings(tmp_path, store, "remove_after_upload: false", **resume)
    train_here([*flags, "--set", "tokens.train_steps=2"])
    last = json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])
    shutil.rmtree(folder)
    folder.mkdir()
    (folder / "metrics.jsonl").write_text(json.dumps(last | {"step": 9}) + "\n")
    train_here(flags)
    assert f"Resumed after step 2 from {store}/2" in capfd.readouterr().out
    shutil.rmtree(tmp_path / "store")
    shutil.rmtree(folder)
    folder.mkdir()
    (folder / "metrics.jsonl").write_text(json.dumps(last | {"step": 9}) + "\n")
    with pytest.raises(ValueError, match="metrics.jsonl ends with step 9 and there is no"):
        train_here(flags)


def test_a_bucket_that_is_missing_ends_the_run_before_its_first_step(s3, tmp_path):
    absent = "s3://absent/run"
    for resume in (None, absent):
        resumed = {} if resume is None else {"checkpoints__resume_checkpoint_path": resume}
        with pytest.raises(OSError, match=f"{absent}: The specified bucket does not exist; make"):
            train_here(settings(tmp_path, absent, "remove_after_upload: true", **resumed))


def test_a_store_that_fails_costs_no_step_and_no_checkpoint(tmp_path, capfd):
    store, folder = tmp_path / "store", tmp_path / "checkpoints"
    store.mkdir()
    (store / "4").write_text("a file where the folder of a step should be")
    assert len(train_here(settings(tmp_path, f"file://{store}", "remove_after_upload: true"))) == 4
    said = capfd.readouterr().out
    assert f"[ERROR|DP=0|PP=0|TP=0]: checkpoint 4 has no complete copy in file://{store}/4" in said
    assert f"resume with checkpoints.resume_checkpoint_path: {folder} to send the rest" in said
    assert (store / "2/manifest.json").exists() and not (folder / "2").exists()
    assert (folder / "4/manifest.json").exists()

    (store / "4").unlink()
    resume = {"checkpoints__resume_checkpoint_path": folder}
    train_here(settings(tmp_path, f"file://{store}", "remove_after_upload: true", **resume))
    assert "nothing is left to do" in capfd.readouterr().out
    assert (store / "4/manifest.json").exists() and not (folder / "4").exists()
    assert (store / "latest.txt").read_text() == "4"


def test_what_is_newer_here_is_resumed_from_here(tmp_path, capfd):
    store, folder = f"file://{tmp_path}/store", tmp_path / "checkpoints"
    keep = "remove_after_upload: false"
    train_here([*settings(tmp_path, store, keep), "--set", "tokens.train_steps=2"])
    train_here([*settings(tmp_path, store, keep), "--set", "s3_upload=null"])
    resume = {"checkpoints__resume_checkpoint_path": folder}
    train_here(settings(tmp_path, store, keep, **resume))
    said = capfd.readouterr().out
    assert f"Resumed after step 4 from {folder}/4; nothing is left to do" in said
    assert f"Uploaded checkpoint {store}/4 in " in said
    shutil.rmtree(tmp_path / "store/4")
    resume = {"checkpoints__resume_checkpoint_path": folder / "4"}
    train_here(settings(tmp_path, store, keep, **resume))
    assert f"Uploaded checkpoint {store}/4 in " in capfd.readouterr().out


def test_a_later_start_counts_before_more_steps_of_an_older_one(tmp_path, capfd, monkeypatch):
    """A host is cut off after step 4; another one continues from step 2, which the store has."""
    store, here = f"file://{tmp_path}/store", "remove_after_upload: false"
    for name in "ab":
        (tmp_path / name).mkdir()
    train_here(settings(tmp_path / "a", store, here))
    shutil.rmtree(tmp_path / "store/4")
    (tmp_path / "store/latest.txt").write_text("2")
    train_here([*settings(tmp_path / "b", store, here, **resumed(store)), *until(3)])
    assert read_manifest(store).generation == 2
    back = settings(tmp_path / "a", store, here, **resumed(tmp_path / "a/checkpoints"))
    train_here(back)
    assert f"Resumed after step 3 from {store}/3" in capfd.readouterr().out
    assert read_manifest(store).generation == 3
    # A start that does not know that it was superseded.
    begin = Uploader.begin

    def superseded(self, generation):
        begin(self, generation)
        (tmp_path / "store/writer.lock").write_text(f"generation 9 {'0' * 16}\n")

    monkeypatch.setattr(Uploader, "begin", superseded)
    with pytest.raises(ValueError, match=r"taken over by a later start .*\(generation 9; this one"):
        train_here([*back, *until(6)])
    assert latest_step(store) == 4


def resumed(place: object) -> dict[str, object]:
    return {"checkpoints__resume_checkpoint_path": place}


def until(step: int) -> list[str]:
    return ["--set", f"tokens.train_steps={step}"]
