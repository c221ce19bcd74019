"""``verify`` of a model of transformers: its narrow copy, and transformers' own in plain torch."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from kenotron_dist import Mesh
from kenotron_train.cli import main
from kenotron_train.verify import comparison, plain_transformers
from kenotron_train.verify.measured import Measured

pytest.importorskip("transformers")
LLAMA = {
    "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 16, "vocab_size": 32003,
    "num_attention_heads": 32, "num_key_value_heads": 8, "tie_word_embeddings": True,
    "rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0,
                        "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                        "original_max_position_embeddings": 8192},
    "max_position_embeddings": 131072,
}  # fmt: skip
EXPERTS = {"hidden_size": 4096, "num_hidden_layers": 32, "output_router_logits": True}
GPT2 = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
DOUBLE = {"parallelism.tp": 2, "parallelism.pp": 2}
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "llama tp2 pp2": ("llama", LLAMA, DOUBLE | {"parallelism.tp_mode": "REDUCE_SCATTER"}, {}),
    "mixtral dp2 ep2": ("mixtral", EXPERTS, {"parallelism.dp": 2, "parallelism.ep": 2}, {}),
    "gpt2 pp2": ("gpt2", GPT2, {"parallelism.pp": 2}, {}),
    "qwen3 cp2 documents": (
        "qwen3", {}, {"parallelism.cp": 2},
        {"attn_implementation": "kenotron", "separate_documents": True},
    ),
    "deepseek_v3 tp2 muon": (
        "deepseek_v3", {},
        {"parallelism.tp": 2, "optimizer.optimizer_factory": "{name: muon}"}, {},
    ),
    "gemma2 dp2 weight decay": (
        "gemma2", {"attn_implementation": "eager"},
        {"parallelism.dp": 2, "optimizer.zero_stage": 3,
         "optimizer.weight_decay_exclude_kinds": "[norms]"}, {},
    ),
}  # fmt: skip
"""Family, keys of its config.json, the layout, and keys of ``model_config``."""


def words(
    folder: Path, kind: str, keys: dict[str, Any], sets: dict[str, Any], **own: Any
) -> list[str]:
    """A command line that verifies a model whose config.json has these keys."""
    from transformers import AutoConfig

    AutoConfig.for_model(kind, **keys).save_pretrained(folder)
    changes = {
        "model.model_config": json.dumps({"is_hf_config": True, "path": str(folder)} | own),
        "model.init_method": json.dumps({"path": str(folder)}),  # no weights are read
        "parallelism.tp": 1,
        "parallelism.tp_mode": "ALL_REDUCE",
    } | sets
    found = str(folder / "found.json")
    flags = [part for key, value in changes.items() for part in ("--set", f"{key}={value}")]
    return ["verify", "--json", found, *flags]


@pytest.mark.by_turns(2)
@pytest.mark.parametrize("case", CASES)
def test_a_layout_is_one_process_and_transformers_own_model(
    case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kind, keys, layout, own = CASES[case]
    assert main(words(tmp_path, kind, keys, layout, **own)) == 0
    printed, found = capsys.readouterr().out, json.loads((tmp_path / "found.json").read_text())
    assert "PASS" in printed and "transformers' own model" in printed.split("PASS")[1]
    measured = {(each["step"], each["what"]) for each in found["transformers"]["checks"]}
    whats = ["loss", "gradient norm", "gradients", "updated weights"][: 3 if "muon" in case else 4]
    assert measured == {(step, what) for step in range(1, 6) for what in whats}
    assert any(each["deviation"] for each in found["transformers"]["checks"])
    losses = found["transformers"]["losses"]
    assert losses["layout"] == pytest.approx(losses["transformers"], rel=1e-5)
    assert len({*losses["layout"]}) == 5
    sizes = {each["key"]: each["copy"] for each in found["changes"]}
    assert int(sizes["model.model_config.vocab_size"]) < 256
    assert not any("config_json" in key for key in sizes)


def off_by_one_weight(mesh: Mesh, *given: Any) -> Measured:
    """A measurement whose first weight gradient is wrong."""
    found = plain_transformers.measure_plain(mesh, *given)
    name, start, values, shape = found.steps[0].gradient[3]
    wrong = [*found.steps[0].gradient]
    wrong[3] = (name, start, values * 1.001, shape)
    return replace(found, steps=[replace(found.steps[0], gradient=wrong), *found.steps[1:]])


def test_a_gradient_that_is_not_transformers_own_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = words(tmp_path, "llama", LLAMA, {"parallelism.pp": 2})
    with mock.patch.object(comparison, "measure_plain", off_by_one_weight):
        assert main(given) == 1
    found, printed = json.loads((tmp_path / "found.json").read_text()), capsys.readouterr().out
    assert all(each["passed"] for each in found["checks"])
    wrong = [each for each in found["transformers"]["checks"] if not each["passed"]]
    assert [each["what"] for each in wrong] == ["gradients"] and len(wrong[0]["departures"]) == 1
    assert f"that depart: {wrong[0]['departures'][0]['name']}, by" in printed
    assert "departs from transformers' own model at step 1" in " ".join(printed.split())


def test_a_family_without_a_narrow_copy_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = {"n_input_layers": 5, "n_recurrent_layers": 5, "n_output_layers": 5}
    keys |= {"num_hidden_layers": 15, "hidden_size": 1536, "head_dim": 96}
    given = words(tmp_path, "dory", keys, {"parallelism.dp": 2})
    with mock.patch("kenotron_models.families.transformers_config.MOST", 1000):
        assert main(given) == 2
    said = capsys.readouterr().err
    assert "a dory has no narrow copy: its sizes (" in said and "n_input_layers" in said
    assert "give the config.json of a small model of this kind" in said
    assert "few features: " in said and "few layers: " in said


def test_a_key_that_no_family_has_stays_and_a_wrong_size_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = words(tmp_path, "llama", LLAMA | {"answer_size": 42}, {"parallelism.dp": 2})
    assert main([*given, "--steps", "1"]) == 0
    assert "answer_size" not in capsys.readouterr().out
    written = tmp_path / "config.json"
    values = json.loads(written.read_text()) | {"num_hidden_layers": "many"}
    written.write_text(json.dumps(values))
    assert main(given) == 2
    assert "transformers refuses it" in capsys.readouterr().err
