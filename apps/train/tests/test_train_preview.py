"""What `--check` says of a config: layout, sizes and memory, and what cannot be run."""

import json
import re
import subprocess
import sys

import runs

from kenotron_config import unavailable
from kenotron_cost.cost_plan import cost_plan
from kenotron_cost.stage_sizes import stage_sizes
from kenotron_train.config_file import load_config
from kenotron_train.run.preview import preview


def parse(*overrides):
    return load_config(runs.TINY_LLAMA, overrides)


def test_tasks_that_cannot_be_evaluated_are_a_warning():
    config = parse("lighteval={tasks: {tasks: 'a|b|0'}}")
    (line,) = unavailable(config)
    said = preview(config)
    assert f"Warning: nothing is evaluated during the training: {line}" in said
    assert "Cannot be run" not in said


def test_parameters_of_a_tied_model_with_adapters_are_counted_once():
    tied, adapter = "model.model_config.tie_word_embeddings=true", "model.adapter={rank: 2}"
    said = preview(parse(tied, adapter))
    base, own = re.search(r"Parameters: ([\d,]+), and ([\d,]+) of adapters, which", said).groups()
    whole = sum(int(each.replace(",", "")) for each in (base, own))
    assert f"embedding ... head, {whole:,} parameters a rank" in said
    assert base == re.search(r"Parameters: ([\d,]+)\n", preview(parse(tied)))[1]


def test_check_prints_layout_and_memory_and_trains_nothing(tmp_path):
    app = runs.APP
    done = subprocess.run(
        [sys.executable, str(app), "--check", "--set", "parallelism.dp=100"],
        capture_output=True, text=True, cwd=tmp_path, timeout=120, check=True,
    )  # fmt: skip
    assert "Layout: 200 processes = pp 1 x dp 100 x tp 2" in done.stdout
    assert "pp rank 0: embedding ... head, 402,816 parameters a rank" in done.stdout
    assert "attention.qkv.weight" in done.stdout and "tp cuts dim 0" in done.stdout
    assert "pp rank 0 sends in a step, in GB a process: tp " in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_sizes_of_stages_add_up_to_the_model():
    config = parse("parallelism.pp=2", "parallelism.tp=2", "parallelism.pp_engine=AFAB")
    stages = stage_sizes(cost_plan(config))
    names = [name for stage in stages for name in stage.layers]
    assert names == ["embedding", "layers.0", "layers.1", "norm", "head"]
    assert all(size >= 0 for stage in stages for size in stage.bytes_of.values())


def test_logits_of_half_precision_count_as_on_a_gpu_wherever_it_is_checked(monkeypatch):
    """All that a GPU has at a time, in float32 and rounded; a CPU has a part of them."""
    big = ("model.model_config.vocab_size=131072", "tokens.sequence_length=4096")

    def logits(*overrides):
        (stage,) = stage_sizes(cost_plan(parse(*big, "tokens.micro_batch_size=1", *overrides)))
        return stage.bytes_of["logits"]

    half = logits("model.dtype=bfloat16")
    assert half == 131072 * 4096 * (4 + 2)
    at_a_time, wide = 2**25, 4 * 2**20  # of which few are in fp32 once more
    assert logits("model.dtype=float32") == 4 * at_a_time + wide
    assert logits("model.dtype=bfloat16", "general.device=cpu") == 2 * at_a_time + wide
    monkeypatch.setattr("torch.accelerator.is_available", lambda: True)
    assert logits("model.dtype=bfloat16") == half
    assert logits("model.dtype=float32") == 131072 * 4096 * (4 + 4)


def test_what_ranks_send_is_that_of_their_layers_and_micro_batches():
    config = parse(
        "parallelism.pp=2",
        "parallelism.tp=2",
        "parallelism.tp_mode=ALL_REDUCE",
        "parallelism.tp_linear_async_communication=false",
        "model.model_config.num_hidden_layers=6",
    )
    stages = stage_sizes(cost_plan(config))
    tokens = config.tokens.micro_batch_size * config.tokens.sequence_length
    whole = tokens * config.decoder.hidden_size * 2  # bf16: two sums forward, two back
    times = config.tokens.batch_accumulation_per_replica
    for stage in stages:
        blocks = sum(name.startswith("layers.") for name in stage.layers)
        head = whole + 5 * 4 * tokens  # and five numbers of each loss
        ends = whole * ("embedding" in stage.layers) + head * ("head" in stage.layers)
        assert stage.sent == {"tp": times * (4 * whole * blocks + ends)}
    assert stage_sizes(cost_plan(parse("parallelism.tp=1")))[0].sent == {}


def test_what_is_likely_a_mistake_is_a_warning():
    schedule = "optimizer.learning_rate_scheduler"
    text = preview(parse(f"{schedule}.lr_warmup_steps=16", f"{schedule}.lr_decay_steps=null"))
    assert f"Warning: {schedule}.lr_warmup_steps: 16 was given, but tokens.train_steps" in text


def test_paths_that_are_not_here_are_warnings(tmp_path):
    text = preview(parse(f"checkpoints.resume_checkpoint_path={tmp_path}/none"))
    assert "Warning: checkpoints.resume_checkpoint_path: " in text


def test_rules_that_name_no_parameter_cannot_be_run():
    text = preview(parse("optimizer.lr_multipliers=[{role: router, multiplier: 5}]"))
    assert "Cannot be run: optimizer: no parameter has the role 'router'" in text


def test_check_says_what_is_not_counted_of_rows_that_are_cut(tmp_path):
    model = {
        "model_type": "seed_oss", "hidden_size": 64, "intermediate_size": 96, "vocab_size": 256,
        "num_attention_heads": 4, "num_key_value_heads": 4, "num_hidden_layers": 2, "head_dim": 16,
        "max_position_embeddings": 256, "attention_dropout": 0.0, "residual_dropout": 0.0,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(model))
    foreign = f"{{is_hf_config: true, path: {tmp_path}, attn_implementation: kenotron}}"
    said = preview(
        parse(
            f"model.model_config={foreign}", "parallelism.cp=2", "model.init_method={std: 0.02}",
            "parallelism.tp_mode=ALL_REDUCE",
        )
    )  # fmt: skip
    assert "activations" in said and "sends over cp is not counted" in said
