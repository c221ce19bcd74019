"""What a run without a config file ends with: a text of the model, and what to try next."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor

from kenotron_ckpt import latest_step
from kenotron_data import decode, encode, printable
from kenotron_models import Sampling, generate
from kenotron_train.assemble import Training
from kenotron_train.report import Report

SAMPLE_PROMPT = "def "
SAMPLE_TOKENS = 160


def show_sample(training: Training, report: Report) -> None:
    """Generate a sample and print it. Collective over the mesh."""
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
            f"\n  python apps/train report {folder}"
        )
