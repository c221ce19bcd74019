"""Nanotron's section `lighteval` as an `evaluate` section, as far as lm-eval has its tasks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from kenotron_config.eval_sections import LightEvalConfig
from kenotron_config.evaluate_section import (
    EvaluateConfig,
    EvaluationJobConfig,
    evaluate_problems,
)

TASKS = {
    "arc:challenge": "arc_challenge",
    "arc:easy": "arc_easy",
    "boolq": "boolq",
    "commonsenseqa": "commonsense_qa",
    "copa": "copa",
    "gsm8k": "gsm8k",
    "hellaswag": "hellaswag",
    "lambada:openai": "lambada_openai",
    "lambada:standard": "lambada_standard",
    "mmlu": "mmlu",
    "openbookqa": "openbookqa",
    "piqa": "piqa",
    "sciq": "sciq",
    "siqa": "social_iqa",
    "triviaqa": "triviaqa",
    "truthfulqa:mc": "truthfulqa_mc2",
    "winogrande": "winogrande",
}
"""Names of lighteval's tasks, without their suite, and those of lm-eval."""
FIX = "write an evaluate section with tasks of lm-eval, and remove this one"


def evaluate_section_of(section: LightEvalConfig) -> EvaluateConfig | None:
    """Return the evaluation that a section asks for; None: it cannot be made."""
    names, problems = _tasks(section)
    if problems:
        return None
    try:
        return _section_of(section, names)
    except ValueError:  # ``lighteval_problems`` names it
        return None


def _section_of(section: LightEvalConfig, names: dict[str, int | None]) -> EvaluateConfig:
    tasks = section.tasks
    shots = {task: count for task, count in names.items() if count is not None}
    return EvaluateConfig(
        interval=section.eval_interval,
        ranks="training" if _job(section) is None else "job",
        tasks=tuple(names),
        num_fewshot=shots or None,
        limit=None if tasks is None else tasks.max_samples,
        batch_size=section.batch_size or 8,
        job=_job(section),
    )


def lighteval_problems(sections: dict[str, Any]) -> list[str]:
    """Name what keeps a run from doing what its section `lighteval` asks for.

    Args:
        sections: the sections of a config by name.

    Returns:
        One line for each problem: `key.path: value given; rule; fix`.
    """
    section = sections.get("lighteval")
    if section is None:
        return []
    if sections.get("evaluate") is not None:
        return ["lighteval: evaluate is given, too, and decides; remove one of them"]
    names, problems = _tasks(section)
    if problems:
        return problems
    try:
        made = _section_of(section, names)
    except ValueError as error:
        return [f"lighteval: {line}; {FIX}" for line in str(error).splitlines()]
    rules = evaluate_problems({**sections, "evaluate": made, "lighteval": None})
    return [f"lighteval: as {line}" for line in rules]


def _tasks(section: LightEvalConfig) -> tuple[dict[str, int | None], list[str]]:
    """Names of lm-eval and numbers of examples; and what is not known."""
    given = None if section.tasks is None else section.tasks.tasks
    if section.tasks is not None and section.tasks.custom_tasks:
        what = section.tasks.custom_tasks
        return {}, [
            f"lighteval.tasks.custom_tasks: {what} was given; its tasks are lighteval's; {FIX}"
        ]
    if not given:
        return {}, [f"lighteval.tasks.tasks: nothing was given, so that there is no task; {FIX}"]
    found: dict[str, int | None] = {}
    problems = []
    for text in given.split(","):
        name, shots = _mapped(text.strip())
        if name is None:
            problems.append(
                f"lighteval.tasks.tasks: {text.strip()} was given; no task of lm-eval is known to "
                f"be the same; {FIX}"
            )
        elif found.get(name, shots) != shots:
            problems.append(
                f"lighteval.tasks.tasks: {text.strip()} was given, and the task with {found[name]} "
                "examples before; it is evaluated once: keep one of them"
            )
        else:
            found[name] = shots
    return found, problems


def _mapped(text: str) -> tuple[str | None, int | None]:
    """The task that `suite|task|examples|0` means in lm-eval, and its examples."""
    suite, _, rest = text.partition("|")
    name, *more = rest.split("|")
    known = TASKS.get(name)
    if name.startswith("mmlu:"):
        known = f"mmlu_{name.removeprefix('mmlu:')}"
    if suite == "custom" or known is None or not more or not more[0].isdecimal():
        return None, None
    return known, int(more[0])


def _job(section: LightEvalConfig) -> EvaluationJobConfig | None:
    """The job that the section describes; None: it describes none."""
    slurm, ranks = section.slurm, section.parallelism
    if slurm is None and section.slurm_template is None:
        return None
    job = EvaluationJobConfig()
    if ranks is not None:
        cp, ep = ranks.context_parallel_size, ranks.expert_parallel_size
        job = replace(job, dp=ranks.dp, pp=ranks.pp, tp=ranks.tp, cp=cp, ep=ep)
    if slurm is None:
        return job
    count = job.dp * job.cp * (job.pp or 1) * (job.tp or 1)
    return replace(
        job,
        nodes=-(-count // slurm.gpus_per_node),
        cpus_per_task=slurm.cpus_per_task,
        partition=slurm.partition,
        qos=slurm.qos,
        reservation=slurm.reservation,
        time=slurm.time,
    )
