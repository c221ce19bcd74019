"""The app as a user runs it: lines, metrics, checkpoints, resume, generation, bad input."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from subprocess import CompletedProcess

import pytest
import runs

LINE = re.compile(
    r"\d\d/\d\d/\d{4} \d\d:\d\d:\d\d \[INFO\|DP=0\|PP=0\|TP=0\]: iteration: (\d+) / 6 \| "
    r"consumed_tokens: \S+ \| elapsed_time_per_iteration_ms: \S+ \| tokens_per_sec: \S+ \| "
    r"tokens_per_sec_per_gpu: \S+ \| global_batch_size: \S+ \| lm_loss: (\S+) \| lr: (\S+) \| "
    r"model_tflops_per_gpu: \S+ \| hardware_tflops_per_gpu: \S+ \| grad_norm: \S+"
)


@pytest.mark.smoke
def test_a_run_prints_nanotrons_lines_and_writes_full_precision(tmp_path: Path) -> None:
    done = runs.train(tmp_path, *runs.arguments(tmp_path))
    assert done.returncode == 0, done.stderr
    found = LINE.findall(done.stdout)
    steps = runs.metrics(tmp_path)
    assert [int(step) for step, _, _ in found] == [1, 2, 3, 4, 5, 6]
    assert [loss for _, loss, _ in found] == [f"{s['lm_loss']:.3g}" for s in steps]
    assert set(steps[0]) == set(steps[-1]) - {"validation_loss", "validation_perplexity"} == {
        "step", "lm_loss", "grad_norm", "lr", "consumed_tokens", "consumed_samples", "tokens",
        "tokens_per_sec", "tokens_per_sec_per_gpu", "step_time_s", "data_wait_s", "save_blocked_s",
        "save_after_s", "communication_s",
        "model_tflops_per_gpu", "model_tflops_per_gpu_causal", "mfu", "mfu_causal", "memory_gb",
    }  # fmt: skip
    assert steps[-1]["consumed_tokens"] == 6 * 2 * 2 * 32
    assert steps[-1]["lm_loss"] < steps[0]["lm_loss"]
    assert "val_loss" in done.stdout
    assert (tmp_path / "checkpoints/3/manifest.json").exists()
    assert (tmp_path / "checkpoints/6/config.yaml").exists()


def test_a_stopped_run_resumes_on_another_layout_as_if_never_stopped(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    whole = runs.train(tmp_path / "a", *runs.arguments(tmp_path / "a"))
    resumed = runs.train(
        tmp_path / "b",
        *runs.arguments(
            tmp_path / "b",
            checkpoints__resume_checkpoint_path=tmp_path / "a/checkpoints/3",
            parallelism__dp=2,
            tokens__micro_batch_size=1,
        ),
    )
    assert whole.returncode == resumed.returncode == 0, resumed.stderr
    want, got = runs.metrics(tmp_path / "a")[3:], runs.metrics(tmp_path / "b")
    assert [s["step"] for s in got] == [4, 5, 6]
    for a, b in zip(got, want, strict=True):
        assert a["lm_loss"] == pytest.approx(b["lm_loss"], rel=1e-6)
        assert (a["lr"], a["consumed_tokens"]) == (b["lr"], b["consumed_tokens"])


def test_a_run_goes_on_with_its_samples_cut_and_back_again(tmp_path: Path) -> None:
    """One process, then cp 3, then tp 2: the losses of one process."""
    want = tmp_path / "whole"
    want.mkdir()
    assert runs.train(want, *runs.arguments(want)).returncode == 0
    found, before = [], want / "checkpoints/3"
    for name, layout in (("cut", {"cp": 3}), ("back", {"tp": 2})):
        (folder := tmp_path / name).mkdir()
        keys = {f"parallelism__{axis}": size for axis, size in layout.items()}
        keys |= {"checkpoints__checkpoint_interval": 5, "general__ignore_sanity_checks": "false"}
        flags = {"checkpoints__resume_checkpoint_path": before, "logging__communication": "true"}
        done = runs.train(folder, *runs.arguments(folder, **keys, **flags))
        assert done.returncode == 0, done.stderr
        found += runs.metrics(folder)
        before = folder / "checkpoints/5"
    assert [s["step"] for s in found] == [4, 5, 6, 6]
    assert found[0]["communication_bytes"]["cp"] > 0
    whole = {s["step"]: s for s in runs.metrics(want)}
    for a in found:
        b = whole[a["step"]]
        assert a["lm_loss"] == pytest.approx(b["lm_loss"], rel=1e-5)
        assert a["consumed_tokens"] == b["consumed_tokens"]


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run that saved before its first step, after the third and the last."""
    folder = tmp_path_factory.mktemp("stopped")
    flags = runs.arguments(folder, checkpoints__save_initial_state="true")
    assert runs.train(folder, *flags).returncode == 0
    return folder


def resumed(stopped: Path, folder: Path, **changes: object) -> CompletedProcess[str]:
    changes = {"checkpoints__resume_checkpoint_path": stopped / "checkpoints/3"} | changes
    return runs.train(folder, *runs.arguments(folder, **changes))


def test_the_initial_state_resumes_as_a_fresh_run(stopped: Path, tmp_path: Path) -> None:
    done = resumed(stopped, tmp_path, checkpoints__resume_checkpoint_path=stopped / "checkpoints/0")
    assert done.returncode == 0, done.stderr
    assert [s["lm_loss"] for s in runs.metrics(tmp_path)] == [
        s["lm_loss"] for s in runs.metrics(stopped)
    ]


def test_a_schedule_begins_anew_where_it_is_not_loaded(stopped: Path, tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    fresh = {"checkpoints__load_lr_scheduler": "false"}
    done = resumed(stopped, tmp_path / "a", **fresh)
    assert done.returncode == 0, done.stderr
    rates = [step["lr"] for step in runs.metrics(stopped)]
    assert [step["lr"] for step in runs.metrics(tmp_path / "a")] == rates[:3]
    # A third run loads the second one's schedule and goes on in it.
    at_6 = tmp_path / "a/checkpoints/6"
    longer = {"checkpoints__resume_checkpoint_path": at_6, "tokens__train_steps": 7}
    done = resumed(stopped, tmp_path / "b", **longer)
    assert done.returncode == 0, done.stderr
    (step,) = runs.metrics(tmp_path / "b")
    assert step["step"] == 7
    assert step["lr"] > rates[3]  # its fourth step, of seven


def test_gradients_may_be_added_in_bf16(tmp_path: Path) -> None:
    losses = {}
    for fp32 in ("true", "false"):
        (folder := tmp_path / fp32).mkdir()
        changes = {"model__dtype": "bfloat16", "tokens__batch_accumulation_per_replica": 3}
        done = runs.train(
            folder, *runs.arguments(folder, **changes, optimizer__accumulate_grad_in_fp32=fp32)
        )
        assert done.returncode == 0, done.stderr
        losses[fp32] = [step["lm_loss"] for step in runs.metrics(folder)]
    assert losses["true"] != losses["false"]
    assert losses["false"] == pytest.approx(losses["true"], rel=0.01)
    assert losses["false"][-1] < losses["false"][0]


def test_both_engines_write_the_same_checkpoints(stopped: Path, tmp_path: Path) -> None:
    changes = {
        "checkpoints__checkpointing_engine": "torch",
        "checkpoints__verify_after_write": "true",
        "checkpoints__keep_last": 1,
    }
    done = runs.train(tmp_path, *runs.arguments(tmp_path, **changes))
    assert done.returncode == 0, done.stderr
    kept = [path.name for path in (tmp_path / "checkpoints").iterdir() if path.is_dir()]
    assert kept == ["6"]  # no older one; every byte was read back
    assert (tmp_path / "checkpoints/6/verified.txt").exists()
    compared = runs.start(
        sys.executable, "-m", "kenotron_ckpt", "diff", str(stopped / "checkpoints/6"),
        str(tmp_path / "checkpoints/6"), cwd=tmp_path,
    )  # fmt: skip
    differing = compared.stdout.splitlines()[2:]
    assert compared.returncode == 1  # the configs have other paths
    kinds = {re.split(r"[.:]", line)[0] for line in differing}
    assert kinds == {"config", "state"}, compared.stdout  # no record


def test_a_checkpoint_of_another_model_is_refused(stopped: Path, tmp_path: Path) -> None:
    done = resumed(
        stopped, tmp_path, model__model_config__rope_theta=100.0,
        model__model_config__tie_word_embeddings="true",
    )  # fmt: skip
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert "is of another model: model.model_config." in done.stderr
    assert "rope_theta is 100.0 in the config and 10000.0 in the checkpoint" in done.stderr
    assert "tie_word_embeddings is True in the config and False in the checkpoint" in done.stderr


def test_changed_data_and_batch_are_named_on_resume(stopped: Path, tmp_path: Path) -> None:
    done = resumed(
        stopped, tmp_path, tokens__micro_batch_size=1, tokens__limit_val_batches=0,
        data_stages__0__data__seed=7, general__seed=8,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "general.seed changes from 42 to 8: dropout draws other numbers" in done.stdout
    assert "global_batch_size changes from 4 to 2" in done.stdout
    words = "(tokens.limit_val_batches) changes from True to False: samples may come twice"
    assert words in done.stdout and "[WARNING|" in done.stdout
    assert "data_stages changes from" in done.stdout
    assert runs.metrics(tmp_path)[-1]["consumed_tokens"] == (3 * 4 + 3 * 2) * 32


def test_a_changed_learning_rate_is_named_on_resume(stopped: Path, tmp_path: Path) -> None:
    done = resumed(stopped, tmp_path, tokens__train_steps=9)
    words = r"; the learning rate of step 4 is (\S+), and would have been (\S+): "
    found = re.search(words + r"tokens\.train_steps changes from 6 to 9", done.stdout)
    assert found is not None, done.stdout
    assert f"{runs.metrics(tmp_path)[0]['lr']:.3g}" == found[1] != found[2]


def test_a_finished_run_says_so(stopped: Path, tmp_path: Path) -> None:
    done = resumed(stopped, tmp_path, checkpoints__resume_checkpoint_path=stopped / "checkpoints")
    assert done.returncode == 0 and "nothing is left to do" in done.stdout


def test_the_same_command_starts_and_restarts_a_job(tmp_path: Path) -> None:
    flags = runs.arguments(tmp_path, checkpoints__resume_checkpoint_path=tmp_path / "checkpoints")
    first = runs.train(tmp_path, *flags, "--set", "tokens.train_steps=3")
    assert first.returncode == 0 and "yet: the run starts afresh" in first.stdout, first.stderr
    (tmp_path / "checkpoints/5").mkdir()  # a save that did not finish
    again = runs.train(tmp_path, *flags)
    assert "Resumed after step 3" in again.stdout
    assert re.search(r"passed over \S+/5: ", again.stdout)
    assert [step["step"] for step in runs.metrics(tmp_path)] == [1, 2, 3, 4, 5, 6]


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    flags = runs.arguments(tmp_path, checkpoints__checkpoints_path=tmp_path / "corpus.txt")
    done = runs.train(tmp_path, *flags)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert "change checkpoints.checkpoints_path to a folder that can be written" in done.stderr


@pytest.mark.parametrize("limit", ["nan", "-1", "0", "inf", "soon"])
def test_a_stall_limit_that_is_none(limit: str, tmp_path: Path) -> None:
    done = runs.train(tmp_path, "--stall-limit", limit)
    assert done.returncode == 2 and "--stall-limit" in done.stderr.splitlines()[-1]


def test_a_window_that_tp_does_not_divide(tmp_path: Path) -> None:
    flags = runs.arguments(tmp_path, parallelism__tp=2, tokens__sequence_length=31)
    done = runs.train(tmp_path, *flags)  # without a config file a run ends with a sample
    assert done.returncode == 0, done.stderr
    assert "A sample of the model" in done.stdout


@pytest.mark.parametrize("cp", [1, 2])
def test_generation_continues_a_prompt_from_the_checkpoint(tmp_path: Path, cp: int) -> None:
    assert runs.train(tmp_path, *runs.arguments(tmp_path, parallelism__cp=cp)).returncode == 0
    prompt = ("apps/generate", tmp_path, "--ckpt-path", "checkpoints/6", "--prompt")
    free = runs.program(*prompt, "", "--max-new-tokens", "12")  # out of nothing
    assert free.returncode == 0 and "12 tokens for 1 prompt" in free.stderr
    texts = [
        runs.program(*prompt, "line ", "--max-new-tokens", "12", *flags)
        for flags in ([], ["--tp", "2"], ["--pp", "2"])
    ]
    assert all(text.returncode == 0 for text in texts), texts[0].stderr
    assert texts[0].stdout.startswith("line ") and len(texts[0].stdout) > 8
    assert texts[0].stdout == texts[1].stdout == texts[2].stdout


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"data_stages__0__data__dataset__hf_dataset_or_datasets": "missing.txt"}, "missing.txt"),
        ({"tokens__sequence_length": 10**9}, "10"),
        (
            {"checkpoints__resume_checkpoint_path": "nowhere"},
            "checkpoints.resume_checkpoint_path: no checkpoint at nowhere",
        ),
        ({"tokens__train_stepz": 3}, "train_steps"),
        ({"parallelism__tp": 3}, "num_attention_heads"),
        ({"parallelism__pp": 9}, "pp"),
        ({"model__init_method__std": 1e30}, "step 1: the gradient of "),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_bad_input_gets_a_sentence_and_not_a_trace(
    changes: dict, sentence: str, tmp_path: Path
) -> None:
    done = runs.train(tmp_path, *runs.arguments(tmp_path, **changes))
    assert done.returncode == 1
    assert sentence in done.stderr
    assert "Traceback" not in done.stderr and len(done.stderr) < 1000


def test_an_empty_corpus_and_a_folder_that_is_no_checkpoint(tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    flags = runs.arguments(tmp_path, data_stages__0__data__dataset__hf_dataset_or_datasets=empty)
    done = runs.train(tmp_path, *flags)
    assert done.returncode == 1 and str(empty) in done.stderr and "Traceback" not in done.stderr
    done = runs.train(
        tmp_path, *runs.arguments(tmp_path, checkpoints__resume_checkpoint_path=empty)
    )
    assert done.returncode == 1 and str(empty) in done.stderr and "Traceback" not in done.stderr


def test_an_unknown_subcommand_gets_a_suggestion(tmp_path: Path) -> None:
    for word, advice in (
        ("reprot", "there is no subcommand 'reprot'; did you mean report? (subcommands: new, "),
        ("my run.yaml", "; a config is given with --config-file 'my run.yaml' (subcommands"),
        (
            "xyz",
            "there is no subcommand 'xyz' (subcommands: new, report, slurm, kubernetes, ",
        ),
    ):
        done = runs.train(tmp_path, word, "runs")
        assert done.returncode == 2
        assert advice in " ".join(done.stderr.split())
