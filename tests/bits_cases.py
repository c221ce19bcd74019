"""Small trainings of which one step, in the reproducible mode, must have the bits of one process.

They cover the axes of a layout and the layers that the mode has. ``mutants_bits.py`` computes them
with planted bugs: the process that they are compared with has none.
"""

from __future__ import annotations

import json
import multiprocessing
import pickle
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

import grid_bits
import grid_run
from bits_layouts import CASES, Case
from grid import Row
from grid_check import unequal
from torch import Tensor, arange

from kenotron_config import Config
from kenotron_data import Batch, Cursor
from kenotron_dist import Mesh, RankError, spawn
from kenotron_engine import (
    DomainObjective,
    Piece,
    join_pieces,
    pieces_of,
    slice_pieces,
    training_step,
    weight_pieces,
)
from kenotron_train.assemble import build_training
from kenotron_train.data.stage_dataset import open_corpus, open_loader

Numbers = tuple[float, float, float, float, str]
Lines = dict[str, list[int]]
"""Lines that were run, by file."""
SECONDS = 60.0
"""Limit of an operation: ranks that wait for one another without end stop there."""


def configure(case: Case, folder: Path, run: str, alone: bool) -> tuple[Row, Config]:
    """Return the layout of a case, or that of one process, and its config."""
    row = grid_bits.alone(case.row) if alone else case.row
    keys = {**grid_bits.keys(row, case.row), **case.keys}
    plain = replace(row, ep=1) if case.model is not None else row
    config = grid_run.configure(plain, folder, run, 1, None, keys)
    if case.model is not None:
        config = replace(config, model=replace(config.model, model_config=case.model))
        config = replace(config, parallelism=replace(config.parallelism, ep=row.ep))
    return row, config


def target_mask(samples: Tensor, sequence: int) -> Tensor:
    """Rows (R,) have targets (R, sequence): at least the first half, no two of a step as many."""
    count = sequence - (samples * 7 + samples // 3) % (sequence // 2)
    return arange(sequence)[None] < count[:, None]


def with_domains(batch: Batch) -> tuple[Batch, DomainObjective]:
    """Give rows two domains by turns, and losses of a reference that follow from the samples."""
    samples = batch.samples_MB
    reference = (5.0 + samples[..., None] % 7 / 10).expand(batch.labels_MBS.shape)
    objective = DomainObjective(
        names=("one", "other"), factors=(0.7, 1.3), reference_MBS=reference.contiguous()
    )
    return replace(batch, sources_MB=samples % 2), objective


def watch_lines(files: Mapping[str, str]) -> dict[str, set[int]]:
    """Begin to watch which lines of files are run, in this thread and new ones.

    Args:
        files: names by path; none: nothing is watched.

    Returns:
        For each name the numbers of the lines, which is filled from now on.
    """
    seen: dict[str, set[int]] = {name: set() for name in files.values()}

    def watch(frame: FrameType, event: str, _: object) -> Any:
        name = files.get(frame.f_code.co_filename)
        if name is None:
            return None
        seen[name].add(frame.f_lineno)
        return watch

    if files:
        threading.settrace(watch)
        sys.settrace(watch)
    return seen


def one_step(
    mesh: Mesh, config: Config, domains: bool, files: Mapping[str, str]
) -> tuple[Numbers, list[Piece], list[Piece], Lines]:
    """Compute a step on a rank.

    Args:
        mesh: of all ranks.
        config: of the training.
        domains: as in ``Case``.
        files: whose lines are watched: names by path.

    Returns:
        Loss, norm, learning rate, what was minimised, and further figures; pieces of gradients, and
        of weights, moments and averages after the step; the lines of those files that were run.
    """
    seen = watch_lines(files)
    training = build_training(config, mesh)
    corpus, gradients = open_corpus(training.data, 0), list[Piece]()
    with open_loader(training.data, mesh, corpus, Cursor(), target_mask) as loader:
        batch = next(loader)
    batch, objective = with_domains(batch) if domains else (batch, None)
    found = training_step(
        training, batch, 1, objective=objective,
        look=lambda own: gradients.extend(slice_pieces(training, own)),
    )  # fmt: skip
    averages = training.averages.state() if training.averages else {}
    state = pieces_of({**training.optimizer.state(), **averages}, mesh)
    figures = json.dumps(found.figures, default=str)
    numbers = found.loss, found.grad_norm, found.lr, found.minimised, figures
    after = weight_pieces(training) + state
    sys.settrace(None)
    return numbers, gradients, after, {name: sorted(lines) for name, lines in seen.items()}


def measure(case: Case, folder: Path, alone: bool, files: Mapping[str, str]) -> tuple[Any, Lines]:
    """Return the step of a case, whole, and the lines that any rank ran."""
    seen = watch_lines(files)
    row, config = configure(case, folder, "run", alone)
    sys.settrace(None)
    threading.settrace(None)  # pyrefly: ignore[bad-argument-type]
    fork = multiprocessing.get_context("fork")
    with (
        mock.patch.object(multiprocessing, "get_context", lambda _: fork),
        mock.patch("kenotron_dist.spawn._PATIENCE", 0.05),  # forks have one another's pipes
    ):
        ranks = spawn(
            one_step, config, case.domains, files, **row.axes, timeout=timedelta(seconds=SECONDS)
        )
    lines = {
        name: sorted(own.union(*(rank[3][name] for rank in ranks))) for name, own in seen.items()
    }
    numbers = [rank[0] for rank in ranks]
    whole = [join_pieces(rank[part] for rank in ranks) for part in (1, 2)]
    return (numbers, *whole), lines


def differing(got: Any, want: Any) -> list[str]:
    """Name what is not the same bits as one process's."""
    names = ("loss", "norm", "rate", "what is minimised", "figures")
    ranks, [right] = got[0], want[0]
    found = [n for i, n in enumerate(names) if any(rank[i] != right[i] for rank in ranks)]
    found += [f"gradient of {name}" for name in unequal(got[1], want[1])]
    return found + unequal(got[2], want[2])


def answer(
    out: Path, folder: str, cases: Sequence[str], files: Mapping[str, str], reference: bool
) -> None:
    """Write a list of what came of each case: its name with ``differs``, or with ``error``.

    Args:
        out: the file.
        folder: documents and references are there.
        cases: names of ``CASES``. Nothing is computed after one that differs.
        files: whose lines are watched.
        reference: one process is measured first, and all cases are computed.
    """
    home, found = Path(folder), list[dict[str, Any]]()
    for name in cases:
        file = home / f"{list(CASES).index(name)}.pickle"
        try:
            if reference:
                file.write_bytes(pickle.dumps(measure(CASES[name], home, True, {})[0]))
            got, lines = measure(CASES[name], home, False, files)
            faults = differing(got, pickle.loads(file.read_bytes()))
            found.append({"case": name, "differs": faults, "lines": lines})
        except RankError as error:
            found.append({"case": name, "error": str(error).strip().splitlines()[-1][:200]})
        except ValueError as error:
            if "do not agree" not in str(error):
                raise
            found.append({"case": name, "differs": [f"replicas: {error}"[:200]]})
        out.write_text(json.dumps(found))
        if found[-1].get("differs") and not reference:
            break
