"""The script of a Slurm job: what it asks for, what it does after each ending, what is refused."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import runs

from kenotron_train.cli import main
from kenotron_train.slurm.durations import seconds_of
from kenotron_train.slurm.job import TEMPLATE
from kenotron_train.slurm.provenance import code_state
from kenotron_train.train_flags import _duration

SUBMIT = "python apps/train slurm "
STUB = """#!/bin/sh
echo "$(basename "$0") $*" >> {log}
exit ${{{status}:-0}}
"""


def dry(capsys: pytest.CaptureFixture[str], *flags: str) -> tuple[int, str, str]:
    """What a dry run leaves: status, script, and remarks."""
    code = main(["slurm", "--dry-run", *flags])
    shown = capsys.readouterr()
    return code, shown.out, shown.err


def test_a_dry_run_shows_the_script_and_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "it's 100% mine"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setenv("PATH", "/nowhere")  # no Slurm
    asked = [
        "--partition",
        "h100",
        "--account",
        "lab",
        "--time",
        "12:00:00",
        "--cpus-per-task",
        "8",
    ]
    asked += [
        "--job-name",
        "my run",
        "--sbatch",
        "constraint=ib&nvme",
        "--sbatch=--exclusive",
        "--stop-before",
        "600",
    ]
    sizes = ["--set", "parallelism.dp=8", "--set", "parallelism.tp=4"]
    code, script, remarks = dry(capsys, "--nodes", "4", "--gpus-per-node", "8", *asked, *sizes)
    assert code == 0 and not remarks and not list(folder.iterdir())
    lines = script.splitlines()
    for line in (
        "--job-name='my run'",
        "--nodes=4",
        "--ntasks-per-node=8",
        "--gpus-per-node=8",
        "--partition=h100",
        "--account=lab",
        "--time=12:00:00",
        "--constraint='ib&nvme'",
        "--exclusive",
        "--requeue",
        "--signal=USR1@600",
    ):
        assert f"#SBATCH {line}" in lines, script
    assert "{{" not in script
    assert subprocess.run(["/bin/bash", "-n"], input=script, text=True, check=True).returncode == 0
    assert main(["slurm", "--nodes", "1"]) == 1
    assert "sbatch is not there" in capsys.readouterr().err and not list(folder.iterdir())


def test_the_document_shows_this_script(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (runs.APP / "docs/launching.md").read_text()
    command = next(line for line in text.splitlines() if line.startswith(SUBMIT))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", [str(runs.APP)])
    _, script, _ = dry(capsys, *command.removeprefix(SUBMIT).split())
    places = {str(tmp_path): "/home/me", str(runs.APP): "/home/me/kenotron/apps/train"}
    for here, there in (places | {sys.executable: "/home/me/venv/bin/python"}).items():
        script = script.replace(here, there)
    script = re.sub(r"/slurm/[0-9-]+", "/slurm/20261121-232906", script)
    assert f"```bash cluster\n{script}```" in text, script


def test_processes_are_divided_among_nodes(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--set", "parallelism.dp=4", "--set", "parallelism.tp=4"]
    _, script, _ = dry(capsys, "--nodes", "2", *sizes)
    assert "--ntasks-per-node=8" in script and "--gpus-per-node=8" in script
    _, script, _ = dry(capsys, "--nodes", "2", "--gpus-per-node", "0", *sizes)
    assert "--ntasks-per-node=8" in script and "--gpus-per-node" not in script
    code, _, remarks = dry(capsys, "--nodes", "8", *sizes)
    assert code == 0 and "with tp 4 and 2 on each node, processes of one tp group" in remarks


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (
            "--nodes 4 --gpus-per-node 8",
            "pp 1 x dp 1 x tp 2 = 2 processes, one a GPU, but --nodes 4 with --gpus-per-node 8 "
            "have 32 GPUs: --set parallelism.dp=16",
        ),
        (
            "--nodes 2 --gpus-per-node 3 --set parallelism.tp=4 --set parallelism.dp=3",
            "= 12 processes, one a GPU, but --nodes 2 with --gpus-per-node 3 have 6 GPUs: "
            "change parallelism.dp, pp, cp or tp, or --nodes 4",
        ),
        (
            "--nodes 1 --gpus-per-node 8 --set parallelism.context_parallel_size=2",
            "pp 1 x dp 1 x cp 2 x tp 2 = 4 processes, one a GPU, but --nodes 1 with "
            "--gpus-per-node 8 have 8 GPUs: --set parallelism.dp=2",
        ),
        ("--nodes 4", "choose --nodes from 1, 2, or change parallelism.dp, pp, cp or tp"),
        ("--nodes 1 --time soon", "--time soon is no time: give MINUTES, MINUTES:SECONDS, "),
        ("--nodes 1 --time 6", "--time 6 is 360 s, and the ranks are asked to save and end 300 s"),
        ("--nodes 1 --stop-before 70000", "give 1 to 65535 seconds"),
        ("--nodes 1 --sbatch C=h100", "'h100' is no option of sbatch: write its long name"),
        ("--nodes 1 --sbatch time=5", "--sbatch time: the script has it; give --time instead"),
        ("--nodes 1 --sbatch no-requeue", "the script has it; give --retries 0 instead"),
        ("--nodes 1 --set tokens.train_steps=-1", "--set: tokens.train_steps: "),
    ],
)
def test_what_would_not_train_is_refused(
    flags: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, script, remarks = dry(capsys, *flags.split())
    assert code == 1 and script == "" and remarks.startswith("error: ") and said in remarks


def test_flags_that_are_none(capsys: pytest.CaptureFixture[str]) -> None:
    for flags in ("", "--nodes 0", "--nodes 1 --retries -1", "--nodes 1 --cpus-per-task none"):
        with pytest.raises(SystemExit) as error:
            main(["slurm", *flags.split()])
        assert error.value.code == 2 and "usage: python apps/train slurm" in capsys.readouterr().err


def test_times_are_read_in_one_way_but_for_a_bare_number() -> None:
    times = {"90:30": 5430, "1:30:00": 5400, "2-12": 216_000, "2-12:30": 217_800}
    times |= {"1-00:00:05": 86_405, "1:30": 90, "02:00:00": 7200, "1-00:30": 88_200}
    for bare, more in (("minutes", {"90": 5400}), ("seconds", {"90": 90, "0.5": 0.5, ".5": 0.5})):
        want = times | more
        assert {text: seconds_of(text, bare) for text in want} == want
    assert all(_duration(text) == seconds for text, seconds in (times | {"90": 90}).items())
    for text in ("", "soon", "1:2:3:4", "nan", "1::2", "-3", "1-", "1.5:00", "1e3", "²"):
        for bare in ("minutes", "seconds"):
            said = f"{text} is no time: give {bare.upper()},"
            with pytest.raises(ValueError, match=re.escape(said)):
                seconds_of(text, bare)
    with pytest.raises(ValueError, match="0.5 is no time: give MINUTES"):
        seconds_of("0.5", "minutes")


@pytest.fixture
def ending(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """Run the script with an srun that ends with a status; its own status, and what it called."""
    monkeypatch.chdir(tmp_path)
    log, tools = tmp_path / "called", tmp_path / "tools"
    tools.mkdir()
    for name in ("srun", "scontrol"):
        (tools / name).write_text(STUB.format(log=log, status=f"{name}_status"))
        (tools / name).chmod(0o755)
    _, script, _ = dry(capsys, "--nodes", "2", "--retries", "2", "--set", "parallelism.dp=4")
    folder = next(line[7:] for line in script.splitlines() if line.startswith("folder="))
    Path(folder).mkdir(parents=True)

    def end(status: int, starts: int = 0) -> tuple[int, str, str]:
        log.write_text("")
        env = {"PATH": f"{tools}:{os.environ['PATH']}", "srun_status": str(status)}
        env |= {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-2]"}
        env |= {"SLURM_RESTART_COUNT": str(starts)} if starts else {}
        done = subprocess.run(
            ["bash"], input=script, env=env, capture_output=True, text=True, check=False
        )
        assert done.stderr == "" or "failures: Is a directory" in done.stderr
        return done.returncode, done.stdout.splitlines()[-1], log.read_text().splitlines()[-1]

    return end


def test_the_file_of_failures_is_no_code(ending, tmp_path: Path) -> None:
    (failures,) = [folder / "failures" for folder in tmp_path.glob("checkpoints/slurm/*")]
    hostile = f"a[$(touch$IFS{tmp_path}/ran)] 0"
    for text in (hostile, "9999999999999999999 0", "-1 0", "", "01 0"):
        failures.write_text(text + "\n")
        assert ending(75)[::2] == (0, "scontrol requeue 7")
        assert failures.read_text() == ("2 0\n" if text == "01 0" else "1 0\n")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "what", ["checkpoints_path", "the current folder", "the interpreter", "the program"]
)
def test_a_path_that_breaks_out_of_the_script_is_refused(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "a\ntouch ran #"
    folder.mkdir()
    flags = ["--set", f"checkpoints.checkpoints_path={json.dumps(str(folder))}"]
    if what != "checkpoints_path":
        flags = ["--set", "checkpoints.checkpoints_path=/tmp/run"]
    if what == "the current folder":
        monkeypatch.chdir(folder)
    elif what == "the interpreter":
        monkeypatch.setattr("sys.executable", f"{folder}/venv/bin/python")
    elif what == "the program":
        monkeypatch.setattr("sys.argv", [f"{folder}/train"])
    code, script, remarks = dry(capsys, "--nodes", "1", *flags)
    assert code == 1 and script == ""
    assert f"{what} '{tmp_path}/a\\ntouch ran #" in remarks
    assert "cannot be printed, which would break out of the job's script: rename it" in remarks


def test_a_path_that_reads_like_commands_is_one_word(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    home = tmp_path / """a $(touch ran) `touch ran` "q" it's; touch ran #é"""
    tools = tmp_path / "tools"
    for folder in (home, tools):
        folder.mkdir()
    for name in ("srun", "scontrol"):
        (tools / name).write_text(f'#!/bin/sh\nprintf "%s\\n" "$PWD" "$@" > {tmp_path}/{name}\n')
        (tools / name).chmod(0o755)
    monkeypatch.chdir(home)
    monkeypatch.setattr("sys.executable", f"{home}/venv/bin/python")
    monkeypatch.setattr("sys.argv", [f"{home}/train"])
    code, script, _ = dry(capsys, "--nodes", "1")
    assert code == 0
    env = {"PATH": f"{tools}:{os.environ['PATH']}", "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n1"}
    done = subprocess.run(["bash"], input=script, env=env, text=True, check=True)
    assert done.returncode == 0
    where, *_, python, program, _, config = (tmp_path / "srun").read_text().splitlines()
    assert (where, python) == (str(home), f"{home}/venv/bin/python")
    assert program == f"{home}/train" and config.startswith(f"{home}/checkpoints/slurm/")
    assert not list(tmp_path.rglob("ran"))


def test_each_start_has_a_secret_for_its_ranks(ending, tmp_path: Path) -> None:
    (tmp_path / "tools" / "srun").write_text(
        f'#!/bin/sh\necho "$KENOTRON_JOB_SECRET" >> {tmp_path}/secrets; echo >> {tmp_path}/called\n'
    )
    ending(0)
    ending(0)
    first, second = (tmp_path / "secrets").read_text().split()
    assert len(first) == len(second) == 64 and first != second


def test_a_job_goes_back_when_it_was_stopped_and_not_for_ever_when_it_fails(ending) -> None:
    again, srun = "scontrol requeue 7", "srun --kill-on-bad-exit=0 --wait=60 "
    code, _, called = ending(0)
    assert code == 0 and called.startswith(srun) and called.endswith("/config.yaml")
    assert [ending(85)[::2] for _ in range(5)] == [(0, again)] * 5
    for status in (1, 2):
        code, said, called = ending(status)
        assert code == status and called.startswith(srun) and "would not help" in said
    assert [ending(status)[::2] for status in (75, 137)] == [(0, again)] * 2
    code, said, called = ending(75)
    assert code == 75 and called.startswith(srun)
    assert said == "Failed 3 times in a row, last with status 75: not started again"
    assert [ending(status)[2] == again for status in (85, 75, 75, 75)] == [True, True, True, False]


def test_failures_with_a_checkpoint_between_them_are_not_in_a_row(ending, tmp_path: Path) -> None:
    newest = tmp_path / "checkpoints/latest.txt"
    for step in (10, 20, 30, 40):
        newest.write_text(f"{step}\n")
        assert ending(137)[0] == 0
    assert [ending(137)[0] for _ in range(2)] == [0, 137]


def test_a_job_that_cannot_count_its_failures_counts_its_starts(ending, tmp_path: Path) -> None:
    (folder,) = tmp_path.glob("checkpoints/slurm/*")
    (folder / "failures").mkdir()
    assert [ending(75, starts)[::2] for starts in (0, 1)] == [(0, "scontrol requeue 7")] * 2
    code, said, called = ending(75, 2)
    assert code == 75 and "failures cannot be written: not started again" in said
    assert called.startswith("srun")


def test_the_state_of_the_code_is_known(tmp_path: Path) -> None:
    def git(*words: str) -> str:
        given = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b.c", *words]
        return subprocess.run(given, capture_output=True, text=True, check=True).stdout.strip()

    file = tmp_path / "code.py"
    file.write_text("x = 1\n")
    assert code_state(file) == {}  # no repository
    git("init", "-q")
    assert code_state(file) == {}  # not in it
    git("add", "code.py")
    git("commit", "-qm", "one")
    assert code_state(file) == {"commit": git("rev-parse", "HEAD"), "dirty": False, "changed": []}
    file.write_text("x = 2\n")
    assert code_state(file)["dirty"] and code_state(file)["changed"] == [" M code.py"]


def test_the_template_comes_with_the_package() -> None:
    assert TEMPLATE.is_relative_to(runs.APP / "kenotron_train") and TEMPLATE.is_file()
