"""End of a run without a config file: a text of the model, and what to try next."""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import Any

from torch import Tensor

from kenotron_ckpt import latest_step
from kenotron_command import printable
from kenotron_data import decode, encode
from kenotron_models import Sampling, TransformersSpec, cache_problem, generate
from kenotron_train.assemble import TrainingRun
from kenotron_train.log.report import Report

SAMPLE_PROMPT = "def "
SAMPLE_TOKENS = 160


def show_sample(training: TrainingRun, report: Report) -> None:
    """Generate a sample and print it, then what to try next. Collective over the mesh.

    The training is over and saved: a sample that fails is a warning.
    """
    try:
        text = _sample(training)
    except Exception as error:  # of any kind: it must not change the status of the run
        about = f"{type(error).__name__}: {error}"
        report.say(f"No sample of the model: {about}; the training itself is complete", "warning")
    else:
        report.say(f"A sample of the model:\n{printable(text)}")
    folder = training.log.folder
    step = latest_step(folder)
    if step is not None:
        commands = next_commands(
            folder,
            step,
            foreign=_is_foreign(training),
            adapter=training.plan.adapter is not None,
        )
        report.say("Next, try:\n" + "\n".join(f"  {line}" for line in commands))


def next_commands(
    folder: Path, step: int, *, foreign: bool = False, adapter: bool = False
) -> list[str]:
    """Return commands that use a finished run, for a shell in the folder where this one began.

    Args:
        folder: the run's folder, as the config names it.
        step: the step of its newest checkpoint.
        foreign: whether transformers has the model, and generates with it.
        adapter: whether checkpoints have adapters alone.
    """
    checkpoint, run = shlex.quote(str(folder / str(step))), shlex.quote(str(folder))
    generate, train = _program("generate"), _program("train")
    if foreign or adapter:
        made = "adapter-to-peft" if adapter else "kenotron-to-hf"
        out = "my-adapter" if adapter else "my-model"
        export = f"{_program('convert')} {made} --ckpt {checkpoint} --out {out}"
        return [export, f"{train} report {run}"]
    return [
        f"{generate} --ckpt-path {checkpoint} --prompt 'class '",
        f"{train} report {run}",
    ]


def _is_foreign(training: TrainingRun) -> bool:
    return isinstance(training.plan.spec, TransformersSpec)


def _program(name: str) -> str:
    """Return a shell's call of one of our programs: its folder in a checkout, else its command."""
    apps = Path(__file__).resolve().parents[3]
    if not (apps / name / "__main__.py").is_file():
        return f"kenotron-{name}"
    place = Path(os.path.relpath(apps / name))
    short = place if len(place.parts) < len((apps / name).parts) else apps / name
    return f"python {shlex.quote(str(short))}"


def _sample(training: TrainingRun) -> str:
    """Return the text of a sample. Collective over the mesh."""
    plan, mesh = training.plan, training.mesh

    def forward(tokens: Tensor, context: Any) -> Tensor | None:
        logits = training.model.pipeline.forward([tokens], [context])
        return logits[0] if logits else None

    prompt = encode([SAMPLE_PROMPT], 256).tolist()
    new = generate(
        forward,
        [prompt],
        mesh,
        window=training.data.tokens.sequence_length,
        vocab_size=plan.spec.vocab_size,
        max_new_tokens=SAMPLE_TOKENS,
        sampling=Sampling(temperature=0.7, seed=plan.seed),
        cached=cache_problem(plan.spec) is None,
        source=training.model.pipeline.last_rank,
    )
    return decode([*prompt, *(token for tokens in new for token in tokens if token is not None)])
