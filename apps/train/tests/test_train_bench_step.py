"""Benchmarks of a step, with and without the reproducible mode: one layout of each is measured."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))
import bench_bridge
import bench_reproducible
import bench_step


def test_every_layout_has_the_mode() -> None:
    for sizes, model, keys, of_mode, _ in bench_reproducible.LAYOUTS.values():
        usual = bench_reproducible.configure(sizes, model, keys, (), mode=False)
        exact = bench_reproducible.configure(sizes, model, (*keys, *of_mode), (), mode=True)
        assert exact.general.reproducible and not usual.general.reproducible
        assert exact.parallelism == usual.parallelism
        assert exact.global_batch_size == usual.global_batch_size == bench_reproducible.SAMPLES


def test_a_layout_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    short = ["--set", "tokens.sequence_length=8", "--set", "tokens.micro_batch_size=2"]
    bench_step.main(["--rounds", "1", "--only", "cp 2", *short])
    lines = capsys.readouterr().out.splitlines()
    assert [line[:33].strip() for line in lines[1:]] == ["one process", "cp 2"]


def test_the_cost_of_the_mode_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    small = (
        "{is_qwen2_config: true, hidden_size: 16, intermediate_size: 32, num_hidden_layers: 1, "
        "num_attention_heads: 2, num_key_value_heads: 1, vocab_size: 257, "
        "max_position_embeddings: 32}"
    )
    words = ["--set", f"model.model_config={small}", "--set", "tokens.sequence_length=32"]
    bench_reproducible.main(["--rounds", "1", "--only", "cp 2", *words])
    name, usual, exact, ratio, most = capsys.readouterr().out.splitlines()[1].rsplit(maxsplit=4)
    assert name.strip() == "cp 2" and float(most) == 1.25
    assert abs(float(exact) / float(usual) / float(ratio) - 1) < 0.5


def test_the_bridge_and_its_contestants_take_one_batch(tmp_path):
    described = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], **bench_bridge.SIZES}
    (tmp_path / "config.json").write_text(json.dumps(described))
    one = bench_bridge.configure(tmp_path, ())
    two = bench_bridge.configure(tmp_path, (), **{"parallelism.dp": 2, "optimizer.zero_stage": 3})
    assert one.global_batch_tokens == two.global_batch_tokens
    assert one.global_batch_tokens == bench_bridge.SAMPLES * bench_bridge.SEQUENCE
    assert (one.world_size, two.world_size, two.optimizer.zero_stage) == (1, 2, 3)
