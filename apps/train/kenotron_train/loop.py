"""A run from its first step (or where it was stopped) to its last."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch import Tensor

from kenotron_ckpt import latest_step, load, save
from kenotron_data import Cursor, Loader, decode, encode
from kenotron_dist import Mesh, check_replicas, named_parameters
from kenotron_models import generate, parameter_count
from kenotron_train.assemble import (
    Corpus,
    Training,
    build_training,
    model_records,
    open_corpus,
    open_loader,
    open_validation,
)
from kenotron_train.config import Config, ignored_keys
from kenotron_train.report import Report, short
from kenotron_train.step import StepResult, evaluate, training_step
from kenotron_train.yaml_config import dump_config

SAMPLE_PROMPT = "def "
SAMPLE_TOKENS = 160
TargetMask = Callable[[Tensor, int], Any]


def train(
    mesh: Mesh, config: Config, sample: bool = False, *, target_mask: TargetMask | None = None
) -> list[StepResult]:
    """Train as the config says; returns what every step reported.

    Arguments: the mesh, of the sizes that the config names; the config; whether to end with a
    generated sample and a hint what to try next; a mask of targets for tests (see
    ``kenotron_data.Loader``). Collective over the mesh. Raises ValueError or FileNotFoundError for
    bad input.
    """
    training = build_training(config, mesh)
    done, cursor = _resume(training)
    check_replicas(named_parameters(training.model.stack), training.model.layouts, mesh)
    stage = _stage_at(config, done + 1)
    if cursor.stage != stage:
        cursor = Cursor(stage=stage)
    corpus = open_corpus(config, stage)
    results = []
    with Report(config, mesh, done + 1) as report:
        _introduce(training, report, done)
        loader = open_loader(config, mesh, corpus, cursor, target_mask)
        if config.checkpoints.save_initial_state and done == 0:
            _save(training, report, 0, loader.cursor)
        for step in range(done + 1, config.tokens.train_steps + 1):
            if _stage_at(config, step) != stage:
                stage = _stage_at(config, step)
                loader.close()
                corpus = open_corpus(config, stage)
                loader = open_loader(config, mesh, corpus, Cursor(stage=stage), target_mask)
                report.say(f"[Training Stage: {config.data_stages[stage].name}]")
            report.start_step()
            results.append(training_step(training, next(loader), step))
            report.step(step, results[-1], step * config.global_batch_tokens)
            _between_steps(training, report, step, corpus, loader)
        loader.close()
        if sample:
            _show_sample(training, report)
    return results


def _between_steps(
    training: Training, report: Report, step: int, corpus: Corpus, loader: Loader
) -> None:
    """Validate and save where the config asks for it."""
    tokens, checkpoints = training.config.tokens, training.config.checkpoints
    last = step == tokens.train_steps
    every = tokens.val_check_interval
    if corpus.validation is not None and (last or (every > 0 and step % every == 0)):
        held_out = open_validation(training.config, training.mesh, corpus.validation)
        batches = list(itertools.islice(held_out, tokens.limit_val_batches))
        loss = evaluate(training, batches)
        report.validation(step, loss)
    if step % checkpoints.checkpoint_interval == 0 or (last and checkpoints.save_final_state):
        _save(training, report, step, loader.cursor)


def _resume(training: Training) -> tuple[int, Cursor]:
    """Load the checkpoint that the config names; (steps done, place in the data)."""
    checkpoints = training.config.checkpoints
    if checkpoints.resume_checkpoint_path is None:
        return 0, Cursor()
    folder = Path(checkpoints.resume_checkpoint_path)
    wanted: dict[str, Any] = dict(model_records(training.model))
    if checkpoints.load_optimizer:
        training.optimizer.prepare()
        wanted |= training.optimizer.wanted()
    state = load(folder, wanted, training.mesh)
    if checkpoints.load_optimizer:
        training.optimizer.steps = int(state["optimizer_steps"])
        training.optimizer.publish()
    else:
        training.optimizer.reload()
    return int(state["step"]), Cursor.from_dict(state["cursor"])


def _save(training: Training, report: Report, step: int, cursor: Cursor) -> None:
    config = training.config
    records = {**model_records(training.model), **training.optimizer.state()}
    state = {
        "step": step,
        "optimizer_steps": training.optimizer.steps,
        "cursor": cursor.to_dict(),
        "consumed_train_samples": step * config.global_batch_size,
        "model_config": asdict(config.model.model_config),
        "dtype": config.model.dtype,
        "sequence_length": config.tokens.sequence_length,
    }
    folder = Path(config.checkpoints.checkpoints_path)
    path = save(folder, step, records, training.mesh, state, config_text=dump_config(config))
    report.say(f"Saved checkpoint {path}")


def _stage_at(config: Config, step: int) -> int:
    """Index of the data stage that a step reads."""
    starts = [stage.start_training_step for stage in config.data_stages]
    return sum(start <= step for start in starts) - 1


def _introduce(training: Training, report: Report, done: int) -> None:
    config = training.config
    sizes = " x ".join(f"{name} {size}" for name, size in training.mesh.sizes.items())
    report.say(f"Project {config.general.project} | {sizes} | device {training.mesh.device}")
    count = parameter_count(config.model.model_config)
    report.say(
        f"Parameters: {count:,} ({short(count)}) | global batch: {config.global_batch_size} "
        f"samples, {short(config.global_batch_tokens)} tokens | steps: {config.tokens.train_steps}"
    )
    for line in ignored_keys(config):
        report.say(f"Ignored: {line}", "warning")
    if done:
        report.say(f"Resumed after step {done} from {config.checkpoints.resume_checkpoint_path}")


def _show_sample(training: Training, report: Report) -> None:
    config, mesh = training.config, training.mesh
    vocab_size = config.model.model_config.vocab_size

    def forward(tokens: Tensor, context: Any) -> Tensor | None:
        logits = training.model.pipeline.forward([tokens], [context])
        return logits[0] if logits else None

    prompt = encode([SAMPLE_PROMPT], 256).tolist()
    new = generate(
        forward,
        prompt,
        mesh,
        window=config.tokens.sequence_length,
        vocab_size=vocab_size,
        max_new_tokens=SAMPLE_TOKENS,
        temperature=0.7,
        seed=config.general.seed,
    )
    text = decode([*prompt, *new])
    folder = Path(config.checkpoints.checkpoints_path)
    step = latest_step(folder)
    report.say(f"A sample of the model:\n{text}")
    if step is not None:
        report.say(
            f"Next, try:\n  python apps/generate --ckpt-path {folder / str(step)} --prompt 'class '"
            "\n  python apps/train --config-file apps/train/kenotron_train/default.yaml"
        )
