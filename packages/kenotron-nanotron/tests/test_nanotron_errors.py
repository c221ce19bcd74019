"""What is said of damaged or unknown checkpoints of Nanotron: the file, the rule, never a guess."""

import shutil

import nanotron_cases as cases
import pytest
import torch
from nanotron_cases import change_part, config_of, metadata_of

from kenotron_nanotron import import_nanotron, read_nanotron

QKV = "model/model/decoder/0/pp_block/attn/qkv_proj/model_weight_pp-rank-0-of-1_tp-rank-{}-of-2"
QKV += ".safetensors"
NORM = "model/model/final_layer_norm/pp_block/model_weight.safetensors"


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    """A checkpoint of two tp ranks with the state of an optimizer."""
    return cases.write(tmp_path_factory.mktemp("good"), tp=2, optimizer=cases.STEPS)[0]


@pytest.fixture
def folder(good, tmp_path):
    """A copy of it to be damaged."""
    return shutil.copytree(good, tmp_path / "6")


PAIRS = "local_global_slices_pairs"
LOCAL = "0,8,None|None,None,None#0,8,None|None,None,None"
DAMAGE = {
    "a part is missing": (
        lambda f: (f / QKV.format(1)).unlink(),
        r"qkv_proj: model.decoder.0.pp_block.attn.qkv_proj.weight has no file of tp rank 1: ",
    ),
    "a part is said to be another": (
        lambda f: shutil.copy(f / QKV.format(0), f / QKV.format(1)),
        "tp-rank-1-of-2.safetensors: it holds elements of model.decoder.0.* too: parts do not ov",
    ),
    "a part leaves something out": (
        lambda f: change_part(f / QKV.format(1), {PAIRS: LOCAL}),
        "qkv_proj/.*: local_global_slices_pairs: .* does not cover the file's tensor",
    ),
    "parts do not cover the whole": (
        lambda f: [change_part(f / QKV.format(r), {"unsharded_shape": "(49, 16)"}) for r in (0, 1)],
        "hold 768 of the 784 elements of .49, 16.: their 2 parts do not cover it",
    ),
    "a slice has gaps": (
        lambda f: change_part(f / QKV.format(0), {PAIRS: LOCAL.replace("0,8,None", "0,8,2", 1)}),
        "'0,8,2' has step 2; only blocks without gaps are known",
    ),
    "a slice is outside": (
        lambda f: change_part(f / QKV.format(0), {PAIRS: LOCAL.replace("#0,8", "#90,98")}),
        "'90,98,None' is not within the 48 of shape",
    ),
    "a slice is no slice": (
        lambda f: change_part(f / QKV.format(0), {PAIRS: "0,8|None,None,None#0,8,None"}),
        "is not start,stop,step of numbers and None",
    ),
    "a pair is not one": (
        lambda f: change_part(f / QKV.format(0), {PAIRS: "0,8,None|None,None,None"}),
        "is not a local part, a # and a global part",
    ),
    "a slice too few": (
        lambda f: change_part(f / QKV.format(0), {PAIRS: "0,8,None#0,8,None"}),
        r"'0,8,None' has 1 slices, the tensor is \[24, 16\]",
    ),
    "a block becomes larger": (
        lambda f: change_part(f / QKV.format(0), {PAIRS: LOCAL.replace("#0,8", "#0,9")}),
        r"pairs a block of \[8, 16\] with one of \[9, 16\]",
    ),
    "an odd shape": (
        lambda f: change_part(f / QKV.format(0), {"unsharded_shape": "(np.float64(48), 16)"}),
        "unsharded_shape is '.np.float64.48., 16.'; it should be a tuple of sizes",
    ),
    "no metadata": (
        lambda f: change_part(f / QKV.format(0), {PAIRS: None}),
        "says which by its metadata, but local_global_slices_pairs is not there",
    ),
    "another dtype": (
        lambda f: change_part(
            f / QKV.format(1), tensors={"data": torch.zeros(24, 16, dtype=torch.float16)}
        ),
        "tp-rank-1-of-2.safetensors: dtype is torch.float16, but torch.bfloat16 in model_weight_pp",
    ),
    "a dtype that parameters have not": (
        lambda f: change_part(f / NORM, tensors={"data": torch.zeros(16, dtype=torch.int64)}),
        "final_layer_norm/pp_block/model_weight.safetensors: dtype 'I64' is not one of F64",
    ),
    "another version in a part": (
        lambda f: change_part(f / QKV.format(1), {"version": "1.5"}),
        "it is of format version 1.5, but checkpoint_metadata.json says 1.4: files of two",
    ),
    "two tensors in a file": (
        lambda f: change_part(f / NORM, tensors={"data": torch.zeros(1), "more": torch.zeros(1)}),
        r"it holds \['data', 'more'\]; a file has one tensor, called data",
    ),
    "a file cut off": (
        lambda f: (f / NORM).write_bytes((f / NORM).read_bytes()[:-3]),
        r"bytes 0 to 32 of 29 does not fit: the file was cut off",
    ),
    "a file of nothing": (
        lambda f: (f / NORM).write_bytes(b""),
        "model_weight.safetensors: its header cannot be read: ",
    ),
    "a name of before 1.4": (
        lambda f: (f / NORM).rename(
            (f / NORM).with_name(
                "model_model_weight.safetensors_pp-rank-0-of-1_tp-rank-0-of-1.safetensors"
            )
        ),
        "is not named as a tensor of Nanotron .*fix_checkpoint_bad_naming.py mends them",
    ),
    "a rank beyond": (
        lambda f: (f / QKV.format(1)).rename(f / QKV.format(2)),
        "its name says tp rank 2 of 2: ranks count from 0",
    ),
    "whole and cut": (
        lambda f: shutil.copy(f / NORM, (f / QKV.format(0)).with_name("model_weight.safetensors")),
        "unsharded_shape is .* all parts of model.decoder.0.pp_block.attn.qkv_proj.weight have the",
    ),
    "files of two engines": (
        lambda f: shutil.copy(f / NORM, (f / NORM).with_suffix(".datastates")),
        "model_weight.datastates: the engine torch writes files that end in .safetensors",
    ),
    "another tp": (
        lambda f: metadata_of(f, lambda said: said.update(tp=4)),
        "its name says 2 tp ranks, but checkpoint_metadata.json says 4",
    ),
    "an unknown version": (
        lambda f: metadata_of(f, lambda said: said.update(version="1.3")),
        "format version 1.3 of the engine torch is not known, only 1.4 and 1.5",
    ),
    "a version of the other engine": (
        lambda f: metadata_of(f, lambda said: said.update(version="1.0")),
        "format version 1.0 of the engine torch is not known",
    ),
    "an unknown engine": (
        lambda f: metadata_of(f, lambda said: said.update(checkpointing_engine_type="fast")),
        "checkpointing_engine_type is 'fast'; known are torch, datastates",
    ),
    "no version": (
        lambda f: metadata_of(f, lambda said: said.pop("version")),
        "checkpoint_metadata.json: version is missing; it must be a text",
    ),
    "a count that is none": (
        lambda f: metadata_of(f, lambda said: said["metas"].update(last_train_step="6")),
        "metas: last_train_step is '6'; it must be a whole number of at least 0",
    ),
    "no metas": (
        lambda f: metadata_of(f, lambda said: said.pop("metas")),
        "checkpoint_metadata.json: metas is missing; it must be an object",
    ),
    "stages that do not add up": (
        lambda f: metadata_of(f, lambda said: said["metas"].update(consumed_train_samples=25)),
        "metas.consumed_train_samples is 25, but the stages' counts add up to 24",
    ),
    "a stage that is not there": (
        lambda f: metadata_of(f, lambda said: said["metas"].update(last_stage_idx=2)),
        "metas.last_stage_idx is 2, but there are 2 data_stages, counted from 0",
    ),
    "stages that are none": (
        lambda f: metadata_of(f, lambda said: said["metas"].update(data_stages=[3])),
        "metas: data_stages is .3.; it must be a list of objects",
    ),
    "metadata that is no JSON": (
        lambda f: (f / "checkpoint_metadata.json").write_text("{"),
        "checkpoint_metadata.json is not JSON",
    ),
    "metadata that is a list": (
        lambda f: (f / "checkpoint_metadata.json").write_text("[]"),
        "checkpoint_metadata.json holds list, not an object",
    ),
    "no metadata file": (
        lambda f: (f / "checkpoint_metadata.json").unlink(),
        "checkpoint_metadata.json is missing: a checkpoint of Nanotron has one",
    ),
    "no model configuration": (
        lambda f: (f / "model_config.json").unlink(),
        "model_config.json is missing",
    ),
    "no tensors": (
        lambda f: shutil.rmtree(f / "model"),
        "6/model has no tensors: no files that end in .safetensors",
    ),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_named_when_a_checkpoint_is_read(folder, damage):
    harm, sentence = DAMAGE[damage]
    harm(folder)
    with pytest.raises(ValueError, match=sentence) as raised:
        read_nanotron(folder)
    assert str(folder) in str(raised.value)


def test_a_path_that_is_no_checkpoint_is_named(tmp_path):
    with pytest.raises(ValueError, match="no checkpoint of Nanotron at .*there is no such folder"):
        read_nanotron(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="it has neither checkpoint_metadata.json .a step folder"):
        read_nanotron(tmp_path)
    (tmp_path / "latest.txt").write_text("9")
    with pytest.raises(ValueError, match="latest.txt says '9': there is no such step folder"):
        read_nanotron(tmp_path)


EXTRA = "model/model/decoder/0/pp_block/attn/qkv_proj/model_bias.safetensors"
MODELS = {
    "a tensor is missing": (
        lambda f: (f / NORM).unlink(),
        "model.final_layer_norm.pp_block.weight is missing",
    ),
    "a tensor is unknown": (
        lambda f: shutil.copy(f / NORM, f / EXTRA),
        "model.decoder.0.pp_block.attn.qkv_proj.bias has no name here",
    ),
    "more layers": (
        lambda f: config_of(f, num_hidden_layers=3),
        "model.decoder.2.pp_block.mlp.down_proj.weight is missing",
    ),
    "other heads": (
        lambda f: config_of(f, num_key_value_heads=2),
        r"qkv_proj.weight has shape \[48, 16\], but model_config.json makes it \[32, 16\]",
    ),
    "a tied matrix written twice": (
        lambda f: config_of(f, tie_word_embeddings=True),
        "tie_word_embeddings is true, so the matrix is written once, .* is there too",
    ),
    "a size that is none": (
        lambda f: config_of(f, hidden_size=None),
        "model_config.json: hidden_size must be there, as whole numbers",
    ),
    "no marker": (
        lambda f: config_of(f, is_llama_config=False),
        "not those of an unmarked model: give rename, a name for every tensor",
    ),
}


@pytest.mark.parametrize("damage", MODELS)
def test_tensors_that_are_not_the_models_are_refused_and_nothing_is_written(folder, damage):
    harm, sentence = MODELS[damage]
    harm(folder)
    with pytest.raises(ValueError, match=sentence):
        import_nanotron(folder, folder.parent / "ours")
    assert not (folder.parent / "ours").exists()


def test_names_of_the_caller_must_be_of_every_tensor_and_different(folder):
    names = list(read_nanotron(folder).tensors)
    rename = dict.fromkeys(names[1:], "same") | {"other": "b"}
    with pytest.raises(ValueError, match="has no name in rename; None leaves it out") as raised:
        import_nanotron(folder, folder.parent / "ours", rename=rename)
    assert "other is in rename and not in the checkpoint" in str(raised.value)
    assert "same is the new name of two tensors" in str(raised.value)


def test_a_checkpoint_is_not_imported_over_itself(folder):
    before = sorted(path.name for path in folder.parent.rglob("*"))
    with pytest.raises(
        ValueError, match="has Nanotron's own checkpoint of step 6: give the import"
    ):
        import_nanotron(folder, folder.parent)
    assert sorted(path.name for path in folder.parent.rglob("*")) == before
