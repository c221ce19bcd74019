"""Plans: sizes of the code that trains, the schedule's own bubble, the best of all layouts."""

import json
import random
from dataclasses import replace

import pytest
import runs

from kenotron_config import load_config
from kenotron_models.hf import config_to_hf
from kenotron_pp import SCHEDULES, Times, schedule_named, simulate
from kenotron_train import cli
from kenotron_train.assemble import cost_plan
from kenotron_train.cost.measured import MeasuredModel
from kenotron_train.cost.recomputed import recomputed
from kenotron_train.cost.stage_sizes import stage_sizes
from kenotron_train.plan import cli as plan_cli
from kenotron_train.plan.layouts import (
    ENGINES,
    RECOMPUTES,
    PlannedLayout,
    Refused,
    legal_layouts,
    own_layout,
    with_layout,
)
from kenotron_train.plan.machine_file import FOLDER, NUMBERS, known_machines, machine_named
from kenotron_train.plan.memory_curve import memory_curve, shown_ranks
from kenotron_train.plan.run_plan import plan_of_run
from kenotron_train.plan.search import Planner, _stages_of_zero
from kenotron_train.plan.step_time import TimedModel

DEEP = ("model.model_config.num_hidden_layers=6", "tokens.batch_accumulation_per_replica=32")
KNOWN = runs.APP / "configs/known"
H100 = machine_named("h100")
OF_405B = (
    "parallelism.dp=128", "parallelism.pp=16", "model.model_config.hidden_size=16384",
    "model.model_config.intermediate_size=53248", "model.model_config.num_hidden_layers=126",
    "model.model_config.num_attention_heads=128", "tokens.batch_accumulation_per_replica=16",
    "parallelism.recompute=selective",  # in place of tensors that are freed early (section 3.3.2)
)  # fmt: skip


OF_A_MODEL = ("--gpus", "8xH100", "--sequence-length", "4096", "--model", ".")


def tiny(*overrides):
    return load_config(runs.TINY_LLAMA, (*DEEP, *overrides))


def legal(config, ranks):
    return [*legal_layouts(config, ranks, Refused())]


def with_stage(plan, again, zero):
    parallelism = replace(plan.parallelism, recompute=again)
    return replace(
        plan, parallelism=parallelism, optimizer=replace(plan.optimizer, zero_stage=zero)
    )


@pytest.mark.smoke
@pytest.mark.parametrize("tied", ["true", "false"])
def test_sizes_and_bytes_are_those_of_check_on_a_sample_of_layouts(tied):
    config = tiny(f"model.model_config.tie_word_embeddings={tied}")
    measured, found = MeasuredModel(cost_plan(config)), legal(config, 8)
    for layout, plan in random.Random(0).sample(found, 12):
        for again, zero in zip(RECOMPUTES, (1, 2, 3), strict=True):
            each = with_stage(plan, again, zero if layout.dp * layout.cp > 1 else 0)
            ways = recomputed(each)
            for rank, size in enumerate(stage_sizes(each)):
                assert measured.held(each, rank, ways) == size.bytes_of, layout
                assert measured.sent_by_stage(each, rank, ways) == size.sent, layout
                assert measured.stages(each)[rank].names == size.layers


def test_sizes_of_experts_are_those_of_check_but_for_their_rounding():
    config = load_config(KNOWN / "qwen3-30b-a3b.yaml", ("model.model_config.num_hidden_layers=4",))
    measured = MeasuredModel(cost_plan(config))
    for layout, plan in random.Random(1).sample(legal(config, 64), 6):
        each = with_stage(plan, "selective", 1 if layout.dp * layout.cp > 1 else 0)
        for rank, size in enumerate(stage_sizes(each)):
            held = measured.held(each, rank, recomputed(each))
            kept, exact = (of.pop("activations") for of in (held, size.bytes_of))
            assert held == size.bytes_of and exact <= kept <= 1.05 * exact, layout


@pytest.mark.parametrize("name", [*SCHEDULES])
@pytest.mark.parametrize("pp", [2, 3, 4])
def test_micro_batches_alive_are_those_of_simulate(name, pp):
    measured, schedule = MeasuredModel(cost_plan(tiny())), schedule_named(name, None)
    for many in (1, 2, pp, 3 * pp, 4 * pp + 1, 8 * pp, 13 * pp + 1):
        trace = simulate(schedule, pp, many)
        assert measured.live(schedule, pp, many) == [*trace.peak_live], many


@pytest.mark.parametrize("engine", ENGINES)
def test_the_bubble_is_that_of_simulate(engine):
    config = with_layout(tiny(), PlannedLayout(1, 2, 1, 1, engine=engine, micro_batch=2, zero=0))
    plan = cost_plan(config)
    timed, again = TimedModel(MeasuredModel(plan), H100), recomputed(plan)
    step, schedule = timed.step(plan, again), plan.parallelism.schedule
    works = timed.works(plan, again)
    stages = {
        schedule.stage(rank, chunk, 2): [*work.seconds]
        for rank, own in enumerate(works)
        for chunk, work in enumerate(own)
    }
    f, i, w = zip(*(stages[stage] for stage in range(len(stages))), strict=True)
    b = [a + c for a, c in zip(i, w, strict=True)]
    times = Times(F=f, B=b, I=i, W=w, transfer=timed._transfer(plan))
    trace = simulate(schedule, 2, plan.microbatches, times)
    assert step.bubble == trace.bubble and step.seconds > trace.ticks
    assert sum(step.parts.values()) == pytest.approx(step.seconds)
    long = timed.step(replace(plan, microbatches=40_000), again, exact=False).seconds
    assert long / step.seconds == pytest.approx(40_000 / plan.microbatches, rel=0.3)


def test_more_recomputation_is_never_more_memory_and_none_is_fastest():
    config = tiny()
    planner = Planner(cost_plan(config), H100, 80e9)
    for _, plan in random.Random(2).sample(legal(config, 8), 10):
        rows = [(again,) * planner.blocks for again in RECOMPUTES]
        held = [planner.measured.held(plan, 0, each)["activations"] for each in rows]
        assert held == sorted(held, reverse=True)
        seconds = [planner.timed.step(plan, each).seconds for each in rows]
        assert seconds[0] == min(seconds)  # selective computes what is cheap twice


def test_more_tp_is_never_more_parameters_and_a_higher_stage_never_more_state():
    config = tiny()
    measured = MeasuredModel(cost_plan(config))

    def held(what, **sizes):
        plan = cost_plan(with_layout(config, PlannedLayout(**{"dp": 2, "pp": 1, "cp": 1} | sizes)))
        return measured.states(plan, 0)[what]

    for what in ("parameters", "gradients", "optimizer"):
        assert held(what, tp=1) >= held(what, tp=2) >= held(what, tp=4)
        assert held(what, tp=1, zero=1) >= held(what, tp=1, zero=2) >= held(what, tp=1, zero=3)


def test_the_search_finds_what_an_estimate_of_every_layout_finds():
    config = tiny()
    planner = Planner(cost_plan(config), H100, 80e9)
    groups, tried = planner._groups(legal(config, 4))
    estimates = []
    for bound, layout, plan, again in groups:
        found = [(*each, again) for each in _stages_of_zero(layout, plan, again[0])]
        estimates += (new := [planner.estimate(*each) for each in found])
        assert all(bound <= each.time.seconds for each in new)
    for objective in ("time", "price", "memory"):
        found, best = planner.search(legal(config, 4), objective), {}
        for each in estimates:
            size = each.memory.total if objective == "memory" else each.time.seconds
            best[each.layout.grid] = min(size, best.get(each.layout.grid, size))
        sizes = [
            each.memory.total if objective == "memory" else each.time.seconds for each in found.best
        ]
        assert (
            found.tried == tried == len(estimates)
            and len({each.layout.grid for each in found.best}) == 10
        )
        assert sizes == pytest.approx(sorted(best.values())[:10])


def test_reasons_of_what_is_not_legal_are_those_of_the_config():
    refused, config = Refused(), tiny()
    assert all(layout.tp <= 8 for layout, _ in legal_layouts(config, 64, refused))
    (reason,) = (each for each in refused.reasons if each.startswith("parallelism.tp: "))
    tp = reason.split()[1]
    with pytest.raises(ValueError, match="parallelism.tp") as error:
        tiny(f"parallelism.tp={tp}", "parallelism.dp=1")
    assert reason in str(error.value)


def test_layouts_keep_the_global_batch():
    config = tiny("parallelism.dp=2")
    for layout, plan in legal(config, 8):
        assert layout.dp * layout.micro_batch * plan.microbatches == config.global_batch_size
        again = with_layout(config, layout)
        assert cost_plan(again) == plan
    with pytest.raises(ValueError, match="does not divide the global batch"):
        with_layout(config, PlannedLayout(3, 1, 1, 1))


@pytest.mark.parametrize(
    ("name", "machine", "overrides", "ranks"),
    [("llama-3.1-70b", "h100", OF_405B, 16_384), ("deepseek-v3", "h800", (), 2_048)],
)
def test_published_layouts_are_legal_and_fit(name, machine, overrides, ranks):
    config, of = load_config(KNOWN / f"{name}.yaml", overrides), machine_named(machine)
    assert config.world_size == ranks
    plan = cost_plan(config)
    own = Planner(plan, of, of["memory"]).estimate(own_layout(config), plan, recomputed(plan))
    assert own.fits and own.memory.bytes_of["reserved"] == of["reserved"]


def test_a_knob_that_makes_it_fit_is_named_with_its_cost():
    config = load_config(KNOWN / "llama-3.1-8b.yaml", ("parallelism.tp=1", "parallelism.dp=8"))
    planned = plan_of_run(config, H100, 96e9, None)
    assert planned.own is not None and not planned.own.fits and planned.chosen is None
    (line,) = (each for each in planned.remedies if "zero_stage=3" in each)
    assert line.startswith("optimizer.zero_stage=3 makes it fit: ")
    ratios = [float(each.split(" times ")[0].split()[-1]) for each in planned.remedies]
    assert len(ratios) > 1 and ratios == sorted(ratios) and all(each >= 1 for each in ratios)


def program(capsys, *flags):
    status = cli.main(["plan", "--config-file", str(runs.TINY_LLAMA), *flags])
    return status, *capsys.readouterr()


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
    best = json.loads(plan.read_text())["layouts"]
    assert len(best) == 10 and all(each["fits"] and each["price"] > 0 for each in best)
    written = load_config(chosen)
    for axis in ("dp", "pp", "cp", "tp"):
        assert getattr(written.parallelism, axis) == best[0]["layout"][axis]
    assert cli.main(["--config-file", str(chosen), "--check"]) == 0
    capsys.readouterr()
    status, _, err = program(capsys, *flags)
    assert status == 2 and "there is such a file" in err


def test_a_folder_of_hugging_face_is_planned_as_its_config(tmp_path, capsys):
    values = config_to_hf(load_config(KNOWN / "llama-3.2-1b.yaml").model.model_config)
    (tmp_path / "config.json").write_text(json.dumps(values))
    flags = ("--gpus", "8xH100", "--sequence-length", "4096", "--batch", "1M")
    for folder in (tmp_path, tmp_path / "config.json"):
        plan = tmp_path / f"{folder.name}.plan"
        status = cli.main(["plan", "--model", str(folder), *flags, "--json", str(plan)])
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
    status, out, _ = program(capsys, "--ranks", "2", "--memory", "4.0001")
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
    config = load_config(runs.TINY_LLAMA, (ulysses,))
    nearby = (number for off in range(1, 53) for number in (53 - off, 53 + off))
    near = next(number for number in nearby if legal(config, number))
    assert err.endswith(f"the nearest number that has one: --ranks {near}\n")


def test_a_machine_file_that_lacks_a_number_or_a_source_is_refused(tmp_path):
    values = json.loads((FOLDER / "h100.json").read_text())
    del values["numbers"]["latency"]
    del values["numbers"]["watts"]["source"]
    values["numbers"]["memory"]["value"] = -1
    values["numbers"]["speed"] = {"value": 1, "source": "none"}
    file = tmp_path / "mine.json"
    file.write_text(json.dumps(values))
    with pytest.raises(ValueError, match="numbers") as error:
        machine_named(str(file))
    lines = str(error.value).splitlines()
    assert all(line.startswith(f"{file}: numbers.") for line in lines) and len(lines) == 4
    assert f"{file}: numbers.latency: it is missing; add {{value, source}}" in str(error.value)
    for text in ("{", "[]", '{"numbers": {}}'):
        file.write_text(text)
        with pytest.raises(ValueError, match=str(file)):
            machine_named(str(file))


@pytest.mark.parametrize("name", known_machines())
def test_every_number_of_a_known_machine_has_a_source(name):
    machine = machine_named(name)
    assert {*machine.numbers} == {*NUMBERS} and machine.devices == 8
    assert machine.dtype == ("float32" if name == "cpu" else "bfloat16")
    assert all(number.source and not number.measured for number in machine.numbers.values())
    assert machine.proof(*NUMBERS) == "not measured here"


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
    monkeypatch.setattr(plan_cli, "can_draw", lambda: False)
    status, _, err = program(capsys, "--html", str(page))
    assert status == 2 and "pictures need matplotlib" in err
