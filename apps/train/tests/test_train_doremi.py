"""DoReMi: all commands, weights that no layout and no stop changes, and what contradicts them."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import runs
import torch
from doremi_runs import NAMES, STEPS, WEIGHTS, flags, write_domains

from kenotron_config import DEFAULT_CONFIG
from kenotron_data import Cursor, StoredLosses
from kenotron_engine import DomainWeights, StepResult, domain_weights_update
from kenotron_train.cli import main
from kenotron_train.config_file import load_config
from kenotron_train.doremi.cli import EXAMPLE, doremi_main
from kenotron_train.progress import Progress, fresh_state
from kenotron_train.run.domain_weights import read_average, write_weights
from kenotron_train.run.preview import preview

RUN = "checkpoints.checkpoints_path="
HUB = "data_stages.0.data.dataset.hf_dataset_or_datasets"
EXACT = ("lm_loss", "dro_loss", "grad_norm", "domain_losses", "domain_excess", "domain_weights")
"""Figures of a step that follow from the numbers of a training alone."""


@pytest.fixture(scope="module")
def walked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which all commands have run, on one process."""
    folder = tmp_path_factory.mktemp("doremi")
    write_domains(folder)
    done = runs.program("apps/train", folder, "doremi", *flags(folder, "walk"))
    assert done.returncode == 0, done.stderr
    (folder / "said.txt").write_text(done.stdout)
    return folder


def proxy(folder: Path, run: str, **changes: object) -> list[dict[str, Any]]:
    """Train a proxy with the losses of the walk; what its steps reported."""
    given = {
        "doremi__ref_model_resume_checkpoint_path": folder / "walk/reference",
        "doremi__reference_losses_path": folder / "walk/proxy/reference_losses",
        **changes,
    }
    done = runs.train(folder, *flags(folder, run, **given))
    assert done.returncode == 0, done.stderr
    return runs.metrics(folder, run)


def numbers(step: dict[str, Any]) -> list[float]:
    """The figures of ``EXACT``, one after the other."""
    found = [step[name] for name in EXACT]
    flat = [x for each in found for x in (each.values() if isinstance(each, dict) else [each])]
    return [-1.0 if each is None else each for each in flat]


def test_all_commands_follow_one_another(walked: Path) -> None:
    said = (walked / "said.txt").read_text()
    headings = [line.split()[1] for line in said.splitlines() if line.startswith("doremi ")]
    assert headings == ["reference", "losses", "proxy", "weights", "final"]
    steps = runs.metrics(walked, "walk/proxy")
    assert len(steps) == STEPS and list(steps[0]["domain_weights"]) == list(NAMES)
    mean = np.mean([list(step["domain_weights"].values()) for step in steps], axis=0)
    last, average = read_average(walked / "walk/proxy")
    assert last == STEPS and list(average.values()) == pytest.approx(list(mean))
    shares = ", ".join(f"{name} {share:.4g}" for name, share in average.items())
    assert f"mixture of {shares}"[:24] in said.split("doremi final")[1]
    assert "dro_loss" not in runs.metrics(walked, "walk/final")[0]
    samples = [sum(step["domain_samples"].values()) for step in steps]
    assert samples == [4] * STEPS and "[DoReMi] Domain weights: first" in said


def test_each_step_follows_from_the_figures_of_the_step_before(walked: Path) -> None:
    weights, last = (1 / 3,) * 3, [0.0] * 3
    for step in runs.metrics(walked, "walk/proxy"):
        counts, losses = step["domain_samples"].values(), step["domain_losses"].values()
        terms = zip(weights, WEIGHTS, counts, losses, strict=True)
        weighted = sum(a / p * n * loss for a, p, n, loss in terms if n)
        assert step["dro_loss"] == pytest.approx(weighted / sum(counts), rel=1e-4)
        found = step["domain_excess"].values()
        last = [old if new is None else new for old, new in zip(last, found, strict=True)]
        weights = domain_weights_update(weights, last, step_size=1.0, smoothing=1e-3)
        assert list(step["domain_weights"].values()) == list(weights)
    assert any(
        None in step["domain_excess"].values() for step in runs.metrics(walked, "walk/proxy")
    )


def test_done_commands_do_nothing_again(walked: Path) -> None:
    done = runs.program("apps/train", walked, "doremi", *flags(walked, "walk"))
    assert done.returncode == 0, done.stderr
    assert "all of them there already" in done.stdout and "iteration:" not in done.stdout


def test_the_weights_command_prints_a_section_for_a_config(walked: Path) -> None:
    given = ["doremi", "weights", *flags(walked, "walk")]
    done = runs.program("apps/train", walked, *given)
    _, average = read_average(walked / "walk/proxy")
    assert f"  domain_weights: {json.dumps(list(average.values()))}" in done.stdout


LAYOUTS = ({"dp": 2}, {"tp": 2}, {"pp": 2}, {"cp": 2})


@pytest.mark.parametrize("axes", LAYOUTS, ids=str)
def test_every_layout_learns_the_weights_of_one_process(walked: Path, axes: dict) -> None:
    (axis,) = axes
    changes = {f"parallelism__{axis}": 2, "tokens__micro_batch_size": 1 if axis == "dp" else 2}
    found = proxy(walked, f"proxy-{axis}", **changes)
    for step, one in zip(found, runs.metrics(walked, "walk/proxy"), strict=True):
        assert numbers(step) == pytest.approx(numbers(one), rel=1e-5, abs=1e-7)
        assert axis != "pp" or numbers(step)[:2] == numbers(one)[:2]


def test_any_layout_writes_the_losses(walked: Path) -> None:
    one = StoredLosses(walked / "walk/proxy/reference_losses/stage-0.losses")
    assert one.samples == STEPS * 4
    changes = {
        "parallelism__dp": 2, "parallelism__cp": 2, "tokens__micro_batch_size": 1,
        "optimizer__nonfinite": "rollback", "optimizer__max_rollbacks": 2,  # two batches more
        "doremi__ref_model_resume_checkpoint_path": walked / "walk/reference",
    }  # fmt: skip
    given = flags(walked, "other", **changes)
    done = runs.program("apps/train", walked, "doremi", "losses", *given)
    assert done.returncode == 0, done.stderr
    other = StoredLosses(walked / "other/proxy/reference_losses/stage-0.losses")
    assert other.about == one.about and other.samples == (STEPS + 2) * 4
    losses = one.rows(0, one.samples)
    assert losses.mean() > 1 and np.allclose(other.rows(0, one.samples), losses, atol=1e-5)


@pytest.fixture
def stopped(walked: Path) -> Path:
    """The proxy run of the walk as it was after step 3."""
    run = walked / "stopped"
    shutil.rmtree(run, ignore_errors=True)
    shutil.copytree(walked / "walk/proxy", run, ignore=shutil.ignore_patterns(str(STEPS)))
    return run


def test_a_resumed_proxy_has_every_bit(walked: Path, stopped: Path) -> None:
    found, whole = proxy(walked, "stopped"), runs.metrics(walked, "walk/proxy")
    assert [numbers(step) for step in found] == [numbers(step) for step in whole]
    assert read_average(stopped) == read_average(walked / "walk/proxy")


def test_a_proxy_resumes_on_another_layout(walked: Path, stopped: Path) -> None:
    found, whole = proxy(walked, "stopped", parallelism__tp=2), runs.metrics(walked, "walk/proxy")
    for step, one in zip(found, whole, strict=True):
        assert numbers(step) == pytest.approx(numbers(one), rel=1e-5, abs=1e-7)


def test_a_step_of_a_proxy_is_made_again(walked: Path, stopped: Path) -> None:
    given = {
        "doremi__ref_model_resume_checkpoint_path": walked / "walk/reference",
        "doremi__reference_losses_path": walked / "walk/proxy/reference_losses",
    }
    done = runs.train(walked, "--replay-step", "5", *flags(walked, "stopped", **given))
    assert done.returncode == 0, done.stderr
    found = json.loads((stopped / "nonfinite/replay-5/step-5.json").read_text())
    assert float(found["grad_norm"]) == runs.metrics(walked, "walk/proxy")[4]["grad_norm"]


def test_signals_are_heard_until_the_last_command_and_a_stopped_one_is_the_last(
    walked: Path,
) -> None:
    def train(words: Sequence[str], leaves: bool) -> int:
        (path,) = (w for w in words if w.startswith(RUN) and "walk/" in w)
        called.append((Path(json.loads(path.removeprefix(RUN))).name, leaves))
        return status

    called: list[tuple[str, bool]] = []
    status = 0
    assert doremi_main(flags(walked, "walk"), train) == 0
    assert called == [("reference", False), ("proxy", False), ("final", True)]
    called.clear()
    status = 85
    named = {"doremi__ref_model_resume_checkpoint_path": walked / "walk/reference"}
    assert doremi_main(flags(walked, "walk", **named), train) == 85
    assert called == [("proxy", False)]


def test_each_run_uploads_to_a_place_of_its_own(walked: Path) -> None:
    def train(words: Sequence[str], leaves: bool) -> int:
        section = load_config(words[1], words[3::2]).s3_upload
        found.append(section and section.upload_s3_path)
        return 0

    found: list[str | None] = []
    given = flags(walked, "walk", s3_upload="{upload_s3_path: 's3://bucket/x/'}")
    for command in ("reference", "proxy", "final"):
        assert doremi_main([command, *given], train) == 0
    assert found == [f"s3://bucket/x/{run}" for run in ("reference", "proxy", "final")]


def test_a_step_that_is_left_out_leaves_the_weights_alone(walked: Path) -> None:
    words = flags(walked, "x", doremi__ref_model_resume_checkpoint_path="reference")
    config = load_config(words[1], words[3::2])
    excess = dict(zip(NAMES, (0.5, None, 0.0), strict=True))
    losses = {"domain_losses": dict(zip(NAMES, (1.0, None, 2.0), strict=True))}
    result = StepResult(1.0, 1.0, 0.1, figures=losses | {"domain_excess": excess})
    before = Progress(state=fresh_state(config.optimizer, torch.float32, config.doremi))
    (weights,) = before.state.policies
    assert isinstance(weights, DomainWeights)
    (made,) = before.after(Cursor(), result, 1).state.policies
    assert made == weights.moved((0.5, None, 0.0)) != weights
    assert before.after(Cursor(), replace(result, skipped=True), 1).state == before.state
    bad = replace(result, figures=losses | {"domain_excess": excess | {NAMES[0]: math.nan}})
    assert before.after(Cursor(), bad, 1).state == before.state


def test_check_names_the_data_set_of_each_domain_and_the_reference(walked: Path) -> None:
    words = flags(walked, "x", doremi__ref_model_resume_checkpoint_path="no/reference")
    said = preview(load_config(words[1], words[3::2]))
    assert "doremi.ref_model_resume_checkpoint_path: no/reference does not exist here" in said
    assert said.count("does not exist here") == 1
    lost = load_config(words[1], [*words[3::2], HUB + f"={walked}"])
    assert f"{HUB}: {walked}/first does not exist here" in preview(lost)
    assert "does not exist" not in preview(load_config(EXAMPLE))


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(words) != 0
    return capsys.readouterr().err


REFUSED = [
    ({}, "doremi.reference_losses_path: there are no losses of the reference in"),
    ({"data_stages__0__data__seed": 5}, "was written with seed 42, and the run has 5: write it ag"),
    (
        {"doremi__domain_names": "[first, 2nd, third]", HUB: [f"texts/{each}" for each in NAMES]},
        "was written with domains ['first', 'second', 'third'], and the run has ['first', '2nd', ",
    ),
    ({"tokens__sequence_length": 16}, "is of samples of 32 tokens, and the run has 16"),
    ({"doremi__domain_weights": [0.4, 0.4, 0.2]}, "is of other data: both have"),
    (
        {"doremi__ref_model_resume_checkpoint_path": "walk/final"},
        "ref_model_resume_checkpoint_path names walk/final",
    ),
    ({"tokens__train_steps": 9}, "samples [24, 28) are needed: write those that are missing with"),
]


@pytest.mark.parametrize(("changes", "sentence"), REFUSED)
def test_losses_of_something_else_are_refused(
    walked: Path,
    changes: dict[str, object],
    sentence: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(walked)
    given = {"doremi__ref_model_resume_checkpoint_path": "walk/reference"}
    if changes:
        given["doremi__reference_losses_path"] = "walk/proxy/reference_losses"
    run = f"refused-{REFUSED.index((changes, sentence))}"
    assert sentence in refused(capsys, *flags(walked, run, **(given | changes)))


def test_damaged_losses_are_named(walked: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(walked / "walk/proxy/reference_losses", walked / "damaged")
    with (walked / "damaged/stage-0.losses").open("r+b") as file:
        file.truncate(100)
    given = {
        "doremi__ref_model_resume_checkpoint_path": walked / "walk/reference",
        "doremi__reference_losses_path": walked / "damaged",
    }
    said = refused(capsys, *flags(walked, "run-damaged", **given))
    assert "doremi.reference_losses_path: " in said and "is cut off; write the losses again" in said


def test_weights_that_cannot_be_written_end_no_run(tmp_path: Path) -> None:
    weights = DomainWeights.start(NAMES, 1.0, 1e-3)
    assert write_weights(tmp_path, 1, weights) == ""
    said = write_weights(tmp_path / "missing", 2, weights)
    assert said.startswith("no doremi_domain_weights_2.json could be written: ")


def test_commands_name_what_they_lack(
    walked: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def said(*words: str) -> str:
        return refused(capsys, "doremi", *words)

    assert "has no doremi_domain_weights_<step>.json" in said("final", *flags(walked, "nowhere"))
    plain = ["--config-file", str(DEFAULT_CONFIG)]
    assert "doremi: is missing; add it with domain_names" in said("all", *plain)
    lost = "doremi.ref_model_resume_checkpoint_path: "
    assert lost in said("losses", *flags(walked, "nowhere"))
    monkeypatch.setattr("kenotron_train.doremi.cli.launcher", lambda: "slurm")
    assert "under a launcher give its commands one by one" in said("all", *flags(walked, "walk"))
