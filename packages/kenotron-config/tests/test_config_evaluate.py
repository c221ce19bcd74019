"""The section `evaluate`, its rules, and what Nanotron's `lighteval` means in its keys."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kenotron_config import (
    Config,
    ConfigError,
    EvaluateConfig,
    EvaluationJobConfig,
    cautions,
    dump_config,
    ignored_keys,
    parse_config,
    unavailable,
)
from kenotron_config.eval_sections import WITHOUT_EFFECT

TEXT = Path(__file__).with_name("tiny_llama.yaml").read_text(encoding="utf-8")
VALIDATES = ("tokens.limit_val_batches", 2)


def parse(*changes: tuple[str, object]) -> Config:
    return parse_config(TEXT, "c.yaml", [f"{path}={json.dumps(value)}" for path, value in changes])


def test_a_section_loads_with_its_defaults_and_can_be_run() -> None:
    config = parse(("evaluate", {"tasks": ["arc_easy"], "num_fewshot": {"arc_easy": 3}}))
    section = config.evaluation
    assert section == EvaluateConfig(tasks=("arc_easy",), num_fewshot={"arc_easy": 3})
    assert (section.fewshot_of("arc_easy"), section.fewshot_of("other")) == (3, None)
    assert (section.ranks, section.interval, section.batch_size) == ("training", None, 8)
    assert parse_config(dump_config(config), "again") == config
    assert unavailable(config) == []
    every = parse(("evaluate", {"tasks": ["a"], "num_fewshot": 2})).evaluation
    assert every is not None
    assert every.fewshot_of("a") == 2
    assert parse(VALIDATES, ("evaluate", {"perplexity": True})).evaluation is not None
    assert parse().evaluation is None


@pytest.mark.parametrize(
    ("section", "words"),
    [
        ({}, "evaluate.tasks: none was given, and perplexity is false, so that nothing is eval"),
        ({"tasks": ["a", "a"]}, "evaluate.tasks: a was given twice; keep one"),
        ({"tasks": ["a"], "interval": 0}, "evaluate.interval: 0 was given; it must be at least 1"),
        ({"tasks": ["a"], "max_length": 1}, "evaluate.max_length: 1 was given; it must be at lea"),
        ({"tasks": ["a"], "num_fewshot": -1}, "evaluate.num_fewshot: -1 was given; it must be at"),
        (
            {"tasks": ["a"], "num_fewshot": {"b": 1}},
            "evaluate.num_fewshot: b was given, which is none of tasks; correct the name",
        ),
        ({"tasks": ["a"], "ranks": "some"}, 'evaluate.ranks: "some" was given; it must be'),
        (
            {"tasks": ["a"], "job": {"dp": 2}},
            "evaluate.job: it was given, but ranks is training; set ranks to job",
        ),
        (
            {"tasks": ["a"], "ranks": "job", "job": {"dp": 0, "gpus_per_node": -1}},
            "evaluate.job.gpus_per_node: -1 was given; it must be at least 0",
        ),
        ({"task": ["a"]}, "evaluate.task: is not a known key; did you mean tasks?"),
        (
            {"perplexity": True},
            "evaluate.perplexity: true was given, but tokens.limit_val_batches is 0, so that no "
            "samples are held out; set it",
        ),
        (
            {"tasks": ["a"], "ranks": "job", "interval": 7},
            "evaluate.interval: 7 was given; a job evaluates checkpoints, so it must be a multiple "
            r"of checkpoints.checkpoint_interval \(10\)",
        ),
    ],
)
def test_a_wrong_section_is_an_error_that_names_the_key(section, words) -> None:
    with pytest.raises(ConfigError, match=words):
        parse(("tokens.limit_val_batches", 0), ("evaluate", section))


def test_sections_that_contradict_one_another_are_errors() -> None:
    lighteval = ("lighteval", {"tasks": {"tasks": "leaderboard|gsm8k|5|0"}})
    both = parse(("evaluate", {"tasks": ["a"]}), lighteval)
    assert both.evaluation == EvaluateConfig(tasks=("a",))
    assert unavailable(both) == [
        "lighteval: evaluate is given, too, and decides; remove one of them"
    ]
    removed = ("s3_upload", {"upload_s3_path": "s3://b/r", "remove_after_upload": True})
    with pytest.raises(ConfigError, match="evaluate.ranks: job was given, but s3_upload.remove"):
        parse(removed, ("evaluate", {"tasks": ["a"], "ranks": "job"}))
    folder = ("data_stages.0.data.dataset", {"dataset_folder": "f"})
    with pytest.raises(ConfigError, match="evaluate.tasks: a, b was given, but the data are token"):
        parse(folder, ("evaluate", {"tasks": ["a", "b"]}))
    with pytest.raises(ValueError, match="ranks: some was given; it must be training or job"):
        EvaluateConfig(tasks=("a",), ranks="some")


def test_lighteval_becomes_the_same_tasks_of_lm_eval_in_a_job() -> None:
    tasks = "leaderboard|arc:challenge|25|0, leaderboard|mmlu:anatomy|5|0,lighteval|piqa|0|1"
    section = {
        "tasks": {"tasks": tasks, "max_samples": 100},
        "parallelism": {"dp": 4, "pp": 2, "tp": 2, "tp_mode": "ALL_REDUCE"},
        "slurm": {"partition": "p", "time": "1:00:00"},
        "eval_interval": 20, "batch_size": 16, "output_dir": "results", "wandb_entity": None,
    }  # fmt: skip
    without = "lighteval: without effect: output_dir, parallelism.tp_mode; tasks are those"
    with pytest.warns(UserWarning, match=without):
        config = parse(("lighteval", section))
    assert unavailable(config) == []
    job = EvaluationJobConfig(
        nodes=2, cpus_per_task=88, partition="p", qos="low", reservation="smollm", time="1:00:00",
        dp=4, pp=2, tp=2, ep=1,
    )  # fmt: skip
    assert config.evaluation == EvaluateConfig(
        tasks=("arc_challenge", "mmlu_anatomy", "piqa"),
        num_fewshot={"arc_challenge": 25, "mmlu_anatomy": 5, "piqa": 0},
        interval=20, ranks="job", limit=100, batch_size=16, job=job,
    )  # fmt: skip
    assert not [line for line in ignored_keys(config) if line.startswith("lighteval")]
    on_ranks = parse(("lighteval", {"tasks": {"tasks": "leaderboard|gsm8k|5|0"}})).evaluation
    assert on_ranks == EvaluateConfig(tasks=("gsm8k",), num_fewshot={"gsm8k": 5})
    template = {"tasks": {"tasks": "leaderboard|gsm8k|5|0"}, "slurm_template": "t.jinja"}
    in_a_job = parse(("lighteval", template)).evaluation
    assert in_a_job is not None
    assert in_a_job.job == EvaluationJobConfig()


@pytest.mark.parametrize(
    ("section", "words"),
    [
        (
            {"slurm_template": "t", "wandb": None, "tasks": {"tasks": "a|b|0"}},
            "lighteval.tasks.tasks: a|b|0 was given; no task of lm-eval is known to be the same; "
            "write an evaluate section with tasks of lm-eval, and remove this one",
        ),
        ({"slurm": {"gpus_per_node": 8}}, "lighteval.tasks.tasks: nothing was given, so that"),
        (
            {"tasks": {"tasks": "early-signal", "custom_tasks": "m.tasks"}},
            "lighteval.tasks.custom_tasks: m.tasks was given; its tasks are lighteval's; write an",
        ),
        (
            {"tasks": {"tasks": "lighteval|copa|0|0, lighteval|copa|0|1, lighteval|copa|5|0"}},
            "lighteval.tasks.tasks: lighteval|copa|5|0 was given, and the task with 0 examples bef",
        ),
        (
            {"tasks": {"tasks": "leaderboard|gsm8k|5|0"}, "eval_interval": 0},
            "lighteval: interval: 0 was given; it must be at least 1; write an evaluate section",
        ),
        (
            {"tasks": {"tasks": "lighteval|copa|0|0"}, "eval_interval": 7, "slurm": {}},
            "lighteval: as evaluate.interval: 7 was given; a job evaluates checkpoints, so it must",
        ),
    ],
)
def test_lighteval_with_tasks_that_are_not_known_loads_and_is_reported(section, words) -> None:
    config = parse(("lighteval", section))
    assert parse_config(dump_config(config), "again") == config
    (line,) = unavailable(config)
    assert line.startswith(words)
    assert config.evaluation is None
    (caution,) = [line for line in cautions(config) if "lighteval" in line]
    assert caution == f"nothing is evaluated during the training: {line}"


OTHERS = [f"{part}.{name}".strip(".") for part, names in WITHOUT_EFFECT.items() for name in names]


@pytest.mark.parametrize("path", OTHERS)
def test_every_other_key_of_nanotrons_is_read_and_named(path) -> None:
    part, _, name = path.rpartition(".")
    section = {part: {name: "x"}} if part else {name: "x"}
    with pytest.warns(UserWarning, match=f"lighteval: without effect: {path};"):
        config = parse(("lighteval", section))
    assert config.lighteval is not None and not hasattr(config.lighteval, name)
