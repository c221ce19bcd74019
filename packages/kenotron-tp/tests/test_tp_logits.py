"""Tokens chosen from cut logits: the same for every cut, and as likely as the model says."""

import math

import pytest
import torch
from tp_ranks import normal, part

from kenotron_dist import Axis, all_reduce
from kenotron_dist.testing import on_ranks
from kenotron_tp import choose_tokens, likeliest, likeliest_ids, top_k_top_p, vocabulary_chunk
from kenotron_tp import logits as choosing
from kenotron_tp.top_k_top_p import sortable, survivors, threshold, unsorted

ROWS, VOCAB = 40, 257
SOLO = Axis.solo("tp")
INF, NAN = torch.inf, torch.nan


def cut(whole, mesh):
    return part(whole, -1, mesh, (vocabulary_chunk(whole.shape[-1], mesh["tp"].size),))


def choose(mesh, logits, **options):
    real = cut(torch.ones_like(logits), mesh).bool()
    own = cut(logits, mesh).masked_fill(~real, 1e4)
    return choose_tokens(own, mesh["tp"], vocab_size=logits.shape[-1], **options)


def kept_by_sorting(logits, temperature=1.0, top_k=None, top_p=1.0):
    """What top-k and then top-p keep, ties included: the plain way, on whole rows in fp64."""
    x = logits.double()
    kept = x > -INF
    if top_k is not None and top_k < x.shape[-1]:
        kept &= x >= x.sort(descending=True).values[:, top_k - 1, None]
    if top_p < 1:
        gaps = ((x - x.amax(-1, keepdim=True)) / temperature).masked_fill(~kept, -INF)
        ordered, place = x.sort(descending=True)
        reached = gaps.softmax(-1).gather(-1, place).cumsum(-1) >= top_p
        last = torch.where(reached.any(-1), reached.int().argmax(-1), x.shape[-1] - 1)
        kept &= x >= ordered.gather(-1, last[:, None])
    return kept


def kept(own, axis, vocab_size, *, temperature=1.0, **options):
    """What ``survivors`` keeps of this rank's columns; the odds come from the whole row."""
    x = own.double()
    alive = (x > -INF) & (torch.arange(x.shape[-1]) + axis.rank * x.shape[-1] < vocab_size)
    largest = all_reduce(x.masked_fill(~alive, -INF).amax(-1, keepdim=True), axis, op="max")
    return survivors(
        own, (x - largest) / temperature, alive, axis, vocab_size=vocab_size, **options
    )


OPTIONS = [
    {"temperature": 1.0},
    {"temperature": 0.5},
    {"temperature": 1.0, "seed": 1},
    {"temperature": 1.0, "step": 1},
    {"temperature": 1.5, "top_k": 3},
    {"temperature": 1.5, "top_p": 0.4},
    {"temperature": 1.5, "top_k": 20, "top_p": 0.7},
    {"temperature": 1.5, "top_k": VOCAB, "top_p": 0.9},
    {"temperature": 1.5, "top_k": 1, "top_p": 1e-300},
]


def choices(mesh):
    found = []
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        logits = normal(ROWS, VOCAB, seed=1, dtype=dtype)
        found.append(choose(mesh, logits, temperature=0.0, top_k=2, top_p=0.1))
        assert torch.equal(found[-1], logits.argmax(-1))
        for options in OPTIONS if dtype == torch.float32 else OPTIONS[5:7]:
            found.append(choose(mesh, logits, **options))
            limits = {key: value for key, value in options.items() if key not in ("seed", "step")}
            assert kept_by_sorting(logits, **limits).gather(1, found[-1][:, None]).all()
    return torch.stack(found)


def edges(mesh):
    ties = torch.zeros(3, VOCAB)
    ties[1, [7, 200]] = ties[2, [100, 256]] = 1.0
    assert choose(mesh, ties).tolist() == [0, 7, 100]
    tiny = choose(mesh, normal(5, 2, seed=2), temperature=1.0, top_k=1)  # some hold only padding
    assert torch.equal(tiny, normal(5, 2, seed=2).argmax(-1))
    logits = normal(ROWS, VOCAB, seed=1)
    for temperature in (1e-4, 1e-308):
        assert torch.equal(choose(mesh, logits, temperature=temperature), logits.argmax(-1))
    masked = normal(ROWS, VOCAB, seed=4)
    masked[:, 2:] = -INF
    for options in ({}, {"top_k": 50}, {"top_p": 1 - 2**-53}, {"top_k": 200, "top_p": 0.99}):
        for temperature in (2.0, INF):
            chosen = choose(mesh, masked, temperature=temperature, **options)
            assert chosen.unique().tolist() == [0, 1]
        assert choose(mesh, masked[:0], temperature=1.0, **options).shape == (0,)
    assert choose(mesh, masked[:0]).shape == (0,)
    masked[:, [30, 60]] = INF
    assert choose(mesh, masked).eq(30).all()
    for options in ({}, {"top_k": 2}, {"top_p": 0.9}):
        assert choose(mesh, masked, temperature=1.0, **options).unique().tolist() == [30, 60]
    assert choose(mesh, torch.zeros(300, 3), temperature=1e3).max() <= 2
    for options in ({}, {"temperature": 1.0}, {"temperature": 1.0, "top_k": 3, "top_p": 0.5}):
        for bad, words in ((NAN, "2 of the logits holds NaN"), (-NAN, "2 of the logits holds NaN")):
            broken = normal(4, VOCAB, seed=4)
            broken[2, 150] = bad
            with pytest.raises(ValueError, match=words):
                choose(mesh, broken, **options)
        broken[1:3] = -INF
        with pytest.raises(ValueError, match="row 1 of the logits is -inf in every column: no tok"):
            choose(mesh, broken, **options)


def likeliest_of_rows(mesh):
    """Ids and logits of the highest, where rows have ties, NaN, or nothing but -inf."""
    logits = normal(ROWS, VOCAB, seed=6).to(torch.bfloat16)
    logits[0], logits[1], logits[2, 7] = 0.0, -INF, NAN
    own = cut(logits, mesh)
    own = own.masked_fill(~cut(torch.ones_like(logits), mesh).bool(), 1e4)
    token, highest = likeliest(own, mesh["tp"], vocab_size=VOCAB)
    assert token.tolist() == logits.argmax(-1).tolist()
    assert torch.equal(highest.float().nan_to_num(1.0), logits.float().amax(-1).nan_to_num(1.0))
    for count in (1, 100, VOCAB):  # a rank has fewer columns than 100
        several = likeliest_ids(own, mesh["tp"], vocab_size=VOCAB, count=count)
        order = logits.double().sort(dim=-1, descending=True, stable=True)[1][:, :count]
        assert torch.equal(several[2:], order[2:]) and torch.equal(several[0], order[0])


def everything(mesh):
    edges(mesh)
    likeliest_of_rows(mesh)
    return choices(mesh)


def test_every_cut_chooses_the_same():
    expected = on_ranks(everything, tp=1)[0]
    assert len({tuple(row.tolist()) for row in expected[1:9]}) == 8  # every option matters
    for tp, check in ((2, choices), (3, everything), (4, choices), (8, choices)):
        for found in on_ranks(check, tp=tp):
            assert torch.equal(found, expected)


def kept_everywhere(mesh, cases):
    for case in range(cases):
        vocab = (1, 2, 5, 37, 257, 1000)[case % 6]
        dtype = (torch.float32, torch.bfloat16, torch.float16, torch.float32)[case % 4]
        logits = normal(6, vocab, seed=case) * (1e-3, 1.0, 20.0, 1e30, 1e-42)[case % 5]
        logits = logits.to(dtype).nan_to_num()  # finite in fp16
        logits[1] = logits[1].float().sign().to(dtype)  # ties, of -0 and 0 too
        logits[2, 1::2] = -INF
        logits[3] = -0.0
        logits[4] = -logits[4].abs()
        for top_k, top_p, temperature in (
            (1, 1.0, 1.0),
            (3, 1.0, 1.0),
            (vocab // 2 + 1, 0.9, 0.3),
            (None, 0.5, 1e-4),
            (None, 1e-9, 1.0),
            (40, 0.999, 1e4),
        ):
            options = {"top_k": top_k, "top_p": top_p, "temperature": temperature}
            found = kept(cut(logits, mesh), mesh["tp"], vocab, **options)
            expected = cut(kept_by_sorting(logits, temperature, top_k, top_p), mesh)
            assert torch.equal(found, expected), (case, options)


@pytest.mark.parametrize(("tp", "cases"), [(1, 60), (3, 8)])
def test_what_is_kept_is_what_sorting_keeps(tp, cases):
    on_ranks(kept_everywhere, cases, tp=tp)


def traffic(mesh):
    """Numbers a rank gives to every collective, for two vocabularies."""
    found = []

    def counted(verb):
        def call(x, axis, **options):
            found[-1].append(x.numel())
            return verb(x, axis, **options)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for module, name in (
            (choosing, "all_reduce"),
            (choosing, "all_gather"),
            (top_k_top_p, "all_reduce"),
        ):
            patch.setattr(module, name, counted(getattr(module, name)))
        for vocab, dtype, limits in (
            (300, torch.float32, {"top_k": 5, "top_p": 0.5}),
            (30_000, torch.float32, {"top_k": 5, "top_p": 0.5}),
            (30_000, torch.float16, {"top_p": 0.5}),
            (30_000, torch.bfloat16, {"top_k": 5}),
            (300, torch.float32, {"top_k": 300, "top_p": 1.0}),
        ):
            found.append([])
            choose(mesh, normal(3, vocab, seed=1, dtype=dtype), temperature=1.0, **limits)
    return found


def test_what_is_sent_does_not_grow_with_the_vocabulary():
    def expected(rounds):
        return [3, *[3 * 256] * rounds, 2 * 3]

    for found in on_ranks(traffic, tp=2):
        assert found == [expected(rounds) for rounds in (8, 8, 3, 2, 0)]


def test_a_p_just_below_1_loses_no_tail():
    """Each of the 5,000 weighs less than half a unit, together they are 1e-9 of the row."""
    logits = torch.full((1, 5001), math.log(2.0**-42))
    logits[0, 70] = 0.0
    for p, count in ((1 - 1e-10, 5001), (1 - 2**-53, 5001), (1 - 1e-8, 1)):
        assert kept(logits, SOLO, 5001, top_p=p).sum() == count
    spread = normal(4, 1000, seed=5) * 1e30
    assert kept(spread, SOLO, 1000, top_p=1 - 2**-53).all()


def test_a_threshold_is_the_largest_that_suffices():
    generator = torch.Generator().manual_seed(0)
    for bits in (3, 9, 32):
        keys = torch.randint(0, 1 << bits, (50, 40), generator=generator)
        amounts = torch.randint(0, 1 << 56, (50, 40), generator=generator)
        need = (torch.rand(50, generator=generator).double() * amounts.sum(-1)).long().clamp(min=1)
        found = threshold(keys, amounts, lambda total, need=need: need.minimum(total), SOLO)
        sums = [(amounts * (keys >= each)).sum(-1) for each in (found[:, None], found[:, None] + 1)]
        assert (sums[0] >= need).all() and (sums[1] < need).all()


def test_keys_have_the_order_of_their_numbers():
    x = torch.tensor([-INF, -3e38, -1.0, -1e-45, -0.0, 0.0, 1e-45, 1.0, 3e38, INF, NAN, -NAN])
    keys = sortable(x)
    assert keys[4] == keys[5] and keys[10] == keys[11] and keys[0] > 0 and keys[-1] < 1 << 32
    assert keys[[0, 1, 2, 3, 4, 6, 7, 8, 9, 10]].diff().gt(0).all()
    torch.testing.assert_close(unsorted(keys), x.abs() * x.sign(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("function", [torch.exp, torch.log])
def test_an_element_has_the_same_bits_wherever_it_stands(function):
    """What a cut leaves to torch: on CPU its exp2, for one, is another at the end of a row."""
    x = torch.rand(4000, dtype=torch.float64) * 27 * (1 if function is torch.log else -1)
    whole = function(x)
    for width in (1, 7, 61, 1001):
        pieces = [function(piece.clone()) for piece in x.split(width)]
        assert torch.equal(torch.cat(pieces), whole)


@pytest.mark.parametrize(
    ("temperature", "limits"),
    [
        (0.7, {}),
        (1.0, {}),
        (2.0, {}),
        (1.0, {"top_k": 3}),
        (1.0, {"top_p": 0.8}),
        (2.0, {"top_k": 5, "top_p": 0.8}),
        (INF, {"top_k": 4}),
    ],
)
def test_tokens_are_as_frequent_as_they_are_likely(temperature, limits):
    logits = torch.tensor([0.0, 1.0, -1.0, 2.5, 0.5, -3.0, 1.5])
    draws = 40_000
    rows = logits.expand(draws // 4, -1)
    options = {"vocab_size": len(logits), "temperature": temperature, "seed": 3, **limits}
    chosen = torch.cat([choose_tokens(rows, SOLO, **options, step=step) for step in range(4)])
    likely = kept_by_sorting(logits[None], temperature, **limits)[0]
    assert likely.all() == (not limits)
    expected = (logits.double() / temperature).masked_fill(~likely, -INF).softmax(0) * draws
    counts = torch.bincount(chosen, minlength=len(logits))
    assert counts[~likely].eq(0).all()
    assert (((counts - expected) ** 2 / expected)[likely]).sum() < 25  # chi square, 6 degrees


def test_no_token_wins_by_an_infinite_number():
    """Noise that reached 1 would choose its token whatever the model says."""
    logits = torch.full((64, 100_000), -60.0)
    logits[:, 5] = 0.0
    chosen = choose_tokens(logits, SOLO, vocab_size=100_000, temperature=1.0)
    assert chosen.eq(5).all()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"temperature": -1.0}, "temperature -1.0 is not 0 or more: 0 is greedy, 1 leaves the"),
        ({"temperature": NAN}, "temperature nan is not 0 or more: 0 is greedy"),
        (
            {"top_k": 0},
            "top_k 0 is not a whole number from 1: give None to sample among all tokens",
        ),
        ({"top_p": 0.0}, r"top_p 0.0 is not within \(0, 1\]: 1 samples among all tokens"),
        ({"top_p": 1.5}, r"top_p 1.5 is not within \(0, 1\]"),
        ({"top_p": NAN}, r"top_p nan is not within \(0, 1\]"),
        ({"vocab_size": 0}, "vocab_size 0 is not within 1..8, the columns of all ranks"),
        ({"vocab_size": 9}, "vocab_size 9 is not within 1..8, the columns of all ranks"),
    ],
)
def test_a_wrong_argument_is_an_error(options, words):
    with pytest.raises(ValueError, match=words):
        choose_tokens(torch.zeros(2, 4), Axis("tp", 0, (0, 1)), **{"vocab_size": 8, **options})


@pytest.mark.parametrize("shape", [(4,), (1, 2, 4), ()])
def test_logits_are_rows(shape):
    with pytest.raises(ValueError, match=r"are not \(rows, columns\): give one row a text"):
        choose_tokens(torch.zeros(shape), Axis.solo("tp"), vocab_size=4)


def test_a_vocabulary_too_large_to_add_up_exactly_is_an_error():
    vocab = (1 << 22) + 1
    words = "top_p adds up probabilities exactly for vocabularies up to 4194304, not 4194305"
    with pytest.raises(ValueError, match=words):
        choose_tokens(
            torch.zeros(1, vocab), Axis.solo("tp"), vocab_size=vocab, temperature=1.0, top_p=0.5
        )
