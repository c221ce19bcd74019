"""``python apps/train evaluate``: a checkpoint on another layout, and what it refuses."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import own_runs
import pytest
import runs
from evaluate_cases import job_of, task_file

from kenotron_ckpt import read_manifest
from kenotron_config import EvaluationJobConfig, dump_config, parse_config
from kenotron_train.cli import main
from kenotron_train.config_file import load_config
from kenotron_train.evaluate import cli, evaluation_job, led_passes
from kenotron_train.evaluate.evaluation_job import (
    outside,
    script_of_evaluation,
    submit_evaluation,
)
from kenotron_train.evaluate.language_model import LayoutLM, generation_options
from kenotron_train.evaluate.led_passes import LedPasses
from kenotron_train.evaluate.text_tokens import open_text_tokens
from kenotron_train.report.curves import ReportedRun
from kenotron_train.report.evaluation_tables import with_evaluations

pytestmark = pytest.mark.xdist_group("evaluate")  # one run for all


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run of six steps, saved every three, whose config evaluates nothing."""
    folder = tmp_path_factory.mktemp("evaluate")
    done = runs.train(folder, *runs.arguments(folder, tokens__val_check_interval=3))
    assert done.returncode == 0, done.stderr
    task_file(folder / "tasks")
    return folder


def evaluate(folder: Path, *flags: str) -> Any:
    tasks = ["--tasks", "house_qa", "--task-folder", str(folder / "tasks")]
    tasks.append("--trust-task-files")
    return runs.program("apps/train", folder, "evaluate", *tasks, *flags)


def test_another_layout_finds_what_the_run_found_and_the_report_shows_it(folder):
    done = evaluate(folder, "--ckpt-path", "checkpoints/3", "--perplexity", "--dp", "2")
    assert done.returncode == 0, done.stderr
    found = json.loads((folder / "checkpoints/evaluations/3.json").read_text())
    assert found["evaluated_step"] == 3
    assert f"house_qa: acc {found['tasks']['house_qa']['acc']:.4g} ± " in done.stdout
    (source,) = found["sources"].values()
    step = runs.metrics(folder)[2]
    assert source["loss"] == pytest.approx(step["validation_loss"], rel=1e-6)
    cut = evaluate(folder, "--ckpt-path", "checkpoints/3", "--tp", "2", "--output", "own.json")
    assert cut.returncode == 0, cut.stderr
    assert json.loads((folder / "own.json").read_text())["tasks"] == found["tasks"]
    url = ("--ckpt-path", f"file://{folder}/checkpoints/3", "--dp", "2", "--output", "there.json")
    there = evaluate(folder, *url, "--perplexity")
    assert there.returncode == 0, there.stderr
    there = json.loads((folder / "there.json").read_text())
    assert (there["tasks"], there["sources"]) == (found["tasks"], found["sources"])
    assert "is a URL: give --output, a file for the re" in evaluate(folder, *url[:2]).stderr
    report = runs.program("apps/train", folder, "report", "checkpoints")
    assert "house_qa: acc" in report.stdout
    assert "perplexity" in report.stdout


def test_what_cannot_be_evaluated_is_an_error_that_names_the_flag(folder, capsys):
    step = ["evaluate", "--ckpt-path", str(folder / "checkpoints/3")]
    tasks = ["--tasks", "house_qa", "--task-folder", str(folder / "tasks")]
    tasks.append("--trust-task-files")
    own = ["--config-file", str(own_data(folder))]
    nothing = ["--config-file", str(own_data(folder, limit=0))]
    for flags, words in (
        ([*step], "there is nothing to evaluate: give --tasks or --perplexity, or a config with"),
        ([*step, "--perplexity", *own], "--perplexity: data of the training are its program's own"),
        (
            [*step, "--perplexity", *nothing],
            "--perplexity: tokens.limit_val_batches of the config is 0, so that no samples were",
        ),
        (
            [*step, *tasks, "--tokenizer", "no.json"],
            "evaluate.tasks needs the tokenizer of the model: tokenizer 'no.json': there is no",
        ),
        ([*step, *tasks, "--tp", "3"], "cannot split 4 attention heads over 3 tp ranks"),
        (["evaluate", "--ckpt-path", str(folder / "none"), *tasks], "no checkpoint at"),
    ):
        assert main(flags) == 1, flags
        assert words in capsys.readouterr().err


def own_data(folder: Path, limit: int = 2) -> Path:
    """A config whose data are its program's own."""
    text = (folder / "checkpoints/3/config.yaml").read_text()
    changed = folder / f"own-{limit}.yaml"
    stage = {"name": "s", "start_training_step": 1, "data": {"dataset": None, "seed": 1}}
    values = [f"tokens.limit_val_batches={limit}"]
    if limit:
        values.append(f"data_stages={json.dumps([stage])}")
    changed.write_text(dump_config(parse_config(text, "c.yaml", values)))
    return changed


def test_a_checkpoint_without_a_model_or_without_a_config_is_an_error(
    folder, tmp_path, capsys, monkeypatch
):
    step = tmp_path / "run/3"
    shutil.copytree(folder / "checkpoints/3", step)
    (step / "config.yaml").unlink()
    assert main(["evaluate", "--ckpt-path", str(step), "--perplexity"]) == 1
    assert "has no config.yaml, so that its data are not known" in capsys.readouterr().err
    manifest = read_manifest(step)
    monkeypatch.setattr(cli, "read_manifest", lambda _: replace(manifest, state={}))
    assert main(["evaluate", "--ckpt-path", str(step), "--tasks", "a"]) == 1
    words = f"--ckpt-path {step} does not describe a model (model_config is missing): was it writ"
    assert words in capsys.readouterr().err


class Answers:
    """Passes of a model that reads eight tokens."""

    window = 8

    def __init__(self, begin: int | None = None) -> None:
        bytes_ = open_text_tokens(None, None, 256)
        self.texts = bytes_ if begin is None else open_text_tokens(None, None, 257)


def test_texts_that_do_not_fit_are_errors_with_the_key():
    lm = LayoutLM(Answers())
    with pytest.raises(ValueError, match="the tokenizer names no token that begins or ends a text"):
        _ = lm.eot_token_id
    assert LayoutLM(Answers(256)).eot_token_id == 256
    with pytest.raises(ValueError, match="an answer has 9 tokens, but the model reads 8: raise ev"):
        lm._loglikelihood_tokens([(None, [1], list(range(9)))])
    with pytest.raises(ValueError, match=r"the task generates 8 tokens \(generation_kwargs.max_g"):
        lm._generate(["a"], {"max_gen_toks": 8})


@pytest.mark.parametrize(
    ("said", "more"), [(None, ()), ([7, 9], (7, 9)), (7, (7,)), ("none", ())], ids=str
)
def test_texts_end_where_generation_config_says_too(said, more, tmp_path, monkeypatch):
    folder = own_runs.tokenizer(tmp_path / "t")
    if said is not None:
        told = {} if said == "none" else {"eos_token_id": said}
        (folder / "generation_config.json").write_text(json.dumps(told))
    texts = open_text_tokens(str(folder), None, 300)
    assert texts.ends == {1, *more} and texts.end_text == "<|im_end|>"

    def continue_texts(*_, ends, **__):
        return [token for token in range(20) if ends(0, token)]

    monkeypatch.setattr(led_passes, "continue_texts", continue_texts)
    passes = LedPasses(None, texts, window=8, batch_size=1)
    assert passes._continue([[3]], 4, [], {}) == sorted(texts.ends)


def test_options_of_generation_are_those_of_lm_eval():
    most, stops, sampling = generation_options({"until": "a", "do_sample": False, "temperature": 1})
    assert (most, stops, sampling.temperature) == (256, ["a"], 0.0)
    given = {"max_new_tokens": 5, "do_sample": True, "top_k": 0, "top_p": 0.9, "temperature": 0.5}
    most, stops, sampling = generation_options(given)
    assert (most, stops) == (5, [])
    assert (sampling.temperature, sampling.top_k, sampling.top_p) == (0.5, None, 0.9)
    with pytest.raises(ValueError, match="generation_kwargs.num_beams of the task has no counterp"):
        generation_options({"num_beams": 2})


def test_a_job_has_a_script_for_its_ranks(tmp_path):
    section = {"tasks": ["a"], "ranks": "job", "job": {"tp": 2, "nodes": 2, "partition": "p q"}}
    config = load_config(runs.TINY_LLAMA, [f"evaluate={json.dumps(section)}"])
    assert config.evaluation is not None
    script = script_of_evaluation(job_of(config), tmp_path / "run/4", tmp_path)
    assert "#SBATCH --nodes=2\n#SBATCH --ntasks-per-node=1\n#SBATCH --partition='p q'\n" in script
    assert "#SBATCH --gpus-per-node=1" in script
    assert f"evaluate --ckpt-path {tmp_path}/run/4 --pp 1 --dp 1 --cp 1 --tp 2 --ep 1\n" in script
    assert "{{" not in script
    for job, words in (
        ({"tp": 2, "gpus_per_node": 3}, r"evaluate.job: 2 ranks \(pp x dp x cp x tp\) cannot be 3"),
        ({"partition": "p\nq"}, r"has characters that cannot be printed, which would break out"),
    ):
        changed = load_config(
            runs.TINY_LLAMA, [f"evaluate={json.dumps(section | {'job': job})}"]
        ).evaluation
        assert changed is not None
        with pytest.raises(ValueError, match=words):
            script_of_evaluation(job_of(config, changed), tmp_path / "run/4", tmp_path)
    on_cpus = EvaluationJobConfig(gpus_per_node=0)
    section["job"] = {"gpus_per_node": 0}
    config = load_config(runs.TINY_LLAMA, [f"evaluate={json.dumps(section)}"])
    assert config.evaluation is not None
    assert config.evaluation.job == on_cpus
    script = script_of_evaluation(job_of(config), tmp_path / "run/4", tmp_path)
    assert "gpus-per-node" not in script
    assert script.endswith("--ep 1 --device cpu\n")


def test_a_job_does_not_see_the_launcher_of_the_training():
    given = dict.fromkeys(("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "SLURM_JOB_ID"), "1")
    given |= dict.fromkeys(("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "KENOTRON_JOB_SECRET"), "1")
    kept = {"PATH": "p", "HF_HOME": "h", "MY_RANK": "1", "KENOTRON_CACHE": "c"}
    assert outside({**given, **kept}) == kept


STUB = """#!/bin/sh
if grep -q refuse "$3"; then
    echo "sbatch: error: no such partition" >&2
    exit 1
fi
if grep -q silent "$3"; then
    exec sleep 60
fi
echo 17
"""


def test_a_job_is_given_to_sbatch_and_its_refusal_is_told(tmp_path, monkeypatch):
    program = tmp_path / "bin/sbatch"
    program.parent.mkdir()
    program.write_text(STUB)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:/usr/bin:/bin")
    failures = {
        "refuse": r"sbatch refused .*4.sbatch \(no such partition\)",
        "silent": "sbatch did not answer within 0.2 s: submit .*4.sbatch once it does",
    }
    for partition, said in (("good", "submitted job 17"), *dict.fromkeys(failures, "").items()):
        section = {"tasks": ["a"], "ranks": "job", "job": {"partition": partition}}
        config = load_config(runs.TINY_LLAMA, [f"evaluate={json.dumps(section)}"])
        assert config.evaluation is not None
        folder = tmp_path / "run/4"
        if said:
            line = submit_evaluation(job_of(config), folder)
            assert line == f"evaluation of step 4: {said}"
        else:
            if partition == "silent":
                monkeypatch.setattr(evaluation_job, "PATIENCE", 0.2)
            with pytest.raises(ValueError, match=failures[partition]):
                submit_evaluation(job_of(config), folder)


def test_a_run_gives_its_checkpoint_to_a_job_whose_result_the_report_shows(tmp_path, monkeypatch):
    programs = {"sbatch": 'bash "$3" > "$3.said" 2>&1\necho 21', "srun": 'exec "$@"'}
    for name, text in programs.items():
        program = tmp_path / "bin" / name
        program.parent.mkdir(exist_ok=True)
        program.write_text(f"#!/bin/sh\n{text}\n")
        program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    section = {
        "ranks": "job", "tasks": ["house_qa"], "task_folders": [str(task_file(tmp_path / "tasks"))],
        "trust_task_files": True,
        "job": {"gpus_per_node": 0},
    }  # fmt: skip
    changes = {"tokens__train_steps": 2, "evaluate": json.dumps(section)}
    done = runs.train(tmp_path, *runs.arguments(tmp_path, **changes))
    assert done.returncode == 0, done.stderr
    assert "evaluation of step 2: submitted job 21" in done.stdout
    folder = tmp_path / "checkpoints/evaluations"
    found = json.loads((folder / "2.json").read_text()), (folder / "2.sbatch.said").read_text()
    assert "house_qa: acc " in found[1]
    assert main(["report", str(tmp_path / "checkpoints")]) == 0
    page = (tmp_path / "checkpoints/report.html").read_text()
    assert f"<td>{found[0]['tasks']['house_qa']['acc']:.4g} ± " in page


def test_the_report_has_what_the_run_found_next_to_what_a_file_has(tmp_path):
    (tmp_path / "evaluations").mkdir()
    text = json.dumps({"evaluated_step": 2, "tasks": {"a": {"acc": 0.5}}})
    (tmp_path / "evaluations/2.json").write_text(text)
    own = {"evaluated_step": 2, "tasks": {"a": {"acc": 0.1}, "b": {"acc": 0.2}}}
    run = with_evaluations(
        ReportedRun("r", [{"step": 1}, {"step": 2, "evaluation": own}]), tmp_path
    )
    assert run.steps[1]["evaluated"] == {"a: acc": 0.5, "b: acc": 0.2}
