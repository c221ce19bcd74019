"""The section `evaluate`: perplexity and tasks during a training, and its rules."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from kenotron_data.config import NanosetDatasetsConfig

Where = Literal["training", "job"]
"""Ranks that evaluate."""


@dataclass(frozen=True, kw_only=True)
class EvaluationJobConfig:
    """The Slurm job of an evaluation, and the ranks that share its model."""

    nodes: int = 1
    """Nodes."""
    gpus_per_node: int | None = None
    """GPUs of each node, one a rank; 0: ranks compute on CPUs; None: as many as there are ranks."""
    cpus_per_task: int | None = None
    """CPUs of each rank."""
    partition: str | None = None
    """Partition."""
    account: str | None = None
    """Account that is charged."""
    qos: str | None = None
    """Quality of service."""
    reservation: str | None = None
    """Reservation."""
    time: str | None = None
    """Time limit in Slurm's formats."""
    dp: int = 1
    """Ranks that share the samples."""
    cp: int = 1
    """Ranks that share a sequence."""
    pp: int | None = None
    """Ranks that share the layers; None: as many as train."""
    tp: int | None = None
    """Ranks that share every layer; None: as many as train."""
    ep: int | None = None
    """Ranks that share the experts; None: as many as train."""

    def __post_init__(self) -> None:
        """Check all fields at once."""
        sizes = ("nodes", "cpus_per_task", "dp", "cp", "pp", "tp", "ep")
        found = [*_below(self, sizes, 1), *_below(self, ("gpus_per_node",), 0)]
        if found:
            raise ValueError("\n".join(found))


@dataclass(frozen=True, kw_only=True)
class EvaluateConfig:
    """Evaluations during a training: perplexity of each source, and tasks of lm-eval.

    Raises:
        ValueError: one line for each problem: field, value given, what is needed.
    """

    interval: int | None = None
    """Training steps from one evaluation to the next; None: at every checkpoint."""
    ranks: Where = "training"
    """`training`: the ranks that train evaluate, and training waits; `job`: a Slurm job evaluates
    the checkpoint, and training continues."""
    perplexity: bool = False
    """True: loss and perplexity of the held-out samples of each source
    (`tokens.limit_val_batches`)."""
    tasks: tuple[str, ...] = ()
    """Names of tasks, groups or tags of lm-eval, or of files in task_folders."""
    task_folders: tuple[str, ...] = ()
    """Folders of task files (YAML) of your own; a name there replaces lm-eval's task."""
    trust_task_files: bool = False
    """True: the files in task_folders may be run. They are code, as they can name functions."""
    num_fewshot: int | dict[str, int] | None = None
    """Examples before each question: of all tasks, or of each task by its name; None: as the task
    says."""
    limit: int | None = None
    """Most samples of each task; None: all."""
    batch_size: int = 8
    """Texts that a dp rank reads at a time."""
    max_length: int | None = None
    """Most tokens of a text that the model reads; None: the model's
    max_position_embeddings, or 2048 where it has no limit."""
    job: EvaluationJobConfig | None = None
    """The job, where ranks is job; None: its defaults."""

    def __post_init__(self) -> None:
        """Check all fields at once."""
        found = _below(self, ("interval", "limit", "batch_size"), 1)
        found += _below(self, ("max_length",), 2)
        if self.ranks not in get_args(Where):
            found.append(f"ranks: {self.ranks} was given; it must be training or job")
        if not self.tasks and not self.perplexity:
            found.append(
                "tasks: none was given, and perplexity is false, so that nothing is evaluated; "
                "name tasks of lm-eval, or set perplexity to true"
            )
        if twice := sorted({task for task in self.tasks if self.tasks.count(task) > 1}):
            found.append(f"tasks: {twice[0]} was given twice; keep one")
        if self.task_folders and not self.trust_task_files:
            found.append(
                f"task_folders: {self.task_folders[0]} was given; task files are code that runs "
                "with your rights: read them, and set trust_task_files to true"
            )
        found += [f"num_fewshot: {line}" for line in self._fewshot_problems()]
        if self.job is not None and self.ranks != "job":
            found.append(f"job: it was given, but ranks is {self.ranks}; set ranks to job")
        if found:
            raise ValueError("\n".join(found))

    def _fewshot_problems(self) -> Iterator[str]:
        given = self.num_fewshot
        counts = given if isinstance(given, dict) else {"": given}
        for name, count in counts.items():
            if name and name not in self.tasks:
                yield f"{name} was given, which is none of tasks; correct the name"
            elif count is not None and count < 0:
                yield f"{count} was given; it must be at least 0"

    def fewshot_of(self, task: str) -> int | None:
        """Return how many examples come before a question of a task; None: as the task says."""
        if isinstance(self.num_fewshot, dict):
            return self.num_fewshot.get(task)
        return self.num_fewshot


def evaluate_problems(sections: Mapping[str, Any]) -> list[str]:
    """Name every contradiction between an evaluation and other sections of a config.

    Args:
        sections: the sections by name; rules that need a missing one are passed over.

    Returns:
        One line for each problem: `key.path: value given; what is needed; what to change`.
    """
    section = sections.get("evaluate")
    if section is None:
        return []
    found = []
    tokens, checkpoints = sections.get("tokens"), sections.get("checkpoints")
    if section.perplexity and tokens and tokens.limit_val_batches <= 0:
        found.append(
            f"evaluate.perplexity: true was given, but tokens.limit_val_batches is "
            f"{tokens.limit_val_batches}, so that no samples are held out; set it to the number of "
            "global batches to read, or perplexity to false"
        )
    if section.ranks == "job" and checkpoints and section.interval:
        every = checkpoints.checkpoint_interval
        if section.interval % every:
            found.append(
                f"evaluate.interval: {section.interval} was given; a job evaluates checkpoints, so "
                f"it must be a multiple of checkpoints.checkpoint_interval ({every}); change one "
                "of them, or set evaluate.ranks to training"
            )
    upload = sections.get("s3_upload")
    if section.ranks == "job" and upload and upload.remove_after_upload:
        found.append(
            "evaluate.ranks: job was given, but s3_upload.remove_after_upload is true: the job may "
            "find no checkpoint; set one of them to training or false"
        )
    return found + _tokenizer_problems(section, sections)


def _tokenizer_problems(section: EvaluateConfig, sections: Mapping[str, Any]) -> list[str]:
    """Tasks are text; data that are ids do not say which tokenizer they were made with."""
    tokenizer, stages = sections.get("tokenizer"), sections.get("data_stages")
    if not section.tasks or not tokenizer or not stages or tokenizer.tokenizer_name_or_path:
        return []
    kinds = [stage.data.dataset for stage in stages]
    if not any(kind is None or isinstance(kind, NanosetDatasetsConfig) for kind in kinds):
        return []
    return [
        f"evaluate.tasks: {', '.join(section.tasks)} was given, but the data are token ids and "
        "tokenizer.tokenizer_name_or_path is null; tasks are texts, so name the tokenizer of the "
        "ids there (bytes: ids are UTF-8 bytes)"
    ]


def _below(section: object, names: tuple[str, ...], least: int) -> list[str]:
    given = {name: getattr(section, name) for name in names}
    return [
        f"{name}: {value} was given; it must be at least {least}"
        for name, value in given.items()
        if value is not None and value < least
    ]
