"""Keys that files of real runs carry, from 2023 on: used, left out with a caution, or refused."""

import json
import re
from pathlib import Path

import pytest
import yaml

from kenotron_config import ConfigError, dump_config, parse_config
from kenotron_config.other_sections import LEFT_OUT, OPTIONAL

TEXT = Path(__file__).with_name("tiny_llama.yaml").read_text(encoding="utf-8")
DATASET = "data_stages.0.data.dataset"
TEXT_KEYS = {"hf_dataset_or_datasets": "web.jsonl", "text_column_name": "text"}


def parse(changes):
    """The config of the tiny file with some keys changed, and the cautions about it."""
    data = yaml.safe_load(TEXT)
    for path, value in changes.items():
        *parents, name = path.split(".")
        owner = data
        for part in parents:
            owner = owner[int(part) if part.isdecimal() else part]
        owner[name] = value
    said = []
    config = parse_config(json.dumps(data), "c.yaml", warn=said.append)
    assert parse_config(dump_config(config), "again", warn=pytest.fail) == config
    return config, said


USED = [
    # what a file says, what it means today, and its value
    (
        {DATASET: TEXT_KEYS | {"dataset_config_name": "en"}},
        "data_stages.0.data.dataset.hf_dataset_config_name",
        "en",
    ),
    ({DATASET: {"dataset_path": ["a", "b"]}}, "data_stages.0.data.dataset.folders", ("a", "b")),
    ({DATASET: {"dataset_path": "a"}}, "data_stages.0.data.dataset.dataset_folder", "a"),
    ({DATASET: {"training_folder": "a"}}, "data_stages.0.data.dataset.dataset_folder", "a"),
    ({"parallelism.recompute_granularity": "selective"}, "parallelism.recompute", "selective"),
    ({"parallelism.recompute_granularity": "FULL"}, "parallelism.recompute", "full"),
    ({"parallelism.recompute_granularity": None}, "parallelism.recompute", None),
    ({"parallelism.context_parallel_size": 2}, "parallelism.cp", 2),
    ({"optimizer.clip_grad": None}, "optimizer.clip_grad", None),
    ({"lighteval": None, "s3_upload": None, "profiler": None}, "lighteval", None),
]


def value_at(config, path):
    for part in path.split("."):
        config = config[int(part)] if part.isdecimal() else getattr(config, part)
    return config


@pytest.mark.parametrize(("changes", "path", "value"), USED)
def test_older_keys_mean_those_of_today(changes, path, value):
    config, said = parse(changes)
    assert value_at(config, path) == value
    assert said == []


CAUTIONS = [
    ({"lighteval": {}}, "lighteval: is left out, because the section is empty"),
    ({"s3_upload": {}}, "s3_upload: is left out, because the section is empty"),
    ({"profiler": {}}, "profiler: is left out, because the section is empty"),
    (
        {"lighteval": {"tasks": {"early_signal": True}}},
        "lighteval: is left out, so that nothing is evaluated during the training: "
        "lighteval.tasks.early_signal: is not a known key",
    ),
    ({"lighteval": "smollm"}, "lighteval: is left out, so that nothing is evaluated"),
    ({"lighteval": {"a": 1, "b": 2}}, r"lighteval.a: is not a known key.* \(and 1 more\)"),
    (
        {"experiment_logger": {"wandb_logger": {"wandb_project": "p"}}},
        "experiment_logger: is left out, for the training does not need it; logging.trackers",
    ),
    (
        {"general.kill_switch_path": "/tmp/kill"},
        "general.kill_switch_path: is left out, .* SIGTERM",
    ),
    ({"general.entity": "team"}, "general.entity: is left out, .* WANDB_ENTITY"),
]


@pytest.mark.parametrize(("changes", "words"), CAUTIONS)
def test_what_is_next_to_a_training_is_left_out_with_one_caution(changes, words):
    config, (line,) = parse(changes)
    assert line.startswith("c.yaml: ")
    assert re.search(words, line)
    assert config == parse({})[0]
    assert parse(dict.fromkeys(changes))[1] == []  # a null says nothing


def test_every_key_that_is_left_out_is_in_the_list():
    tested = {path for changes, _ in CAUTIONS for path in changes}
    assert tested >= {*LEFT_OUT, *OPTIONAL}


REFUSED = [
    (
        {DATASET: {"dataset_path": "a", "dataset_folder": "b"}},
        "dataset_path: dataset_folder is giv",
    ),
    (
        {DATASET: {"dataset_folder": "b", "training_folder": "a"}},
        "training_folder: dataset_folder is given, too; keep one",
    ),
    (
        {"parallelism.recompute_granularity": "full", "parallelism.recompute": "mixer"},
        "parallelism.recompute_granularity: recompute is given, too; keep one",
    ),
    ({"brrr_data": {"a": 1}}, "^c.yaml: brrr_data is a key of BRRR, the system before Nanotron"),
    ({"model": {"n_layer": 2, "n_head": 4}}, "^c.yaml: model.n_layer is a key of BRRR, .*today's"),
    ({DATASET + ".hf_dataset_split": "train"}, "did you mean hf_dataset_splits?"),
    ({"general.projects": "x"}, "general.projects: is not a known key; did you mean project?"),
]


@pytest.mark.parametrize(("changes", "words"), REFUSED)
def test_what_cannot_be_meant_names_the_key_of_today(changes, words):
    with pytest.raises(ConfigError, match=words) as error:
        parse(changes)
    assert "\n" not in str(error.value)


def test_changes_on_the_command_line_may_be_older_keys():
    nanoset = parse_config(TEXT, "c.yaml", [f"{DATASET}={{dataset_folder: a}}"])
    older = [f"{DATASET}={{dataset_folder: b}}", f"{DATASET}.dataset_path=a"]
    named = parse_config(TEXT, "c.yaml", older)
    assert nanoset == named
    recompute = parse_config(TEXT, "c.yaml", ["parallelism.recompute_granularity=full"])
    assert recompute.parallelism.recompute == "full"
