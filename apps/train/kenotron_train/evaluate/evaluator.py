"""One evaluation of a model on its mesh: tasks, and held-out samples of each source."""

from __future__ import annotations

import importlib.util
import os
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from kenotron_ckpt import on_first_at_length
from kenotron_config import EvaluateConfig
from kenotron_engine import ModelOnMesh, Validation
from kenotron_train.evaluate.led_passes import LedPasses
from kenotron_train.evaluate.results import Evaluation, losses_of
from kenotron_train.evaluate.text_tokens import open_text_tokens

if TYPE_CHECKING:
    from kenotron_train.evaluate.harness import Harness

WITHOUT_LIMIT = 1 << 20
"""A model that says so many positions, or more, has no longest text: Mamba, ALiBi."""
USUAL_LENGTH = 2048
"""Most tokens of a text for such a model, as lm-eval has it."""


def check_evaluate(section: EvaluateConfig | None) -> None:
    """Raise ValueError where tasks are asked for and lm-eval is not installed."""
    if section and section.tasks and importlib.util.find_spec("lm_eval") is None:
        raise ValueError(
            f"evaluate.tasks: {', '.join(section.tasks)} was given, but lm-eval is not installed: "
            "pip install './apps/train[evaluate]' in the repository, or leave tasks out"
        )


class Evaluator:
    """Evaluates a model as a section asks; every rank has one.

    Args:
        model: the model; a training's is evaluated where it lies.
        section: what is evaluated.
        tokenizer: its name (None: bytes) and revision.
        sequence: a reproducible model pads texts that it scores to a multiple of this.

    Collective over the mesh. Raises ValueError for a task that is not known or has no data, and
    for a tokenizer that cannot be opened. ``notes`` are lines about keys without effect.
    """

    def __init__(
        self,
        model: ModelOnMesh,
        section: EvaluateConfig,
        tokenizer: tuple[str | None, str | None],
        sequence: int = 1,
    ) -> None:
        self._model, self._section = model, section
        self._harness: Harness | None = None
        self._passes: LedPasses | None = None
        self.notes: list[str] = []
        if not section.tasks:
            return
        check_evaluate(section)
        spec = model.plan.spec
        try:
            texts = open_text_tokens(*tokenizer, spec.vocab_size)
        except (ImportError, ValueError) as error:
            raise ValueError(
                f"evaluate.tasks needs the tokenizer of the model: {error}; correct "
                "tokenizer.tokenizer_name_or_path (or --tokenizer)"
            ) from error
        most = spec.max_position_embeddings
        window = section.max_length or (most if most < WITHOUT_LIMIT else USUAL_LENGTH)
        self._passes = LedPasses(
            model, texts, window=window, batch_size=section.batch_size, multiple_of=sequence
        )
        self.notes = on_first_at_length(model.mesh, "finding tasks", self._find_tasks)

    def _find_tasks(self) -> list[str]:
        """Import lm-eval, and look at the tasks and their data. For rank 0."""
        os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
        from kenotron_train.evaluate.harness import Harness

        in_mode = self._model.plan.reproducible
        self._harness = Harness(self._section, reproducible=in_mode)
        return self._harness.notes

    def evaluate(self, step: int, held_out: Callable[[], Validation | None]) -> Evaluation:
        """Evaluate the model as it is now; nothing that training depends on changes.

        Args:
            step: the step that it stands at.
            held_out: gives the loss on held-out samples, where the section asks for it.

        Collective over the mesh. A failure of lm-eval is in the result; one of the model raises.
        """
        begin = time.perf_counter()
        losses = losses_of(held_out()) if self._section.perplexity else {}
        tasks, failure = {}, ""
        if passes := self._passes:
            found, failure = passes.lead(lambda: self._run(passes))
            tasks, failed = found or ({}, "")
            failure = failure or failed
        seconds = time.perf_counter() - begin
        return Evaluation(step=step, tasks=tasks, losses=losses, seconds=seconds, failure=failure)

    def _run(self, passes: LedPasses) -> tuple[dict[str, dict[str, float]], str]:
        assert self._harness is not None, "made on rank 0"
        return self._harness.run(passes)
