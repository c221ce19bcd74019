"""The manifest of a job for Kubernetes: its fields, what is refused, and how its pods end.

No cluster is there: the official models of JobSet and Kubeflow Trainer read the manifests, and the
script of a pod runs here, one process a pod.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import launchers
import pytest
import runs
import yaml

from kenotron_config import DEFAULT_CONFIG
from kenotron_train.cli import main
from kenotron_train.config_file import load_config, parse_config

PRINT = "python apps/train kubernetes "
NEEDED = ["--nodes", "2", "--image", "registry.example/kenotron:cuda", "--claim", "runs"]
ALL = [
    "--nodes", "4", "--gpus-per-node", "8",
    "--set", "parallelism.dp=8", "--set", "parallelism.tp=4",
    "--image", "a:b", "--claim", "lustre", "--mount-path", "/runs", "--secret", "my-keys",
    "--set", "checkpoints.checkpoints_path=/runs/a", "--cpus", "96", "--memory", "512Gi",
    "--job-name", "my-run", "--namespace", "ml", "--program", "python '/runs/my data.py'",
    "--grace", "900", "--retries", "5", "--stall-limit", "60",
]  # fmt: skip


def printed(capsys: pytest.CaptureFixture[str], *flags: str) -> tuple[int, str, str]:
    """Status, manifest and remarks."""
    code = main(["kubernetes", *flags])
    shown = capsys.readouterr()
    return code, shown.out, shown.err


def documents(capsys: pytest.CaptureFixture[str], *flags: str) -> dict[str, dict[str, Any]]:
    """The documents of a manifest, by their kind."""
    code, text, _ = printed(capsys, *flags)
    assert code == 0 and "{{" not in text
    found = list(yaml.safe_load_all(text))
    return {each["kind"]: each for each in found}


def job_of(spec: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """The specs of the Job and its pods, and their container, of a JobSet."""
    (replicated,) = spec["replicatedJobs"]
    job = replicated["template"]["spec"]
    pod = job["template"]["spec"]
    return job, pod, pod["containers"][0]


def test_a_job_set_has_all_that_was_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    found = documents(capsys, *ALL)
    assert list(found) == ["ConfigMap", "JobSet"]
    names = {each["metadata"]["name"]: each["metadata"]["namespace"] for each in found.values()}
    assert names == {"my-run-config": "ml", "my-run": "ml"}
    job, pod, container = job_of(found["JobSet"]["spec"])
    assert (job["parallelism"], job["completions"], job["completionMode"]) == (4, 4, "Indexed")
    assert (pod["terminationGracePeriodSeconds"], pod["restartPolicy"]) == (900, "Never")
    assert (container["image"], container["workingDir"]) == ("a:b", "/runs")
    assert container["resources"]["limits"] == {
        "cpu": "96", "memory": "512Gi", "nvidia.com/gpu": "8",
    }  # fmt: skip
    assert {each["name"]: each["value"] for each in container["env"]} == {
        "MASTER_ADDR": "my-run-node-0-0.my-run", "MASTER_PORT": "29500",
        "WORLD_SIZE": "32", "LOCAL_WORLD_SIZE": "8",
    }  # fmt: skip
    assert container["envFrom"] == [{"secretRef": {"name": "my-keys"}}]
    mounts = {each["name"]: each["mountPath"] for each in container["volumeMounts"]}
    assert mounts == {"run": "/runs", "config": "/etc/kenotron", "shm": "/dev/shm"}
    volumes = {each.pop("name"): each for each in pod["volumes"]}
    assert volumes["run"] == {"persistentVolumeClaim": {"claimName": "lustre"}}
    assert volumes["config"] == {"configMap": {"name": "my-run-config"}}
    script = found["ConfigMap"]["data"]["start_ranks.sh"]
    config = "--config-file /etc/kenotron/config.yaml --stall-limit 60 &"
    assert f"python '/runs/my data.py' {config}" in script
    assert container["command"] == ["bash", "/etc/kenotron/start_ranks.sh"]


def test_a_stopped_job_starts_again_and_an_error_ends_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    spec = documents(capsys, *ALL)["JobSet"]["spec"]
    job, _, container = job_of(spec)
    assert job["backoffLimit"] == 0 and spec["failurePolicy"]["maxRestarts"] == 5
    codes, moved = job["podFailurePolicy"]["rules"]
    assert codes["onExitCodes"] == {
        "containerName": container["name"], "operator": "In", "values": [1, 2, 85],
    }  # fmt: skip
    assert moved["onPodConditions"] == [{"type": "DisruptionTarget", "status": "True"}]
    said = "Container node for pod ml/my-run-node-0-0-x failed with exit code {} matching FailJob "
    messages = {code: said.format(code) + "rule at index 0" for code in (1, 2, 85)}
    messages[143] = "Pod ml/x has condition DisruptionTarget matching FailJob rule at index 1"
    actions = {}
    for code, message in messages.items():  # as the controller of JobSet does: the first that fits
        actions[code] = next(
            rule["action"]
            for rule in spec["failurePolicy"]["rules"]
            if any(re.search(p, message) for p in rule.get("onJobFailureMessagePatterns", [""]))
        )
    again = "RestartJobSetAndIgnoreMaxRestarts"
    assert actions == {1: "FailJobSet", 2: "FailJobSet", 85: again, 143: again}


def test_a_train_job_has_the_same_pods_in_a_runtime_of_its_own(
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = documents(capsys, "--kind", "trainjob", *ALL)
    assert list(found) == ["ConfigMap", "TrainingRuntime", "TrainJob"]
    spec = found["TrainingRuntime"]["spec"]
    assert spec["mlPolicy"] == {"numNodes": 4, "torch": {}}
    assert spec["template"]["spec"] == documents(capsys, *ALL)["JobSet"]["spec"]
    (replicated,) = spec["template"]["spec"]["replicatedJobs"]  # Trainer looks for these two names
    label = "trainer.kubeflow.org/trainjob-ancestor-step"
    assert replicated["template"]["metadata"]["labels"] == {label: "trainer"}
    assert replicated["name"] == job_of(spec["template"]["spec"])[2]["name"] == "node"
    assert found["TrainJob"]["spec"] == {
        "runtimeRef": {
            "apiGroup": "trainer.kubeflow.org", "kind": "TrainingRuntime", "name": "my-run",
        },
        "trainer": {"numNodes": 4, "numProcPerNode": 8},
    }  # fmt: skip


@pytest.mark.parametrize("flags", [NEEDED, ALL], ids=["few", "all"])
@pytest.mark.parametrize("kind", ["jobset", "trainjob"])
def test_the_official_models_know_every_field(
    kind: str, flags: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    models = pytest.importorskip("kubeflow_trainer_api.models")
    readers = {
        "ConfigMap": models.IoK8sApiCoreV1ConfigMap,
        "JobSet": models.JobsetV1alpha2JobSet,
        "TrainingRuntime": models.TrainerV1alpha1TrainingRuntime,
        "TrainJob": models.TrainerV1alpha1TrainJob,
    }
    for name, document in documents(capsys, "--kind", kind, *flags).items():
        read = readers[name].from_dict(document).to_dict()  # drops what the schema does not have
        assert read == document


def test_the_config_of_the_pods_is_the_one_that_was_read(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KENOTRON_RUN", "one")
    name = 'data_stages.0.name="it\'s: #1 {{name}} {name}"'
    changes = ["general.run=!env KENOTRON_RUN", name]
    flags = [part for each in changes for part in ("--set", each)]
    code, manifest, remarks = printed(capsys, *NEEDED, *flags)
    assert code == 0, remarks
    text = next(yaml.safe_load_all(manifest))["data"]["config.yaml"]
    assert "!env 'KENOTRON_RUN'" in text
    assert parse_config(text, "ConfigMap", saved=True) == load_config(DEFAULT_CONFIG, changes)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--nodes 3", "choose --nodes from 1, 2, or change parallelism.dp, pp, cp or tp"),
        ("--gpus-per-node 8", "2 processes, one a GPU, but --nodes 2 with --gpus-per-node 8 have"),
        ("--job-name My_Run", "--job-name 'My_Run': host names are made of it, so give a letter"),
        (f"--job-name {'a' * 49}", "lower case, 48 characters at most"),
        ("--namespace -x", "--namespace: expected one argument"),
        ("--namespace x.y", "--namespace 'x.y': host names are made of it"),
        ("--mount-path runs", "--mount-path runs: give an absolute path, such as /data"),
        ("--mount-path /", "--mount-path /: give an absolute path"),
        (
            "--set checkpoints.checkpoints_path=/tmp/a",
            "checkpoints.checkpoints_path: /tmp/a is not in /data, where the claim runs is "
            "mounted, and what is not is lost with its pod: --set "
            "checkpoints.checkpoints_path=/data/checkpoints, or another --mount-path",
        ),
        ("--set checkpoints.checkpoints_path=../a", "checkpoints_path: ../a is not in /data"),
        ("--set s3_upload.upload_s3_path=s3://me:hunter3@b/r", "a URL with credentials was given"),
        ("--program '", "--program ': No closing quotation: quote it as in a shell"),
        ("--program=", "--program '': give a command on one line"),
    ],
)
def test_what_would_not_train_is_refused(
    flags: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code, text, remarks = printed(capsys, *NEEDED, *flags.split())
    except SystemExit:  # of argparse
        code, text, remarks = 1, "", f"error: {capsys.readouterr().err}"
    assert code == 1 and not text and remarks.startswith("error: ")
    assert said in remarks and "hunter3" not in remarks


def test_a_group_on_several_nodes_is_a_warning(capsys: pytest.CaptureFixture[str]) -> None:
    _, _, remarks = printed(capsys, *NEEDED)
    assert remarks.startswith("Warning: with tp 2 and 1 on each node, processes of one tp group")
    assert not printed(capsys, *ALL)[2]


def test_the_document_shows_this_manifest(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (runs.APP / "docs/launching.md").read_text()
    command = next(line for line in text.splitlines() if line.startswith(PRINT))
    flags = command.removeprefix(PRINT).partition(" | ")[0].split()
    _, manifest, _ = printed(capsys, *flags)
    assert f"```yaml\n{manifest.partition('---')[2].lstrip()}```" in text, manifest


def script_of(
    capsys: pytest.CaptureFixture[str], folder: Path, config: Path, program: str
) -> list[str]:
    """The command of a pod whose files lie in a folder here."""
    data = documents(capsys, *NEEDED, "--program", program)["ConfigMap"]["data"]
    file = folder / "start_ranks.sh"
    file.write_text(data["start_ranks.sh"].replace("/etc/kenotron/config.yaml", str(config)))
    return ["bash", str(file)]


@pytest.mark.parametrize(
    ("statuses", "pod"), [("0 0", 0), ("0 75", 75), ("85 85", 85), ("1 1", 1), ("1 75", 75)]
)
def test_a_pod_ends_with_the_highest_status_of_its_ranks(
    statuses: str, pod: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rank = tmp_path / "rank.sh"
    rank.write_text(
        'echo "$RANK $LOCAL_RANK $*" >> ranks\nstatuses=($STATUSES)\nexit ${statuses[LOCAL_RANK]}\n'
    )
    command = script_of(capsys, tmp_path, Path("c.yaml"), f"bash {rank}")
    env = {"LOCAL_WORLD_SIZE": "2", "JOB_COMPLETION_INDEX": "3", "STATUSES": statuses}
    done = subprocess.run(command, cwd=tmp_path, env=os.environ | env)
    assert done.returncode == pod
    assert sorted((tmp_path / "ranks").read_text().splitlines()) == [
        "6 0 --config-file c.yaml", "7 1 --config-file c.yaml",
    ]  # fmt: skip


def pods(command: list[str], folder: Path) -> list[subprocess.Popen[str]]:
    """Two pods of one rank, here."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
    env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2"}
    env |= {"LOCAL_WORLD_SIZE": "1", "KENOTRON_JOB_SECRET": "0123456789abcdef" * 4}
    return [
        subprocess.Popen(
            command, cwd=folder, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            env=launchers.environment(**env, JOB_COMPLETION_INDEX=str(index)),
        )
        for index in range(2)
    ]  # fmt: skip


def test_a_job_whose_pod_is_moved_saves_and_resumes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def command(steps: int) -> list[str]:
        flags = launchers.flags(tmp_path, parallelism__dp=2, tokens__train_steps=steps)
        program = " ".join([sys.executable, str(runs.APP), *flags[2:]])
        return script_of(capsys, tmp_path, DEFAULT_CONFIG, program)

    first = pods(command(4000), tmp_path)
    launchers.until(lambda: launchers.steps_made(tmp_path) > 2, lambda: "no step was made")
    first[1].send_signal(signal.SIGTERM)  # to the script, as Kubernetes sends it
    said = [pod.communicate(timeout=120)[0] for pod in first]
    assert [pod.returncode for pod in first] == [85, 85], said
    assert "rank 1 received SIGTERM" in said[0]
    step = int((tmp_path / "checkpoints/latest.txt").read_text())
    second = pods(command(step + 2), tmp_path)
    said = [pod.communicate(timeout=120)[0] for pod in second]
    assert [pod.returncode for pod in second] == [0, 0], said
    assert f"Resumed after step {step} from" in said[0]
    assert [each["step"] for each in runs.metrics(tmp_path)] == list(range(1, step + 3))
