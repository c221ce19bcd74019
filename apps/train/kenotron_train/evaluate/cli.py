"""``python apps/train evaluate``: a checkpoint on any layout, as a job of its own."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from kenotron_ckpt import open_checkpoint, read_manifest, resolve_step, store_at
from kenotron_command import FAILED, OK, add_layout, count, framed, layout_sizes
from kenotron_config import Config, EvaluateConfig, unavailable
from kenotron_data import tokenizer_libraries
from kenotron_dist import Mesh, MeshConfig, explained, start
from kenotron_engine import ModelOnMesh, ModelPlan, Validation, model_as_trained
from kenotron_models import model_from_json
from kenotron_train.assemble import data_plan
from kenotron_train.called import parser_of
from kenotron_train.config_file import load_config, parse_config
from kenotron_train.data.stage_dataset import open_corpus
from kenotron_train.data_plan import DataPlan
from kenotron_train.evaluate.evaluator import Evaluator, check_evaluate
from kenotron_train.evaluate.results import FOLDER, Evaluation, write_evaluation
from kenotron_train.evaluate.validation import validate_model
from kenotron_train.log.printing import fail, say

CONFIG = "config.yaml"
USER_ERRORS = (ValueError, OSError, ImportError)


@dataclass(frozen=True)
class EvaluationRequest:
    """Request of an evaluation; the same on every rank."""

    folder: Path | str
    """The step folder, by its path or URL."""
    section: EvaluateConfig
    data: DataPlan | None
    """Data of the training; None: the checkpoint has no config, held-out samples are not known."""
    tokenizer: tuple[str | None, str | None]
    """Name (None: bytes) and revision."""
    output: Path
    """The file of the result."""
    sequence: int = 1
    """Tokens of the training's samples, to a multiple of which a reproducible model pads texts."""
    threads: int | None = None
    """Threads of each rank; None: those of a reproducible training, or as many as there are."""


def evaluate_main(argv: Sequence[str]) -> int:
    """Evaluate a checkpoint, write what was found, and print it; the exit status."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # ranks fork, and share the cores
    os.environ.setdefault("TQDM_DISABLE", "1")  # lines of a log, not bars of libraries
    given = evaluate_parser().parse_args(argv)
    return framed(
        lambda: _start(given), explain=lambda error: explained(error, *USER_ERRORS), report=fail
    )


def _start(given: argparse.Namespace) -> int:
    """Evaluate on the ranks that are asked for; the exit status."""
    request = _request(given)
    check_evaluate(request.section)
    sizes = layout_sizes(given, read_manifest(request.folder).mesh)
    found: dict[str, Any] = start(
        _evaluate,
        request,
        config=MeshConfig(**sizes),
        preload=tokenizer_libraries(request.tokenizer[0]) if request.section.tasks else (),
        device=given.device,
        threads=given.threads,
    )
    return FAILED if found["failure"] else OK


def _request(given: argparse.Namespace) -> EvaluationRequest:
    """Read what the flags ask for, above the checkpoint's config. Raises ValueError."""
    folder = resolve_step(given.ckpt_path)
    manifest = read_manifest(folder)
    if "model_config" not in manifest.state:
        raise ValueError(
            f"--ckpt-path {folder} does not describe a model (model_config is missing): was it "
            "written by apps/train?"
        )
    config = load_config(given.config_file) if given.config_file else _config_of(folder)
    if isinstance(folder, str) and not given.output:
        raise ValueError(f"--ckpt-path {folder} is a URL: give --output, a file for the result")
    output = Path(given.output or Path(folder).parent / FOLDER / f"{Path(folder).name}.json")
    data = None if config is None else data_plan(config)
    base = None if config is None else config.evaluation
    section = _section(given, base, [] if config is None else unavailable(config))
    if section.perplexity:
        _check_held_out(data, folder)
    tokenizer = _tokenizer(given.tokenizer, manifest.state, folder)
    sequence = manifest.state.get("sequence_length") or 1
    return EvaluationRequest(folder, section, data, tokenizer, output, sequence, given.threads)


def _config_of(folder: Path | str) -> Config | None:
    """Config that lies in a step folder; None where there is none."""
    step = store_at(folder)
    with suppress(FileNotFoundError):
        return parse_config(step.read(CONFIG).decode(), f"{step.at(CONFIG)}", saved=True)
    return None


def _section(
    given: argparse.Namespace, base: EvaluateConfig | None, problems: list[str]
) -> EvaluateConfig:
    """Return the section of the config with what the flags change.

    ``problems`` say why the config has none that can be used. Raises ValueError.
    """
    changes: dict[str, Any] = {
        name: getattr(given, name)
        for name in (
            "num_fewshot",
            "limit",
            "batch_size",
            "max_length",
            "perplexity",
            "trust_task_files",
        )
        if getattr(given, name) is not None
    }
    if given.tasks is not None:
        changes["tasks"] = tuple(filter(None, given.tasks.split(",")))
    if given.task_folder:
        changes["task_folders"] = tuple(given.task_folder)
    if base is None:
        if problems and not changes.get("tasks"):
            raise ValueError("\n".join(problems))
        if not changes.get("tasks") and not changes.get("perplexity"):
            raise ValueError(
                "there is nothing to evaluate: give --tasks or --perplexity, or a config with a "
                "section evaluate (--config-file)"
            )
        return EvaluateConfig(**changes)
    if given.tasks is not None and given.num_fewshot is None:
        changes["num_fewshot"] = None
    return replace(base, **changes)


def _check_held_out(data: DataPlan | None, folder: Path | str) -> None:
    """Raise ValueError where a checkpoint does not know its held-out samples."""
    if data is None:
        raise ValueError(
            f"--perplexity: {folder} has no config.yaml, so that its data are not known: give "
            "--config-file, or --no-perplexity"
        )
    if data.tokens.limit_val_batches <= 0:
        raise ValueError(
            "--perplexity: tokens.limit_val_batches of the config is 0, so that no samples were "
            "held out: give --no-perplexity"
        )
    if any(stage.data.dataset is None for stage in data.stages):
        raise ValueError(
            "--perplexity: data of the training are its program's own (dataset: null), which this "
            "program does not have: give --no-perplexity"
        )


def _tokenizer(
    given: str | None, state: Mapping[str, Any], folder: Path | str
) -> tuple[str | None, str | None]:
    """The tokenizer that is asked for, or else the checkpoint's; None: bytes."""
    if given is not None:
        return given, None
    named = state.get("tokenizer")
    if named:
        return str(named["name"]), named.get("revision")
    converted = Path(folder).parent / "tokenizer"  # one next to a URL is not read
    return (str(converted) if converted.is_dir() else None), None


def _evaluate(mesh: Mesh, request: EvaluationRequest) -> dict[str, Any]:
    """Evaluate, on every rank; rank 0 writes and prints. Returns the result as JSON."""
    scores = bool(request.section.tasks)
    model, remark = read_model(request.folder, mesh, threads=request.threads, scores=scores)
    evaluator = Evaluator(model, request.section, request.tokenizer, request.sequence)
    for note in (remark, *evaluator.notes):
        if note and mesh.rank == 0:
            say(note)
    name = store_at(request.folder).name
    step = int(name) if name.isdecimal() else 0
    found = evaluator.evaluate(step, lambda: _held_out(model, request, step))
    if mesh.rank == 0:
        if not found.failure:
            write_evaluation(request.output, found, checkpoint=str(request.folder))
        _show(found, request.output)
    return {"failure": found.failure}


def read_model(
    folder: Path | str, mesh: Mesh, *, threads: int | None = None, scores: bool = True
) -> tuple[ModelOnMesh, str]:
    """Build the model of a checkpoint on a mesh, and read its weights. Collective over the mesh.

    That of a run with ``general.reproducible`` computes as it did, where the mesh allows it.

    Args:
        folder: of the step; path or URL.
        mesh: any layout that the model fits.
        threads: those that torch has; None: those of a reproducible run.
        scores: whether texts are scored, too, of which the remark speaks.

    Returns:
        The model, and a remark about the bits of a reproducible run.

    Raises ValueError when the mesh does not fit the model, or a file is damaged.
    """
    checkpoint = open_checkpoint(folder, mesh)
    state = checkpoint.manifest.state
    config, multipliers = model_from_json(state["model_config"])
    dtype = state.get("dtype") or "float32"
    plan = ModelPlan(
        spec=multipliers.applied(config.decoder), dtype=getattr(torch, dtype), draws=None
    )
    saved = state.get("reproducible")
    model, remark = model_as_trained(plan, saved, mesh, scores=scores, threads=threads)
    checkpoint.load(model.records())
    return model, remark


def _held_out(model: ModelOnMesh, request: EvaluationRequest, step: int) -> Validation | None:
    """Loss on the held-out samples of the stage that the step belongs to."""
    data = request.data
    assert data is not None, "checked before"
    with model.mesh.pulse.busy("reading the corpus"):
        corpus = open_corpus(data, data.stage_at(max(step, 1)))
    rows = request.section.batch_size, model.mesh.sizes["pp"]
    return validate_model(model, data, corpus.validation, *rows)


def _show(found: Evaluation, output: Path) -> None:
    for line in found.lines():
        say(line)
    if found.failure:
        fail(found.failure)
    else:
        say(f"Written in {found.seconds:.1f} s: {output}")


def evaluate_parser() -> argparse.ArgumentParser:
    """The flags of ``evaluate``."""
    parser = parser_of(
        "evaluate",
        "Evaluate a checkpoint on any layout: tasks of lm-eval, and perplexity of the "
        "held-out samples of each source. What is evaluated is that of the section evaluate of "
        "the training, unless flags say otherwise. The result is a file in evaluations next to "
        "the step folders, from where a run that continues, and report, take it.",
    )
    add = parser.add_argument
    add(
        "--ckpt-path",
        required=True,
        metavar="FOLDER",
        help="a step or run folder; path or URL",
    )
    add("--config-file", metavar="YAML", help="default: config.yaml of the checkpoint")
    add("--tasks", metavar="NAME,...", help="tasks, groups or tags of lm-eval, or of task folders")
    add(
        "--task-folder", action="append", default=[], metavar="FOLDER",
        help="task files (YAML) of your own; may be given several times",
    )  # fmt: skip
    add(
        "--trust-task-files", action="store_true", default=None,
        help="run the files of --task-folder: they are code",
    )  # fmt: skip
    add("--num-fewshot", type=int, metavar="N", help="examples before each question")
    add("--limit", type=count, metavar="N", help="most samples of each task")
    add("--batch-size", type=count, metavar="N", help="texts that a dp rank reads at a time")
    add("--max-length", type=count, metavar="N", help="most tokens of a text that are read")
    flag = argparse.BooleanOptionalAction
    add("--perplexity", action=flag, help="held-out samples of each source")
    add("--tokenizer", metavar="NAME", help="instead of the checkpoint's; bytes: ids are bytes")
    add_layout(parser)
    add("--device", choices=("cpu", "cuda"), help="default: cuda where there are GPUs enough")
    add("--output", metavar="FILE", help="default: evaluations/STEP.json next to the step folder")
    add("--threads", type=count, metavar="N", help="CPU threads of each rank")
    return parser
