"""The conversion app as a user starts it, and what it says when something is wrong."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, Starcoder2Config

from kenotron_ckpt import read_box, read_manifest, read_record
from kenotron_convert import exporting, importing
from kenotron_convert.cli import convert_parser, main
from kenotron_convert.shards import deal, parse_size
from kenotron_dist.launch import threads_of_rank
from kenotron_models import config_from_json, hf_comparison, hf_import
from kenotron_models.hf import read_hf_config

UP = "model.layers.0.mlp.up_proj"
APP = Path(__file__).parents[1]
TINY = {
    "vocab_size": 99,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}


@pytest.fixture
def hf(tmp_path) -> Path:
    """A tiny Llama with random weights."""
    torch.manual_seed(0)
    folder = tmp_path / "hf"
    AutoModelForCausalLM.from_config(LlamaConfig(**TINY)).save_pretrained(folder)
    return folder


def imported(hf: Path, *flags: str) -> int:
    return main(["hf-to-kenotron", "--hf", str(hf), "--out", str(hf.parent / "run"), *flags])


def exported(hf: Path, *flags: str) -> int:
    run, out = hf.parent / "run", hf.parent / "out"
    return main(["kenotron-to-hf", "--ckpt", str(run), "--out", str(out), *flags])


def left_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def write_tokenizer(folder: Path) -> None:
    words = {word: i for i, word in enumerate(["[UNK]", "a", "b", "c"])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    folder.mkdir(exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))


@pytest.mark.smoke
def test_the_program_goes_both_ways(hf):
    def start(*flags: str) -> str:
        command = [sys.executable, str(APP), *flags]
        done = subprocess.run(command, cwd=hf.parent, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        return done.stdout

    said = start("hf-to-kenotron", "--hf", "hf", "--out", "run")
    assert said.startswith("wrote run/0; logits and a gradient are those of transformers to ")
    said = start("kenotron-to-hf", "--ckpt", "run/0", "--out", "out", "--max-shard-size", "20KB")
    assert said.startswith("wrote out from run/0; its logits are ours to ")
    files = [name for name in left_in(hf.parent / "out") if name.startswith("model-")]
    index = json.loads((hf.parent / "out/model.safetensors.index.json").read_text())
    assert files == sorted({*index["weight_map"].values()})
    assert len(files) > 2
    assert left_in(hf.parent) == ["hf", "out", "run"]
    url = f"file://{hf.parent}/run"
    said = start("kenotron-to-hf", "--ckpt", url, "--out", "there", "--max-shard-size", "20KB")
    assert said.startswith(f"wrote there from {url}/0; its logits are ours to ")
    for name in files:
        assert (hf.parent / "there" / name).read_bytes() == (hf.parent / "out" / name).read_bytes()


def test_an_export_says_what_a_training_alone_reads(hf, monkeypatch, capsys):
    monkeypatch.setattr(exporting, "not_carried", lambda config: ["expert_capacity_factor: 1.0"])
    monkeypatch.chdir(hf.parent)
    assert main(["hf-to-kenotron", "--hf", "hf", "--out", "run"]) == 0
    assert main(["kenotron-to-hf", "--ckpt", "run/0", "--out", "out"]) == 0
    said = capsys.readouterr().err
    assert "config.json does not have: expert_capacity_factor: 1.0\n" in said


def test_threads_are_those_of_the_environment_unless_given(hf, monkeypatch, capsys):
    asked: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", asked.append)
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert imported(hf) == 0
    assert imported(hf, "--threads", "2", "--overwrite") == 0
    monkeypatch.delenv("OMP_NUM_THREADS")
    assert imported(hf, "--overwrite") == 0
    assert asked == [3, 2, threads_of_rank(1)]
    monkeypatch.setenv("OMP_NUM_THREADS", "many")
    assert imported(hf, "--overwrite") == 1
    assert "OMP_NUM_THREADS=many: give a number" in capsys.readouterr().err


def test_a_tokenizer_travels_both_ways(hf):
    write_tokenizer(hf)
    assert imported(hf) == exported(hf) == 0
    tokenizer = AutoTokenizer.from_pretrained(hf.parent / "out")
    assert tokenizer("b c a")["input_ids"] == [2, 3, 1]


CODE = {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}


def test_code_of_a_folder_is_neither_run_nor_carried_along(hf):
    write_tokenizer(hf)
    (hf / "evil.py").write_text(f"open({str(hf.parent / 'ran')!r}, 'w')\n")
    config = json.loads((hf / "config.json").read_text())
    (hf / "config.json").write_text(json.dumps(config | {"auto_map": CODE}))
    (hf / "generation_config.json").write_text(json.dumps({"auto_map": CODE, "eos_token_id": 2}))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "auto_map": {"AutoTokenizer": "evil.T"},
    }
    (hf / "tokenizer_config.json").write_text(json.dumps(settings))
    assert imported(hf) == 0
    run = hf.parent / "run"
    state = read_manifest(run).state["imported"]
    assert "auto_map" not in json.dumps(state) and state["generation_config"] == {"eos_token_id": 2}
    assert "auto_map" not in (run / "tokenizer/tokenizer_config.json").read_text()
    manifest = read_manifest(run)  # as an older version wrote it
    manifest.state["imported"]["config"]["auto_map"] = CODE
    manifest.state["imported"]["generation_config"]["auto_map"] = CODE
    (run / "0/manifest.json").write_text(manifest.to_json())
    assert exported(hf, "--tokenizer", str(hf)) == 0
    for file in (hf.parent / "out").glob("*.json"):
        assert "auto_map" not in file.read_text(), file
    assert not (hf.parent / "ran").exists()


def test_settings_of_a_tokenizer_that_are_not_json_are_named(hf, capsys):
    write_tokenizer(hf)
    (hf / "tokenizer_config.json").write_text("{")
    assert imported(hf) == 1
    assert "tokenizer_config.json is not JSON: " in capsys.readouterr().err


def test_transformers_is_told_to_run_no_code(hf, monkeypatch):
    assert imported(hf) == 0
    told, load = [], AutoModelForCausalLM.from_pretrained

    def loads(*given, **options):
        told.append(options.get("trust_remote_code"))
        return load(*given, **options)

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", loads)
    assert exported(hf) == imported(hf, "--overwrite") == 0
    assert told == [False, False]


def test_a_tokenizer_can_be_given(hf, capsys):
    assert imported(hf) == 0
    assert exported(hf, "--tokenizer", str(hf)) == 1
    assert "hf has no tokenizer: give a folder with tokenizer.json" in capsys.readouterr().err
    write_tokenizer(hf.parent / "words")
    assert exported(hf, "--tokenizer", str(hf.parent / "words/tokenizer.json")) == 0
    assert AutoTokenizer.from_pretrained(hf.parent / "out")("c")["input_ids"] == [3]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_weights_keep_their_dtype_unless_another_is_asked_for(hf, dtype):
    model = AutoModelForCausalLM.from_pretrained(hf, dtype=getattr(torch, dtype))
    model.save_pretrained(hf)
    assert imported(hf) == 0
    manifest = read_manifest(hf.parent / "run")
    assert {each.dtype for each in manifest.records.values()} == {dtype}
    assert manifest.state["dtype"] == dtype
    assert exported(hf) == 0
    assert json.loads((hf.parent / "out/config.json").read_text())["dtype"] == dtype
    values = load_file(hf.parent / "out/model.safetensors")
    assert all(torch.equal(values[n], v) for n, v in load_file(hf / "model.safetensors").items())
    assert imported(hf, "--dtype", "float32", "--overwrite") == 0
    assert read_manifest(hf.parent / "run").state["dtype"] == "float32"
    assert exported(hf, "--overwrite") == 0
    assert json.loads((hf.parent / "out/config.json").read_text())["dtype"] == "float32"


def test_numbers_that_a_dtype_cannot_hold_are_refused_both_ways(hf, capsys):
    spoilt(hf, lambda v: v[f"{UP}.weight"][0, 0].fill_(70000.0))
    assert imported(hf, "--dtype", "float16") == 1
    assert "numbers up to 7e+04, too large for torch.float16" in capsys.readouterr().err
    assert imported(hf) == 0
    assert exported(hf, "--dtype", "float16") == 1
    assert f"{UP}.weight has numbers up to 7e+04" in capsys.readouterr().err
    assert left_in(hf.parent) == ["hf", "run"]


def test_a_changed_model_gets_a_config_of_its_own(hf):
    assert imported(hf) == 0
    path = hf.parent / "run/0/manifest.json"
    manifest = read_manifest(hf.parent / "run")
    manifest.state["model_config"]["rope_theta"] = 777.0
    path.write_text(manifest.to_json())
    assert exported(hf) == 0
    assert AutoModelForCausalLM.from_pretrained(hf.parent / "out").config.rope_parameters == {
        "rope_theta": 777.0,
        "rope_type": "default",
    }


def test_a_file_that_is_there_is_kept_unless_told_otherwise(hf, capsys):
    assert imported(hf) == exported(hf) == 0
    before = (hf.parent / "out/model.safetensors").stat().st_mtime_ns
    assert imported(hf) == exported(hf) == 1
    said = capsys.readouterr().err
    assert said.count("is there: give --overwrite to replace it") == 2
    assert (hf.parent / "out/model.safetensors").stat().st_mtime_ns == before
    assert imported(hf, "--overwrite") == exported(hf, "--overwrite") == 0
    assert (hf.parent / "out/model.safetensors").stat().st_mtime_ns != before
    (hf.parent / "out/config.json").unlink()
    assert exported(hf, "--overwrite") == 1
    assert "out is no model of Hugging Face" in capsys.readouterr().err
    assert left_in(hf.parent) == ["hf", "out", "run"]


INTO_ITS_SOURCE = {
    "hf-to-kenotron": ["--hf", "hf", "--out", "hf"],
    "kenotron-to-hf": ["--ckpt", "run", "--out", "run"],
    "upcycle": ["--ckpt", "run/0", "--out", "run", "--experts", "2"],
    "average": ["--ckpt", "other", "run", "--out", "run"],
    "adapter-to-peft": ["--ckpt", "run", "--out", "run/0"],
    "merge-adapter": ["--adapter", "run", "--base", "hf", "--out", "link"],
}


def test_no_command_writes_over_what_it_reads(hf, capsys, monkeypatch):
    makers = {name for name, each in commands().items() if "--out" in each.format_help()}
    assert makers == {*INTO_ITS_SOURCE}
    assert imported(hf, "--no-check") == 0
    monkeypatch.chdir(hf.parent)
    shutil.copytree("run", "other")
    Path("link").symlink_to("hf")
    before = {path: path.read_bytes() for path in Path().rglob("*") if path.is_file()}
    for command, flags in INTO_ITS_SOURCE.items():
        assert main([command, *flags, "--overwrite"]) == 1, command
        assert "in it, which is read: give --out a new folder" in capsys.readouterr().err, command
    assert {path: path.read_bytes() for path in Path().rglob("*") if path.is_file()} == before


def commands() -> dict[str, Any]:
    """Parsers of all commands, by name."""
    return next(each.choices for each in convert_parser()._actions if each.choices)


def test_the_folder_of_a_run_is_not_written_to(hf, capsys):
    assert imported(hf) == 0
    (hf.parent / "run/0").rename(hf.parent / "run/7")
    manifest = (hf.parent / "run/7/manifest.json").read_text()
    assert imported(hf, "--overwrite") == 1
    assert "run is the folder of a run (step 7)" in capsys.readouterr().err
    assert (hf.parent / "run/7/manifest.json").read_text() == manifest


def test_the_tokenizer_that_a_checkpoint_names_is_taken(hf):
    assert imported(hf) == 0
    write_tokenizer(hf.parent / "words")
    manifest = read_manifest(hf.parent / "run")
    manifest.state["tokenizer"] = {"name": str(hf.parent / "words")}
    (hf.parent / "run/0/manifest.json").write_text(manifest.to_json())
    assert exported(hf) == 0
    assert AutoTokenizer.from_pretrained(hf.parent / "out")("c")["input_ids"] == [3]


def test_all_tokens_that_end_a_text_come_back(hf):
    config = json.loads((hf / "config.json").read_text()) | {"eos_token_id": [7, 8]}
    (hf / "config.json").write_text(json.dumps(config))
    (hf / "generation_config.json").unlink()
    assert imported(hf) == exported(hf) == 0
    model = AutoModelForCausalLM.from_pretrained(hf.parent / "out")
    assert model.config.eos_token_id == model.generation_config.eos_token_id == [7, 8]


def test_an_export_that_says_something_else_is_not_kept(hf, capsys, monkeypatch):
    assert imported(hf) == 0
    right = exporting.write_safetensors

    def wrong(path, sizes, values):
        right(path, sizes, (value * 1.01 for value in values))

    monkeypatch.setattr(exporting, "write_safetensors", wrong)
    assert exported(hf) == 1
    said = capsys.readouterr().err
    assert "logits of a text: those of transformers differ from ours by " in said
    assert "The export was not kept. Please report this; --no-check writes it" in said
    assert left_in(hf.parent) == ["hf", "run"]
    assert exported(hf, "--no-check") == 0
    assert "logits were not compared" in capsys.readouterr().out


def test_without_transformers_the_check_says_what_to_do(hf, capsys, monkeypatch):
    assert imported(hf) == 0
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert exported(hf) == 1
    assert "pip install transformers, or give --no-check" in capsys.readouterr().err
    assert exported(hf, "--no-check") == 0


def read_as(monkeypatch, **changes):
    """Let a model folder be read with other values of our config."""
    right = hf_import.read_hf_config

    def wrong(folder):
        config, values = right(folder)
        return replace(config, **changes), values

    monkeypatch.setattr(hf_import, "read_hf_config", wrong)


def test_an_import_that_transformers_computes_otherwise_writes_nothing(hf, capsys, monkeypatch):
    read_as(monkeypatch, rope_theta=5e4)
    assert imported(hf) == main(["compare", "--hf", str(hf)]) == 1
    said = capsys.readouterr().err
    assert "logits of a text: those of transformers differ from ours by " in said
    assert f"{hf} was not imported. Please report this; --no-check imports it all the same" in said
    assert left_in(hf.parent) == ["hf"]
    assert imported(hf, "--no-check") == 0
    assert "run/0; logits were not compared\n" in capsys.readouterr().out


def test_a_model_that_magnifies_rounding_is_compared_with_itself(hf, capsys, monkeypatch):
    monkeypatch.setattr(hf_comparison, "BOUND", 1e-9)
    assert main(["compare", "--hf", str(hf)]) == 0
    read_as(monkeypatch, rms_norm_eps=1e-4)
    assert main(["compare", "--hf", str(hf)]) == 1
    assert "those of transformers differ from ours by " in capsys.readouterr().err


def test_an_import_is_compared_where_transformers_is_installed(hf, capsys, monkeypatch):
    assert main(["compare", "--hf", str(hf)]) == 0
    assert f"{hf}: logits and a gradient are those of transformers to" in capsys.readouterr().out
    assert left_in(hf.parent) == ["hf"]
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert imported(hf) == 0
    assert "logits were not compared: transformers is not installed" in capsys.readouterr().out


def test_weights_that_are_not_finite_are_no_fault_of_an_import(hf, capsys):
    spoilt(hf, lambda values: values["model.norm.weight"].fill_(float("nan")))
    for flags in ((), ("--no-check",)):
        assert imported(hf, *flags) == 1
        assert capsys.readouterr().err == f"error: {hf}: weights are nan or inf in norm.weight\n"


def test_the_config_of_a_training_is_told(hf, capsys):
    assert main(["config", "--hf", str(hf)]) == 0
    told = json.loads(capsys.readouterr().out)
    assert config_from_json(told) == read_hf_config(hf)[0] and told["is_llama_config"]
    assert "rms_norm_eps" not in told  # it is the default


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda v: v.update(new=torch.ones(1)), "unexpected: new"),
        (lambda v: v.pop("lm_head.weight"), "missing: lm_head.weight"),
    ],
)
def test_an_export_has_the_tensors_that_transformers_needs(
    hf, change, sentence, capsys, monkeypatch
):
    right = hf_comparison.load_theirs

    def wrong(folder, keys=None):
        spoilt(folder, change)
        return right(folder, keys)

    assert imported(hf) == 0
    monkeypatch.setattr(hf_comparison, "load_theirs", wrong)
    assert exported(hf) == 1
    said = capsys.readouterr().err
    assert "transformers finds other tensors in " in said and sentence in said
    assert left_in(hf.parent) == ["hf", "run"]


def test_a_folder_that_transformers_does_not_load_is_named(tmp_path):
    with pytest.raises(ValueError, match=f"transformers does not load {tmp_path}: "):
        hf_comparison.load_theirs(tmp_path)


def spoilt(hf: Path, change) -> None:
    values = load_file(hf / "model.safetensors")
    change(values)
    save_file(values, hf / "model.safetensors", {"format": "pt"})


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (
            lambda v: v.update({"model.layers.0.mlp.up_proj.weigth": v.pop(f"{UP}.weight")}),
            f"{UP}.weight is missing",
        ),
        (lambda v: v.update(extra=torch.ones(1)), "extra is none of the model's"),
        (
            lambda v: v.update({f"{UP}.weight": torch.ones(2, 32)}),
            f"{UP}.weight has shape [2, 32], but the model makes it [48, 32]",
        ),
        (
            lambda v: v.update({f"{UP}.weight": v[f"{UP}.weight"].half()}),
            "layers.0.mlp.gate_up.weight is made of tensors of several dtypes",
        ),
        (
            lambda v: v.update({f"{UP}.weight": v[f"{UP}.weight"].to(torch.int8)}),
            f"{UP}.weight is int8; weights must be bfloat16, float16, float32",
        ),
        (
            lambda v: v.update({"model.norm.weight": v["model.norm.weight"].double()}),
            "model.norm.weight is float64; weights must be",
        ),
        (lambda v: v[f"{UP}.weight"][3].fill_(torch.nan), "nan or inf in layers.0.mlp.gate_up"),
    ],
)
def test_tensors_that_are_not_the_models_are_named_and_nothing_is_written(
    hf, change, sentence, capsys
):
    spoilt(hf, change)
    assert imported(hf) == 1
    assert sentence in capsys.readouterr().err
    assert left_in(hf.parent) == ["hf"]


def test_keys_of_a_config_that_mean_nothing_are_named(hf, capsys):
    path = hf / "config.json"
    values = json.loads(path.read_text())
    path.write_text(json.dumps(values | {"dtype": "int8"}))
    assert imported(hf) == 1
    assert f"{path}: dtype: 'int8' was given; it must be one of" in capsys.readouterr().err
    path.write_text("[" * 10**5)
    assert imported(hf) == 1
    assert f"{path} is not read: its JSON is nested too deeply" in capsys.readouterr().err


def test_pickles_and_folders_that_are_no_models_are_refused(hf, capsys):
    (hf / "model.safetensors").rename(hf / "pytorch_model.bin")
    assert imported(hf) == 1
    assert "which can run any code when they are opened" in capsys.readouterr().err
    (hf / "config.json").unlink()
    assert imported(hf) == 1
    assert "it has no config.json" in capsys.readouterr().err
    assert imported(hf.with_name("none")) == 1
    assert "none is no model of Hugging Face: there is no such folder" in capsys.readouterr().err
    assert left_in(hf.parent) == ["hf"]


def test_a_checkpoint_of_something_else_is_refused(hf, capsys):
    assert exported(hf) == 1
    assert imported(hf) == 0
    manifest = read_manifest(hf.parent / "run")
    del manifest.records["norm.weight"], manifest.state["imported"]
    (hf.parent / "run/0/manifest.json").write_text(manifest.to_json())
    assert exported(hf) == 1
    assert "norm.weight is missing" in capsys.readouterr().err
    del manifest.state["model_config"]
    (hf.parent / "run/0/manifest.json").write_text(manifest.to_json())
    assert exported(hf) == 1
    assert "does not describe a model" in capsys.readouterr().err
    assert left_in(hf.parent) == ["hf", "run"]


def test_a_damaged_checkpoint_is_not_exported(hf, capsys):
    assert imported(hf) == 0
    shard = next((hf.parent / "run/0").glob("*.safetensors"))
    data = bytearray(shard.read_bytes())
    data[-5] ^= 1
    shard.write_bytes(data)
    assert exported(hf, "--no-check") == 1
    assert "norm.weight@0 are not those that were written" in capsys.readouterr().err
    assert left_in(hf.parent) == ["hf", "run"]


def say_tied(hf: Path) -> None:
    config = json.loads((hf / "config.json").read_text())
    (hf / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))


def test_the_head_of_a_tied_model_may_be_in_the_file_and_is_not_read(hf):
    say_tied(hf)
    spoilt(hf, lambda v: v.update({"lm_head.weight": v["model.embed_tokens.weight"].clone()}))
    assert imported(hf) == 0
    manifest = read_manifest(hf.parent / "run")
    assert "head.weight" not in manifest.records
    embedding = load_file(hf / "model.safetensors")["model.embed_tokens.weight"]
    assert torch.equal(read_record(hf.parent / "run/0", manifest, "embedding.weight"), embedding)


@pytest.mark.parametrize("family", ["llama", "starcoder2"])
def test_a_head_that_is_not_the_embedding_is_kept_whatever_the_config_says(hf, family):
    if family == "starcoder2":  # without the key, which means that it is tied
        shutil.rmtree(hf)
        config = Starcoder2Config(**TINY, tie_word_embeddings=False)
        AutoModelForCausalLM.from_config(config).save_pretrained(hf)
        said = json.loads((hf / "config.json").read_text())
        del said["tie_word_embeddings"]
        (hf / "config.json").write_text(json.dumps(said))
    else:
        say_tied(hf)
    assert imported(hf) == exported(hf) == 0
    manifest = read_manifest(hf.parent / "run")
    head = load_file(hf / "model.safetensors")["lm_head.weight"]
    assert torch.equal(read_record(hf.parent / "run/0", manifest, "head.weight"), head)
    assert not manifest.state["model_config"]["tie_word_embeddings"]
    assert torch.equal(load_file(hf.parent / "out/model.safetensors")["lm_head.weight"], head)
    assert not json.loads((hf.parent / "out/config.json").read_text())["tie_word_embeddings"]


def test_an_export_can_have_another_dtype(hf, capsys):
    assert imported(hf) == exported(hf, "--dtype", "bfloat16") == 0
    said = capsys.readouterr()
    assert "run/0; logits and a gradient are those" in said.out
    assert "its logits are ours to" in said.out
    assert json.loads((hf.parent / "out/config.json").read_text())["dtype"] == "bfloat16"
    was, now = (load_file(hf.parent / name / "model.safetensors") for name in ("hf", "out"))
    assert all(torch.equal(now[name], values.bfloat16()) for name, values in was.items())


def test_what_is_not_carried_is_said(hf, capsys):
    assert imported(hf) == exported(hf) == 0
    said = capsys.readouterr().err
    assert f"no tokenizer: {hf} has none" in said and "give --tokenizer" in said
    write_tokenizer(hf)
    assert imported(hf, "--overwrite") == exported(hf, "--overwrite") == 0
    assert "no tokenizer" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "size"),
    [("5GB", 5 * 10**9), ("1.5 kb", 1500), ("2GiB", 2 << 30), ("12", 12), ("7B", 7)],
)
def test_sizes_are_read_with_their_units(text, size):
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "GB", "0GB", "-1GB", "5 apples", "1e9"])
def test_a_size_that_is_none_is_refused(text, hf, capsys):
    with pytest.raises(ValueError, match="as 5GB, 500MB or 2GiB"):
        parse_size(text)


def test_files_are_filled_in_order_and_a_large_tensor_has_its_own():
    sizes = [(str(i), exporting.TensorSize((n,), torch.uint8)) for i, n in enumerate((3, 3, 9, 1))]
    assert [[*each] for each in deal(sizes, 6).values()] == [["0", "1"], ["2"], ["3"]]
    assert [*deal(sizes, 16)] == ["model.safetensors"]


@pytest.mark.parametrize("size", ["5GB", "20KB"])
def test_one_tensor_is_in_memory_at_a_time_both_ways(hf, size, monkeypatch):
    alive = []

    def read(*arguments):
        assert all(each() is None for each in alive)
        made = read_box(*arguments)
        alive.append(weakref.ref(made))
        return made

    monkeypatch.setattr(importing, "read_box", read)
    monkeypatch.setattr(exporting, "read_box", read)
    assert imported(hf) == 0
    assert len(alive) == len(read_manifest(hf.parent / "run").records)
    alive.clear()
    assert exported(hf, "--no-check", "--max-shard-size", size) == 0
    assert len(alive) == len(load_file(hf / "model.safetensors"))


def test_an_interrupted_export_leaves_nothing(hf, monkeypatch):
    assert imported(hf) == 0

    def stop(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(exporting, "compare_export", stop)
    assert exported(hf) == 130
    assert left_in(hf.parent) == ["hf", "run"]


def test_a_checkpoint_is_given_as_to_the_other_programs(capsys):
    for command in ("kenotron-to-hf", "average"):
        given = convert_parser().parse_args([command, "--ckpt-path", "a", "--out", "b"])
        assert given.ckpt in ("a", ["a"])
    with pytest.raises(SystemExit):
        main(["--version"])
    assert capsys.readouterr().out.startswith("kenotron-convert ")
