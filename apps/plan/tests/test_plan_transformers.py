"""Models of transformers, from a config and from a folder."""

import json
from pathlib import Path

import pytest

from kenotron_config import load_config
from kenotron_cost import problems_of
from kenotron_plan.cli import main

pytest.importorskip("transformers")
TINY_LLAMA = Path(__file__).parents[3] / "packages/kenotron-config/tests/tiny_llama.yaml"
SIZES = {
    "hidden_size": 256, "intermediate_size": 640, "num_attention_heads": 8,
    "num_key_value_heads": 4, "num_hidden_layers": 4, "vocab_size": 512, "head_dim": 32,
    "max_position_embeddings": 512,
}  # fmt: skip
SEED_OSS = {"model_type": "seed_oss", "attention_dropout": 0.0, "residual_dropout": 0.0}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128}
COMMON = (
    "model.make_vocab_size_divisible_by=1", "model.dtype=bfloat16", "parallelism.dp=1",
    "parallelism.pp=1", "parallelism.tp=1", "tokens.sequence_length=512",
    "tokens.batch_accumulation_per_replica=16", "tokens.micro_batch_size=1",
    "model.init_method.scaling_method=NONE", "parallelism.tp_mode=ALL_REDUCE",
)  # fmt: skip


def folder_of(path, values):
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(values))
    return path


def test_a_family_that_is_none_of_ours_is_planned_from_its_folder(tmp_path, capsys):
    folder = folder_of(tmp_path / "model", SIZES | SEED_OSS)
    chosen = tmp_path / "chosen.yaml"
    flags = (
        "--gpus",
        "4xH100",
        "--sequence-length",
        "512",
        "--batch",
        "8K",
        "--write",
        str(chosen),
    )
    assert main(["--model", str(folder), *flags, "--write", str(chosen)]) == 0
    out = capsys.readouterr().out
    assert "legal layouts of 4 ranks" in out and "sends over cp is not counted" in out
    written = load_config(chosen)
    assert written.model.model_config.path == str(folder) and written.world_size == 4
    assert problems_of(written) == []


def test_a_model_in_one_piece_and_an_unknown_family_are_refused(tmp_path, capsys):
    none = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    gpt = {"model_type": "openai-gpt", "n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 64}
    folder = folder_of(tmp_path / "gpt", gpt | none)
    flags = ("--gpus", "2xH100", "--sequence-length", "64", "--batch", "2K")
    assert main(["--model", str(folder), *flags]) == 2
    assert "transformers computes this model in one piece" in capsys.readouterr().err
    folder = folder_of(tmp_path / "unknown", {"model_type": "no_such_family"})
    assert main(["--model", str(folder), *flags]) == 2
    assert "no_such_family" in capsys.readouterr().err


def test_rows_that_are_cut_and_compile_are_refused(tmp_path, capsys):
    folder = folder_of(tmp_path / "model", SIZES | SEED_OSS)
    model = f"{{is_hf_config: true, path: {folder}, attn_implementation: kenotron}}"
    words = [*COMMON, f"model.model_config={model}", "parallelism.cp=2"]
    flags = [part for each in words for part in ("--set", each)]
    assert main(["--config-file", str(TINY_LLAMA), *flags]) == 2
    assert "sends over cp is not counted; plan it with cp 1" in capsys.readouterr().err
    flags[-1] = "parallelism.cp=1"
    flags += ["--ranks", "4", "--search", "offload,compile"]
    assert main(["--config-file", str(TINY_LLAMA), *flags]) == 2
    err = capsys.readouterr().err
    assert "--search compile: leave it out" in err and "no layout is legal" not in err
