"""A session: mesh, model, optimizer, data and saver of one set of ranks, opened and dropped."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta

import torch

from kenotron_ckpt import Saver
from kenotron_config import Config, cautions, ignored_keys
from kenotron_cost import mesh_sizes
from kenotron_dist import Mesh, Signals, all_reduce, listening
from kenotron_dist.diagnosis import watch
from kenotron_dist.rng import key
from kenotron_train.assemble import OwnModel, TrainingRun, build_training, data_plan
from kenotron_train.data.own_data import Hook, check_hook
from kenotron_train.data.stage_dataset import MaskTargets
from kenotron_train.data.stage_loader import StageLoader
from kenotron_train.data.vocabulary import check_vocabulary
from kenotron_train.evaluate.evaluator import check_evaluate
from kenotron_train.life_cycle import HookList, LifeCycle
from kenotron_train.log.banner import introduce
from kenotron_train.log.instrumentation import Watching, check_watching
from kenotron_train.log.report import Report, open_report
from kenotron_train.progress import Progress
from kenotron_train.reproducible import check_conditions
from kenotron_train.run.elastic import slow_ranks_of, waiting
from kenotron_train.run.evaluations import Evaluations
from kenotron_train.run.memory_copies import MemoryCopies
from kenotron_train.run.memory_folder import memory_folder
from kenotron_train.run.own_folder import going_on
from kenotron_train.run.resume import resume
from kenotron_train.run.saving import bytes_of, open_saver
from kenotron_train.run.set_back import set_back
from kenotron_train.run.slow_ranks import SlowRanks
from kenotron_train.run.stopping import Stopper
from kenotron_train.run.upload import Uploads


@dataclass(frozen=True)
class Session:
    """Objects that the steps of a session work with; every rank has one of each."""

    training: TrainingRun
    """Model and optimizer on their mesh."""
    progress: Progress
    """Progress of the run when the session begins."""
    feed: StageLoader
    saver: Saver
    copies: MemoryCopies
    uploads: Uploads
    report: Report
    signals: Signals
    stopper: Stopper
    watching: Watching
    life: LifeCycle
    evaluations: Evaluations
    slow: SlowRanks
    waiting: int
    """Processes that join at the next checkpoint."""
    checked: bool
    """True: batches are checked before steps, and the state after them."""
    failed: dict[int, str] = field(default_factory=dict)
    """Reason why the last failed save failed, by its step."""


@contextmanager
def open_session(
    config: Config,
    mesh: Mesh | None = None,
    loader: Hook | None = None,
    *,
    target_mask: MaskTargets | None = None,
    deadline: float = math.inf,
    model: OwnModel | None = None,
    hooks: tuple[LifeCycle, ...] = (),
    limit: timedelta = timedelta(minutes=5),
) -> Iterator[Session]:
    """Build everything that trains by a config on these ranks, and drop it again.

    It resumes where the run's folder has checkpoints (`going_on`). At the end, also after an error,
    what was opened is closed in reverse order; then the next session may open in these processes.

    Args:
        config: of the run.
        mesh: of the config's sizes, which stays open; None: one is made, watched, and destroyed.
        loader: data of one's own for stages with ``dataset: null``.
        target_mask: a mask of targets, for tests.
        deadline: when the time is over, of ``time.monotonic``.
        model: layers of one's own.
        hooks: what is called at moments of the run.
        limit: how long a rank may wait in one communication of a mesh that is made here.

    Collective over all processes. Raises ValueError, FileNotFoundError or OSError for bad input.
    """
    with ExitStack() as opened:
        mesh = _connected(opened, config, limit) if mesh is None else mesh
        _check(config, loader, mesh)
        asked, memory = config.checkpoints, memory_folder(config.checkpoints, mesh)
        config = replace(config, checkpoints=going_on(asked, config.s3_upload, mesh))
        (life := HookList(hooks)).pre_init(config, mesh)
        training = build_training(config, mesh, model)
        check_conditions(training.checkpoints.conditions, mesh)
        life.post_init(training)
        progress, remark = resume(training, asked=asked, memory=memory)
        training.check_replicas()
        signals = opened.enter_context(listening())
        report = opened.enter_context(open_report(training))
        uploads = opened.enter_context(Uploads(config.s3_upload, config.checkpoints, mesh, report))
        saver = opened.enter_context(open_saver(training, uploads))
        copies = opened.enter_context(MemoryCopies(training, memory, report, saver))
        set_back(asked, progress.step, copies, mesh)
        watching = opened.enter_context(Watching(training, report, progress.step + 1))
        report.begin(progress.step + 1)  # the saver has locked the folder
        introduce(training, report, remark, cautions(config), ignored_keys(config))
        uploads.resumed(progress.step)
        feed = opened.enter_context(closing(StageLoader(training, report, loader, target_mask)))
        own = Evaluations(
            training, report, config.evaluation, own_model=model is not None, step=progress.step,
            optional=config.evaluate is None,  # of lighteval, which no training depends on
        )  # fmt: skip
        yield Session(
            training, progress, feed, saver, copies, uploads, report, signals,
            Stopper(signals, deadline, bytes_of(training), mesh.world.size), watching, life, own,
            slow_ranks_of(config, mesh, watching.rank_times, report), waiting(hooks, report),
            not config.general.ignore_sanity_checks,
        )  # fmt: skip


def _connected(opened: ExitStack, config: Config, limit: timedelta) -> Mesh:
    """Make the mesh of a config, watched, and closed with what is opened."""
    mesh = Mesh.connect(**vars(mesh_sizes(config.parallelism)), batch_threads=True)
    opened.callback(mesh.close)
    opened.enter_context(watch(mesh, limit=limit))
    return mesh


def _check(config: Config, loader: Hook | None, mesh: Mesh) -> None:
    """Refuse what cannot be run, and ranks that were started with different configs."""
    check_hook(config.data_stages, loader)
    check_watching(config.logging.trackers, config.general.benchmark_csv_path)
    check_evaluate(config.evaluate)
    check_vocabulary(data_plan(config))
    own = torch.tensor([key(json.dumps(asdict(config)), bits=56)], device=mesh.device)
    if all_reduce(own, mesh.world, op="max") != all_reduce(own, mesh.world, op="min"):
        raise ValueError(
            f"rank {mesh.rank}: the ranks were started with different configs: give all of them "
            "the same file and --set flags"
        )
