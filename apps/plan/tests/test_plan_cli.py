"""``kenotron plan``: tables, JSON, pages, configs, known models, bad input."""

import json
import os
import random
from dataclasses import replace
from pathlib import Path

import pytest

from kenotron_config import load_config
from kenotron_cost.cost_plan import cost_plan
from kenotron_cost.layouts import (
    ENGINES,
    PlannedLayout,
    Refused,
    legal_layouts,
    own_layout,
    with_layout,
)
from kenotron_cost.machine_file import machine_named
from kenotron_cost.measured import MeasuredModel
from kenotron_cost.problems import problems_of
from kenotron_cost.recomputed import recomputed
from kenotron_cost.run_plan import plan_of_run
from kenotron_cost.search import Planner
from kenotron_cost.stage_sizes import stage_sizes
from kenotron_models.hf import config_to_hf
from kenotron_plan import cli
from kenotron_plan.calibrate import calibrate_parser
from kenotron_plan.cli import main
from kenotron_plan.memory_curve import memory_curve, shown_ranks

REPOSITORY = Path(__file__).parents[3]
TINY_LLAMA = REPOSITORY / "packages/kenotron-config/tests/tiny_llama.yaml"
DEEP = ("model.model_config.num_hidden_layers=6", "tokens.batch_accumulation_per_replica=32")
KNOWN = REPOSITORY / "apps/train/configs/known"
H100 = machine_named("h100")
OF_405B = (
    "parallelism.dp=128", "parallelism.pp=16", "model.model_config.hidden_size=16384",
    "model.model_config.intermediate_size=53248", "model.model_config.num_hidden_layers=126",
    "model.model_config.num_attention_heads=128", "tokens.batch_accumulation_per_replica=16",
    "parallelism.recompute=selective",  # in place of tensors that are freed early (section 3.3.2)
)  # fmt: skip


OF_A_MODEL = ("--gpus", "8xH100", "--sequence-length", "4096", "--model", ".")


def tiny(*overrides):
    return load_config(TINY_LLAMA, (*DEEP, *overrides))


def legal(config, ranks):
    return [*legal_layouts(config, ranks, Refused())]


def program(capsys, *flags):
    status = main(["--config-file", str(TINY_LLAMA), *flags])
    return status, *capsys.readouterr()


def test_sizes_of_experts_are_those_of_check_but_for_their_rounding():
    config = load_config(KNOWN / "qwen3-30b-a3b.yaml", ("model.model_config.num_hidden_layers=4",))
    measured = MeasuredModel(cost_plan(config))
    for layout, plan in random.Random(1).sample(legal(config, 64), 6):
        zero = 1 if layout.dp * layout.cp > 1 else 0
        parallelism = replace(plan.parallelism, recompute="selective")
        optimizer = replace(plan.optimizer, zero_stage=zero)
        each = replace(plan, parallelism=parallelism, optimizer=optimizer)
        for rank, size in enumerate(stage_sizes(each)):
            held = measured.held(each, rank, recomputed(each))
            kept, exact = (of.pop("activations") for of in (held, size.bytes_of))
            assert held == size.bytes_of and exact <= kept <= 1.05 * exact, layout


@pytest.mark.parametrize(
    ("name", "machine", "overrides", "ranks"),
    [("llama-3.1-70b", "h100", OF_405B, 16_384), ("deepseek-v3", "h800", (), 2_048)],
)
def test_published_layouts_are_legal_and_fit(name, machine, overrides, ranks):
    config, of = load_config(KNOWN / f"{name}.yaml", overrides), machine_named(machine)
    assert config.world_size == ranks
    plan = cost_plan(config)
    own = Planner(plan, of, of["memory"]).estimate(own_layout(config), plan, recomputed(plan))
    by_class = own.memory.bytes_of
    assert own.fits and by_class["context"] == of["context"]
    assert by_class["communicators"] % (of["channels"] * of["channel_buffer"]) == 0
    layers = own.memory.layers
    assert sum(layers.values()) == pytest.approx(by_class["activations"], rel=1e-6)
    if name == "deepseek-v3":
        assert {*layers} <= {"latent attention + mlp", "latent attention + experts"}
    assert 0 < by_class["communicators"] < 2e9 and 0 < by_class["allocator rounding"] < 2e9


def test_a_knob_that_makes_it_fit_is_named_with_its_cost():
    config = load_config(KNOWN / "llama-3.1-8b.yaml", ("parallelism.tp=1", "parallelism.dp=8"))
    planned = plan_of_run(config, H100, 96e9, None)
    assert planned.own is not None and not planned.own.fits and planned.chosen is None
    (line,) = (each for each in planned.remedies if "zero_stage=3" in each)
    assert line.startswith("optimizer.zero_stage=3 makes it fit: ")
    ratios = [float(each.split(" times ")[0].split()[-1]) for each in planned.remedies]
    assert len(ratios) > 1 and ratios == sorted(ratios) and all(each >= 1 for each in ratios)


def test_where_none_fits_what_the_search_does_not_change_is_tried(capsys):
    file, objective = KNOWN / "llama-3.2-1b.yaml", ("--objective", "memory")
    needed = plan_of_run(load_config(file), H100, 80e9, 8, "memory")
    assert needed.found is not None and not needed.remedies
    room = (needed.found.best[0].memory.total - 300e6) / 1e9
    flags = ["--config-file", str(file), "--gpus", "8xH100", *objective, "--memory"]
    assert main([*flags, f"{room:.6f}"]) == 1
    text = " ".join(capsys.readouterr().out.split())
    assert "none fits: those that lack least memory" in text
    assert "The first of them" in text and "does not fit" in text
    assert "optimizer.offload=true makes the first one fit" in text
    assert "--ranks 16: with dp" in text
    assert main([*flags, "0.001"]) == 1
    assert "shorten tokens.sequence_length" in " ".join(capsys.readouterr().out.split())


@pytest.mark.smoke
def test_the_program_writes_a_table_json_and_a_config_that_check_takes(tmp_path, capsys):
    flags = [part for each in DEEP for part in ("--set", each)]
    plan, chosen = tmp_path / "plan.json", tmp_path / "chosen.yaml"
    flags += ["--gpus", "8xH200", "--json", str(plan), "--write", str(chosen), "--price", "2.5"]
    status, out, _ = program(capsys, *flags)
    lines = [line for line in out.splitlines() if str(tmp_path) not in line]
    assert status == 0 and max(map(len, lines)) <= 100
    assert "legal layouts of 8 ranks, by time" in out and "Not legal" in out
    assert "Memory that is not counted" in out
    assert "assumption: no data sheet has it (not measured here)" in " ".join(out.split())
    assert f"Start it: kenotron train --config-file {chosen}" in out
    own = out[out.index("The first of them") :]
    for words in (
        "Largest instant: ",
        "tokens/s, MFU",
        "Whole training: ",
        "A rank sends in a step",
    ):
        assert words in own
    script = chosen.with_suffix(".sh")
    assert script.read_text().endswith(f'exec kenotron train --config-file {chosen} "$@"\n')
    assert os.access(script, os.X_OK)
    best = json.loads(plan.read_text())["layouts"]
    assert len(best) == 10 and all(each["fits"] and each["price"] > 0 for each in best)
    written = load_config(chosen)
    for axis in ("dp", "pp", "cp", "tp"):
        assert getattr(written.parallelism, axis) == best[0]["layout"][axis]
    assert problems_of(written) == []
    for file in (chosen, script):
        status, _, err = program(capsys, *flags)
        assert status == 2 and f"there is such a file ({file})" in " ".join(err.split())
        file.unlink()


def test_a_folder_of_hugging_face_is_planned_as_its_config(tmp_path, capsys):
    values = config_to_hf(load_config(KNOWN / "llama-3.2-1b.yaml").model.model_config)
    (tmp_path / "config.json").write_text(json.dumps(values))
    flags = ("--gpus", "8xH100", "--sequence-length", "4096", "--batch", "1M")
    for folder in (tmp_path, tmp_path / "config.json"):
        plan = tmp_path / f"{folder.name}.plan"
        status = main(["--model", str(folder), *flags, "--json", str(plan)])
        assert status == 0 and "legal layouts of 8 ranks" in capsys.readouterr().out
        layouts = json.loads(plan.read_text())["layouts"]
    own = load_config(KNOWN / "llama-3.2-1b.yaml", (
        "tokens.sequence_length=4096", "tokens.micro_batch_size=1",
        "tokens.batch_accumulation_per_replica=256", "parallelism={dp: 1, tp: 1, pp: 1}",
        "optimizer.zero_stage=1",
    ))  # fmt: skip
    best = Planner(cost_plan(own), H100, 80e9).search(legal(own, 8)).best
    assert [each["step_seconds"] for each in layouts] == [each.time.seconds for each in best]


def test_nothing_that_fits_is_status_1_and_shows_what_lacks_least(capsys):
    status, out, _ = program(capsys, "--ranks", "2", "--memory", "0.3")
    assert status == 1 and "none fits: those that lack least memory" in out


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--machine", "h99"), "there is no machine of this name and no such file"),
        (("--gpus", "8*H100"), "--gpus 8*H100: give their number and kind"),
        (("--gpus", "8xH100", "--ranks", "4"), "--ranks 4: --gpus 8xH100 are 8"),
        (("--objective", "price"), "--objective price: give --price"),
        (("--set", "parallelism.tp=3"), "parallelism.tp: 3 was given; it must divide"),
        (("--set", "optimizer.lr_multipliers=[{role: router, multiplier: 5}]"), "no parameter has"),
        (("--json", "."), "--json .: this is a folder"),
        (("--batch", "4M"), "--sequence-length and --batch go with --model"),
        (("--model", "none"), "--model none: give --gpus, --sequence-length and --batch, too"),
        ((*OF_A_MODEL, "--batch", "4M"), "no model of Hugging Face: it has no config.json"),
        ((*OF_A_MODEL, "--batch", "many"), "--batch many: give tokens of a global batch"),
        ((*OF_A_MODEL, "--batch", "5K"), "5,120 tokens are no whole number of samples of 4,096"),
    ],
)
def test_bad_input_is_status_2(flags, words, capsys):
    status, out, err = program(capsys, *flags)
    assert (status, out) == (2, "") and words in err


def test_no_legal_layout_says_why_and_the_nearest_number_of_ranks(capsys):
    ulysses = "parallelism.cp_attention=ulysses"
    status, _, err = program(capsys, "--set", ulysses, "--ranks", "53")
    assert status == 2 and "--ranks 53: no layout is legal" in err and "must divide" in err
    config = load_config(TINY_LLAMA, (ulysses,))
    nearby = (number for off in range(1, 53) for number in (53 - off, 53 + off))
    near = next(number for number in nearby if legal(config, number))
    assert err.endswith(f"the nearest number that has one: --ranks {near}\n")


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("again", ["none", "full"])
def test_memory_over_a_step_has_the_largest_instant_at_its_top(engine, again):
    layout = PlannedLayout(1, 2, 1, 1, engine=engine, micro_batch=1, zero=0, recompute=again)
    config = with_layout(tiny(), layout)
    plan = cost_plan(config)
    planner = Planner(plan, H100, 80e9)
    estimate = planner.estimate(own_layout(config), plan, recomputed(plan))
    curves = [memory_curve(planner, estimate, rank) for rank in range(2)]
    top = max(gb for curve in curves for _, gb in curve)
    assert top == pytest.approx(estimate.memory.total / 1e9, rel=1e-6)
    for curve in curves:
        seconds = [each for each, _ in curve]
        assert seconds == sorted(seconds) and seconds[-1] == estimate.time.seconds
        assert curve[0][1] == curve[-1][1] == min(gb for _, gb in curve)


def test_the_page_has_the_plan_and_a_curve_for_some_ranks(tmp_path, capsys, monkeypatch):
    page = tmp_path / "plan.html"
    flags = [part for each in DEEP for part in ("--set", each)]
    assert program(capsys, *flags, "--set", "parallelism.pp=2", "--html", str(page))[0] == 0
    text = page.read_text()
    assert text.count("<title>pp rank") == 2 and "Largest instant" in text
    assert "color-scheme: light dark" in text
    assert shown_ranks(16, 3) == [0, 3, 8, 15] and shown_ranks(1, 0) == [0]
    monkeypatch.setattr(cli, "can_draw", lambda: False)
    status, _, err = program(capsys, "--html", str(page))
    assert status == 2 and "pictures need matplotlib" in err


def test_the_program_says_what_a_search_does_not_know(capsys):
    names = ("--search", "dtype,compile")
    status, out, _ = program(capsys, "--ranks", "2", "--imbalance", "1.5", *names)
    assert status == 0 and max(map(len, out.splitlines())) <= 100
    assert 'model.dtype="float32", model.compile=true' in out or 'model.dtype="bfloat16"' in out
    assert "Searched: all layouts have model.compile: true" in out
    assert "Experts: there are none; --imbalance 1.5 changes nothing" in out
    for flags, words in (
        (names, "--search dtype,compile: it goes with --ranks or --gpus"),
        (("--ranks", "2", "--search", "seed"), "--search seed: give some of dtype, accumulate"),
    ):
        status, _, err = program(capsys, *flags)
        assert status == 2 and words in err
    with pytest.raises(SystemExit):
        program(capsys, "--imbalance", "0.5")
    assert "'0.5' was given; it must be a number from 1" in capsys.readouterr().err


def test_the_readme_has_every_flag():
    text = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
    for parser in (cli.plan_parser(), calibrate_parser()):
        for action in parser._actions[1:]:  # the first is --help
            assert f"| `{action.option_strings[-1]} " in text
