"""Layouts: sizes of the code that trains, the schedule's own bubble, the best of all."""

import json
import random
from dataclasses import replace

import pytest
from cost_cases import H100, tiny

from kenotron_cost import step_time
from kenotron_cost.cost_plan import cost_plan
from kenotron_cost.layouts import (
    ENGINES,
    RECOMPUTES,
    PlannedLayout,
    Refused,
    legal_layouts,
    with_layout,
)
from kenotron_cost.machine_file import FOLDER, NUMBERS, known_machines, machine_named
from kenotron_cost.measured import MeasuredModel
from kenotron_cost.recomputed import recomputed
from kenotron_cost.search import Planner, _stages_of_zero
from kenotron_cost.stage_sizes import stage_sizes
from kenotron_cost.step_time import TimedModel
from kenotron_pp import SCHEDULES, Times, schedule_named, simulate

DEEP = "model.model_config.num_hidden_layers=6"


def deep(*overrides):
    return tiny(DEEP, *overrides)


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
    config = deep(f"model.model_config.tie_word_embeddings={tied}")
    measured, found = MeasuredModel(cost_plan(config)), legal(config, 8)
    for layout, plan in random.Random(0).sample(found, 12):
        for again, zero in zip(RECOMPUTES, (1, 2, 3), strict=True):
            each = with_stage(plan, again, zero if layout.dp * layout.cp > 1 else 0)
            ways = recomputed(each)
            for rank, size in enumerate(stage_sizes(each)):
                assert measured.held(each, rank, ways) == size.bytes_of, layout
                assert measured.sent_by_stage(each, rank, ways) == size.sent, layout
                assert measured.stages(each)[rank].names == size.layers


@pytest.mark.parametrize("name", [*SCHEDULES])
@pytest.mark.parametrize("pp", [2, 3, 4])
def test_micro_batches_alive_are_those_of_simulate(name, pp):
    measured, schedule = MeasuredModel(cost_plan(deep())), schedule_named(name, None)
    for many in (1, 2, pp, 3 * pp, 4 * pp + 1, 8 * pp, 13 * pp + 1):
        trace = simulate(schedule, pp, many)
        assert measured.live(schedule, pp, many) == [*trace.peak_live], many


@pytest.mark.parametrize("engine", ENGINES)
def test_the_bubble_is_that_of_simulate(engine, monkeypatch):
    config = with_layout(deep(), PlannedLayout(1, 2, 1, 1, engine=engine, micro_batch=2, zero=0))
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
    monkeypatch.setattr(step_time, "MOST_EVENTS", 0)
    many = replace(plan, microbatches=24 * schedule.chunks)
    short, whole = (timed._pipeline(many, works, exact)[0] for exact in (False, True))
    assert short == pytest.approx(whole, rel=0.01)
    long = timed.step(replace(plan, microbatches=40_000), again, exact=False).seconds
    assert long / step.seconds == pytest.approx(40_000 / plan.microbatches, rel=0.3)


def test_ranks_that_wait_leave_shared_cores_to_the_others():
    config = with_layout(deep(), PlannedLayout(1, 2, 1, 1, engine="afab", micro_batch=16, zero=0))
    plan, measured = cost_plan(config), MeasuredModel(cost_plan(config))
    alone = TimedModel(measured, H100)
    again, schedule = recomputed(plan), plan.parallelism.schedule
    times, _ = alone._times(plan, alone.works(plan, again))
    trace = simulate(schedule, 2, plan.microbatches, times)
    after = alone.after(plan, again)
    assert alone.step(plan, again).seconds == pytest.approx(trace.ticks + after)
    for sharing in (1.1, 2.0):
        timed = TimedModel(MeasuredModel(plan), replace(H100, sharing=sharing))
        found = timed.step(plan, again)
        ticks = trace.ticks * max(1 / sharing, 1 - trace.bubble)
        assert found.seconds == pytest.approx(ticks + after) and found.bubble < trace.bubble
        assert sum(found.parts.values()) == pytest.approx(found.seconds)
        assert timed.least(plan, again) <= ticks
    assert 0.1 < trace.bubble < 0.5 and found.bubble == pytest.approx(0)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_bound_is_below_the_time_of_few_micro_batches(engine):
    numbers = {**H100.numbers, "peak_flops": replace(H100.numbers["peak_flops"], value=1e9)}
    layout = PlannedLayout(1, 3, 1, 1, engine=engine, micro_batch=2, zero=0)
    plan = cost_plan(with_layout(deep(), layout))
    timed = TimedModel(MeasuredModel(plan), replace(H100, numbers=numbers))
    again = recomputed(plan)
    for many in (1, 2, 3, 6):
        few = replace(plan, microbatches=many)
        ticks, _ = timed._pipeline(few, timed.works(few, again), True)
        assert timed.least(few, again) <= ticks, many


def test_more_recomputation_is_never_more_memory_and_none_is_fastest():
    config = deep()
    planner = Planner(cost_plan(config), H100, 80e9)
    for _, plan in random.Random(2).sample(legal(config, 8), 10):
        rows = [(again,) * planner.blocks for again in RECOMPUTES]
        held = [planner.measured.held(plan, 0, each)["activations"] for each in rows]
        assert held == sorted(held, reverse=True)
        seconds = [planner.timed.step(plan, each).seconds for each in rows]
        assert seconds[0] == min(seconds)  # selective computes what is cheap twice


def test_more_tp_is_never_more_parameters_and_a_higher_stage_never_more_state():
    config = deep()
    measured = MeasuredModel(cost_plan(config))

    def held(what, **sizes):
        plan = cost_plan(with_layout(config, PlannedLayout(**{"dp": 2, "pp": 1, "cp": 1} | sizes)))
        return measured.states(plan, 0)[what]

    for what in ("parameters", "gradients", "optimizer"):
        assert held(what, tp=1) >= held(what, tp=2) >= held(what, tp=4)
        assert held(what, tp=1, zero=1) >= held(what, tp=1, zero=2) >= held(what, tp=1, zero=3)


def test_the_search_finds_what_an_estimate_of_every_layout_finds():
    config = deep()
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
    refused, config = Refused(), deep()
    assert all(layout.tp <= 8 for layout, _ in legal_layouts(config, 64, refused))
    (reason,) = (each for each in refused.reasons if each.startswith("parallelism.tp: "))
    tp = reason.split()[1]
    with pytest.raises(ValueError, match="parallelism.tp") as error:
        deep(f"parallelism.tp={tp}", "parallelism.dp=1")
    assert reason in str(error.value)


def test_layouts_keep_the_global_batch():
    config = deep("parallelism.dp=2")
    for layout, plan in legal(config, 8):
        assert layout.dp * layout.micro_batch * plan.microbatches == config.global_batch_size
        again = with_layout(config, layout)
        assert cost_plan(again) == plan
    with pytest.raises(ValueError, match="does not divide the global batch"):
        with_layout(config, PlannedLayout(3, 1, 1, 1))
    config = deep("parallelism.dp=2", "data_stages.0.batch_accumulation_per_replica=16")
    (stage,) = with_layout(config, PlannedLayout(1, 1, 1, 2, zero=0)).data_stages
    assert stage.batch_accumulation_per_replica == 16 * (2 * 2) // (1 * 1)


def test_an_estimate_has_the_bytes_of_the_rank_that_sends_most():
    config = deep("model.model_config.tie_word_embeddings=false")
    planner, places = Planner(cost_plan(config), H100, 80e9), set()
    for layout, plan in legal(config, 8):
        if layout.pp == 4 and layout.micro_batch == 1:
            sent = [sum(size.sent.values()) for size in stage_sizes(plan)]
            places.add(sent.index(max(sent)))
            found = planner.estimate(layout, plan, recomputed(plan)).sent
            assert sum(found.values()) == max(sent), layout
    assert places != {0}


@pytest.mark.parametrize(("mode", "parts"), [("ALL_REDUCE", 1), ("REDUCE_SCATTER", 2)])
def test_what_is_sent_between_stages_is_cut_as_activations_are(mode, parts):
    config = deep("parallelism.tp=2", f"parallelism.tp_mode={mode}")
    plan = cost_plan(with_layout(config, PlannedLayout(1, 2, 1, 2, micro_batch=2, zero=0)))
    seconds = TimedModel(MeasuredModel(plan), H100)._transfer(plan) - H100["latency"]
    rows, tokens, hidden, width = 2, 256, 16, 2
    want = rows * tokens * hidden * width / parts
    assert seconds * H100["node_bandwidth"] == pytest.approx(want)


def test_a_machine_file_that_lacks_a_number_or_a_source_is_refused(tmp_path):
    values = json.loads((FOLDER / "h100.json").read_text())
    del values["numbers"]["latency"]
    del values["numbers"]["watts"]["source"]
    values["numbers"]["memory"]["value"] = -1
    values["numbers"]["reserved"] = {"value": 1, "source": "none"}
    values["numbers"]["speed"] = {"value": 1, "source": "none"}
    values["numbers"]["context"]["value"], values["numbers"]["channels"]["value"] = 0, -1
    file = tmp_path / "mine.json"
    file.write_text(json.dumps(values))
    with pytest.raises(ValueError, match="numbers") as error:
        machine_named(str(file))
    lines = str(error.value).splitlines()
    assert all(line.startswith(f"{file}: numbers.") for line in lines) and len(lines) == 6
    replaced = "give context, channels, channel_buffer, graph_node in its place, as the files of"
    assert f"numbers.reserved: there is no such number any more; {replaced}" in str(error.value)
    assert "numbers.channels: value is -1; give a number from 0" in str(error.value)
    assert f"{file}: numbers.latency: it is missing; add {{value, source}}" in str(error.value)
    values = json.loads((FOLDER / "h100.json").read_text()) | {"sharing": 0.5}
    file.write_text(json.dumps(values))
    with pytest.raises(ValueError, match="sharing: value is 0.5; give a number from 1"):
        machine_named(str(file))
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
