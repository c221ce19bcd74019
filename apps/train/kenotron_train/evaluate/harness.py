"""Tasks of lm-eval: finding them, reading their data, and running them. Imports lm-eval."""

from __future__ import annotations

import difflib
import logging
import os
import random
import threading
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lm_eval.evaluator import evaluate
from lm_eval.tasks import TaskManager
from tqdm import tqdm

from kenotron_ckpt import random_state, restore_random_state
from kenotron_config import EvaluateConfig
from kenotron_train.evaluate.language_model import LayoutLM
from kenotron_train.evaluate.led_passes import LedPasses, is_failure

FEWSHOT_SEED = 1234
"""Draws the examples before a question, as lm-eval has it."""
BOOTSTRAPS = 1000
"""Draws for standard errors of metrics that have no formula for theirs."""


class Harness:
    """The tasks of an evaluation. On rank 0 alone.

    Args:
        section: names them.
        reproducible: whether the model's scores have the same bits on every layout; ``notes`` name
            tasks whose results do not.
    """

    def __init__(self, section: EvaluateConfig, *, reproducible: bool = False) -> None:
        self._section, self._reproducible = section, reproducible
        tqdm.set_lock(threading.RLock())  # its own is a semaphore, which ranks do not give back
        logging.getLogger("lm_eval").setLevel(logging.ERROR)  # it remarks on every default
        folders: list[str | Path] = [*section.task_folders]
        for folder in section.task_folders:
            if not Path(folder).is_dir():
                raise ValueError(
                    f"evaluate.task_folders: {folder} was given; there is no such folder; correct "
                    f"the path (a relative one begins at {Path.cwd()})"
                )
        self._tasks = TaskManager(include_path=folders, include_defaults=False)
        if not set(section.tasks) <= set(self._tasks.all_tasks):  # lm-eval has 10,000 files
            self._tasks = TaskManager(include_path=folders)
        self.notes: list[str] = []
        for name in section.tasks:
            self._check(name)

    def run(self, passes: LedPasses) -> tuple[dict[str, dict[str, float]], str]:
        """Run all tasks with passes that other ranks follow.

        The random streams of the process are afterwards where they were.

        Returns:
            The metrics of each task and group, and why tasks have none.
        """
        before, named = random_state(), os.environ.get("DISABLE_MULTIPROC")
        os.environ["DISABLE_MULTIPROC"] = "1"  # bootstraps would fork a process with threads
        try:
            _seed()
            found: dict[str, dict[str, float]] = {}
            failures: list[str] = []
            counts: dict[int | None, list[str]] = {}
            for name in self._section.tasks:
                counts.setdefault(self._section.fewshot_of(name), []).append(name)
            for count, names in counts.items():
                found |= self._run_each(passes, names, count, failures)
            return found, "; ".join(failures)
        finally:
            restore_random_state(before)
            if named is None:
                del os.environ["DISABLE_MULTIPROC"]

    def _run_each(
        self, passes: LedPasses, names: list[str], examples: int | None, failures: list[str]
    ) -> dict[str, dict[str, float]]:
        """Run tasks together; where that fails, each by itself, so that one fails alone."""
        try:
            return self._run(passes, names, examples)
        except BaseException as error:  # of any class: task files are code
            if passes.broken or not is_failure(error):
                raise
            if len(names) == 1:
                failures.append(f"{names[0]}: {_said(error)}")
                return {}
        found: dict[str, dict[str, float]] = {}
        for name in names:
            found |= self._run_each(passes, [name], examples, failures)
        return found

    def _run(
        self, passes: LedPasses, names: list[str], examples: int | None
    ) -> dict[str, dict[str, float]]:
        """Run tasks that have so many examples before a question."""
        section = self._section
        loaded = self._tasks.load(names)
        for task in loaded["tasks"].values():
            own = task.get_config("num_fewshot")
            if own is None or (examples is not None and own != 0):  # 0 in a file stays, as there
                task.set_config(key="num_fewshot", value=examples or 0)
            task.set_fewshot_seed(seed=FEWSHOT_SEED)
        results: Any = evaluate(
            lm=LayoutLM(passes),
            task_dict=loaded,
            limit=section.limit,
            bootstrap_iters=BOOTSTRAPS,
            log_samples=False,
        )
        groups = results.get("groups") or {}
        return {name: _numbers(each) for name, each in {**results["results"], **groups}.items()}

    def _check(self, name: str) -> None:
        """Raise ValueError for a task that is not known, or whose data cannot be read."""
        if name not in self._tasks.task_index:
            near = difflib.get_close_matches(name, self._tasks.all_tasks, n=3)
            advice = f"did you mean {', '.join(near)}?" if near else "correct the name"
            where = ", ".join(self._section.task_folders) or "none was given"
            raise ValueError(
                f"evaluate.tasks: {name} was given; neither lm-eval {version('lm_eval')} nor "
                f"evaluate.task_folders ({where}) has such a task; {advice}"
            )
        file = self._tasks.task_index[name].yaml_path
        try:
            loaded = self._tasks.load([name])  # reads the first sample
        except BaseException as error:  # of any class: data sets and tasks raise their own
            if not is_failure(error):
                raise
            said = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise ValueError(
                f"evaluate.tasks: {name} was given; its data cannot be read ({said}); correct "
                f"dataset_path and dataset_kwargs in {file} (a relative path begins at "
                f"{Path.cwd()}), put the data there, or leave the task out"
            ) from error
        if self._reproducible:
            self.notes += [
                f"evaluate.tasks: {each} generates texts, which may differ between layouts, also "
                "with general.reproducible"
                for each, task in loaded["tasks"].items()
                if task.get_config("output_type") == "generate_until"
            ]
        if examples := self._section.fewshot_of(name):
            self.notes += [
                f"evaluate.num_fewshot: {examples} has no effect on {each}: its file says 0, which "
                "lm-eval keeps"
                for each, task in loaded["tasks"].items()
                if task.get_config("num_fewshot") == 0
            ]


def _said(error: BaseException) -> str:
    text = str(error) or "no message"
    return text if isinstance(error, ValueError) else f"{type(error).__name__}: {text}"


def _numbers(metrics: dict[str, Any]) -> dict[str, float]:
    """Metrics by name, with the name of the filter where there is one."""
    found = {}
    for key, value in metrics.items():
        name, _, filtered = key.partition(",")
        if isinstance(value, int | float) and filtered:
            found[name if filtered == "none" else f"{name}/{filtered}"] = float(value)
    return found


def _seed() -> None:
    """Seed what tasks may draw from, as lm-eval does."""
    random.seed(0)
    np.random.seed(FEWSHOT_SEED)
    torch.manual_seed(FEWSHOT_SEED)
