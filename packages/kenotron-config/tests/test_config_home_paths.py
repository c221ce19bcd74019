"""`~` in a path of a config is the user's home, wherever a path may stand."""

import json
import re
from dataclasses import asdict

import pytest
import yaml
from test_config_real_files import DATASET, TEXT, TEXT_KEYS

from kenotron_config import ConfigError, config_reference, parse_config

HOME = {"HOME": "/home/ada/"}
NO_PATH = {
    "use_fast_path", "checkpoints_path_is_shared_file_system", "nanotron_path",
    "slurm_script_dir", "local_checkpoint_dir", "logs_path", "output_dir", "local_output_path",
    "eval_interval_file", "s5cmd_path",
    "s3_save_path", "upload_s3_path",
}  # fmt: skip
"""Keys with a path in their names that are none, are URLs, or of Nanotron's evaluations."""
PLACES = [
    ("checkpoints.checkpoints_path", "~/x"),
    ("checkpoints.resume_checkpoint_path", "~/x"),
    ("checkpoints.memory_path", "~/x"),
    ("general.benchmark_csv_path", "~/x"),
    ("model.init_method", {"path": "~/x"}),
    ("model.adapter", {"path": "~/x"}),
    ("tokenizer.tokenizer_name_or_path", "~/x"),
    ("profiler", {"profiler_export_path": "~/x"}),
    ("evaluate", {"task_folders": ["~/x", "~"], "trust_task_files": True, "tasks": ["a"]}),
    (DATASET, {"dataset_folder": "~/x", "dataset_read_path": "~/x"}),
    (DATASET, {"dataset_folder": {"~/x": 1.0, "/y": 1.0}, "dataset_read_path": ["~/x", "/y"]}),
    (DATASET, TEXT_KEYS | {"hf_dataset_or_datasets": "~/x"}),
    ("doremi", {"domain_names": ["a"], "ref_model_resume_checkpoint_path": "~/x",
                "reference_losses_path": "~/x"}),
]  # fmt: skip


def changed(place, value):
    data = yaml.safe_load(TEXT)
    *parents, name = place.split(".")
    owner = data
    for part in parents:
        owner = owner[int(part) if part.isdecimal() else part]
    owner[name] = value
    return json.dumps(data)


@pytest.mark.parametrize(("place", "value"), PLACES)
def test_a_path_from_home_is_written_in_full(place, value):
    text = changed(place, value)
    read = {}
    for name, given in (("home", text), ("full", text.replace('"~', '"/home/ada'))):
        try:
            read[name] = asdict(parse_config(given, "c.yaml", environment=HOME, warn=lambda _: 0))
        except ConfigError as error:
            read[name] = str(error)
    assert read["home"] == read["full"] and "~" not in str(read["home"])
    with pytest.raises(ConfigError, match=r"'~.*' was given, and HOME is not set: write the fold"):
        parse_config(text, "c.yaml", warn=lambda _: 0)


def test_every_key_with_a_path_in_its_name_is_tried():
    named = set(re.findall(r"`(\w*(?:path|folder|_dir)\w*)` \|", config_reference()))
    said = json.dumps(PLACES)
    tried = {key for key in named if f'"{key}"' in said or f'.{key}"' in said}
    assert named - NO_PATH - {"path"} <= tried


def test_an_override_may_begin_at_home():
    config = parse_config(TEXT, "c.yaml", ["checkpoints.checkpoints_path=~/runs"], environment=HOME)
    assert str(config.checkpoints.checkpoints_path) == "/home/ada/runs"
