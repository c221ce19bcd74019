"""Task files with data of their own, in bytes: no tokenizer and no network is needed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from kenotron_config import Config, EvaluateConfig, EvaluationJobConfig, Mask
from kenotron_train.evaluate.evaluation_job import EvaluationJob


def task_file(folder: Path, name: str = "house_qa", **changes: Any) -> Path:
    """A folder of a task of six questions with two answers each."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = [
        {"question": f"line {i} of", "choices": [f" {i * i % 89}", " none"], "answer": i % 2}
        for i in range(6)
    ]
    data = folder / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    task = {
        "task": name, "dataset_path": "json", "test_split": "test", "num_fewshot": 0,
        "dataset_kwargs": {"data_files": {"test": str(data)}}, "output_type": "multiple_choice",
        "doc_to_text": "{{question}}", "doc_to_choice": "choices", "doc_to_target": "answer",
        "metric_list": [{"metric": "acc"}],
    }  # fmt: skip
    (folder / f"{name}.yaml").write_text(json.dumps(task | changes), encoding="utf-8")
    return folder


def job_of(config: Config, section: EvaluateConfig | None = None) -> EvaluationJob:
    """The jobs that a config, or another section in it, has its checkpoints evaluated by."""
    section = section or config.evaluation
    assert section is not None
    return EvaluationJob(
        asked=section.job or EvaluationJobConfig(),
        trained=config.parallelism,
        project=config.general.project,
        run=config.checkpoints.checkpoints_path,
        mask=Mask(config),
    )
