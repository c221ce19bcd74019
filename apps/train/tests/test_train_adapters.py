"""LoRA and DoRA train as peft does, on every layout, and both read one another's files."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import runs
import torch
from adapter_runs import losses, peft_folder, same_tensors, set_up, trained_as_peft
from foreign_models import configure, folder_of, run
from safetensors.torch import load_file, save_file

from kenotron_ckpt import read_manifest
from kenotron_config import Config, ConfigError
from kenotron_dist import RankError
from kenotron_train.run.adapters import check_adapter_file

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # peft
HALF = {"parallelism.dp": 2, "tokens.batch_accumulation_per_replica": 1}
LAYOUTS = {
    "tp2": {"parallelism.tp": 2},
    "pp2": {"parallelism.pp": 2, "parallelism.pp_engine": "zb-h1"},
    "dp2 zero1": HALF | {"optimizer.zero_stage": 1},
    "dp2 zero3 recompute": HALF | {"optimizer.zero_stage": 3, "parallelism.recompute": "full"},
    "tp2 pp2 dp2": HALF | {"parallelism.tp": 2, "parallelism.pp": 2},
    "tp2 sequence": {"parallelism.tp": 2, "parallelism.tp_mode": "REDUCE_SCATTER"},
}
OURS = {
    "tp2 sequence selective": {"parallelism.tp": 2, "parallelism.tp_mode": "REDUCE_SCATTER"}
    | {"parallelism.recompute": "selective"},
    "cp2": {"parallelism.cp": 2},
}


def check_file(config: Config) -> None:
    folder = Path(config.checkpoints.checkpoints_path)
    check_adapter_file(config.model, config.adapter, folder, None)


@pytest.mark.parametrize("kind", ["lora", "dora"])
@pytest.mark.parametrize("native", [False, True])
def test_training_is_that_of_peft_and_each_reads_the_others_files(kind, native, tmp_path):
    folder = folder_of("llama", tmp_path / "model")
    first = peft_folder(folder, tmp_path / "first", kind)
    config = set_up(folder, tmp_path / "run", {}, native=native, kind=kind, path=str(first))
    _, theirs = trained_as_peft(config, folder, first, tmp_path)
    same_tensors(tmp_path, theirs, rtol=1e-4, atol=2e-6)
    _compare_folders(tmp_path, folder)


def _compare_folders(tmp_path: Path, folder: Path) -> None:
    """peft reads our files, and what we merge computes what peft computes with them."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = torch.arange(24)[None]
    plain = base(input_ids=ids).logits.detach()
    loaded = PeftModel.from_pretrained(base, tmp_path / "ours").eval()
    due = loaded(input_ids=ids).logits
    assert (due - plain).abs().max() > 1e-2
    command = "merge-adapter", "--adapter", "ours", "--base", str(folder), "--out", "merged"
    done = runs.program("apps/convert", tmp_path, *command)
    assert done.returncode == 0, done.stderr
    assert "adapters are added to 15 weights" in done.stdout
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32).eval()
    torch.testing.assert_close(merged(input_ids=ids).logits, due, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("layout", [*LAYOUTS, *OURS])
@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_every_layout_trains_as_one_process_with_dropout(kind, native, layout, tmp_path):
    if not native and layout == "tp2 sequence selective":
        pytest.skip("layers of transformers do not have this layout")
    folder = folder_of("llama", tmp_path / "model")
    first = peft_folder(folder, tmp_path / "first", kind)
    how = {"native": native, "kind": kind, "dropout": 0.3, "path": str(first)}
    one = losses(set_up(folder, tmp_path / "one", {}, **how))
    many = losses(set_up(folder, tmp_path / "many", (LAYOUTS | OURS)[layout], **how))
    assert many == pytest.approx(one, rel=1e-6)
    assert losses(set_up(folder, tmp_path / "all", {}, **how | {"dropout": 0.0})) != one


@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_a_checkpoint_has_the_adapter_alone_and_resumes_on_another_layout(kind, native, tmp_path):
    folder = folder_of("llama", tmp_path / "model")
    one = losses(set_up(folder, tmp_path / "one", {}, native=native, kind=kind))
    two = LAYOUTS["tp2 pp2 dp2"] | {"tokens.train_steps": 2}
    run(set_up(folder, tmp_path / "many", two, native=native, kind=kind))
    again = LAYOUTS["dp2 zero3 recompute"]
    again = again | {"checkpoints.resume_checkpoint_path": tmp_path / "many/2"}
    resumed = losses(set_up(folder, tmp_path / "resumed", again, native=native, kind=kind))
    assert resumed == pytest.approx(one[2:], rel=1e-6)
    assert all(".lora." in name for name in read_manifest(tmp_path / "many/2").records)
    other = again | {"tokens.train_steps": 3}
    with pytest.raises(RankError, match="of another adapter: model.adapter.rank is 2 in the con"):
        run(set_up(folder, tmp_path / "other", other, native=native, kind=kind, rank=2))
    with pytest.raises(RankError, match="it has an adapter alone, and model.adapter asks for none"):
        run(configure(folder, tmp_path / "none", again))
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"][3] += 1e-3
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(RankError, match="of an adapter of other weights: they were those of"):
        run(set_up(folder, tmp_path / "base", again, native=native, kind=kind))
    done = runs.program("apps/generate", tmp_path, "--ckpt-path", "many", "--prompt", "A")
    assert done.returncode != 0 and "the checkpoint has an adapter and no weights" in done.stderr


def test_a_base_in_bf16_and_experts_are_frozen(tmp_path):
    folder = folder_of("mixtral", tmp_path / "model")
    changes = {"model.dtype": "bfloat16"} | HALF | {"parallelism.ep": 2}
    targets = {"targets": ["self_attn.[qkv]_proj"]}
    one = losses(set_up(folder, tmp_path / "one", {}, native=False, **targets))
    many = losses(set_up(folder, tmp_path / "many", changes, native=False, **targets))
    assert many == pytest.approx(one, rel=2e-2) and one[-1] != one[0]
    names = read_manifest(tmp_path / "many/4").records
    log = (tmp_path / "one/log.txt").read_text()
    assert "groups of adapters (the base is frozen):" in log
    groups = re.findall(r"\]: +\d+ +\S+ +\S+ +(\d+) +[\d,]+  (layers\..*)", log)
    # Saved are a weight, its copy in fp32 and two moments of each.
    assert [(4 * int(count), ".lora." in shown) for count, shown in groups] == [(len(names), True)]
    assert all(".self_attn." in name and ".lora." in name for name in names)


REFUSED = {
    "rank": ({"rank": 0}, "model.adapter.rank: 0 was given; it must be at least 1"),
    "kind": ({"kind": "ia3"}, "model.adapter.kind"),
    "alpha": ({"alpha": 0}, "model.adapter.alpha: 0.* was given; it must be finite and above 0"),
    "dropout": ({"dropout": 1}, "model.adapter.dropout: 1.* was given; it must be from 0 to below"),
    "none": ({"targets": []}, "model.adapter.targets: nothing was given; name layers, or"),
    "unknown": ({"targets": ["q_porj"]}, "targets: 'q_porj' is no linear layer: .*; is it q_proj?"),
    "head": ({"targets": ["lm_head"]}, "targets: 'lm_head' is no linear layer: there are down_pro"),
    "pattern": ({"targets": ["(q"]}, "targets: .* is no pattern"),
}


@pytest.mark.parametrize("case", REFUSED)
@pytest.mark.parametrize("native", [False, True])
def test_bad_input_is_refused_by_name(case, native, tmp_path):
    folder = folder_of("llama", tmp_path / "model")
    change, words = REFUSED[case]
    with pytest.raises(ConfigError, match=words):
        set_up(folder, tmp_path / "run", {}, native=native, **change)


COMBINED = {
    "model.compile": (True, "model.compile: true was given; "),
    "model.cuda_graph": (True, "model.cuda_graph: true was given; "),
    "general.reproducible": (True, "general.reproducible: true was given; model.adapter.rank is s"),
    "model.mtp": ("{}", "model.mtp.layers: 1 was given"),
    "model.init_method": ("{use_mup: true}", "adapters have no scales of use_mup"),
}


@pytest.mark.parametrize("key", COMBINED)
def test_what_adapters_are_not_combined_with_is_refused_by_name(key, tmp_path):
    folder, (value, words) = folder_of("llama", tmp_path / "model"), COMBINED[key]
    with pytest.raises(ConfigError, match=words):
        set_up(folder, tmp_path / "run", {key: value}, native=True)


def test_files_of_other_adapters_are_refused_before_ranks_start(tmp_path):
    folder = folder_of("llama", tmp_path / "model")
    first = peft_folder(folder, tmp_path / "first", words=["q_proj"])

    def refused(words: str, **adapter: object) -> None:
        given = {"path": str(first), **adapter}
        config = set_up(folder, tmp_path / "run", {}, native=False, **given)
        with pytest.raises(ValueError, match=words):
            check_file(config)

    refused(r"model.adapter.path: .*its tensors are not those of .*\n.*v_proj.lora_A.weight is mi")
    refused("adapter_config.json: r is 4, and it must be 2 for the adapters", rank=2)
    refused("model.adapter.path: .*nowhere", path=str(tmp_path / "nowhere"))
    values = json.loads((first / "adapter_config.json").read_text())
    for key, value, words in (
        ("use_rslora", True, "use_rslora is True, and it must be False"),
        ("init_lora_weights", "pissa_niter_4", "'pissa_niter_4', which changes the model's own we"),
        ("lora_bias", True, "lora_bias is True, which is not computed here"),
    ):
        (first / "adapter_config.json").write_text(json.dumps(values | {key: value}))
        refused(words, targets=["q_proj"])
    with pytest.raises(RankError, match="lora_bias is True"):  # of a run without this check
        run(set_up(folder, tmp_path / "run", {}, native=False, path=str(first)))
    (tmp_path / "run/3").mkdir(parents=True)
    (tmp_path / "run/3/manifest.json").write_text("{}")  # a run that goes on does not read it
    check_file(set_up(folder, tmp_path / "run", {}, native=False, path="nowhere"))
