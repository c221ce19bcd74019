"""``python apps/train verify``: right layouts pass, planted faults are found and named."""

from __future__ import annotations

import json
import re
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import runs
from verify_faults import Planted

from kenotron_engine import gradient_deviations, largest_difference
from kenotron_train.cli import main
from kenotron_train.verify import comparison
from kenotron_train.verify.comparison import layout_gradients
from kenotron_train.verify.measured import ComparedStep, Departure, Measured

TIED = ["model.model_config.tie_word_embeddings=true"]


def flags(*sets: str) -> list[str]:
    return [part for each in sets for part in ("--set", each)]


def verify(path: Path, *sets: str, more: tuple[str, ...] = (), fault: str = "") -> tuple[int, dict]:
    """Exit status, and what was written for programs."""
    words = ["verify", *flags(*sets), "--json", str(path / "found.json"), *more]
    planted = mock.patch.object(comparison, "measure", Planted(fault))
    if fault:
        with planted:
            status = main(words)
    else:
        status = main(words)
    return status, json.loads((path / "found.json").read_text())


def failed(found: dict) -> dict[str, list[str]]:
    """Names that depart, by what was compared."""
    return {
        check["what"]: [each["name"] for each in check["departures"]]
        for check in found["checks"]
        if not check["passed"]
    }


def test_the_default_passes_and_says_what_it_did(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    status, found = verify(tmp_path, more=("--steps", "2"))
    printed = capsys.readouterr().out
    assert status == 0 and found["passed"]
    assert [path.name for path in tmp_path.iterdir()] == ["found.json"]
    assert re.search(r"model_config.hidden_size +128 +64", printed)
    assert "2 processes (pp 1 x dp 1 x tp 2) against one: 2 steps of 4 samples" in printed
    assert "PASS: pp 1 x dp 1 x tp 2 computes what one process computes" in printed
    assert all(len(line) <= 80 for line in printed.splitlines())
    assert {(check["step"], check["what"]) for check in found["checks"]} == {
        (0, "initial weights"),
        *((step, what) for step in (1, 2) for what in
          ("loss", "gradient norm", "gradients", "updated weights")),
    }  # fmt: skip
    bounds = {check["what"]: check["bound"] for check in found["checks"] if check["step"] == 1}
    assert bounds["loss"] == 1e-5 and 0 < bounds["gradients"] < 1e-5
    assert 0 < bounds["updated weights"] < 1e-6  # of weights that change by 3e-3


def test_eight_ranks_of_another_family_pass(tmp_path: Path) -> None:
    sizes = "{is_qwen2_config: true, hidden_size: 64, intermediate_size: 96, vocab_size: 257, "
    sizes += "num_hidden_layers: 6, num_attention_heads: 8, num_key_value_heads: 1, "
    sizes += "tie_word_embeddings: true, use_doc_masking: true, sliding_window_size: 20, "
    sizes += "no_rope_layer: 3, attention_bias: true}"
    layout = ("dp=2", "pp=2", "pp_engine=zb-v", "tp_linear_async_communication=true")
    status, found = verify(
        tmp_path,
        f"model.model_config={sizes}",
        *(f"parallelism.{each}" for each in layout),
        "optimizer.zero_stage=1",
        "optimizer.optimizer_factory={name: sgd, momentum: 0.9}",
        more=("--steps", "2"),
    )
    assert status == 0 and found["layout"] == {"pp": 2, "dp": 2, "cp": 1, "tp": 2}


@pytest.mark.parametrize("way", ["ulysses", "auto"])
def test_rows_that_cp_cuts_pass(tmp_path: Path, way: str) -> None:
    sets = ("cp=4", "tp=2", f"cp_attention={way}", "pp=1", "dp=8", "recompute=selective")
    sizes = ("num_attention_heads=16", "num_key_value_heads=16", "hidden_size=256")
    status, found = verify(
        tmp_path,
        *(f"parallelism.{each}" for each in sets),
        *(f"model.model_config.{each}" for each in sizes),
        more=("--steps", "1", "--ranks", "4"),
    )
    assert status == 0 and found["layout"] == {"pp": 1, "dp": 1, "cp": 2, "tp": 2}
    changes = {change["key"]: change["copy"] for change in found["changes"]}
    assert changes.get("parallelism.cp_attention", "ulysses") == "ulysses"  # as on 4 ranks


def test_a_pipeline_alone_must_agree_to_the_bit(tmp_path: Path) -> None:
    layout = ("parallelism.pp=2", "parallelism.tp=1", "parallelism.recompute=full")
    status, found = verify(tmp_path, *layout, *TIED, more=("--steps", "2"))
    assert status == 0 and found["passed"]
    assert {check["bound"] for check in found["checks"]} == {0}


@pytest.mark.parametrize(
    ("fault", "layout", "names"),
    [
        ("norms_not_reduced", ["tp=2"], {"gradients": "layers.0.attention_norm.weight"}),
        ("tie_missed", ["tp=1", "pp=2"], {"gradients": "embedding.weight"}),
        ("one_gradient_off", ["tp=1", "dp=2"], {"gradients": "layers.1.mlp.down.weight"}),
        ("local_count", ["tp=1", "dp=2"], {"loss": "", "gradients": "embedding.weight"}),
        ("not_published", ["tp=1", "dp=2"], {"updated weights": "embedding.weight"}),
        ("other_weights", ["tp=1", "dp=2"], {"initial weights": "embedding.weight"}),
        ("norm_of_replicas", ["tp=2"], {"gradient norm": ""}),
        ("nan_gradient", ["tp=2"], {"gradients": "norm.weight"}),
    ],
)
def test_a_planted_fault_is_found_and_named(
    fault: str,
    layout: list[str],
    names: dict[str, str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    sizes = [f"parallelism.{each}" for each in layout]
    status, found = verify(tmp_path, *sizes, *TIED, more=("--steps", "1"), fault=fault)
    printed = capsys.readouterr().out
    assert status == 1 and not found["passed"]
    departed = failed(found)
    for what, name in names.items():
        assert what in departed
        assert not name or departed[what][0] == name
        assert not name or f"that depart: {name}, by " in printed
    assert "FAIL: " in printed and "PASS" not in printed
    if fault == "one_gradient_off":
        assert departed["gradients"] == ["layers.1.mlp.down.weight"]
        assert "loss" not in departed and "gradient norm" in departed
    if fault == "norms_not_reduced":
        assert all("norm" in name for name in departed["gradients"])


def test_axes_that_do_not_fit_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    layout = ("parallelism.dp=2", "parallelism.pp=2")
    status, found = verify(tmp_path, *layout, more=("--ranks", "2", "--steps", "1"))
    printed = capsys.readouterr().out
    assert status == 0 and found["passed"]
    assert found["layout"]["tp"] == 2 and found["not_compared"] == ["dp", "pp"]
    assert "Not compared, for want of --ranks: dp, pp" in printed
    assert "dp and pp of the config: not compared" in printed.split("PASS: ")[1]
    status, found = verify(tmp_path, "parallelism.tp=1", more=("--ranks", "1", "--steps", "1"))
    assert status == 0 and found["not_compared"] == []
    assert "The config asks for one process: nothing is cut." in capsys.readouterr().out


def test_a_layout_that_dies_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, found = verify(tmp_path, "parallelism.tp=2", fault="crash")
    assert status == 1 and not found["passed"] and not found["checks"]
    assert "does not run: rank" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--config-file", "nowhere.yaml"], "nowhere.yaml: there is no such file"),
        (flags("parallelism.tp=3"), "it must divide model.model_config.num_attention_heads"),
        (["--ranks", "1"], "--ranks 1: nothing is left of pp 1 x dp 1 x tp 2 to compare"),
        (["--ranks", "0"], "argument --ranks: '0' is no whole number from 1"),
        (["--steps", "two"], "argument --steps: 'two' is no whole number from 1"),
        (["--json", "no/such/folder.json"], "there is no folder no/such; make it first"),
        (["--json", "."], "--json .: this is a folder; give the path of a file"),
    ],
)
def test_bad_input_is_told_apart_from_a_failure(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        status = main(["verify", *words])
    except SystemExit as end:
        status = end.code
    assert status == 2
    assert said in capsys.readouterr().err


def test_a_file_that_cannot_be_written_is_refused_before_the_comparison(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kenotron_train.verify.cli.os.access", lambda path, mode: path != tmp_path)
    assert main(["verify", "--json", str(tmp_path / "found.json")]) == 2
    assert "found.json: no permission to write there" in capsys.readouterr().err


def test_a_config_that_diverges_is_no_fault_of_the_layout(
    capsys: pytest.CaptureFixture[str],
) -> None:
    rate = "optimizer.learning_rate_scheduler.learning_rate=1e30"
    assert main(["verify", *flags(rate)]) == 2
    assert "one process itself has a loss of" in capsys.readouterr().err


def test_a_layout_that_is_refused_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert verify(tmp_path, fault="refused_layout")[0] == 1
    assert "does not run" in " ".join(capsys.readouterr().out.split())


def test_muon_has_the_weights_of_one_process_over_tp() -> None:
    assert main(["verify", *flags("optimizer.optimizer_factory={name: muon}")]) == 0


def test_a_launcher_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("RANK", "LOCAL_RANK"):
        monkeypatch.setenv(name, "0")
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, "2")
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MASTER_PORT", "29500")
    assert main(["verify"]) == 2
    assert "run it without a launcher" in capsys.readouterr().err


def test_files_of_nanotron_and_own_loaders_are_verified(tmp_path: Path) -> None:
    for path in (
        runs.TINY_LLAMA,
        runs.APP / "examples/custom_dataloader/config.yaml",
    ):
        more = ("--config-file", str(path), "--ranks", "2", "--steps", "1")
        status, found = verify(tmp_path, more=more)
        assert status == 0 and found["config"] == str(path)


def test_a_gradient_that_no_rank_has_is_the_layouts_fault() -> None:
    pieces = [(name, (0,), np.ones(2, np.float32), (2,)) for name in ("a", "b")]
    with pytest.raises(ValueError, match="no rank has a gradient of b"):
        layout_gradients([Measured(pieces, [ComparedStep(1.0, 1.0, pieces[:1], pieces)])])
    whole = [Measured(pieces, [ComparedStep(1.0, 1.0, pieces, pieces)])]
    assert list(layout_gradients(whole)[0]) == ["a", "b"]


def test_deviations_are_in_units_of_what_is_allowed() -> None:
    want = {"a": np.array([1.0, -4.0], np.float32), "b": np.array([3.0, 0.0], np.float32)}
    got = {"a": np.array([1.0, -4.0], np.float32), "b": want["b"] + np.float32(6e-5)}
    found = gradient_deviations(got, want)
    assert found["a"] == 0 and found["b"] == pytest.approx(2, rel=0.01)
    with pytest.raises(ValueError, match="only one of two trainings has b"):
        gradient_deviations({"a": want["a"]}, want)
    assert largest_difference(np.array([np.nan]), np.array([1.0])) == np.inf
    assert Departure("a", 1.0, 0.5).bound == 0.5
