"""A checkpoint in Nanotron's format, imported, goes on in the app as our own does."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import runs
import torch
from safetensors.torch import save_file
from torch import Tensor

from kenotron_ckpt import read_manifest, read_record
from kenotron_nanotron import import_nanotron

NAMES = {
    "attention_norm.weight": "input_layernorm.weight",
    "attention.qkv.weight": "attn.qkv_proj.weight",
    "attention.out.weight": "attn.o_proj.weight",
    "mlp_norm.weight": "post_attention_layernorm.weight",
    "mlp.gate_up.weight": "mlp.gate_up_proj.weight",
    "mlp.down.weight": "mlp.down_proj.weight",
    "experts_norm.weight": "post_attention_layernorm.weight",
    "experts.router.weight": "mlp.router.weight",
    "experts.gate_up.weight": "mlp.experts.merged_gate_up_proj",
    "experts.down.weight": "mlp.experts.merged_down_proj",
    "experts.shared.gate_up.weight": "mlp.shared_expert.gate_up_proj.weight",
    "experts.shared.down.weight": "mlp.shared_expert.down_proj.weight",
    "experts.shared_gate.weight": "mlp.shared_expert_gate.weight",
    "embedding.weight": "model.token_position_embeddings.pp_block.token_embedding.weight",
    "norm.weight": "model.final_layer_norm.pp_block.weight",
    "head.weight": "model.lm_head.pp_block.weight",
}
MOMENTS = ("exp_avg", "exp_avg_sq")


def theirs(name: str) -> str:
    """Nanotron's name of a parameter."""
    if not name.startswith("layers."):
        return NAMES[name]
    _, layer, rest = name.split(".", 2)
    return f"model.decoder.{layer}.pp_block.{NAMES[rest]}"


def write_nanotron(ours: Path, folder: Path) -> None:
    """Write one of our checkpoints as Nanotron would on one rank, with the state of Adam."""
    manifest = read_manifest(ours)

    def read(name: str) -> Tensor:
        found = read_record(ours, manifest, name)
        return found.transpose(1, 2).contiguous() if found.ndim == 3 else found  # experts

    names = [name for name in manifest.records if not name.startswith("optimizer.")]
    for name in names:
        *modules, last = theirs(name).split(".")
        place = folder.joinpath("model", *modules)
        place.mkdir(parents=True, exist_ok=True)
        value, whole = read(name), ("norm", "router", "experts.down", "experts.gate_up", "d_gate")
        cut = not any(part in name for part in whole)
        every = "|".join(["None,None,None"] * value.ndim)
        rows = f"0,{value.shape[0]},None" + "|None,None,None" * (value.ndim - 1)
        said = {
            "version": "1.4",
            "local_global_slices_pairs": f"{rows}#{rows}" if "qkv" in name else f"{every}#{every}",
            "unsharded_shape": str(tuple(value.shape)),
        }
        file = f"model_{last}_pp-rank-0-of-1_tp-rank-0-of-1" if cut else f"model_{last}"
        save_file({"data": value}, place / f"{file}.safetensors", metadata=said if cut else {})
    state = manifest.state
    stage = {"name": "Python sources", "start_training_step": 1}
    stage["consumed_train_samples"] = state["cursor"]["consumed"]
    metas = {key: state[key] for key in ("consumed_train_samples",)}
    metas |= {"last_train_step": state["step"], "last_stage_idx": 0, "data_stages": [stage]}
    said = {"version": "1.4", "tp": 1, "dp": 1, "metas": metas, "custom_metas": None}
    (folder / "checkpoint_metadata.json").write_text(json.dumps(said))
    (folder / "model_config.json").write_text(json.dumps(state["model_config"]))
    (folder / "config.yaml").write_text("tokens:\n  sequence_length: 32\n")
    held = {
        "state": {
            i: {"step": torch.tensor(float(state["optimizer_steps"]))}
            | {kind: read(f"optimizer.{kind}.{name}") for kind in MOMENTS}
            for i, name in enumerate(names)
        },
        "param_groups": [],
        "names": {i: theirs(name) for i, name in enumerate(names)},
        "gradient_accumulator": {theirs(n): read(f"optimizer.master.{n}") for n in names},
    }
    place = folder / "optimizer"
    place.mkdir()
    torch.save(held, place / "optimizer_pp-0-of-1_tp-0-of-1_exp-0-of-1.pt")
    sizes = dict.fromkeys(("tp_size", "dp_size", "pp_size", "expert_parallel_size"), "1")
    kind = {"type": "OptimizerFromGradientAccumulator", "parallelism": sizes, "configs": {}}
    (place / "optimizer_config.json").write_text(json.dumps(kind))


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a bf16 run of six steps, and its third as Nanotron would have written it."""
    folder = tmp_path_factory.mktemp("stopped")
    done = runs.train(folder, *runs.arguments(folder, model__dtype="bfloat16"))
    assert done.returncode == 0, done.stderr
    write_nanotron(folder / "checkpoints/3", folder / "nanotron/3")
    (folder / "nanotron/latest.txt").write_text("3")
    return folder


def losses(folder: Path, start: Path, **changes: object) -> tuple[list[float], str]:
    """What a run prints and reports that goes on from ``start``."""
    folder.mkdir()
    changes = {"checkpoints__resume_checkpoint_path": start, "model__dtype": "bfloat16"} | changes
    done = runs.train(folder, *runs.arguments(folder, **changes))
    assert done.returncode == 0, done.stderr
    return [step["lm_loss"] for step in runs.metrics(folder)], done.stdout


def test_an_import_with_its_optimizer_goes_on_as_if_never_stopped(
    stopped: Path, tmp_path: Path
) -> None:
    import_nanotron(stopped / "nanotron", tmp_path / "ours", optimizer=True)
    found, said = losses(tmp_path / "a", tmp_path / "ours")
    assert found == [step["lm_loss"] for step in runs.metrics(stopped)[3:]]
    assert "Resumed after step 3 from" in said
    assert "data_stages changes from the order of Nanotron's samples" in said
    assert runs.metrics(tmp_path / "a")[-1]["consumed_tokens"] == 6 * 2 * 2 * 32
    cut, _ = losses(tmp_path / "b", tmp_path / "ours", parallelism__tp=2)
    assert cut == pytest.approx(found, rel=5e-3)


EXPERTS = {
    "is_qwen2_config": True, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 256,
    "max_position_embeddings": 64, "rope_interleaved": False,
    "moe_config": {
        "num_experts": 4, "top_k": 2, "moe_intermediate_size": 24, "layers": [1, 2],
        "enable_shared_expert": True, "shared_expert_intermediate_size": 16,
    },
}  # fmt: skip


def test_experts_go_on_as_if_never_stopped(tmp_path: Path) -> None:
    def run(name: str, **changes: object) -> list[float]:
        (tmp_path / name).mkdir()
        model = {"model__dtype": "bfloat16", "model__model_config": json.dumps(EXPERTS)}
        done = runs.train(tmp_path / name, *runs.arguments(tmp_path / name, **model, **changes))
        assert done.returncode == 0, done.stderr
        return [step["lm_loss"] for step in runs.metrics(tmp_path / name)]

    due, theirs = run("whole"), tmp_path / "nanotron/3"
    write_nanotron(tmp_path / "whole/checkpoints/3", theirs)
    said = json.loads((theirs / "model_config.json").read_text())
    for new in ("norm_topk_prob", "router_z_loss_coef", "router_bias_rate"):  # it has none
        del said["moe_config"][new]
    (theirs / "model_config.json").write_text(json.dumps(said))
    import_nanotron(theirs, tmp_path / "ours", optimizer=True)
    assert run("again", checkpoints__resume_checkpoint_path=tmp_path / "ours") == due[3:]
    spread = run("ep", checkpoints__resume_checkpoint_path=tmp_path / "ours", parallelism__tp=2,
                 parallelism__ep=2)  # fmt: skip
    assert spread == pytest.approx(due[3:], rel=5e-3)


def test_a_run_with_use_mup_goes_on_under_its_rule(tmp_path: Path) -> None:
    named = {"model__init_method": "{use_mup: true, rule: nanotron}"}
    (tmp_path / "whole").mkdir()
    dtype = {"model__dtype": "bfloat16"}
    done = runs.train(tmp_path / "whole", *runs.arguments(tmp_path / "whole", **named, **dtype))
    assert done.returncode == 0, done.stderr
    theirs = tmp_path / "nanotron/3"
    write_nanotron(tmp_path / "whole/checkpoints/3", theirs)
    said = json.loads((theirs / "model_config.json").read_text())
    del said["multipliers"]  # ours
    (theirs / "model_config.json").write_text(json.dumps(said))
    with (theirs / "config.yaml").open("a") as config:
        config.write("model:\n  init_method:\n    use_mup: true\n")
    import_nanotron(theirs, tmp_path / "ours", optimizer=True)
    found, _ = losses(tmp_path / "again", tmp_path / "ours", **named)
    assert found == [step["lm_loss"] for step in runs.metrics(tmp_path / "whole")[3:]]


def test_imported_weights_go_on_as_our_own_without_an_optimizer(
    stopped: Path, tmp_path: Path
) -> None:
    import_nanotron(stopped / "nanotron", tmp_path / "ours")
    alone = {"checkpoints__load_optimizer": "false"}
    due, _ = losses(tmp_path / "a", stopped / "checkpoints/3", **alone)
    found, _ = losses(tmp_path / "b", tmp_path / "ours", **alone)
    assert found == due
    (tmp_path / "c").mkdir()
    flags = runs.arguments(tmp_path / "c", checkpoints__resume_checkpoint_path=tmp_path / "ours")
    done = runs.train(tmp_path / "c", *flags)
    assert done.returncode == 1
    assert "has no exp_avg, exp_avg_sq, master of optimizer.optimizer_factory" in done.stderr
    assert "it has weights only; begin a run from them with another" in done.stderr
    assert f"model.init_method: {{path: {tmp_path / 'ours/3'}}}" in done.stderr


def changed(stopped: Path, folder: Path, file: str, change: Callable[[dict], object]) -> Path:
    """A copy of what Nanotron would have written, with a change of one of its JSON files."""
    shutil.copytree(stopped / "nanotron", folder)
    path = folder / "3" / file
    said = json.loads(path.read_text())
    change(said)
    path.write_text(json.dumps(said))
    return folder


def test_more_samples_than_the_data_set_has_are_several_epochs(
    stopped: Path, tmp_path: Path
) -> None:
    def read_more(said: dict) -> None:
        for counts in (said["metas"], said["metas"]["data_stages"][0]):
            counts["consumed_train_samples"] = 5001

    theirs = changed(stopped, tmp_path / "theirs", "checkpoint_metadata.json", read_more)
    import_nanotron(theirs, tmp_path / "ours")
    losses(tmp_path / "a", tmp_path / "ours", checkpoints__load_optimizer="false")
    cursor = read_manifest(tmp_path / "a/checkpoints").state["cursor"]
    assert cursor["consumed"] == 5001 + 3 * 4 and cursor["epoch"] > 1


def test_what_the_app_does_not_compute_is_refused_by_name(stopped: Path, tmp_path: Path) -> None:
    def narrow(said: dict) -> None:
        said["sliding_window_size"] = 20

    theirs = changed(stopped, tmp_path / "theirs", "model_config.json", narrow)
    import_nanotron(theirs, tmp_path / "ours")
    flags = runs.arguments(tmp_path, checkpoints__resume_checkpoint_path=tmp_path / "ours")
    done = runs.train(tmp_path, *flags)
    assert done.returncode == 1
    assert "sliding_window_size is None in the config and 20 in the checkpoint" in done.stderr
