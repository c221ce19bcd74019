"""Training configs from YAML: every sentence about what does not load."""

import re
from pathlib import Path

import pytest

from kenotron_config import Config, ConfigError, LoggingConfig, load_config, parse_config

NANOTRON_YAML = Path(__file__).with_name("tiny_llama.yaml").read_text(encoding="utf-8")


def problems(*overrides, text=NANOTRON_YAML):
    with pytest.raises(ConfigError) as caught:
        parse_config(text, "c.yaml", overrides)
    assert str(caught.value) == "\n".join(caught.value.problems)
    return list(caught.value.problems)


def edited(old, new):
    assert old in NANOTRON_YAML
    return NANOTRON_YAML.replace(old, new)


VALUES = [
    ("parallelism.tp=two", '"two" was given; it must be a whole number'),
    ("parallelism.tp=2.0", "2.0 was given; it must be a whole number"),
    ("parallelism.tp=true", "true was given; it must be a whole number"),
    ("parallelism.dp=0", "0 was given; it must be at least 1"),
    ("parallelism.pp_engine=gpipe", "\"gpipe\" was given; it must be 'afab', '1f1b', "),
    ("parallelism.pp_chunks=2", "schedule '1f1b' has 1 chunks a rank, 2 were given: only interle"),
    ("parallelism.recompute_layer=1", "1 was given; it must be true or false"),
    ("general.project=3", "3 was given; it must be text (quotes make text of a number)"),
    ("general.seed=-1", "-1 was given; it must be at least 0"),
    ("model.dtype=half", "\"half\" was given; it must be 'float32', 'bfloat16' or 'float16'"),
    ("model.dtype=int8", "\"int8\" was given; it must be 'float32', 'bfloat16' or 'float16'"),
    ("model.init_method.std=-1", "-1.0 was given; it must be finite and not negative"),
    ("model.init_method.std=.nan", "nan was given; it must be finite and not negative"),
    ("model.make_vocab_size_divisible_by=0", "0 was given; it must be at least 1"),
    ("model.model_config=3", "3 was given; it must be a mapping"),
    ("model.model_config.hidden_size=18", "18 was given; it must be a multiple of num_attention_h"),
    ("model.model_config.rope_scaling=2", "2 was given; it must be a mapping"),
    ("model.model_config.vocab_size=100", "100 was given; text is read as bytes and needs at leas"),
    ("tokens.train_steps=1e3", "1000.0 was given; it must be a whole number"),
    ("tokens.train_steps=0", "0 was given; it must be at least 1"),
    ("tokens.val_check_interval=0", "0 was given; it must be at least 1 step, or -1 for only afte"),
    ("tokens.limit_val_batches=-1", "-1 was given; it must be at least 0"),
    ("tokens.limit_test_batches=-1", "-1 was given; it must be at least 0"),
    (
        "optimizer.nonfinite=stop",
        "\"stop\" was given; it must be 'error', 'skip', 'rollback' or 'continue'",
    ),
    ("optimizer.zero_stage=4", "4 was given; it must be 0, 1, 2 or 3"),
    ("optimizer.reduce=never", "\"never\" was given; it must be 'step' or 'micro_batch'"),
    ("optimizer.regather=step", "step was given; zero_stage 0 keeps all parameters"),
    ("optimizer.weight_decay=much", '"much" was given; it must be a number'),
    (
        "optimizer.optimizer_factory.name=lion",
        "\"lion\" was given; it must be one of 'adamW', 'sgd', 'muon'",
    ),
    ("optimizer.optimizer_factory.adam_eps=0", "0.0 was given; it must be finite and above 0"),
    ("optimizer.optimizer_factory.adam_beta1=big", '"big" was given; it must be a number'),
    ("optimizer.shard_ranks=0", "0 was given; it must divide dp, whose ranks"),
    ("optimizer.shard_ranks=3", "3 was given; it must divide dp (1), whose ranks"),
    ("optimizer.lr_multipliers=2", "2 was given; it must be a list"),
    ("optimizer.weight_decay_exclude_named_params=a", '"a" was given; it must be a list'),
    ("checkpoints.checkpoint_interval=0", "0 was given; it must be at least 1"),
    ("checkpoints.checkpoints_path=s3://b/run", "s3://b/run was given; it must be a folder that"),
    ("logging.log_level=loud", "\"loud\" was given; it must be 'debug', 'info'"),
    ("logging.iteration_step_info_interval=0", "0 was given; it must be at least 1"),
    ("data_stages={}", "{} was given; it must be a list"),
    ("data_stages=[]", "an empty list was given; there must be at least one stage"),
    ("data_stages.0.start_training_step=2", "2 was given; the first stage must start at step 1"),
    ("data_stages.1.start_training_step=1", "1 was given; it must come after the stage before (1)"),
    ("data_stages.1.name=Stable Training Stage", "was given; another stage has that name"),
    (
        "data_stages.0.data.dataset.hf_dataset_or_datasets={a: 1.5}",
        "1.5 was given for 'a'; a fraction is a number from 0 to 1",
    ),
    (
        "data_stages.0.data.dataset.hf_dataset_or_datasets=[a, a]",
        "['a', 'a'] was given; each data set is named once",
    ),
    ("data_stages.0.sequence_length=0", "0 was given; it must be at least 1"),
    ("s3_upload=x", '"x" was given; it must be a mapping'),
    ("s3_upload.upload_s3_path=runs/1", "runs/1 was given; it must be a URL such as s3://"),
    ("metrics_logging=1", "1 was given; it must be a mapping"),
    ("metrics_logging.log_level=2", "2 was given; it must be 0 or 1"),
    ("doremi=x", '"x" was given; it must be a mapping'),
    ("parallelism.ep=0", "0 was given; it must be at least 1"),
    ("parallelism.ep=3", "3 was given; it must divide dp x cp x tp"),
    ("model.init_method.scaling_method=MODEL_SCALE", "no rule for it; choose NONE"),
    (
        "model.init_method.scaling_method=half",
        "\"half\" was given; it must be 'NONE', 'NUM_LAYERS'",
    ),
    ("tokenizer.tokenizer_max_length=0", "0 was given; it must be at least 1"),
]


@pytest.mark.parametrize(("override", "sentence"), VALUES)
def test_one_wrong_value_is_one_sentence(override, sentence):
    (problem,) = problems(override)
    path = override.split("=")[0]
    assert problem.startswith(f"--set: {path}: ")
    assert sentence in problem


OVER_RANKS = [
    (
        ("parallelism.tp=3", "model.model_config.intermediate_size=66",
         "model.model_config.num_key_value_heads=1", "tokens.sequence_length=255"),
        "tp: 3 was given; it must divide model.model_config.num_attention_heads (4); set tp to 2",
    ),
    (
        ("parallelism.tp=4", "model.model_config.intermediate_size=66"),
        "tp: 4 was given; it must divide model.model_config.intermediate_size (66); set tp to 2",
    ),
    (
        ("parallelism.tp=2", "model.model_config.num_attention_heads=6",
         "model.model_config.hidden_size=24", "model.model_config.num_key_value_heads=3"),
        "num_key_value_heads (3) must divide one another; set tp to 1",
    ),
    (
        ("parallelism.cp=8", "parallelism.cp_attention=ulysses"),
        "cp_attention: ulysses was given; parallelism.cp (8) must divide the 4 query heads of a "
        "tp rank, and divide its",
    ),
    (("parallelism.cp=0",), "parallelism.cp: 0 was given; it must be at least 1"),
    (("parallelism.ep_chunks=0",), "parallelism.ep_chunks: 0 was given; it must be at least 1"),
    (("parallelism.cp_attention=star",), 'parallelism.cp_attention: "star" was given'),
    (("parallelism.cp_block=0",), "parallelism.cp_block: 0 was given; it must be at least 1"),
    (("parallelism.cp_stride=0",), "parallelism.cp_stride: 0 was given; it must be at least 1"),
    (
        ("parallelism.cp=2", "parallelism.cp_stride=2"),
        "parallelism.cp_stride: 2 was given; it counts key heads that are gathered at a time, and "
        "cp_attention is auto; set cp_attention to gather, or leave cp_stride out",
    ),
    (
        ("optimizer.zero_stage=2", "model.cuda_graph=true"),
        "cuda_graph: true was given with optimizer.zero_stage 2; a graph adds up whole gradients",
    ),
    (
        ("parallelism.cp=2", "model.cuda_graph=true"),
        "cuda_graph: true was given with parallelism.cp 2; a graph holds one rank's kernels",
    ),
    (
        ("parallelism.pp=6",),
        "pp: 6 was given; each stage needs a layer, and the model has 5 (2 decoder layers, "
        "embedding, final norm, head); set pp to at most 5",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("overrides", "sentence"), OVER_RANKS)
def test_what_cannot_be_shared_out_is_named(overrides, sentence):
    (problem,) = problems(*overrides)
    assert sentence in problem


def test_items_of_the_optimizers_lists_are_named():
    found = problems(
        "optimizer.weight_decay_exclude_kinds=[norms, norm]",
        "optimizer.lr_multipliers=[{pattern: '(', multiplier: -1}, {patern: a}]",
    )
    assert [line.removeprefix("--set: optimizer.").split(" (")[0] for line in found] == [
        "weight_decay_exclude_kinds.1: \"norm\" was given; it must be 'norms', 'biases' or "
        "'embeddings'",
        "lr_multipliers.0.pattern: '(' was given; it must be a regular expression",
        "lr_multipliers.0.multiplier: -1.0 was given; it must be finite and not negative",
        "lr_multipliers.1.patern: is not a known key; did you mean pattern?",
        "lr_multipliers.1.multiplier: is missing; it has no default, so add it",
    ]


def test_the_name_of_an_optimizer_says_which_keys_it_has():
    sgd = "optimizer.optimizer_factory={name: SGD, momentum: 0.9, nesterov: true, dampening: 0.1}"
    assert problems(sgd) == [
        "--set: optimizer.optimizer_factory.nesterov: true was given; it needs momentum above 0 "
        "(0.9) and dampening 0 (0.1)"
    ]
    (problem,) = problems("optimizer.optimizer_factory={name: sgd, momentun: 0.9}")
    assert problem.endswith("momentun: is not a known key; did you mean momentum?")
    (problem,) = problems("optimizer.optimizer_factory={name: sgd, momentum: fast}")
    assert problem.endswith('optimizer_factory.momentum: "fast" was given; it must be a number')
    assert len(problems("optimizer.optimizer_factory={}")) == 4  # AdamW's constants are missing
    assert problems("optimizer.optimizer_factory=sgd")[0].startswith(
        '--set: optimizer.optimizer_factory: "sgd" was given; '
    )


def test_keys_of_two_forms_of_a_section_exclude_one_another():
    assert problems("model.init_method.path=folder") == [
        "--set: model.init_method: path excludes std; set the whole section: "
        "model.init_method={path: ...}"
    ]


def test_unknown_keys_name_the_nearest_one():
    text = edited("  tp: 1\n", "  tp: 1\n  tp_mod: REDUCE_SCATTER\n")
    assert problems(text=text) == [
        "c.yaml: parallelism.tp_mod: is not a known key; did you mean tp_mode?"
    ]
    (problem,) = problems("general.zzz=1")
    assert "--set: general.zzz: is not a known key; known are project, run, seed" in problem
    assert problems("tokenz={}") == ["--set: tokenz: is not a known key; did you mean tokens?"]
    assert problems("data_stages.1.dat=1") == [
        "--set: data_stages.1.dat: is not a known key; did you mean data?"
    ]
    assert problems("dat=1") == ["--set: dat: is not a known key; did you mean data?"]
    assert problems("checkpoints.datastates.host_cache=1") == [
        "--set: checkpoints.datastates.host_cache: is not a known key; "
        "did you mean host_cache_size?"
    ]


def test_a_section_that_a_change_makes_is_the_changes_fault():
    for change in ("nosection.x=1", "nosection.x.y=1"):
        (problem,) = problems(change)
        assert problem.startswith("--set: nosection: is not a known key; known are general, ")
    both = problems("nosection.x=1", text=edited("  tp: 1\n", "  tp: 1\n  zzz: 1\n"))
    assert sorted(line.split(":")[0] for line in both) == ["--set", "c.yaml"]
    for problem in problems("profiler.profiler_export=1"):
        assert problem.startswith("--set: profiler.profiler_export")


def test_folders_of_more_ids_than_the_model_are_refused():
    section = "{dataset_folder: a, vocab_size: 300}"
    assert problems(f"data_stages.0.data.dataset={section}") == [
        "--set: data_stages.0.data.dataset.vocab_size: 300 was given; "
        "model.model_config.vocab_size is 256, which must be at least as many"
    ]


def test_missing_keys_are_named():
    assert problems(text=edited("  train_steps: 15\n", "")) == [
        "c.yaml: tokens.train_steps: is missing; it has no default, so add it"
    ]
    text = NANOTRON_YAML[: NANOTRON_YAML.index("\ntokens:")]
    assert problems(text=text) == ["c.yaml: tokens: is missing; it has no default, so add it"]
    assert problems("model.model_config=null")[0].startswith(
        "--set: model.model_config: is missing"
    )


def test_every_problem_of_a_file_comes_at_once():
    text = edited("  tp: 1\n", "  tp: 3\n").replace("train_steps: 15", "trian_steps: 15")
    text = text.replace("zero_stage: 0", "zero_stage: 5").replace("std: 0.025", "std: small")
    text = text.replace("start_training_step: 10", "start_training_step: 1")
    paths = [line.split(": ")[1] for line in problems("general.sed=1", "nonsense", text=text)]
    assert paths == [
        "a change is written section.key=value",
        "general.sed",
        "model.init_method.std",
        "tokens.trian_steps",
        "tokens.train_steps",
        "optimizer.zero_stage",
        "data_stages.1.start_training_step",
    ]


@pytest.mark.parametrize(("override", "sentence"), [
    ("tokens.train_steps", "--set tokens.train_steps: a change is written section.key=value"),
    ("tokens..x=1", "a change is written section.key=value"),
    ("data_stages.7.name=x", "7 was given; the list has items 0 to 1"),
    ("data_stages.first.name=x", "first was given; the list has items 0 to 1"),
    ("general.seed.x=1", "--set general.seed.x=1: seed is 42 and has no keys to change"),
    ("general.seed.x.y=1", "x was given; 42 has no keys"),
    ("general.seed=[", "line 1, column 2: this is not YAML"),
])  # fmt: skip
def test_overrides_that_cannot_be_applied(override, sentence):
    (problem,) = problems(override)
    assert sentence in problem


@pytest.mark.parametrize(("text", "sentence"), [
    ("", "c.yaml: nothing was given; a config is a mapping of sections"),
    ("- 1", "c.yaml: [1] was given; a config is a mapping"),
    ("a: [1\nb: 2", "c.yaml: line 2, column 2: this is not YAML (while parsing a flow sequence"),
    ("a: \x01", "c.yaml: this is not YAML (unacceptable character"),
    ("a: &a [*a]", "c.yaml: this cannot be a config (Circular reference detected)"),
    ("a: 1\n---\nb: 1", "c.yaml: line 2, column 1: this is not YAML (expected a single document"),
    ("a: !!python/name:os.system x", "this is not YAML (could not determine a constructor"),
])  # fmt: skip
def test_text_that_is_no_config(text, sentence):
    (problem,) = problems(text=text)
    assert problem.startswith(sentence) or sentence in problem


def test_files_that_cannot_be_read(tmp_path):
    with pytest.raises(ConfigError, match="there is no such file; give the path of a YAML file"):
        load_config(tmp_path / "none.yaml")
    with pytest.raises(ConfigError, match="this is a folder; give the path of a YAML file"):
        load_config(tmp_path)
    (tmp_path / "latin.yaml").write_bytes(b"general: \xe9")
    with pytest.raises(ConfigError, match="latin.yaml: this cannot be read as UTF-8 text"):
        load_config(tmp_path / "latin.yaml")


def test_file_and_overrides(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text(NANOTRON_YAML)
    assert load_config(path, ["tokens.train_steps=3"]).tokens.train_steps == 3
    with pytest.raises(ConfigError, match=re.escape(f"{path}: tokens.train_steps: -1 was given")):
        path.write_text(edited("train_steps: 15", "train_steps: -1"))
        load_config(path)


def test_config_made_in_python_is_checked_too():
    config = parse_config(NANOTRON_YAML, "c.yaml")
    sections = {name: getattr(config, name) for name in Config.__dataclass_fields__}
    with pytest.raises(ValueError, match="data_stages: an empty list was given"):
        Config(**sections | {"data_stages": ()})
    with pytest.raises(ValueError, match="log_level: loud was given; it must be one of debug"):
        LoggingConfig(log_level="loud")
