"""Proof that a run outlives its ranks: seeded signals hit them, and neither losses nor data change.

``python apps/train/tests/elastic_proof.py --steps 300 --faults 20`` trains once undisturbed, and
once with SIGKILL and SIGSTOP at random moments of steps, saves and loads. A rank that is lost is
not replaced (but with ``--max-restarts``); when the last one is gone, the program starts all of
them again. Compared are losses,
gradient norms and the samples of every step; no process, temporary file or copy in memory may be
left. The exit status is 1 where anything differs.

``--rounds 50 --minutes 120`` proves 50 disturbed runs, each with the next seed, and begins no
further one after two hours. With ``--hosts 2`` ranks do not see one memory.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import shutil
import signal
import statistics
import tempfile
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import launchers
import runs

from kenotron_ckpt import MANIFEST, CheckpointsConfig, manifest_at
from kenotron_config import DEFAULT_CONFIG, Config, load_config
from kenotron_data import Batch
from kenotron_dist import Mesh, RankError, broadcast_object
from kenotron_engine import StepResult
from kenotron_train.assemble import TrainingRun
from kenotron_train.data.own_data import OwnData
from kenotron_train.failures.nonfinite_record import samples_of
from kenotron_train.library import train
from kenotron_train.life_cycle import LifeCycle
from kenotron_train.log.metrics_file import last_step, read_journal
from kenotron_train.progress import Progress
from kenotron_train.run import loop, session

BATCH, INTERVAL, LIMIT = 7, 10, 6.0
"""Samples of a step, steps between checkpoints on the disk, and seconds until a hang is found."""
APART = 4
"""Steps between two faults at least: a signal comes within two steps of its own."""
HOST = "HOST_OF_THIS_RANK"
"""Variable with the number of a rank's host, which is part of the path of its memory."""
REPRODUCIBLE = {
    "general__reproducible": "true", "optimizer__accumulate_grad_in_fp32": "true",
    "optimizer__optimizer_factory__torch_adam_is_fused": "false",
}  # fmt: skip


@dataclass(frozen=True)
class Fault:
    """A signal that a rank sends to itself."""

    step: int
    """After this step, or the first one that is made after it."""
    is_loading: bool
    """True: instead, while the ranks that follow the fault before it load the checkpoint."""
    share: float
    """Rank that is hit, as a share of the ranks that are there."""
    number: signal.Signals
    delay: float
    """Seconds from the end of the step, or from the rendezvous."""


def faults_of(seed: int, steps: int, count: int, stops: bool = True) -> list[Fault]:
    """Draw the faults of a run; every fourth hits rank 0, every fourth is a SIGSTOP (``stops``)."""
    if steps <= APART * count:
        raise ValueError(
            f"--steps {steps}: {count} faults need at least {APART * count + 1} steps: give more "
            "steps or fewer --faults"
        )
    draw = random.Random(seed)
    first = sorted(draw.choices(range(1, steps - APART * count + 1), k=count))
    kinds = [signal.SIGSTOP if stops and n % 4 == 1 else signal.SIGKILL for n in range(count)]
    draw.shuffle(kinds)
    return [
        Fault(
            step=step + APART * n,
            is_loading=n > 0 and draw.random() < 0.2,
            share=0.0 if n % 4 == 2 else draw.random(),
            number=number,
            delay=draw.random() * 0.05,
        )
        for n, (step, number) in enumerate(zip(first, kinds, strict=True))
    ]


class Faults(LifeCycle):
    """Sends the signals, one in each session, and records what the comparison needs."""

    def __init__(self, folder: Path, faults: Sequence[Fault], ranks_of_host: int = 0) -> None:
        """Take what is sent.

        Args:
            folder: with ``ranks`` and ``fired``, which get a file for each rank and signal.
            faults: the signals.
            ranks_of_host: ranks that see one memory; 0: all.
        """
        self._folder, self._faults, self._ranks_of_host = folder, faults, ranks_of_host
        self._thread: threading.Thread | None = None
        self._armed = 0

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Arrive in a rank, before its memory is looked for."""
        self.__dict__.update(state)
        make = session.memory_folder

        def made(section: CheckpointsConfig, mesh: Mesh) -> Any:
            host = mesh.rank // self._ranks_of_host if self._ranks_of_host else 0
            os.environ[HOST] = str(host)
            return make(section, mesh)

        session.memory_folder = made  # of this process, which is one rank

    def pre_init(self, config: Config, mesh: Mesh) -> None:
        """Choose the fault of this session."""
        (self._folder / "ranks" / str(os.getpid())).write_text(born(os.getpid()))
        self._record_batches()
        fired = broadcast_object(len(fired_in(self._folder)), mesh.world)
        self._fault = self._faults[fired] if fired < len(self._faults) else None
        self._path = self._folder / "fired" / str(fired)
        if mesh.rank == 0:
            metrics = Path(config.checkpoints.checkpoints_path) / "metrics.jsonl"
            seen = last_step(metrics) if metrics.exists() else 0
            self._write("finished", max(self._read("finished"), seen))
        if self._fault is not None and self._fault.is_loading:
            self._arm(self._fault, mesh)

    def pre_training(self, training: TrainingRun, progress: Progress) -> None:
        """Note finished steps that are not in the checkpoint."""
        if self._thread is not None:
            self._thread.join()  # this process ends, or stands still
        self._began = progress.step
        if training.mesh.rank == 0:
            lost = self._read("finished") - progress.step
            self._write("lost", self._read("lost") + max(lost, 0))
            self._write("finished", progress.step)

    def post_train_step(
        self, training: TrainingRun, progress: Progress, result: StepResult
    ) -> None:
        """Record the samples of the step; send the signal where it is time."""
        result.figures["samples"] = samples_of(self._batch, training.mesh)
        fired = fired_in(self._folder)
        if training.mesh.rank == 0 and progress.step == self._began + 1 and fired:
            latest = max(fired, key=lambda path: int(path.name))
            took = time.time() - latest.stat().st_mtime
            with (self._folder / "recoveries").open("a") as file:
                file.write(f"{latest.read_text()} {took}\n")
        if self._fault is None or progress.step < self._fault.step:
            return
        if not self._armed:
            self._armed = progress.step
            self._arm(self._fault, training.mesh)
        elif self._thread is not None and progress.step >= self._armed + 2:
            self._thread.join()

    def _arm(self, fault: Fault, mesh: Mesh) -> None:
        """Start the thread that sends the signal, on the rank that is hit."""
        world = mesh.config.world_size
        if mesh.rank != int(fault.share * world):
            return
        number = signal.SIGKILL if world == 1 else fault.number  # no rank watches the last one

        def send() -> None:
            time.sleep(fault.delay)
            self._path.write_text(number.name)
            os.kill(os.getpid(), number)

        self._thread = threading.Thread(target=send, daemon=True)
        self._thread.start()

    def _record_batches(self) -> None:
        step = loop.training_step

        def recorded(training: TrainingRun, batch: Batch, *more: Any) -> StepResult:
            self._batch = batch
            return step(training, batch, *more)

        loop.training_step = recorded  # of this process, which runs one session

    def _read(self, name: str) -> int:
        path = self._folder / name
        return int(path.read_text()) if path.exists() else 0

    def _write(self, name: str, number: int) -> None:
        path = self._folder / f"{name}.new"
        path.write_text(str(number))
        path.replace(self._folder / name)


def sample(number: int) -> list[int]:
    """Tokens of a sample, other ones for each number."""
    draw = random.Random(number)
    return [draw.randrange(251) for _ in range(33)]


def configured(folder: Path, steps: int, ranks: int, **more: object) -> Config:
    """The config of a tiny run with a copy in memory after every step."""
    changes = {
        "tokens__train_steps": steps, "tokens__global_batch_size": BATCH,
        "tokens__micro_batch_size": 1, "tokens__limit_val_batches": 0, "parallelism__dp": "auto",
        "checkpoints__checkpoint_interval": INTERVAL, "checkpoints__keep_last": 3,
        "checkpoints__memory_every": 1, "checkpoints__memory_path": f"{folder}/memory/${HOST}",
        "checkpoints__checkpointing_engine": "torch", "optimizer__zero_stage": 1,
        "data_stages__0__data__dataset": "null", "logging__log_level": "warning",
        "optimizer__learning_rate_scheduler__learning_rate": 1e-4,
        "optimizer__learning_rate_scheduler__min_decay_lr": 1e-5,
    }  # fmt: skip
    flags = runs.arguments(folder, **changes | more)[1::2]
    flags = [flag for flag in flags if "hf_dataset" not in flag]
    return load_config(DEFAULT_CONFIG, flags, world=ranks)


@dataclass(frozen=True)
class Proof:
    """Findings about a disturbed run."""

    problems: list[str]
    """Departures from the undisturbed run, and what was left; empty where there are none."""
    fired: dict[str, int]
    """Signals that were sent, by name."""
    starts: int
    """Starts of all ranks."""
    lost: int
    """Finished steps that were made again."""
    recoveries: dict[str, list[float]]
    """Seconds from a signal to the next finished step, by its name."""
    goodput: float
    """Share of the seconds of the disturbed run in steps that were kept."""


def undisturbed(folder: Path, steps: int, **more: object) -> list[dict[str, Any]]:
    """Train on one rank, in an empty folder, and return the curve; see ``prove``."""
    for name in ("memory/0", "ranks", "fired"):
        (folder / name).mkdir(parents=True)
    data = OwnData(sample, samples=steps * BATCH)
    calm = configured(folder, steps, 1, **more)
    train(calm, loader=data, hooks=[Faults(folder, ())], ranks=1, threads=1)
    return read_journal(folder / "checkpoints/metrics.jsonl")


def prove(
    folder: Path,
    expected: Sequence[dict[str, Any]],
    *,
    faults: int,
    seed: int = 0,
    ranks: int = 4,
    hosts: int = 1,
    stops: bool = True,
    max_restarts: int = 0,
    **more: object,
) -> Proof:
    """Train on up to ``ranks``, disturbed, and compare with the undisturbed curve.

    Args:
        folder: an empty one, for all files.
        expected: of ``undisturbed``, with the same further keys.
        faults, seed, stops: see ``faults_of``.
        ranks: of every start.
        hosts: memories that these ranks have; divides their number.
        max_restarts: processes of a start that are replaced.
        more: further keys of the config, with ``__`` for the dots.
    """
    steps = len(expected)
    for name in ("tmp", "ranks", "fired", *(f"memory/{host}" for host in range(hosts))):
        (folder / name).mkdir(parents=True)
    data, limit = OwnData(sample, samples=steps * BATCH), timedelta(seconds=LIMIT)
    each = ranks // hosts if hosts > 1 else 0
    hook = Faults(folder, faults_of(seed, steps, faults, stops), each)
    config, starts, begun = configured(folder, steps, ranks, **more), 0, time.monotonic()
    before, tempfile.tempdir = tempfile.tempdir, str(folder / "tmp")
    try:
        while True:
            fired, starts = len(fired_in(folder)), starts + 1
            try:
                given = {"threads": 1, "stall_limit": limit, "max_restarts": max_restarts}
                train(config, loader=data, hooks=[hook], ranks=ranks, **given)
                break
            except RankError:
                if len(fired_in(folder)) == fired:
                    raise  # by itself
    finally:
        tempfile.tempdir = before
    took = time.monotonic() - begun
    found = read_journal(folder / "checkpoints/metrics.jsonl")
    problems = departures(expected, found, steps, exact="general__reproducible" in more)
    sent = [path.read_text() for path in fired_in(folder)]
    if len(sent) != faults:
        problems.append(f"{len(sent)} of {faults} signals were sent")
    lines = [line.split() for line in (folder / "recoveries").read_text().splitlines()]
    kinds = sorted({*sent})
    return Proof(
        problems=problems + leftovers(folder),
        fired={kind: sent.count(kind) for kind in kinds},
        starts=starts,
        lost=int((folder / "lost").read_text()),
        recoveries={k: [float(took) for name, took in lines if name == k] for k in kinds},
        goodput=sum(each["step_time_s"] for each in found) / took,
    )


def departures(
    expected: Sequence[dict[str, Any]], found: Sequence[dict[str, Any]], steps: int, *, exact: bool
) -> list[str]:
    """Compare two curves: steps, samples, losses (1e-6 relative) and gradient norms (1e-5).

    Args:
        expected, found: lines of metrics.jsonl, with the ``samples`` of each step.
        steps: of the whole run.
        exact: not a bit may differ.
    """
    problems = []
    for name, curve in (("undisturbed", expected), ("disturbed", found)):
        if [each["step"] for each in curve] != list(range(1, steps + 1)):
            problems.append(f"the steps of the {name} run are not 1 to {steps}, each once")
        taken = [number for each in curve for number in each["samples"]]
        if sorted(taken) != list(range(steps * BATCH)):
            counts = {n: taken.count(n) for n in {*range(steps * BATCH), *taken}}
            wrong = {n: count for n, count in counts.items() if count != 1}
            problems.append(f"{name}: samples that were not taken once, with counts: {wrong}")
    for ours, theirs in zip(found, expected, strict=False):
        if ours["samples"] != theirs["samples"]:
            problems.append(f"step {ours['step']}: samples {ours['samples']}")
        for key, tolerance in (("lm_loss", 1e-6), ("grad_norm", 1e-5)):
            near = 0.0 if exact else tolerance
            if not math.isclose(ours[key], theirs[key], rel_tol=near):
                problems.append(f"step {ours['step']}: {key} {ours[key]!r}, not {theirs[key]!r}")
    return problems


def leftovers(folder: Path) -> list[str]:
    """List processes, temporary files and copies in memory of a run that is over."""
    pids = [int(path.name) for path in (folder / "ranks").iterdir()]

    def alive() -> list[int]:
        return [pid for pid in pids if born(pid) == (folder / "ranks" / str(pid)).read_text()]

    try:
        launchers.until(lambda: not alive(), lambda: f"processes are left: {alive()}", 60)
    except TimeoutError as error:
        return [str(error)]
    shared = [path for path in Path("/dev/shm").glob("torch_*") if _pid_of(path) in pids]
    # The last ranks are on host 0; the memory of a host that was lost is out of their reach.
    inside = [*(folder / "memory/0").iterdir(), *(folder / "tmp").iterdir()]
    return [f"{path} is left" for path in (*shared, *inside, *_strays(folder / "checkpoints"))]


def _strays(run: Path) -> Iterable[Path]:
    """Yield files of a run folder that belong to no complete checkpoint."""
    for path in run.rglob("*"):
        step = path.relative_to(run).parts[0]
        if path.suffix == ".tmp" or (step.isdecimal() and not (run / step / MANIFEST).exists()):
            yield path
        elif path.suffix == ".safetensors" and path.name not in manifest_at(run / step).files:
            yield path


def _pid_of(path: Path) -> int:
    number = path.name.split("_")[1]
    return int(number) if number.isdecimal() else 0


def born(pid: int) -> str:
    """The time at which a process was started, in ticks; empty where it is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in "ZX" else fields[19]


def fired_in(folder: Path) -> list[Path]:
    """A file for each signal that was sent."""
    return list((folder / "fired").iterdir())


def main() -> int:
    """Read the flags, run the proof, and print what was found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--faults", type=int, default=20, help="of each round")
    parser.add_argument("--seed", type=int, default=0, help="of the first round")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--hosts", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=math.inf, help="begin no round after them")
    parser.add_argument("--kills-only", action="store_true", help="no SIGSTOP, which takes 15 s")
    parser.add_argument("--background", action="store_true", help="copies during the next step")
    parser.add_argument("--max-restarts", type=int, default=0, help="processes that are replaced")
    parser.add_argument("--reproducible", action="store_true", help="compare bits")
    given = parser.parse_args()
    more = REPRODUCIBLE if given.reproducible else {}
    if given.background:
        more |= {"checkpoints__checkpointing_engine": "datastates"}
    # Of a copy every step one finished step may be lost, and two during the next step.
    bound, end, proofs = 2 if given.background else 0, time.monotonic() + 60 * given.minutes, []
    with tempfile.TemporaryDirectory(prefix="elastic-proof-") as folder:
        expected = undisturbed(Path(folder) / "calm", given.steps, **more)
        for seed in range(given.seed, given.seed + given.rounds):
            if time.monotonic() > end:
                break
            what = {"seed": seed, "faults": given.faults, "stops": not given.kills_only}
            what["max_restarts"] = given.max_restarts
            where = Path(folder) / str(seed)
            proof = prove(where, expected, ranks=given.ranks, hosts=given.hosts, **what, **more)
            proofs.append(proof)
            shutil.rmtree(where)
            print(
                f"seed {seed}: signals {proof.fired}; starts of all ranks {proof.starts}; finished "
                f"steps lost {proof.lost}; goodput {proof.goodput:.1%}", flush=True,
            )  # fmt: skip
            for problem in proof.problems:
                print(f"PROBLEM {problem}", flush=True)
    return summarise(proofs, bound)


def summarise(proofs: Sequence[Proof], bound: int) -> int:
    """Print what all rounds found; the exit status. ``bound``: steps that a signal may cost."""
    sent = sum(sum(proof.fired.values()) for proof in proofs)
    lost = sum(proof.lost for proof in proofs)
    print(f"{len(proofs)} rounds, {sent} signals, {lost} finished steps lost")
    for name in sorted({name for proof in proofs for name in proof.recoveries}):
        seconds = [took for proof in proofs for took in proof.recoveries.get(name, ())]
        middle, most = (f(seconds or [math.nan]) for f in (statistics.median, max))
        print(f"{name} to the next finished step: median {middle:.1f} s, most {most:.1f} s")
    problems = [problem for proof in proofs for problem in proof.problems]
    print("losses and samples are those of the undisturbed run" if not problems else "failed")
    return 1 if problems or lost > bound * sent else 0


if __name__ == "__main__":
    raise SystemExit(main())
