"""Models of transformers, from a config and from a folder."""

import json
from pathlib import Path

import pytest

from kenotron_config import DEFAULT_CONFIG, load_config
from kenotron_cost import problems_of
from kenotron_cost.cost_plan import cost_plan
from kenotron_cost.layouts import Refused, legal_layouts
from kenotron_cost.machine_file import machine_named
from kenotron_cost.measured import MeasuredModel
from kenotron_cost.recomputed import recomputed
from kenotron_cost.run_plan import plan_of_run
from kenotron_cost.search import Planner
from kenotron_cost.stage_sizes import stage_sizes
from kenotron_models.families import LlamaConfig
from kenotron_models.hf import config_to_hf
from kenotron_plan.cli import main

pytest.importorskip("transformers")
H100 = machine_named("h100")
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


def test_an_uneven_load_of_a_foreign_model_is_said_to_change_nothing(tmp_path, capsys):
    folder = folder_of(tmp_path / "model", SIZES | EXPERTS | {"model_type": "exaone_moe"})
    flags = ("--gpus", "2xH100", "--sequence-length", "64", "--batch", "2K", "--imbalance", "2")
    assert main(["--model", str(folder), *flags]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "Experts: an even load; of models of transformers --imbalance changes nothing" in text


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


def test_rows_that_are_cut_and_a_search_for_what_is_refused(tmp_path, capsys):
    folder = folder_of(tmp_path / "model", SIZES | SEED_OSS)
    model = f"{{is_hf_config: true, path: {folder}, attn_implementation: kenotron}}"
    words = [*COMMON, f"model.model_config={model}", "parallelism.cp=2"]
    flags = [part for each in words for part in ("--set", each)]
    assert main(["--config-file", str(TINY_LLAMA), *flags]) == 2
    assert "sends over cp is not counted; plan it with cp 1" in capsys.readouterr().err
    words = ["general.reproducible=true", "optimizer.optimizer_factory.torch_adam_is_fused=false"]
    flags = [part for each in words for part in ("--set", each)]
    flags += ["--ranks", "4", "--search", "offload,compile"]
    assert main(["--config-file", str(TINY_LLAMA), *flags]) == 2
    err = capsys.readouterr().err
    assert "--search compile: leave it out" in err and "no layout is legal" not in err


def config_of(folder, *overrides):
    model = f"{{is_hf_config: true, path: {folder}}}"
    return load_config(DEFAULT_CONFIG, (*COMMON, f"model.model_config={model}", *overrides))


def test_a_llama_of_transformers_is_planned_nearly_as_ours(tmp_path):
    ours = LlamaConfig(**SIZES, tie_word_embeddings=False)
    theirs = config_of(folder_of(tmp_path / "model", config_to_hf(ours)))
    keys = ", ".join(f"{key}: {value}" for key, value in SIZES.items())
    model = f"{{is_llama_config: true, {keys}, tie_word_embeddings: false}}"
    own = load_config(DEFAULT_CONFIG, (*COMMON, f"model.model_config={model}"))
    found = [plan_of_run(each, H100, 80e9, None).own for each in (own, theirs)]
    mine, foreign = found
    for what in ("parameters", "gradients", "optimizer", "fp32 masters"):
        assert mine.memory.bytes_of.get(what) == foreign.memory.bytes_of.get(what), what
    logits = foreign.memory.bytes_of["logits"] / mine.memory.bytes_of["logits"]
    assert logits == (2 + 2 + 4) / (2 + 4)  # in bf16, their gradients, softmax in fp32
    ratio = foreign.memory.bytes_of["activations"] / mine.memory.bytes_of["activations"]
    assert 1 < ratio < 2  # its norms are several kernels, and it does not write over its inputs
    assert foreign.time.parts["products"] == pytest.approx(mine.time.parts["products"])
    assert foreign.time.seconds > mine.time.seconds


def test_sizes_and_bytes_are_those_of_check(tmp_path):
    folder = folder_of(tmp_path / "model", SIZES | EXPERTS | {"model_type": "qwen3_moe"})
    layouts = ("parallelism.tp=2", "parallelism.pp=2"), ("parallelism.ep=2", "parallelism.dp=2")
    for layout in layouts:
        plan = cost_plan(config_of(folder, *layout))
        measured, ways = MeasuredModel(plan), recomputed(plan)
        for rank, size in enumerate(stage_sizes(plan)):
            assert measured.held(plan, rank, ways) == size.bytes_of
            assert measured.sent_by_stage(plan, rank, ways) == size.sent
            assert size.bytes_of["activations"] > 0 and size.sent


def test_a_search_has_ep_and_tp_and_no_cp(tmp_path):
    folder = folder_of(tmp_path / "model", SIZES | EXPERTS | {"model_type": "qwen3_moe"})
    config, refused = config_of(folder), Refused()
    legal = [*legal_layouts(config, 4, refused)]
    assert {layout.ep for layout, _ in legal} == {1, 2, 4}
    assert {layout.tp for layout, _ in legal} == {1, 2, 4} and {each.cp for each, _ in legal} == {1}
    assert any("sends over cp is not counted" in reason for reason in refused.reasons)
    found = Planner(cost_plan(config), H100, 80e9).search(legal)
    assert {way for each in found.best for way in each.again} <= {"none", "full"}
    assert len(found.best) == 10 and all(each.time.seconds > 0 for each in found.best)
