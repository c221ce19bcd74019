"""A run from its first step (or where it was stopped) to its last."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kenotron_ckpt import Saver, latest_step
from kenotron_data import Cursor, Loader, decode, encode, printable
from kenotron_dist import Mesh, all_reduce, check_replicas, named_parameters
from kenotron_dist.hashing import key
from kenotron_models import Sampling, generate, parameter_count
from kenotron_optim import describe
from kenotron_train.assemble import Training, build_training
from kenotron_train.availability import check_available
from kenotron_train.config import Config, ignored_keys
from kenotron_train.corpus import Corpus, MaskTargets, open_corpus, open_loader, open_validation
from kenotron_train.report import Report, short
from kenotron_train.resume import Progress, earlier_run, open_saver, resume, save_run
from kenotron_train.step import StepResult, evaluate, training_step
from kenotron_train.upload import Uploads
from kenotron_train.yaml_config import dump_config

SAMPLE_PROMPT = "def "
SAMPLE_TOKENS = 160


def train(
    mesh: Mesh, config: Config, sample: bool = False, *, target_mask: MaskTargets | None = None
) -> list[StepResult]:
    """Train as the config says; returns what every step reported.

    Arguments: the mesh, of the sizes that the config names; the config; whether to end with a
    generated sample and a hint what to try next; a mask of targets for tests (see
    ``kenotron_data.Loader``). Collective over the mesh. Raises ValueError or FileNotFoundError for
    bad input.
    """
    check_available(config)
    _check_same(config, mesh)
    training = build_training(config, mesh)
    progress, remark = resume(training)
    if config.checkpoints.resume_checkpoint_path is None:
        remark = "; ".join(filter(None, (remark, earlier_run(config))))
    check_replicas(named_parameters(training.model.stack), training.model.layouts, mesh)
    with (
        Report(config, mesh, progress.step + 1) as report,
        Uploads(config, mesh, report) as uploads,
        open_saver(training, uploads) as saver,
    ):
        _introduce(training, report, remark)
        uploads.resumed(progress.step)
        if config.checkpoints.save_initial_state and progress.step == 0:
            save_run(saver, training, progress)
        results = _steps(training, saver, uploads, report, progress, target_mask)
        saver.finish()
        _say_saved(saver, report)
        uploads.finish()
        if sample:
            _show_sample(training, report)
    return results


def _check_same(config: Config, mesh: Mesh) -> None:
    """Refuse ranks that were started with different configs."""
    own = torch.tensor([key(dump_config(config), bits=56)], device=mesh.device)
    if all_reduce(own, mesh.world, op="max") != all_reduce(own, mesh.world, op="min"):
        raise ValueError(
            f"rank {mesh.rank}: the ranks were started with different configs: give all of them "
            "the same file and --set flags"
        )


def _steps(
    training: Training,
    saver: Saver,
    uploads: Uploads,
    report: Report,
    progress: Progress,
    target_mask: MaskTargets | None,
) -> list[StepResult]:
    """All steps that are left."""
    config, mesh = training.config, training.mesh
    results: list[StepResult] = []
    corpus: Corpus | None = None
    loader: Loader | None = None
    while progress.step < config.tokens.train_steps:
        stage = _stage_at(config, progress.step + 1)
        if corpus is None or loader is None or loader.cursor.stage != stage:
            if loader is not None:
                loader.close()
            with mesh.pulse.busy("reading the corpus"):
                corpus = open_corpus(config, stage)
            cursor = progress.cursor if progress.cursor.stage == stage else Cursor(stage=stage)
            if not progress.epoch_known:
                cursor = Cursor(stage, cursor.consumed // len(corpus.training), cursor.consumed)
            loader = open_loader(config, mesh, corpus, cursor, target_mask)
            report.say(f"[Training Stage: {config.data_stages[stage].name}]")
            if corpus.about:
                report.say(corpus.about)
        report.start_step()
        batch = next(loader).to(mesh.device)
        step = progress.step + 1
        start = progress.schedule_start
        results.append(training_step(training, batch, step, saver.wait, start))
        report.end_step()
        progress = progress.after(config, loader.cursor)
        validation = _validate(training, progress.step, corpus)
        report.step(progress.step, results[-1], progress.tokens, validation)
        if _is_due(config, progress.step):
            save_run(saver, training, progress)
        _say_saved(saver, report)
        uploads.say()
    if loader is not None:
        loader.close()
    return results


def _validate(training: Training, step: int, corpus: Corpus) -> float | None:
    """Loss on held-out samples, where the config asks for it after this step."""
    tokens = training.config.tokens
    every, last = tokens.val_check_interval, step == tokens.train_steps
    if corpus.validation is None or not (last or (every > 0 and step % every == 0)):
        return None
    batches = open_validation(training.config, training.mesh, corpus.validation)
    return evaluate(training, itertools.islice(batches, tokens.limit_val_batches))


def _say_saved(saver: Saver, report: Report) -> None:
    """A line for each save that has ended."""
    for saved in saver.reports():
        if saved.failure:
            report.say(f"{saved}; earlier checkpoints are whole", "error")
        else:
            report.say(f"Saved checkpoint {saved}")
        if saved.follow_up:
            report.say(f"{saved.folder} stands, but then: {saved.follow_up}", "warning")


def _is_due(config: Config, step: int) -> bool:
    """Whether a checkpoint is written after this step."""
    checkpoints = config.checkpoints
    last = step == config.tokens.train_steps and checkpoints.save_final_state
    return last or step % checkpoints.checkpoint_interval == 0


def _stage_at(config: Config, step: int) -> int:
    """Index of the data stage that a step reads."""
    starts = [stage.start_training_step for stage in config.data_stages]
    return sum(start <= step for start in starts) - 1


def _introduce(training: Training, report: Report, remark: str) -> None:
    config = training.config
    sizes = " x ".join(f"{name} {size}" for name, size in training.mesh.sizes.items())
    report.say(f"Project {config.general.project} | {sizes} | device {training.mesh.device}")
    count = parameter_count(config.decoder)
    report.say(
        f"Parameters: {count:,} ({short(count)}) | global batch: {config.global_batch_size} "
        f"samples, {short(config.global_batch_tokens)} tokens | steps: {config.tokens.train_steps}"
    )
    report.say(
        f"Optimizer: {config.optimizer.optimizer_factory.name}, groups of parameters:\n"
        + describe(training.groups, training.model.layouts, training.grads.whole)
    )
    for line in ignored_keys(config):
        report.say(f"Ignored: {line}", "warning")
    if remark:
        report.say(remark)


def _show_sample(training: Training, report: Report) -> None:
    config, mesh = training.config, training.mesh
    vocab_size = config.decoder.vocab_size

    def forward(tokens: Tensor, context: Any) -> Tensor | None:
        logits = training.model.pipeline.forward([tokens], [context])
        return logits[0] if logits else None

    prompt = encode([SAMPLE_PROMPT], 256).tolist()
    new = generate(
        forward,
        [prompt],
        mesh,
        window=config.tokens.sequence_length,
        vocab_size=vocab_size,
        max_new_tokens=SAMPLE_TOKENS,
        sampling=Sampling(temperature=0.7, seed=config.general.seed),
        source=training.model.pipeline.last_rank,
    )
    text = decode([*prompt, *(token for tokens in new for token in tokens if token is not None)])
    folder = Path(config.checkpoints.checkpoints_path)
    step = latest_step(folder)
    report.say(f"A sample of the model:\n{printable(text)}")
    if step is not None:
        report.say(
            f"Next, try:\n  python apps/generate --ckpt-path {folder / str(step)} --prompt 'class '"
            "\n  python apps/train --config-file apps/train/kenotron_train/default.yaml"
        )
