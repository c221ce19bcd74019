"""Nanotron's YAML with a context-parallel size trains, with the losses of one process."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import runs
import yaml

QWEN = {
    "is_qwen2_config": True, "hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2,
    "num_key_value_heads": 2, "intermediate_size": 48, "vocab_size": 257, "rope_theta": 100000,
    "_attn_implementation": "llama3_ring_attention", "ring_attn_heads_k_stride": 1,
    "_use_doc_masking": True, "sliding_window_size": None, "max_position_embeddings": 64,
    "attention_bias": True,
}  # fmt: skip


def nanotron(folder: Path, **parallelism: int) -> Path:
    """A published config of Nanotron with its Qwen2 and these sizes; 4 steps."""
    data = yaml.safe_load(runs.TINY_LLAMA.read_text(encoding="utf-8"))
    data["model"] |= {"model_config": QWEN, "dtype": "float32"}
    data["parallelism"] |= {"dp": 1, "pp": 1, "tp": 1} | parallelism
    data["tokens"] |= {"train_steps": 4, "sequence_length": 50, "micro_batch_size": 2}
    data["data_stages"] = data["data_stages"][:1]
    corpus = runs.write_text(folder)
    data["data_stages"][0]["data"]["dataset"]["hf_dataset_or_datasets"] = str(corpus)
    data["checkpoints"]["checkpoints_path"] = str(folder / "checkpoints")
    (file := folder / "nanotron.yaml").write_text(yaml.safe_dump(data))
    return file


def test_nanotrons_yaml_trains_as_one_process(tmp_path: Path) -> None:
    """Samples of 50 tokens, which 2 ranks and 16 strips do not divide; two samples at a time."""
    found = []
    for size in (1, 2):
        (folder := tmp_path / str(size)).mkdir()
        file = nanotron(folder, context_parallel_size=size)
        done = runs.train(folder, "--config-file", str(file))
        assert done.returncode == 0, done.stderr
        found.append([(s["lm_loss"], s["grad_norm"]) for s in runs.metrics(folder)])
    one, two = found
    assert len(one) == 4
    for a, b in zip(two, one, strict=True):
        assert a == pytest.approx(b, rel=1e-5)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (
            ["cp_attention=ulysses", "cp=3", "context_parallel_size=3"],
            "parallelism.cp (3) must divide the 4 query heads of a tp rank",
        ),
        (["cp_attention=wheel"], "it must be 'auto', 'ring', 'gather' or 'ulysses'"),
        (["cp_layout=spiral"], "it must be 'zigzag' or 'contiguous'"),
        (["cp=0"], "parallelism.cp: 0 was given; it must be at least 1"),
    ],
)
def test_what_cannot_be_cut_is_refused_before_ranks_start(
    tmp_path: Path, flags: list[str], said: str
) -> None:
    file = nanotron(tmp_path)
    sets = [part for flag in flags for part in ("--set", f"parallelism.{flag}")]
    done = runs.train(tmp_path, "--config-file", str(file), *sets)
    assert done.returncode != 0 and said in done.stderr and "Traceback" not in done.stderr


def test_a_check_says_how_attention_runs(tmp_path: Path) -> None:
    file = nanotron(tmp_path, context_parallel_size=2)
    done = runs.train(tmp_path, "--check", "--config-file", str(file))
    assert done.returncode == 0
    assert "Layout: 2 processes = pp 1 x dp 1 x cp 2 x tp 1; " in done.stdout
    assert "rank = ((pp * 1 + dp) * 2 + cp) * 1 + tp" in done.stdout
    said = (
        "gather, 1 key head at a time, zigzag; 32 tokens a rank (14 of 64 are padding), in blocks"
    )
    assert said in done.stdout
    whole = runs.train(tmp_path, "--check", "--config-file", str(nanotron(tmp_path)))
    assert "Attention over cp" not in whole.stdout
    # A rank keeps what 32 tokens need, not 25, of the 50 that one process has.
    two, one = (
        float(re.search(r"activations (\S+?)[,;]", each.stdout)[1]) for each in (done, whole)
    )
    assert two / one == pytest.approx(32 / 50, rel=0.01)


def test_a_check_names_an_order_that_cp_does_not_follow(tmp_path: Path) -> None:
    file = nanotron(tmp_path, context_parallel_size=2)
    flags = ("--set", "model.model_config.ring_attn_heads_k_stride=null")
    flags += ("--set", "model.model_config.attn_implementation=sdpa")
    flags += ("--set", "parallelism.cp_attention=gather", "--set", "parallelism.cp_stride=2")
    done = runs.train(tmp_path, "--check", "--config-file", str(file), *flags)
    assert done.returncode == 0, done.stderr
    assert "Ignored: model.model_config.attn_implementation: sdpa has no effect" in done.stdout
    assert "Attention over cp: gather" in done.stdout
