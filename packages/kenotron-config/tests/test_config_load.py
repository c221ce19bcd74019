"""Training configs from YAML: what loads, and what it means."""

import subprocess
import sys
from pathlib import Path
from types import MappingProxyType

import pytest

from kenotron_ckpt import S3UploadConfig
from kenotron_config import (
    GeneralConfig,
    LoggingConfig,
    dump_config,
    ignored_keys,
    parse_config,
)
from kenotron_optim import LRMultiplier, SGDConfig
from kenotron_tp import TPMode

PATH = Path(__file__).with_name("tiny_llama.yaml")
NANOTRON_YAML = PATH.read_text(encoding="utf-8")


def parse(*overrides, text=NANOTRON_YAML, environment=MappingProxyType({})):
    return parse_config(text, "c.yaml", overrides, environment=environment)


def edited(old, new):
    assert old in NANOTRON_YAML
    return NANOTRON_YAML.replace(old, new)


def test_variables_are_read_where_it_is_asked():
    environment = {"KENOTRON_FOLDER": "a/b c"}
    text = (
        NANOTRON_YAML
        + "lighteval:\n  slurm_template: !env KENOTRON_FOLDER\n"
        + "  slurm: {qos: !env KENOTRON_NONE x y}\n"
    )
    config = parse(text=text.replace("lighteval: null\n", ""), environment=environment)
    assert (config.lighteval.slurm_template, config.lighteval.slurm.qos) == ("a/b c", "x y")
    with pytest.raises(ValueError, match=r"line \d+, .*!env KENOTRON_NONE: there is no such env"):
        parse(
            text=text.replace("!env KENOTRON_NONE x y", "!env KENOTRON_NONE"),
            environment=environment,
        )


@pytest.mark.smoke
def test_nanotron_file_loads():
    config = parse()
    assert [stage.start_training_step for stage in config.data_stages] == [1, 10]
    assert config.model.model_config.rope_theta == 10000.0
    assert config.optimizer.learning_rate_scheduler.min_decay_lr == 1e-5
    assert config.parallelism.tp_mode == "REDUCE_SCATTER"
    assert (config.world_size, config.global_batch_size) == (1, 2)


def test_sizes_follow_the_ranks():
    config = parse(
        "parallelism.dp=3", "parallelism.pp=5", "tokens.batch_accumulation_per_replica=4"
    )
    assert (config.world_size, config.global_batch_size) == (15, 24)


def test_dumped_config_loads_back_equal():
    config = parse()
    assert parse(text=dump_config(config)) == config


@pytest.mark.parametrize("run", ["1e5", "2024-08-31", "12", "null", "yes", "a: b", "", "é"])
def test_text_that_looks_like_something_else_survives_a_round_trip(run):
    text = dump_config(parse()).replace("tiny_llama_%date_%jobid", "'" + run + "'")
    config = parse(text=text)
    assert config.general.run == run
    assert parse(text=dump_config(config)) == config


@pytest.mark.parametrize("number", ["1e-5", "1E-05", "1.0e-5", "1.e-5", ".00001", "0.00001"])
def test_every_way_to_write_a_small_number(number):
    config = parse(f"optimizer.learning_rate_scheduler.min_decay_lr={number}")
    assert config.optimizer.learning_rate_scheduler.min_decay_lr == 1e-5


def test_a_date_is_text_and_whole_numbers_serve_as_real_ones():
    config = parse("general.run=2024-08-31", "optimizer.clip_grad=1")
    assert config.general.run == "2024-08-31"
    assert config.optimizer.clip_grad == 1.0


def test_choices_in_any_case():
    config = parse(
        "parallelism.tp_mode=all_reduce", "parallelism.pp_engine=AFAB", "model.dtype=Float32"
    )
    assert config.parallelism.tp_mode == "ALL_REDUCE"
    assert (config.parallelism.pp_engine, config.model.dtype) == ("afab", "float32")


def test_null_means_the_default_where_there_is_one():
    config = parse(
        "general.seed=null", "logging=null", "model.dtype=null", "parallelism.tp_mode=null",
        "tokenizer=null", "optimizer.clip_grad=null",
    )  # fmt: skip
    assert config.general == GeneralConfig(project="debug", run="tiny_llama_%date_%jobid")
    assert (config.logging, config.model.dtype) == (LoggingConfig(), "bfloat16")
    assert config.parallelism.tp_mode == "ALL_REDUCE"
    assert config.optimizer.clip_grad is None


def test_last_of_two_equal_keys_wins():
    text = edited("  seed: 42\n  step", "  seed: 1\n  seed: 7\n  step")
    with pytest.warns(UserWarning, match="the key seed is given in line"):
        assert parse(text=text).general.seed == 7


def test_dataset_may_be_null():
    assert parse("data_stages.0.data.dataset=null").data_stages[0].data.dataset is None


def test_override_of_an_aliased_section_changes_one_place():
    text = edited("data_stages:\n- data:", "data_stages:\n- data: &d")
    start = text.index("- data:\n")
    text = text[:start] + "- data: *d\n" + text[text.index("  name: Annealing") :]
    config = parse("data_stages.1.data.seed=5", text=text)
    assert [stage.data.seed for stage in config.data_stages] == [42, 5]


def test_regular_expressions_of_parameters_without_decay():
    config = parse("optimizer.weight_decay_exclude_named_params=[.*norm.*, .*bias]")
    assert config.optimizer.weight_decay_exclude_named_params == (".*norm.*", ".*bias")


def test_an_optimizer_is_chosen_by_its_name_and_adamw_without_one():
    plain = parse("optimizer.optimizer_factory={name: sgd}")  # Nanotron's
    assert plain.optimizer.optimizer_factory == SGDConfig()
    sgd = parse("optimizer.optimizer_factory={name: SGD, momentum: 0.9, nesterov: true}")
    assert sgd.optimizer.optimizer_factory == SGDConfig(momentum=0.9, nesterov=True)
    assert parse(text=edited("    name: adamW\n", "")) == parse()
    for config in (plain, sgd):
        assert parse(text=dump_config(config)) == config


def test_groups_of_parameters_survive_a_round_trip():
    config = parse(
        "optimizer.weight_decay_exclude_kinds=[Norms, biases]",
        "optimizer.lr_multipliers=[{pattern: head.*, multiplier: 0.5}]",
    )
    assert config.optimizer.weight_decay_exclude_kinds == ("norms", "biases")
    assert config.optimizer.lr_multipliers == (LRMultiplier(pattern="head.*", multiplier=0.5),)
    assert parse(text=dump_config(config)) == config


def test_keys_without_effect_are_named():
    assert ignored_keys(parse()) == []
    lines = ignored_keys(
        parse(
            "model.model_config.pad_token_id=0",
            "data_stages.0.data.dataset=null",
            "data_stages.1.data.num_loading_workers=4",
            "data_stages.1.data.dataset.dataset_overwrite_cache=true",
            "tokenizer.tokenizer_revision=v1",
        )
    )
    assert [line.split(" has no effect")[0] for line in lines] == [
        "tokenizer.tokenizer_revision: v1",
        "model.model_config.pad_token_id: 0",
    ]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("parallelism.recompute_layers", 1),
        ("parallelism.cp_layout", "contiguous"),
        ("parallelism.cp_block", 4),
        ("parallelism.ep_chunks", 2),
        ("parallelism.moe_layer_recompute", True),
        ("optimizer.max_rollbacks", 1),
        ("general.reproducible_threads", 3),
    ],
)
def test_keys_that_another_key_leaves_without_effect_are_named(key, value):
    (line,) = ignored_keys(parse(f"{key}={str(value).lower()}"))
    assert line.startswith(f"{key}: {str(value).lower()} has no effect: ")


def test_nanotrons_upload_section_is_read_and_s5cmd_has_no_effect():
    section = (
        "s3_upload={upload_s3_path: 's3://bucket/run', remove_after_upload: true, "
        "s5cmd_numworkers: 16, s5cmd_concurrency: 5, s5cmd_path: /usr/bin/s5cmd}"
    )
    config = parse(section)
    assert config.s3_upload == S3UploadConfig(
        upload_s3_path="s3://bucket/run",
        remove_after_upload=True,
        s5cmd_numworkers=16,
        s5cmd_concurrency=5,
        s5cmd_path="/usr/bin/s5cmd",
    )
    assert parse(text=dump_config(config)) == config
    reason = "has no effect: the training process uploads, without s5cmd"
    assert ignored_keys(config) == [
        f"s3_upload.s5cmd_numworkers: 16 {reason}",
        f"s3_upload.s5cmd_concurrency: 5 {reason}",
        f"s3_upload.s5cmd_path: /usr/bin/s5cmd {reason}",
    ]
    off = parse("s3_upload={upload_s3_path: null, remove_after_upload: false}").s3_upload
    assert off == S3UploadConfig(upload_s3_path=None) and parse("s3_upload=null").s3_upload is None


def test_how_layers_communicate_follows_the_keys_of_tp():
    one = parse("parallelism.tp=1").parallelism.mode
    assert one == TPMode(overlap=True, regather=True)  # nothing to cut
    two = parse("parallelism.tp=2", "parallelism.tp_recompute_allgather=false").parallelism.mode
    assert two == TPMode(sequence_parallel=True, overlap=True)
    plain = parse(
        "parallelism.tp=2",
        "parallelism.tp_mode=ALL_REDUCE",
        "parallelism.tp_linear_async_communication=false",
    )
    assert plain.parallelism.mode == TPMode(regather=True)


def test_loading_does_not_start_torch_distributed_or_the_network():
    code = (
        "import socket, sys\n"
        "socket.socket.connect = None\n"
        "from kenotron_config import load_config\n"
        f"load_config({str(PATH)!r})\n"
        "assert not {'datasets', 'transformers'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("overrides", [
    ("parallelism.tp=4", "model.model_config.num_key_value_heads=2"),
    ("parallelism.tp=2", "model.model_config.num_key_value_heads=4"),
    ("parallelism.tp=2", "parallelism.tp_mode=ALL_REDUCE", "tokens.sequence_length=3",
     "tokens.micro_batch_size=1"),
    ("parallelism.pp=5",),
    ("optimizer.accumulate_grad_in_fp32=false", "model.dtype=float32"),
    ("data_stages.0.data.dataset=null", "data_stages.1.data.dataset=null",
     "model.model_config.vocab_size=100"),
])  # fmt: skip
def test_what_can_be_shared_out_loads(overrides):
    parse(*overrides)


def test_later_keys_that_are_off_are_accepted():
    assert (
        parse("model.model_config.attention_bias=false", "checkpoints.datastates=null") == parse()
    )


def test_override_fills_a_section_that_is_null():
    assert parse("logging=null", "logging.log_level=error").logging.log_level == "error"
