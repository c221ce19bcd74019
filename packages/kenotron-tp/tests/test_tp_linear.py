"""Cut linear layers compute what ``nn.Linear`` computes: outputs and all gradients.

With small integers every sum is exact, so fp32 and bf16 are compared bit by bit; with normal draws
fp32 is compared to the default tolerances.
"""

import copy
import itertools

import pytest
import torch
from torch import nn
from torch.testing import assert_close
from tp_ranks import check_parameters, equal, normal, own_rows, part, parts_of_all, whole_numbers

import kenotron_tp as kt
from kenotron_dist import Axis, Mesh, all_gather, spawn
from kenotron_dist.placement import Chunk, Partial, Shard, parameter_layouts
from kenotron_dist.testing import on_ranks
from kenotron_tp import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    join_tokens,
    split_tokens,
)

TOKENS, IN = 12, 24
KV_HEADS = {1: 2, 2: 1, 3: 1, 4: 2, 8: 2}
SHAPES = {  # 11 and 2 tokens: some ranks have padding, some nothing else
    "rows": (12, IN),
    "odd": (11, IN),
    "none": (0, 3, IN),
    "few": (2, 3, IN),
    "deep": (5, 2, 3, IN),
    "strided": (7, 2, IN),
    "many": (701, IN),  # sums in two rounds
}
MODES = [
    {},
    {"overlap": True},
    {"sequence_parallel": True},
    {"sequence_parallel": True, "overlap": True},
    {"sequence_parallel": True, "regather": True},
    {"sequence_parallel": True, "regather": True, "overlap": True},
]
EXACT, DRAWN = (whole_numbers, equal), (normal, assert_close)
KINDS = [(torch.float32, EXACT), (torch.bfloat16, EXACT), (torch.float32, DRAWN)]


def pieces_of(n):
    """Ways to cut the output features over n ranks."""
    kv = KV_HEADS[n]
    return [
        None if 12 % n == 0 else (Chunk(24),),
        (Chunk(24), Chunk(24)),
        (Chunk(24, parts=24), Chunk(2 * kv, parts=kv), Chunk(2 * kv, parts=kv)),
        (Chunk(7, pad=-7 % n), Chunk(24)),
        (Chunk(1, pad=n - 1), Chunk(3, parts=1)),
    ]


def fill(layer, reference, draw, dtype):
    """Give the reference new values and the layer its part of them."""
    with torch.no_grad():
        for seed, parameter in enumerate(reference.parameters()):
            parameter.copy_(draw(*parameter.shape, seed=seed, dtype=dtype))
        for name, parameter in layer.named_parameters():
            placement = layer.placements.get(name)
            whole = reference.get_parameter(name)
            cut = isinstance(placement, Shard)
            value = part(whole, placement.dim, layer.mesh, placement.chunks) if cut else whole
            parameter.copy_(value)


def pair(make, reference, mesh, draw, dtype):
    """The cut layer and the whole one, begun alike by torch's generator, then filled."""
    torch.manual_seed(5)
    layer = make(mesh["tp"])
    torch.manual_seed(5)
    whole = reference()
    for name, parameter in layer.named_parameters():
        placement = layer.placements.get(name)
        expected = whole.get_parameter(name)
        if isinstance(placement, Shard):
            expected = part(expected, placement.dim, mesh, placement.chunks)
        equal(parameter.detach(), expected.detach())
    layer.mesh = mesh
    fill(layer, whole, draw, dtype)
    return layer, whole


def spread(x, shape):
    """The same values, not contiguous."""
    return x.transpose(0, -1).contiguous().transpose(0, -1) if shape == "strided" else x


def scale_of(x):
    """Keeps sums over many tokens near 1; a power of two keeps them exact."""
    return 1.0 if len(x) < 100 else 2.0**-6


def check_column(mesh, mode, bias, dtype, kind, chunks, shape):
    draw, close = kind
    me, sequence = mesh["tp"].rank, mode.get("sequence_parallel", False)
    out = sum(chunk.size for chunk in chunks) if chunks else 12
    options = {"bias": bias, "dtype": dtype}
    layer, whole = pair(
        lambda axis: ColumnParallelLinear(IN, out, axis, chunks=chunks, **mode, **options),
        lambda: nn.Linear(IN, out, **options),
        mesh,
        draw,
        dtype,
    )
    x = draw(*SHAPES[shape], seed=10, dtype=dtype).requires_grad_()
    own = own_rows(x.detach(), mesh) if sequence else x.detach()
    own = spread(own.clone(), shape).requires_grad_()
    y, expected = layer(own, tokens=len(x)), parts_of_all(whole(x), -1, mesh, chunks)
    weights = [draw(*each.shape, seed=20 + r, dtype=dtype) for r, each in enumerate(expected)]
    for r, each in enumerate(expected):  # what a rank's padding is multiplied with is nobody's
        weights[r] *= scale_of(x) * part_mask(each, whole, x, mesh, chunks, r)
    close(y.detach(), expected[me].detach())
    y.backward(spread(weights[me], shape))
    sum((e * w).sum().double() for e, w in zip(expected, weights, strict=True)).backward()
    close(own.grad, own_rows(x.grad, mesh) if sequence else x.grad)
    check_parameters(layer, whole, mesh, close)


def part_mask(each, whole, x, mesh, chunks, rank):
    """1 where a rank's output is a feature, 0 where it is padding."""
    ones = torch.ones(*x.shape[:-1], whole.out_features, dtype=each.dtype)
    return parts_of_all(ones, -1, mesh, chunks)[rank]


def check_row(mesh, mode, bias, dtype, kind, shape):
    draw, close = kind
    sequence = mode.get("sequence_parallel", False)
    mode = {name: value for name, value in mode.items() if name != "regather"}
    options = {"bias": bias, "dtype": dtype}
    layer, whole = pair(
        lambda axis: RowParallelLinear(IN, 7, axis, **mode, **options),
        lambda: nn.Linear(IN, 7, **options),
        mesh,
        draw,
        dtype,
    )
    x = draw(*SHAPES[shape], seed=10, dtype=dtype).requires_grad_()
    own = spread(part(x.detach(), -1, mesh), shape).requires_grad_()
    y, expected = layer(own), whole(x)
    weight = draw(*expected.shape, seed=20, dtype=dtype) * scale_of(x)
    real = min(max(len(x) - mesh["tp"].rank * len(y), 0), len(y)) if sequence else len(y)
    found = y.detach()
    close(found[:real], (own_rows(expected.detach(), mesh) if sequence else expected)[:real])
    assert found[real:].eq(0 if layer.bias is None else layer.bias.detach()).all()
    y.backward(spread(own_rows(weight, mesh) if sequence else weight, shape))
    expected.backward(weight)
    close(own.grad, part(x.grad, -1, mesh))
    check_parameters(layer, whole, mesh, close)


def check_grid(mesh):
    """All modes, with everything else in turn: each value meets each mode several times."""
    pieces, turn = pieces_of(mesh["tp"].size), itertools.count()
    for mode, (dtype, kind), bias in itertools.product(MODES, KINDS, [False, True]):
        for _ in range(3):
            i = next(turn)
            shape = list(SHAPES)[i % len(SHAPES)]
            check_column(mesh, mode, bias, dtype, kind, pieces[i % len(pieces)], shape)
            check_row(mesh, mode, bias, dtype, kind, shape)


@pytest.mark.parametrize("tp", [1, 2, 3, 4, 8])
def test_cut_layers_are_whole_layers(tp):
    on_ranks(check_grid, tp=tp, seconds=120)


class Block(nn.Module):
    """A gated feed-forward with its residual, cut or whole."""

    def __init__(self, axis, sequence):
        super().__init__()
        chunks = (Chunk(24), Chunk(24))
        options = {"bias": True, "sequence_parallel": sequence}
        self.up = ColumnParallelLinear(8, 48, axis, chunks=chunks, **options)
        self.down = RowParallelLinear(24, 8, axis, **options)

    def forward(self, x):
        gate, up = self.up(x).chunk(2, -1)
        return x + self.down(torch.nn.functional.silu(gate) * up)


def run_block(block, x, weight):
    x = x.clone().requires_grad_()
    y = block(x)
    (y * weight).sum().backward()
    found = [y.detach(), x.grad, *(p.grad for p in block.parameters())]
    block.zero_grad()
    return found


def check_block(mesh, sequence):
    n, me = mesh["tp"].size, mesh["tp"].rank
    torch.manual_seed(1)
    block = Block(mesh["tp"], sequence)
    torch.manual_seed(1)
    whole = Block(Axis.solo("tp"), sequence)
    x, weight = normal(TOKENS, 8, seed=2), normal(TOKENS, 8, seed=3)
    own = [t.chunk(n)[me] if sequence else t for t in (x, weight)]
    found, expected = run_block(block, *own), run_block(whole, x, weight)
    for a, b in zip(found[:2], expected[:2], strict=True):
        assert_close(a, b.chunk(n)[me] if sequence else b)

    twin = copy.deepcopy(block)
    assert twin.up.axis is mesh["tp"] and twin.up.placements == block.up.placements
    other = Block(mesh["tp"], sequence)
    other.load_state_dict(block.state_dict())
    late = Block(mesh["tp"], sequence).to("meta")
    late.load_state_dict(block.state_dict(), assign=True)
    assert parameter_layouts(late, mesh.sizes) == parameter_layouts(block, mesh.sizes)
    in_place = copy.deepcopy(block)
    in_place.compile(backend="aot_eager")
    for each in (twin, other, late, torch.compile(block, backend="aot_eager"), in_place):
        for a, b in zip(run_block(each, *own), found, strict=True):
            equal(a, b)


@pytest.mark.parametrize(("tp", "sequence"), [(1, False), (2, False), (2, True), (3, True)])
@pytest.mark.by_turns(1)
def test_a_pair_of_layers_whole_copied_loaded_and_compiled(tp, sequence):
    on_ranks(check_block, sequence, tp=tp)


def gather_outputs(mesh):
    """Without chunks the outputs of the ranks are the whole output, in order."""
    torch.manual_seed(0)
    layer = ColumnParallelLinear(4, 8, mesh["tp"])
    x = normal(3, 4, seed=1)
    return all_gather(layer(x).detach(), mesh["tp"], -1)


def test_gathered_outputs_are_those_of_a_linear():
    torch.manual_seed(0)
    expected = nn.Linear(4, 8, bias=False)(normal(3, 4, seed=1)).detach()
    for found in on_ranks(gather_outputs, tp=2):
        assert_close(found, expected)


def axis_of(size, rank=0):
    """An axis to build layers on; nothing is sent while they are built."""
    return Axis("tp", rank, tuple(range(size)))


def test_placements_say_what_is_cut():
    column = ColumnParallelLinear(4, 6, axis_of(2), bias=True)
    rows = Shard("tp", 0, (Chunk(6),))
    assert column.placements == {"weight": rows, "bias": rows}
    assert (column.weight.shape, column.bias.shape) == ((3, 4), (3,))
    row = RowParallelLinear(4, 6, axis_of(2), bias=True)
    assert row.placements == {"weight": Shard("tp", 1)}
    assert (row.weight.shape, row.bias.shape) == ((6, 2), (6,))
    row = RowParallelLinear(4, 6, axis_of(2), bias=True, sequence_parallel=True)
    assert row.placements == {"weight": Shard("tp", 1), "bias": Partial("tp")}
    assert RowParallelLinear(4, 6, axis_of(2)).bias is None
    other = ColumnParallelLinear(4, 6, Axis("ep", 0, (0, 1)))
    assert other.placements["weight"].axis == "ep"


def test_layers_are_built_on_meta_in_the_shape_of_the_part():
    options = {"bias": True, "device": "meta", "dtype": torch.bfloat16}
    for layer in (
        ColumnParallelLinear(4, 6, axis_of(3), **options),
        RowParallelLinear(6, 4, axis_of(3), **options),
    ):
        assert layer.weight.is_meta and layer.bias.is_meta
        assert layer.weight.dtype == torch.bfloat16
        assert layer.weight.numel() == 8


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (
            lambda: ColumnParallelLinear(4, 15, axis_of(2)),
            "cannot split dim 0 of size 15 over 2 tp ranks",
        ),
        (
            lambda: RowParallelLinear(15, 4, axis_of(2), device="meta"),
            "cannot split dim 1 of size 15 over 2 tp ranks",
        ),
        (
            lambda: ColumnParallelLinear(4, 8, axis_of(2), chunks=[Chunk(4), Chunk(2)]),
            r"chunks \[4, 2\] do not add up to out_features 8",
        ),
        (
            lambda: ColumnParallelLinear(4, 6, axis_of(4), chunks=[Chunk(6, parts=3)]),
            "cannot place 3 indivisible parts of dim 0 over 4 tp ranks: one number must divide",
        ),
        (
            lambda: ColumnParallelLinear(4, 6, axis_of(2), chunks=[Chunk(6, parts=4)]),
            "cannot split dim 0 of size 6 over 4 parts",
        ),
    ],
)
def test_sizes_that_do_not_fit_are_an_error(build, words):
    with pytest.raises(ValueError, match=words):
        build()


def build_all(axis):
    """Every layer in every mode, with what it is called with."""
    for mode in MODES:
        row_mode = {name: value for name, value in mode.items() if name != "regather"}
        for bias in (False, True):
            yield (
                ColumnParallelLinear(4, 4 * axis.size, axis, bias=bias, **mode),
                (3, 4),
                {"tokens": 3 * axis.size - 1},
            )
            yield RowParallelLinear(4 * axis.size, 6, axis, bias=bias, **row_mode), (5, 4), {}


def change_in_place(mesh):
    """What a layer returns may be changed in place, as what torch's returns."""
    axis = mesh["tp"]
    for layer, shape, options in build_all(axis):
        options = options if layer.sequence_parallel else {}
        x = normal(*shape, seed=1).requires_grad_()
        expected = torch.autograd.grad((layer(x, **options) * 3 + 1).square().sum(), x)[0]
        y = layer(x, **options)
        y *= 3
        y += 1
        equal(torch.autograd.grad(y.square().sum(), x)[0], expected)
    table = VocabParallelEmbedding(9, 4, axis)
    y = table(torch.arange(9))
    y *= 2
    y.sum().backward()
    for cut in (split_tokens, join_tokens):
        x = normal(4, 2, seed=1).requires_grad_()
        y = cut(x * 1, axis)
        y += 1
        y.sum().backward()


def test_results_may_be_changed_in_place():
    for tp in (2, 3):
        on_ranks(change_in_place, tp=tp)


def survive(mesh):
    """A product that cannot be made leaves the axis usable: what was under way still arrives."""
    layer = ColumnParallelLinear(4, 8, mesh["tp"], sequence_parallel=True, overlap=True)
    for wrong in (torch.zeros(3, 5), torch.zeros(3, 4, dtype=torch.bfloat16)):
        with pytest.raises((ValueError, RuntimeError)):
            layer(wrong)
    return layer(torch.zeros(3, 4)).shape


def test_an_error_in_the_middle_does_not_end_communication():
    assert on_ranks(survive, tp=2, seconds=20) == [(6, 4)] * 2


def test_tokens_have_features():
    for layer, features in ((ColumnParallelLinear, 4), (RowParallelLinear, 2)):
        with pytest.raises(ValueError, match=r"under sequence parallelism x \(.,\) needs its tok"):
            layer(4, 4, axis_of(2), sequence_parallel=True)(torch.zeros(features))


def test_what_a_layer_cannot_take_is_named():
    for layer, whose in (
        (ColumnParallelLinear(6, 4, axis_of(2)), "6 features along its last dim, the in_features"),
        (RowParallelLinear(6, 4, axis_of(2)), "3 features along its last dim, this rank's part"),
    ):
        with pytest.raises(ValueError, match=rf"x \(2, 5\) needs {whose}"):
            layer(torch.zeros(2, 5))
    for make in (ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding):
        with pytest.raises(
            TypeError, match=r'axis is a str: give one axis of a mesh, mesh\["tp"\]'
        ):
            make(4, 4, "tp")


def test_a_layer_describes_itself():
    column = ColumnParallelLinear(6, 4, axis_of(2), bias=True, overlap=True)
    assert repr(column) == (
        "ColumnParallelLinear(6 -> 2 on rank 0 of 2 along tp, bias=True, "
        "sequence_parallel=False, overlap=True, regather=False)"
    )
    assert "3 -> 4 on rank 1 of 2" in repr(RowParallelLinear(6, 4, axis_of(2, 1)))
    assert "3 of 5 rows x 4 on rank 0 of 2" in repr(VocabParallelEmbedding(5, 4, axis_of(2)))


def test_a_frozen_weight_does_not_hide_a_bias_from_a_change_of_mode():
    layer = RowParallelLinear(4, 4, axis_of(2), bias=True)
    layer.weight.requires_grad_(False)
    with pytest.raises(ValueError, match="sequence_parallel=True in forward, but the layer was"):
        layer(torch.zeros(2, 2), sequence_parallel=True)


def keep_double(mesh):
    layer = ColumnParallelLinear(4, 8, mesh["tp"], dtype=torch.float64)
    with torch.autocast("cpu", torch.bfloat16):
        return layer(torch.zeros(2, 4, dtype=torch.float64)).dtype


def test_autocast_leaves_fp64_alone():
    assert on_ranks(keep_double, tp=2) == [torch.float64] * 2


def cut_with_weights(mesh: Mesh, sequence: bool) -> list[torch.Tensor]:
    """What cut copies of whole modules compute, and the gradients that land on the whole ones'."""
    torch.manual_seed(3)
    table, up, down = nn.Embedding(11, 8), nn.Linear(8, 12), nn.Linear(12, 8, bias=False)
    up.weight.requires_grad_(False)
    tp, tokens = mesh["tp"], torch.arange(10)
    embedding = kt.VocabParallelEmbedding.from_embedding(table, tp, sequence_parallel=sequence)
    column = kt.ColumnParallelLinear.from_linear(up, tp, sequence_parallel=sequence)
    row = kt.RowParallelLinear.from_linear(down, tp, sequence_parallel=sequence)
    frozen = [p.requires_grad for p in (column.weight, column.bias, row.weight)]
    assert frozen == [False, True, True] and row.bias is None
    y = row(torch.relu(column(embedding(tokens), tokens=10)))
    if sequence:
        y = kt.join_tokens(y, tp)[:10]
    want = down(torch.relu(up(table(tokens))))
    with torch.no_grad():
        down.weight.zero_()  # the copies are their own
    torch.testing.assert_close(y, want)
    return [column.weight, row.weight]


@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("tp", [1, 2])
def test_a_whole_module_is_cut_with_its_weights(tp: int, sequence: bool) -> None:
    torch.manual_seed(3)
    _, up, down = nn.Embedding(11, 8), nn.Linear(8, 12), nn.Linear(12, 8, bias=False)
    columns, rows = zip(*spawn(cut_with_weights, sequence, tp=tp), strict=True)
    assert torch.equal(torch.cat(columns), up.weight)
    assert torch.equal(torch.cat(rows, dim=1), down.weight)


@pytest.mark.parametrize("option", ["max_norm", "scale_grad_by_freq", "sparse"])
def test_an_embedding_that_does_more_is_not_cut(option: str) -> None:
    with pytest.raises(ValueError, match=f"{option} (1.0|True) of an nn.Embedding is not known"):
        options = {option: 1.0 if option == "max_norm" else True}
        kt.VocabParallelEmbedding.from_embedding(nn.Embedding(4, 2, **options), Axis.solo("tp"))
