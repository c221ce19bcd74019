"""Full disks and closed pipes behind metrics and output: said once, and the training continues."""

from __future__ import annotations

import errno
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import runs

from kenotron_ckpt import SaveFailed, on_first
from kenotron_config import Mask
from kenotron_dist import STALLED, Mesh, RankError
from kenotron_train import cli
from kenotron_train.failures.passing_errors import PassingError, as_passing
from kenotron_train.log.line_writer import LineWriter
from kenotron_train.log.metrics_file import MetricsFile, read_journal
from kenotron_train.log.printing import StandardOutput
from kenotron_train.log.run_folder import writing

FIRST_STEPS = {"tokens__train_steps": 8, "tokens__limit_val_batches": 0}


class Disk:
    """``os.write`` with so much room left, then ENOSPC."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.room = 10**9
        real = os.write

        def write(handle: int, data: bytes) -> int:
            if not self.room:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            done = real(handle, data[: self.room])
            self.room -= done
            return done

        patch.setattr(os, "write", write)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    return Disk(monkeypatch)


def test_lines_wait_for_a_full_disk_and_none_is_lost(tmp_path: Path, disk: Disk) -> None:
    said: list[str] = []
    book = MetricsFile(tmp_path, 1, said.append)
    book.write({"step": 1})
    disk.room = 5  # a part of a line
    for step in (2, 3, 4):
        book.write({"step": step})
    path = tmp_path / "metrics.jsonl"
    assert len(said) == 1 and said[0].startswith(f"{path} cannot be written (")
    assert "No space left on device" in said[0] and "each step tries again" in said[0]
    assert [step["step"] for step in read_journal(path)] == [1]
    disk.room = 10**9
    book.write({"step": 5})
    assert said[1:] == [f"{path} can be written again, nothing is lost"]
    disk.room = 0
    book.write({"step": 6})
    book.close()
    assert said[-1] == f"{path} lacks the last 1 lines: they could not be written"
    assert [step["step"] for step in read_journal(path)] == [1, 2, 3, 4, 5]


def test_what_waits_is_bounded(tmp_path: Path, disk: Disk) -> None:
    said: list[str] = []
    path = tmp_path / "lines"
    lines = LineWriter(path, said.append, kept_bytes=100)
    disk.room = 3
    for number in range(1000):
        lines.write(f"{number:09}")
    assert len(lines._waiting) <= 11
    disk.room = 10**9
    lines.write("last")
    assert "can be written again, but 990 lines are lost" in said[1]
    lines.close()
    found = path.read_text().splitlines()
    assert found[0] == "000000000" and found[-2:] == ["000000999", "last"]
    assert all(len(line) == 9 for line in found[:-1])


def flags(folder: Path, **changes: object) -> list[str]:
    return runs.arguments(folder, **(FIRST_STEPS | changes))


def app(folder: Path, arguments: list[str], **options: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, str(runs.APP), *arguments],
        cwd=folder,
        stderr=subprocess.PIPE,
        text=True,
        **options,  # type: ignore[arg-type]
    )


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
def test_a_full_disk_behind_metrics_does_not_end_the_run(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints/metrics.jsonl").symlink_to("/dev/full")
    done = runs.train(tmp_path, *flags(tmp_path))
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("metrics.jsonl cannot be written ([Errno 28]") == 1
    assert (tmp_path / "checkpoints/8/manifest.json").exists()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
def test_a_full_disk_behind_standard_output_does_not_end_the_run(tmp_path: Path) -> None:
    with open("/dev/full", "w") as full, app(tmp_path, flags(tmp_path), stdout=full) as process:
        _, stderr = process.communicate(timeout=120)
    assert process.returncode == 0, stderr
    assert stderr.count("standard output cannot be written ([Errno 28]") == 1
    assert "metrics.jsonl has all figures" in stderr and "Traceback" not in stderr
    assert [step["step"] for step in runs.metrics(tmp_path)] == [*range(1, 9)]
    assert (tmp_path / "checkpoints/8/manifest.json").exists()


def test_a_reader_that_leaves_does_not_end_the_run(tmp_path: Path) -> None:
    """``python apps/train | head -3``."""
    arguments = flags(tmp_path, parallelism__tp=2)
    with app(tmp_path, arguments, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stderr is not None
        for _ in range(3):
            process.stdout.readline()
        process.stdout.close()
        stderr = process.stderr.read()
        process.wait(120)
    assert process.returncode == 0, stderr
    assert stderr.count("standard output cannot be written") == 1 and "Traceback" not in stderr
    assert len(runs.metrics(tmp_path)) == 8
    assert (tmp_path / "checkpoints/8/manifest.json").exists()


def test_a_last_checkpoint_that_does_not_fit_asks_for_another_start(tmp_path: Path) -> None:
    def small() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))

    with app(tmp_path, flags(tmp_path), stdout=subprocess.PIPE, preexec_fn=small) as process:
        _, stderr = process.communicate(timeout=120)
    assert process.returncode == STALLED, stderr
    assert "the run is over, but without its last checkpoint: " in stderr


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), STALLED),
        (OSError(errno.EROFS, "Read-only file system"), STALLED),
        (OSError(errno.ESTALE, "Stale file handle"), STALLED),
        (SaveFailed("no"), STALLED),
        (RankError(0, "PassingError", "full", "trace", ("PassingError", "OSError")), STALLED),
        (OSError(errno.EACCES, "Permission denied"), 1),
        (RankError(0, "OSError", "denied", "trace", ("OSError",)), 1),
        (ValueError("bad"), 1),
    ],
)
def test_the_status_says_whether_another_start_helps(
    error: Exception, status: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli._failed(error, "", Mask()) == status
    assert str(error) in capsys.readouterr().err


def test_the_number_of_an_error_outlives_messages_around_it() -> None:
    def fail() -> None:
        with writing("cannot write x"):
            raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(OSError, match="cannot write x: .*No space left.*change checkpoints") as one:
        on_first(Mesh.connect(), fail)
    made = as_passing(one.value)
    assert isinstance(made, PassingError) and str(made) == str(one.value)
    assert not isinstance(as_passing(OSError("other")), PassingError)


def test_a_terminal_that_is_gone_is_said_once(capsys: pytest.CaptureFixture[str]) -> None:
    output = StandardOutput("there is more in x")

    def gone() -> None:
        raise OSError(errno.EIO, "Input/output error")

    output.show(gone)
    output.show(gone)
    said = capsys.readouterr().err
    assert said.count("cannot be written ([Errno 5] Input/output error)") == 1
    assert said.endswith("there is more in x\n")
