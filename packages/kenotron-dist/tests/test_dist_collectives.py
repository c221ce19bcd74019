"""Every verb on one to four ranks: exact, the same on all ranks, whatever the place in the buffer.

Values are multiples of 1/16 below 16, so that any sum of four is exact in fp32 and a bf16 result is
the fp64 sum rounded once.
"""

import pytest
import torch

from kenotron_dist import (
    Axis,
    Handle,
    all_gather,
    all_reduce,
    all_to_all,
    barrier,
    broadcast,
    receive,
    reduce_scatter,
    send,
    shift,
)
from kenotron_dist.sum_tree import tree_sum
from kenotron_dist.testing import on_ranks

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64]
FEW = [(), (0,), (5, 3)]
SHAPES = [(), (0,), (1,), (7,), (5, 3), (3, 0, 2), (16_384,), (16_385,), (3, 7001)]


def exact(rank, shape, dtype=torch.float64, seed=0):
    """The tensor of a rank, which every rank can make."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    drawn = torch.randint(-256, 256, shape, generator=generator, device="cpu") / 16
    return drawn.to(torch.get_default_device(), dtype)


def every(axis, shape, dtype=torch.float64, seed=0):
    """The tensors of all ranks."""
    return torch.stack([exact(rank, shape, dtype, seed) for rank in range(axis.size)])


def same(found, expected):
    """Bitwise, shape and dtype too."""
    assert found.dtype == expected.dtype and found.shape == expected.shape
    assert torch.equal(found, expected), (found, expected)


def check_sums(mesh, dtypes=DTYPES):
    axis = mesh["tp"]
    for dtype in dtypes:
        for shape in SHAPES if dtype in DTYPES[:2] else FEW:
            x = exact(axis.rank, shape, dtype)
            kept = x.clone()
            rows = every(axis, shape, dtype)
            same(all_reduce(x, axis), rows.double().sum(0).to(dtype))
            same(all_reduce(x, axis, "max"), rows.amax(0))
            same(all_reduce(x, axis, op="min"), rows.amin(0))
            same(all_reduce(x, axis, async_op=True).wait(), rows.double().sum(0).to(dtype))
            same(x, kept)
    flags = torch.tensor([axis.rank == 0, False, True])
    same(all_reduce(flags, axis, "max"), torch.tensor([True, False, True]))
    strided = exact(axis.rank, (6, 9)).t()[::2]
    same(all_reduce(strided, axis), every(axis, (6, 9)).sum(0).t()[::2])


def check_moves(mesh, summed=DTYPES):
    axis = mesh["tp"]
    n = axis.size
    for dtype in [*DTYPES, torch.bool, torch.uint8]:
        for shape in (
            [(0,), (7,), (5, 3), (3, 0, 2), (2, 3, 4)] if dtype in DTYPES[:2] else [(5, 3)]
        ):
            x, rows = exact(axis.rank, shape, dtype), every(axis, shape, dtype)
            for dim in range(-len(shape), len(shape)):
                same(all_gather(x, axis, dim), torch.cat(rows.unbind(), dim))
        scalar = exact(axis.rank, (), dtype)
        same(all_gather(scalar, axis), every(axis, (), dtype) if n > 1 else scalar)
    for dtype in summed:
        for shape in [(4 * n,), (n, 0), (5 * n, n, 2 * n)] if dtype in DTYPES[:2] else [(n, 2)]:
            x, rows = exact(axis.rank, shape, dtype), every(axis, shape, dtype)
            whole = rows.double().sum(0).to(dtype)
            for dim in [d for d in range(-len(shape), len(shape)) if shape[d] % n == 0]:
                same(reduce_scatter(x, axis, dim), whole.chunk(n, dim)[axis.rank])
    x = exact(axis.rank, (3, 2 * n)).t()
    whole = every(axis, (3, 2 * n)).sum(0).t()
    same(reduce_scatter(x, axis), whole.chunk(n)[axis.rank])
    same(all_gather(x, axis), torch.cat([exact(r, (3, 2 * n)).t() for r in range(n)]))


def check_all_to_all(mesh):
    axis = mesh["tp"]
    n, me = axis.size, axis.rank
    for dtype in [*DTYPES, torch.bool]:
        x = exact(me, (2 * n, 3), dtype)
        expected = [exact(r, (2 * n, 3), dtype)[2 * me : 2 * me + 2] for r in range(n)]
        same(all_to_all(x, axis), torch.cat(expected))
        counts = [[(source + 2 * to) % 3 for to in range(n)] for source in range(n)]  # some zero
        sent = [exact(r, (sum(counts[r]), 2), dtype).split(counts[r]) for r in range(n)]
        incoming = [counts[r][me] for r in range(n)]
        found = all_to_all(exact(me, (sum(counts[me]), 2), dtype), axis, counts[me], incoming)
        same(found, torch.cat([sent[r][me] for r in range(n)]))
    only_first = [5] + [0] * (n - 1)
    incoming = [5] * n if me == 0 else [0] * n
    found = all_to_all(exact(me, (5,)), axis, only_first, incoming)
    same(found, every(axis, (5,)).flatten() if me == 0 else torch.empty(0).double())
    same(all_to_all(torch.empty(0, 3), axis), torch.empty(0, 3))
    strided = exact(me, (3, 2 * n)).t()
    parts = [exact(r, (3, 2 * n)).t()[2 * me : 2 * me + 2] for r in range(n)]
    same(all_to_all(strided, axis, async_op=True).wait(), torch.cat(parts))


def check_broadcast_and_barrier(mesh):
    axis = mesh["tp"]
    for source in range(axis.size):
        for dtype in [*DTYPES, torch.bool]:
            x = exact(axis.rank, (3, 2), dtype)
            found = broadcast(x, axis, source)
            assert found is x
            same(x, exact(source, (3, 2), dtype))
    barrier(axis)


def check_several_in_flight(mesh):
    axis, n = mesh["tp"], mesh["tp"].size
    sizes = [10, 20_000, 300, 17_000]
    sums = [all_reduce(exact(axis.rank, (s,), seed=s), axis, async_op=True) for s in sizes]
    gathered = all_gather(exact(axis.rank, (3,)), axis, async_op=True)
    part = reduce_scatter(exact(axis.rank, (4 * n,)), axis, async_op=True)
    same(part.wait(), every(axis, (4 * n,)).sum(0).chunk(n)[axis.rank])
    for s, handle in reversed(list(zip(sizes, sums, strict=True))):
        same(handle.wait(), every(axis, (s,), seed=s).sum(0))
    same(gathered.wait(), every(axis, (3,)).flatten())
    assert gathered.wait() is gathered.wait()


def check_rounds(mesh):
    """A sum in two rounds, both started before the wait."""
    axis, shape = mesh["tp"], (3, 7001)
    flight = all_reduce(exact(axis.rank, shape), axis, async_op=True)
    for _ in range(3):
        flight.advance()
    same(flight.wait(), sum(every(axis, shape)))
    flight.advance()
    same(flight.wait(), sum(every(axis, shape)))


def check_abandoned(mesh):
    """A handle that nobody waits for does no harm to what follows."""
    axis = mesh["tp"]
    for _ in range(3):
        all_gather(torch.ones(70_000), axis, async_op=True)
        same(all_reduce(torch.ones(5), axis), torch.full((5,), float(axis.size)))


def check_no_graph(mesh):
    """Collectives are no part of the autograd graph; kenotron_dist.autograd has those that are."""
    axis = mesh["tp"]
    if axis.size == 1:
        return
    x = torch.ones(2 * axis.size, requires_grad=True)
    for found in (
        all_reduce(x, axis),
        all_reduce(x, axis, "max"),
        all_gather(x, axis),
        reduce_scatter(x, axis),
        all_to_all(x, axis),
        shift(x, axis),
    ):
        assert not found.requires_grad


def check_all(mesh):
    check_abandoned(mesh)
    check_no_graph(mesh)
    check_rounds(mesh)
    check_sums(mesh)
    check_moves(mesh)
    check_all_to_all(mesh)
    check_broadcast_and_barrier(mesh)
    check_several_in_flight(mesh)


@pytest.mark.parametrize("tp", [1, 2, 3, 4])
def test_every_verb_is_exact(tp):
    on_ranks(check_all, tp=tp)


def place_independence(mesh):
    axis = mesh["tp"]
    generator = torch.Generator().manual_seed(axis.rank)
    x = torch.randn(40_001, generator=generator) * 10 ** torch.randn(40_001, generator=generator)
    results = []
    for dtype in (torch.float32, torch.bfloat16):
        y = x.to(dtype)
        whole = all_reduce(y, axis)
        for places in (1, 777, 20_000):
            assert torch.equal(all_reduce(y.roll(places), axis), whole.roll(places))
        pieces = [all_reduce(piece, axis) for piece in y.split(5000)]  # the small path
        assert torch.equal(torch.cat(pieces), whole)
        padded = torch.cat([y, y.new_zeros(-len(y) % axis.size)])
        part = reduce_scatter(padded, axis)
        assert torch.equal(all_gather(part, axis)[: len(y)], whole)
        assert torch.equal(whole, tree_sum(all_gather(y[None], axis)))
        results.append(whole)
    return results


@pytest.mark.smoke
@pytest.mark.gloo(reason="NCCL adds an element in an order that depends on its place")
@pytest.mark.parametrize("tp", [2, 3, 4])
def test_a_sum_has_the_same_bits_in_every_place_and_on_every_rank(tp):
    first, *others = on_ranks(place_independence, tp=tp)
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))


def transfers(mesh):
    axis = mesh["pp"]
    n, me = axis.size, axis.rank
    after, before = (me + 1) % n, (me - 1) % n
    for dtype in (torch.float32, torch.bfloat16, torch.bool):
        outs = [torch.empty(3, 4, dtype=dtype) for _ in range(3)]
        receiving = [receive(out, axis, before, tag) for tag, out in enumerate(outs)]
        sending = [  # in the other order, and not contiguous
            send(exact(me, (4, 3), dtype, seed=tag).t(), axis, after, tag) for tag in (2, 1, 0)
        ]
        for tag in (1, 2, 0):
            found = receiving[tag].wait()
            assert found is outs[tag]
            same(found, exact(before, (4, 3), dtype, seed=tag).t())
        for handle in sending:
            handle.wait()
    outside = []
    for call in (
        lambda: send(torch.zeros(1), axis, me),
        lambda: receive(torch.zeros(1), axis, n),
        lambda: receive(torch.zeros(2, 2).t(), axis, after),
    ):
        with pytest.raises(ValueError) as error:
            call()
        outside.append(str(error.value))
    return outside


@pytest.mark.gloo(reason="NCCL has no tags: the next send meets the next receive")
@pytest.mark.parametrize("pp", [2, 3])
def test_transfers_meet_by_tag(pp):
    for rank, errors in enumerate(on_ranks(transfers, pp=pp)):
        assert errors == [
            f"send: index {rank} of the pp axis is this rank itself",
            f"receive: index {pp} is outside the pp axis of {pp} ranks",
            "receive: the tensor must be contiguous, it is overwritten in place",
        ]


def shifts(mesh):
    """Every rank's tensor goes round, several laps in flight at once, none of them confused."""
    axis = mesh["tp"]
    n, me = axis.size, axis.rank
    own = exact(me, (3, 2))
    flights = {by: shift(own.t(), axis, by, async_op=True) for by in range(-n, 2 * n)}
    total = all_reduce(own, axis, async_op=True)
    for by, flight in reversed(flights.items()):
        same(flight.wait(), exact((me - by) % n, (3, 2)).t())
    same(total.wait(), sum(every(axis, (3, 2))))
    same(shift(own[:0], axis), own[:0])
    assert shift(own, axis, by=n) is own
    for by in (0, 1):
        out = torch.empty_like(own)
        assert shift(own, axis, by, out=out) is out
        same(out, exact((me - by) % n, (3, 2)))
    with pytest.raises(ValueError, match=r"shift: out torch.float64 \(2, 3\) must be contiguous"):
        shift(own, axis, out=torch.empty(2, 3, dtype=own.dtype))


@pytest.mark.parametrize("tp", [1, 2, 3, 4])
def test_tensors_go_round_the_ring(tp):
    on_ranks(shifts, tp=tp)


def test_one_rank_gets_its_own_tensor_back():
    axis, x = Axis.solo("tp"), torch.randn(4, 3)
    assert all_reduce(x, axis) is x
    assert all_reduce(x, axis, "max") is x
    assert all_gather(x, axis, 1) is x
    assert reduce_scatter(x, axis, -1) is x
    assert all_to_all(x, axis) is x
    assert all_to_all(x, axis, [4], [4]) is x
    assert broadcast(x, axis) is x
    barrier(axis)
    for verb in (all_reduce, all_gather, reduce_scatter, all_to_all):
        handle = verb(x, axis, async_op=True)
        assert isinstance(handle, Handle)
        assert handle.wait() is x and handle.wait() is x


TWO = Axis("tp", 0, (0, 1))  # errors come before any communication, so it needs no group


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda x: all_reduce(x, TWO, "mean"), "all_reduce: op 'mean' is not one of sum, max, min"),
        (
            lambda x: reduce_scatter(x, TWO, 1),
            "reduce_scatter: cannot split dim 1 of size 3 over 2 tp ranks",
        ),
        (
            lambda x: all_to_all(x[:3], TWO),
            "all_to_all: cannot deal 3 rows evenly to 2 tp ranks: give send and receive counts",
        ),
        (
            lambda x: all_to_all(x, TWO, [1, 2], [1, 2]),
            r"all_to_all: send counts \[1, 2\] do not deal 4 rows to 2 tp ranks",
        ),
        (lambda x: all_to_all(x, TWO, [5, -1], [1, 2]), r"send counts \[5, -1\] do not deal 4"),
        (lambda x: all_to_all(x, TWO, [4], [1, 2]), r"send counts \[4\] do not deal 4 rows to 2"),
        (lambda x: all_to_all(x, TWO, [2, 2], [1, 2, 3]), r"receive counts \[1, 2, 3\] do not"),
        (lambda x: all_to_all(x, TWO, [2, 2]), "give both send and receive counts, or neither"),
        (lambda x: broadcast(x.t(), TWO), "broadcast: the tensor must be contiguous"),
        (lambda x: broadcast(x, TWO, 2), "broadcast: index 2 is outside the tp axis of 2 ranks"),
        (lambda x: send(x, TWO, -1), "send: index -1 is outside the tp axis of 2 ranks"),
        (lambda x: receive(x, TWO, 0), "receive: index 0 of the tp axis is this rank itself"),
    ],
)
def test_a_wrong_argument_is_an_error_before_anything_is_sent(call, words):
    with pytest.raises(ValueError, match=words):
        call(torch.zeros(4, 3))


def test_a_sum_is_a_tree_of_neighbours():
    rows = torch.tensor([[1e8], [1.0], [-1e8], [1.0], [3.0]])
    assert tree_sum(rows.clone()).item() == ((1e8 + 0.0) + (-1e8 + 0.0)) + 3.0
    big = torch.tensor([[256.0], [1.0], [1.0], [1.0]], dtype=torch.bfloat16)
    assert tree_sum(big.clone()).item() == 260.0  # 259 in fp32, rounded once; bf16 would say 258
    assert tree_sum(torch.tensor([[2.0, 3.0]])).tolist() == [2.0, 3.0]
    assert tree_sum(torch.tensor([[200], [100]], dtype=torch.uint8)).item() == 44
    rows = torch.randn(4, 1000)
    assert tree_sum(rows).untyped_storage().nbytes() == 4000  # keeps no row alive


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_without_a_group_tensors_on_meta_give_shapes(backend):
    axis = Axis("tp", 1, (0, 1, 2), backend=backend)
    x = torch.empty(6, 7000, device="meta", requires_grad=True)
    assert all_reduce(x, axis).shape == (6, 7000)
    assert all_gather(x, axis, dim=1).shape == (6, 21000)
    assert reduce_scatter(x, axis).shape == (2, 7000)
    assert all_to_all(x, axis).shape == (6, 7000)
    assert shift(x, axis, async_op=True).wait().shape == (6, 7000)
    assert broadcast(x.detach(), axis, 2).shape == (6, 7000)
    with pytest.raises((AssertionError, ValueError)):
        all_reduce(torch.ones(2), axis)
