"""Further keys of a search, and uneven loads of experts."""

import random
import re
from dataclasses import replace

import pytest
from cost_cases import EXPERTS, H100, LLAMA, configured, tiny

from kenotron_cost import measured, stage_tensors
from kenotron_cost.cost_plan import cost_plan
from kenotron_cost.knobs import SEARCH_KEYS
from kenotron_cost.layouts import (
    RECOMPUTES,
    PlannedLayout,
    Refused,
    legal_layouts,
    own_layout,
    with_layout,
)
from kenotron_cost.measured import MeasuredModel
from kenotron_cost.memory import instants, peak_memory
from kenotron_cost.model_folder import with_model
from kenotron_cost.recomputed import recomputed
from kenotron_cost.run_plan import plan_of_run
from kenotron_cost.search import Planner
from kenotron_cost.state_bytes import state_of_rank
from kenotron_models.block_costs import kept_bytes

HYBRID = {
    "is_nemotron_h_config": True, "vocab_size": 512, "hidden_size": 64, "intermediate_size": 192,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "mamba_num_heads": 8,
    "mamba_head_dim": 16, "ssm_state_size": 16, "n_groups": 2, "chunk_size": 32, "layers": "M-M*-",
}  # fmt: skip
DEEP = LLAMA | {"num_hidden_layers": 4, "tie_word_embeddings": False}
ADAPTED = "model.adapter={rank: 4, alpha: 8, targets: [q_proj, down_proj]}"
OF_MODEL = {
    "dense": configured(DEEP), "experts": configured(EXPERTS), "hybrid": configured(HYBRID),
    "LoRA": configured(DEEP, ADAPTED), "offload": configured(DEEP),
}  # fmt: skip
EVERY = tuple(SEARCH_KEYS)
TWO = "parallelism.dp=2", "parallelism.expert_parallel_size=2"


def legal(config, search, devices=2):
    return [*legal_layouts(config, 8, Refused(), search, devices)]


def test_sizes_of_layouts_with_other_keys_are_those_of_a_plan_of_their_own():
    config = tiny()
    measured, found = MeasuredModel(cost_plan(config)), legal(config, EVERY)
    values = {each for layout, _ in found for each in layout.knobs}
    assert {key for key, _ in values} == {key for key, _ in SEARCH_KEYS.values()}
    assert ("optimizer.shard_ranks", 2) in values and ("optimizer.offload", True) in values
    for layout, plan in random.Random(0).sample(found, 40):
        alone, ways = MeasuredModel(plan), recomputed(plan)
        assert measured.held(plan, 0, ways) == alone.held(plan, 0, ways), layout
        assert measured.sent_by_stage(plan, 0, ways) == alone.sent_by_stage(plan, 0, ways), layout
        assert measured.working(plan, 0, "none") == alone.working(plan, 0, "none"), layout
        made = with_layout(config, layout)
        assert cost_plan(made) == plan and made.model.compile
    assert len(found) > 8 * len(legal(config, ()))


@pytest.mark.parametrize(
    ("name", "what", "ratio"), [("dtype", "parameters", 2), ("accumulate", "gradients", 0.5)]
)
def test_a_key_changes_what_it_is_for(name, what, ratio):
    config = tiny("model.dtype=bfloat16")
    planner = Planner(cost_plan(config), H100, 80e9)
    pairs = {}
    for layout, plan in legal(config, (name,)):
        pairs.setdefault(replace(layout, knobs=()), []).append(planner.measured.states(plan, 0))
    assert pairs and all(second[what] == ratio * first[what] for first, second in pairs.values())


def test_offloaded_state_takes_no_memory_of_a_device_and_more_time():
    config = tiny("model.dtype=bfloat16")
    planner = Planner(cost_plan(config), H100, 80e9)
    for layout, plan in legal(config, ())[:6]:
        moved = replace(plan, optimizer=replace(plan.optimizer, offload=True))
        here, there = (planner.estimate(layout, p, recomputed(p)) for p in (plan, moved))
        assert "optimizer" not in there.memory.bytes_of
        mine, moved = (
            each.memory.total - each.memory.bytes_of["allocator rounding"] for each in (here, there)
        )
        assert moved < mine and there.time.seconds > here.time.seconds


@pytest.mark.parametrize("model", ["dense", "experts", "hybrid", "LoRA", "offload"])
def test_a_bound_of_memory_is_below_it_and_changes_no_result(model):
    config = OF_MODEL[model]
    planner = Planner(cost_plan(config), H100, 80e9)
    search = ("offload",) if model == "offload" else ()
    found = [*legal_layouts(config, 4, Refused(), search, 2)]
    bounds, tried = planner._by_memory(found)
    totals = [planner.memory(plan, again).total for _, _, plan, again in bounds]
    best = {}
    for total, (bound, layout, _, _) in zip(totals, bounds, strict=True):
        assert bound <= total, layout
        best[layout.grid] = min(total, best.get(layout.grid, total))
    want, memory, asked = sorted(best.values())[:10], planner.memory, []
    planner.memory = lambda *of: asked.append(of) or memory(*of)
    result = planner.search(found, "memory")
    assert [each.memory.total for each in result.best] == want and len(want) == 10
    assert result.tried == tried == len(totals)
    assert len(asked) < len(totals)  # the others are known by their bound
    planner.room = want[0] - 1  # nothing fits: the ones that lack least
    lacking = [each.memory.total for each in planner.search(found, "memory").best]
    assert lacking == sorted(totals)[:10]


def test_an_uneven_load_is_that_of_as_many_more_choices():
    config = configured(EXPERTS, "model.dtype=float32", *TWO)
    plan = cost_plan(config)
    measured = MeasuredModel(plan, imbalance=2.0)
    block, given = measured.of_kind[0][0], measured._batch(plan, 0, "none", plan.micro_batch_size)
    experts = block.feed_forward
    twice = replace(experts, router=replace(experts.router, top_k=2 * experts.router.top_k))
    want = kept_bytes(replace(block, feed_forward=twice), *given)
    rows = MeasuredModel(plan, exact=True, imbalance=2.0).kept(plan, 0, "none")
    assert rows == pytest.approx(want, rel=0.01)
    assert want > 1.1 * MeasuredModel(plan, exact=True).kept(plan, 0, "none")


def test_an_uneven_load_takes_memory_and_time_of_experts_alone():
    for model, keys, grows in ((EXPERTS, TWO, True), (EXPERTS, (), False), (LLAMA, (), False)):
        config = configured(model, *keys)
        even, uneven = (
            plan_of_run(config, H100, 80e9, None, imbalance=factor).own for factor in (1.0, 1.5)
        )
        assert (uneven.memory.total > even.memory.total) is grows
        assert (uneven.time.seconds > even.time.seconds) is grows
        assert own_layout(config) == even.layout


def counted(function, calls):
    def made(*args, **how):
        calls.append((*args, *sorted(how.items())))
        return function(*args, **how)

    return made


@pytest.mark.smoke
def test_a_search_measures_a_block_once_for_each_way_of_cutting_it(monkeypatch):
    calls = {"kernels": [], "kept": [], "working": [], "actions": []}
    for module, name, of in (
        (measured, "block_kernels", "kernels"), (measured, "kept_bytes", "kept"),
        (measured, "working_bytes", "working"), (stage_tensors, "rank_actions", "actions"),
    ):  # fmt: skip
        monkeypatch.setattr(module, name, counted(getattr(module, name), calls[of]))
    dense = {**EXPERTS, "moe_config": {**EXPERTS["moe_config"], "layers": [1]}}
    config = configured(dense, "tokens.batch_accumulation_per_replica=64")
    found = [*legal_layouts(config, 16, Refused())]
    planner = Planner(cost_plan(config), H100, 80e9)
    planner.search(found, "memory")
    planner.search(found)
    cut = {(plan.parallelism.tp, plan.row_tokens, plan.parallelism.ep) for _, plan in found}
    tps, tokens = {tp for tp, *_ in cut}, {(tp, row) for tp, row, _ in cut}
    cuts, ways = len(tps) + len({(tp, ep) for tp, _, ep in cut}), len(RECOMPUTES)
    assert len({*calls["kernels"]}) == ways * cuts  # only experts are cut over ep
    blocks = len(tokens) + len(cut)
    # What a bound drops is not measured. A backward is one of one row, of two, and over cp.
    assert 0 < len({*calls["kept"]}) == len(calls["kept"]) <= ways * blocks
    assert 0 < len({*calls["working"]}) <= 3 * ways * blocks
    assert len({*calls["actions"]}) == len(calls["actions"]) < len(found)
    before = {name: len(each) for name, each in calls.items()}
    planner.search(found)
    assert before == {name: len(each) for name, each in calls.items()}


PLAN = cost_plan(tiny())
AGAIN = recomputed(PLAN)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: [*legal_layouts(tiny(), 0, Refused())], "ranks: 0 was given; it must be"),
        (lambda: [*legal_layouts(tiny(), 2, Refused(), ("speed",))], "--search speed: give some"),
        (lambda: plan_of_run(tiny(), H100, 0, 2), "--memory: 0 was given; it must be above 0"),
        (lambda: plan_of_run(tiny(), H100, 1, 2, "price", -1), "--price: -1 was given"),
        (lambda: plan_of_run(tiny(), H100, 1, 2, "speed"), "--objective speed: give one of time"),
        (lambda: Planner(PLAN, H100, 1).search([], "speed"), "--objective speed: give one of time"),
        (lambda: MeasuredModel(PLAN, imbalance=0.5), "imbalance: 0.5 was given; it must be a num"),
        (lambda: peak_memory(PLAN, MeasuredModel(PLAN), AGAIN[:1]), "give each of the 2 blocks"),
        (lambda: peak_memory(PLAN, MeasuredModel(PLAN), ["x"] * 2), "give each of the 2 blocks"),
        (lambda: peak_memory(PLAN, MeasuredModel(cost_plan(configured(EXPERTS))), AGAIN), "of an"),
        (lambda: instants(PLAN, MeasuredModel(PLAN), AGAIN, 7), "rank: 7 was given; paralleli"),
        (lambda: state_of_rank(PLAN, "gpu"), "place: 'gpu' was given; give one of all, host, dev"),
        (lambda: with_layout(tiny(), PlannedLayout(1, 1, 1, 1, micro_batch=0)), "micro_batch: 0"),
        (lambda: with_layout(tiny(), PlannedLayout(1, 1, 1, 1, recompute="x")), "recompute: 'x'"),
        (lambda: with_model(tiny(), "none", 0, "4M"), "--sequence-length 0: it must be at least"),
    ],
)  # fmt: skip
def test_bad_values_are_refused_by_name(call, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        call()


def test_what_a_backward_has_in_use_is_counted_block_by_block():
    experts = {**EXPERTS["moe_config"], "layers": [0], "moe_intermediate_size": 384}
    plan = cost_plan(configured({**EXPERTS, "num_hidden_layers": 4, "moe_config": experts}))
    measured, again = MeasuredModel(plan), ("full",) * 4
    most, behind = dict[int, int](), 0
    for block in reversed(range(4)):
        way = measured.kinds[block], again[block]
        behind += measured.kept(plan, *way)
        most[block] = measured.working(plan, *way)[0] - behind
    found = instants(plan, measured, again, 0)[1]["backward of a layer"]
    assert found == max(most.values()) == most[0] > most[3]
