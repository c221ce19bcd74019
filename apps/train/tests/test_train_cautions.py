"""What is accepted and likely wrong is said, in ``--check`` and at the start."""

from __future__ import annotations

from pathlib import Path

import runs

SCHEDULE = "optimizer.learning_rate_scheduler"


def test_a_run_says_it(tmp_path: Path) -> None:
    changes = {f"{SCHEDULE.replace('.', '__')}__lr_warmup_steps": 9, "tokens__train_steps": 1}
    done = runs.train(tmp_path, *runs.arguments(tmp_path, **changes))
    assert done.returncode == 0
    assert "lr_warmup_steps: 9 was given, but tokens.train_steps is 1" in done.stdout


def test_a_sample_that_fails_is_a_warning(tmp_path: Path) -> None:
    changes = {"tokens__sequence_length": 1, "tokens__train_steps": 2}
    done = runs.train(tmp_path, *runs.arguments(tmp_path, **changes))
    assert done.returncode == 0, done.stderr
    assert "No sample of the model: ValueError: " in done.stdout
    assert "the training itself is complete" in done.stdout
    assert " report " in done.stdout
