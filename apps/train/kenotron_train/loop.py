"""A run from its first step (or where it was stopped) to its last."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kenotron_ckpt import Saver, latest_step
from kenotron_data import Batch, Cursor, IterableLoader, Loader, decode, encode, printable
from kenotron_dist import Mesh, all_reduce, check_replicas, named_parameters
from kenotron_dist.hashing import key
from kenotron_models import Sampling, generate, parameter_count
from kenotron_optim import describe
from kenotron_train.assemble import Training, build_training
from kenotron_train.availability import check_available
from kenotron_train.config import Config, cautions, ignored_keys
from kenotron_train.corpus import Corpus, MaskTargets, has_index, open_corpus, open_loader
from kenotron_train.own_data import Hook, check_hook
from kenotron_train.progress import Progress
from kenotron_train.report import Report, short
from kenotron_train.resume import earlier_run, open_saver, resume, save_run
from kenotron_train.step import StepResult, training_step
from kenotron_train.upload import Uploads
from kenotron_train.validation import Validation, validate
from kenotron_train.vocabulary import check_vocabulary
from kenotron_train.yaml_config import dump_config

SAMPLE_PROMPT = "def "
SAMPLE_TOKENS = 160


def train(
    mesh: Mesh,
    config: Config,
    sample: bool = False,
    loader: Hook | None = None,
    *,
    target_mask: MaskTargets | None = None,
) -> list[StepResult]:
    """Train as the config says; returns what every step reported.

    Arguments: the mesh, of the sizes that the config names; the config; whether to end with a
    generated sample and a hint what to try next; data of one's own for stages whose config says
    ``dataset: null`` (see ``own_data.Hook``; without it they read made-up tokens); a mask of
    targets for tests (see ``kenotron_data.Loader``). Collective over the mesh. Raises ValueError or
    FileNotFoundError for bad input.
    """
    check_available(config)
    check_hook(config, loader)
    _check_same(config, mesh)
    check_vocabulary(config)
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
        data = _Data(training, report, loader, target_mask)
        try:
            results = _steps(training, data, saver, uploads, report, progress)
        finally:
            data.close()
        saver.finish()
        _say_saved(saver, report)
        uploads.finish()
        if sample and config.tokenizer.tokenizer_name_or_path is None:
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


class _Data:
    """The stage that is read: its corpus and its loader."""

    def __init__(
        self, training: Training, report: Report, hook: Hook | None, target_mask: MaskTargets | None
    ) -> None:
        self._training, self._report = training, report
        self._hook, self._target_mask = hook, target_mask
        self._open: _Stage | None = None

    def stage(self, progress: Progress) -> _Stage:
        """The stage of the next step, opened where the progress stands."""
        number = self._training.config.stage_at(progress.step + 1)
        if self._open is None or self._open.number != number:
            self.close()
            self._open = self._enter(number, progress)
        return self._open

    def close(self) -> None:
        """End what reads ahead."""
        if self._open is not None:
            self._open.loader.close()
        self._open = None

    def _enter(self, number: int, progress: Progress) -> _Stage:
        config, mesh = self._training.config, self._training.mesh
        with mesh.pulse.busy("reading the corpus"):
            corpus = open_corpus(config, number, self._hook)
        cursor = progress.cursor if progress.cursor.stage == number else Cursor(stage=number)
        if not progress.epoch_known and has_index(corpus.training):
            epoch = cursor.consumed // len(corpus.training)
            cursor = Cursor(number, epoch, cursor.consumed)
        loader = open_loader(config, mesh, corpus, cursor, self._target_mask)
        self._report.say(f"[Training Stage: {config.data_stages[number].name}]")
        if corpus.about:
            self._report.say(corpus.about)
        return _Stage(number, corpus, loader, config.sequence_of(number))


@dataclass(frozen=True)
class _Stage:
    number: int
    corpus: Corpus
    loader: Loader | IterableLoader
    sequence: int

    def next_batch(self, step: int) -> Batch:
        """The batch of a step. Raises ValueError at the end of the data, or for another length."""
        batch = next(self.loader, None)
        if batch is None:
            raise ValueError(
                f"data_stages.{self.number}: the data ended after {self.loader.cursor.consumed} "
                f"samples, before step {step} had its {self.loader.global_batch}: give more, or "
                "lower tokens.train_steps"
            )
        width = batch.tokens_MBS.shape[-1]
        if width != self.sequence:
            raise ValueError(
                f"data_stages.{self.number}: samples have {width + 1} ids, but sequence_length "
                f"{self.sequence} needs {self.sequence + 1}"
            )
        return batch


def _steps(
    training: Training,
    data: _Data,
    saver: Saver,
    uploads: Uploads,
    report: Report,
    progress: Progress,
) -> list[StepResult]:
    """All steps that are left."""
    config, mesh = training.config, training.mesh
    results: list[StepResult] = []
    while progress.step < config.tokens.train_steps:
        stage = data.stage(progress)
        report.start_step()
        step = progress.step + 1
        batch = stage.next_batch(step).to(mesh.device)
        start = progress.schedule_start
        scale = progress.loss_scale
        results.append(training_step(training, batch, step, saver.wait, start, scale))
        report.end_step()
        progress = progress.after(config, stage.loader.cursor, results[-1].loss_scale)
        report.step(step, results[-1], progress.tokens, _validate(training, step, stage.corpus))
        if _is_due(config, step):
            save_run(saver, training, progress)
        _say_saved(saver, report)
        uploads.say()
    return results


def _validate(training: Training, step: int, corpus: Corpus) -> Validation | None:
    """Loss on held-out samples, where the config asks for it after this step."""
    tokens = training.config.tokens
    every, last = tokens.val_check_interval, step == tokens.train_steps
    if not (last or (every > 0 and step % every == 0)):
        return None
    return validate(training, corpus.validation)


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


def _introduce(training: Training, report: Report, remark: str) -> None:
    config = training.config
    sizes = " x ".join(f"{name} {size}" for name, size in training.mesh.sizes.items())
    report.say(f"Project {config.general.project} | {sizes} | device {training.mesh.device}")
    count = parameter_count(config.decoder)
    report.say(
        f"Parameters: {count:,} ({short(count)}) | global batch: {config.global_batch_size} "
        f"samples, {short(config.batch_tokens(0))} tokens | steps: {config.tokens.train_steps}"
    )
    stages = config.data_stages
    report.say(
        f"[Training Plan] There are {len(stages)} training stages\n"
        + "\n".join(f"[Stage {s.name}] start from step {s.start_training_step}" for s in stages)
    )
    report.say(
        f"Optimizer: {config.optimizer.optimizer_factory.name}, groups of parameters:\n"
        + describe(training.groups, training.model.layouts, training.grads.whole)
    )
    for line in cautions(config):
        report.say(line, "warning")
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
