"""Bytes that are no tensors: segments of the allocator, communicators, the context, graphs."""

from dataclasses import replace

import pytest
from cost_cases import EXPERTS, H100, LLAMA, configured, tiny

from kenotron_cost import machine_named
from kenotron_cost.allocator import MIB, rounding, taken_bytes
from kenotron_cost.cost_plan import cost_plan
from kenotron_cost.layouts import PlannedLayout, with_layout
from kenotron_cost.measured import MeasuredModel
from kenotron_cost.memory import instants, peak_memory
from kenotron_cost.overheads import communicators, rounded_up
from kenotron_cost.recomputed import recomputed
from kenotron_models.block_costs import kept_bytes

CLASSES = {"context", "communicators", "allocator rounding"}


@pytest.mark.parametrize(
    ("blocks", "mib"),
    [
        ({}, 0),
        ({0: 5}, 0),
        ({1: 1}, 2),  # a small segment
        ({MIB: 2}, 2),
        ({MIB: 3}, 4),
        ({1: 4096}, 2),  # each is 512 bytes
        ({1: 4097}, 4),
        ({MIB + 1: 1}, 20),  # a shared large segment
        ({6 * MIB: 3}, 20),
        ({6 * MIB: 4}, 40),
        ({6 * MIB: 3, 2 * MIB: 1}, 20),  # which lies behind the three
        ({6 * MIB: 3, 2 * MIB: 2}, 40),
        ({6 * MIB: 4, 2 * MIB: 8}, 40),  # 1 behind three, and 7 behind the fourth
        ({6 * MIB: 4, 2 * MIB: 9}, 60),
        ({10 * MIB - 512: 2}, 20),
        ({10 * MIB: 1}, 10),  # a segment of its own
        ({11 * MIB: 2}, 24),
        ({11 * MIB: 2, 6 * MIB: 1, 1: 1}, 24 + 20 + 2),
    ],
)
def test_blocks_take_the_segments_of_torchs_allocator(blocks, mib):
    assert taken_bytes(blocks) == mib * MIB
    assert rounding(blocks) == mib * MIB - sum(size * n for size, n in blocks.items())


@pytest.mark.parametrize(
    ("model", "flags", "counts"),
    [
        # The world of 2, whose lines are all axes.
        (LLAMA, ("parallelism.dp=2",), [1]),
        (LLAMA, ("parallelism.tp=2",), [1]),
        # dp, tp and the world.
        (LLAMA, ("parallelism.dp=2", "parallelism.tp=2"), [3]),
        # dp, cp, tp, dp x cp and the world.
        (LLAMA, ("parallelism.dp=2", "parallelism.cp=2", "parallelism.tp=2"), [5]),
        # The world, and a group for each direction between neighbours: the ring is not closed.
        (LLAMA | {"tie_word_embeddings": False}, ("parallelism.pp=2",), [1 + 2, 1 + 2]),
        (
            LLAMA | {"tie_word_embeddings": False, "num_hidden_layers": 4},
            ("parallelism.pp=4",),
            [1 + 2, 1 + 4, 1 + 4, 1 + 2],
        ),
        # Ends that share a matrix, and those between them.
        (LLAMA | {"num_hidden_layers": 4}, ("parallelism.pp=4",), [4, 6, 6, 4]),
        # Pairs of tp that share one of 2 kv heads; tp is the world.
        (LLAMA | {"num_key_value_heads": 2}, ("parallelism.tp=4",), [2]),
        # Blocks of dp, and their like.
        (LLAMA, ("parallelism.dp=4", "optimizer.zero_stage=1", "optimizer.shard_ranks=2"), [3]),
        # dp, tp, the world, and ep of 2 of its 4 ranks, which are the lines of tp.
        (EXPERTS, ("parallelism.dp=2", "parallelism.tp=2", "parallelism.ep=2"), [3]),
        (EXPERTS, ("parallelism.dp=4", "parallelism.ep=2"), [3]),
    ],
)
def test_communicators_are_the_groups_of_a_layout(model, flags, counts):
    plan = cost_plan(configured(model, *flags))
    measured, buffers = MeasuredModel(plan), 16 * 10 * MIB
    assert [communicators(plan, measured, rank) for rank in range(len(counts))] == counts
    for rank, count in enumerate(counts):
        for each in instants(plan, measured, recomputed(plan), rank, H100):
            assert each["communicators"] == count * buffers
    cpu = instants(plan, measured, recomputed(plan), 0, machine_named("cpu"))
    assert all("communicators" not in each for each in cpu)


def test_classes_that_are_no_tensors_are_added_to_those_that_are():
    plan = cost_plan(tiny("parallelism.dp=2"))
    measured, again = MeasuredModel(plan), recomputed(plan)
    tensors, every = (instants(plan, measured, again, 0, of) for of in (None, H100))
    for without, each in zip(tensors, every, strict=True):
        assert each.keys() - without.keys() == CLASSES
        assert {what: each[what] for what in without} == without
        assert each["context"] == H100["context"] == 287_047_680
    peak = peak_memory(plan, measured, again, H100)
    assert peak.total == sum(peak.bytes_of.values()) == max(sum(each.values()) for each in every)
    on_cpu = replace(plan, device="cpu")
    assert rounded_up(on_cpu, measured, again, 0) == (0, 0)


def test_rounding_is_that_of_the_tensors_of_the_rank_and_of_its_activations():
    config = tiny("model.model_config.tie_word_embeddings=false")
    plan = cost_plan(config)
    measured, again = MeasuredModel(plan, exact=True), recomputed(plan)
    own, states = MeasuredModel(plan).tensors(plan)[0], measured.states(plan, 0)
    blocks = {states["gradients"]: 1}
    for each, n in own.items():  # a parameter in bf16, its master, two moments in fp32
        for size, count in ((2, 1), (4, 3)):
            blocks[size * each.count] = blocks.get(size * each.count, 0) + count * n
    assert sum(size * n for size, n in blocks.items()) == sum(states.values())
    found, kept = rounded_up(plan, measured, again, 0)
    assert found == rounding(blocks) > 0
    storages = measured.kept_storages(plan, 0, again[0])
    width, batch = measured._batch(plan, 0, again[0], plan.micro_batch_size)
    total = sum(size * n for size, n in storages.items())
    assert total == kept_bytes(measured.of_kind[0][0], width, batch)
    assert kept == rounding({size: 2 * n for size, n in storages.items()})  # of two blocks


def test_a_graph_keeps_its_pool_through_the_update_and_has_nodes():
    layout = PlannedLayout(2, 1, 1, 1, zero=1)
    plan = cost_plan(with_layout(tiny(), layout))
    measured, again = MeasuredModel(plan), recomputed(plan)
    graph = replace(plan, cuda_graph=True)
    forward, backward, update = instants(graph, measured, again, 0, H100)
    without = instants(plan, measured, again, 0, H100)
    kernels = sum(sum(w.kernels for w in measured.kernels(plan, 0, way)) for way in again)
    for each, plain in zip((forward, backward), without, strict=False):
        assert each == plain | {"nodes of the graph": 10_000 * kernels}
    pool = max(sum(each.values()) for each in (forward, backward)) - sum(without[2].values())
    rounded = forward["allocator rounding"] - update["allocator rounding"]
    assert update["pool of the graph"] == pool - 10_000 * kernels - rounded > 0
