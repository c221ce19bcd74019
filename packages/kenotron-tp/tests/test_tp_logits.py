"""Tokens chosen from cut logits: the same for every cut, and as likely as the model says."""

import pytest
import torch
from tp_ranks import normal, on_ranks, part

from kenotron_dist import Axis
from kenotron_tp import choose_tokens, vocabulary_chunk

ROWS, VOCAB = 40, 257


def choose(mesh, logits, **options):
    vocab = logits.shape[-1]
    chunks = (vocabulary_chunk(vocab, mesh["tp"].size),)
    own = part(logits, -1, mesh, chunks)
    real = part(torch.ones_like(logits), -1, mesh, chunks).bool()
    return choose_tokens(own.masked_fill(~real, 1e4), mesh["tp"], vocab_size=vocab, **options)


def choices(mesh):
    found = []
    for dtype in (torch.float32, torch.bfloat16):
        logits = normal(ROWS, VOCAB, seed=1, dtype=dtype)
        found.append(choose(mesh, logits))
        assert torch.equal(found[-1], logits.argmax(-1))
        for temperature, seed, step in ((1.0, 0, 0), (0.5, 0, 0), (1.0, 1, 0), (1.0, 0, 1)):
            options = {"temperature": temperature, "seed": seed, "step": step}
            found.append(choose(mesh, logits, **options))
    ties = torch.zeros(3, VOCAB)
    ties[1, [7, 200]] = ties[2, [100, 256]] = 1.0
    assert choose(mesh, ties).tolist() == [0, 7, 100]
    tiny = choose(mesh, normal(5, 2, seed=2), temperature=1.0)  # some ranks hold only padding
    assert tiny.max() <= 1
    cold = choose(mesh, normal(ROWS, VOCAB, seed=1), temperature=1e-4)
    assert torch.equal(cold, found[0])
    masked = normal(ROWS, VOCAB, seed=4)
    masked[:, 1:] = -torch.inf
    assert choose(mesh, masked, temperature=2.0).eq(0).all()
    assert choose(mesh, masked[:0]).shape == (0,)
    assert choose(mesh, torch.zeros(300, 3), temperature=1e3).max() <= 2
    return torch.stack(found)


def test_every_cut_chooses_the_same():
    expected = on_ranks(choices, tp=1)[0]
    assert len({tuple(row.tolist()) for row in expected[1:5]}) == 4  # seed and step matter
    for tp in (2, 3, 4):
        for found in on_ranks(choices, tp=tp):
            assert torch.equal(found, expected)


@pytest.mark.parametrize("temperature", [0.7, 1.0, 2.0])
def test_tokens_are_as_frequent_as_they_are_likely(temperature):
    logits = torch.tensor([0.0, 1.0, -1.0, 2.5, 0.5, -3.0, 1.5])
    draws, axis = 40_000, Axis.solo("tp")
    rows = logits.expand(draws // 4, -1)
    chosen = torch.cat(
        [
            choose_tokens(
                rows, axis, vocab_size=len(logits), temperature=temperature, seed=3, step=step
            )
            for step in range(4)
        ]
    )
    expected = torch.softmax(logits.double() / temperature, 0) * draws
    counts = torch.bincount(chosen, minlength=len(logits))
    assert ((counts - expected) ** 2 / expected).sum() < 25  # chi square, 6 degrees


def test_no_token_wins_by_an_infinite_number():
    """Noise that reached 1 would choose its token whatever the model says."""
    logits = torch.full((64, 100_000), -60.0)
    logits[:, 5] = 0.0
    chosen = choose_tokens(logits, Axis.solo("tp"), vocab_size=100_000, temperature=1.0)
    assert chosen.eq(5).all()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"temperature": -1.0}, "temperature -1.0 is negative: 0 is greedy, 1 leaves the model"),
        ({"vocab_size": 0}, "vocab_size 0 is not within 1..8, the columns of all ranks"),
        ({"vocab_size": 9}, "vocab_size 9 is not within 1..8, the columns of all ranks"),
    ],
)
def test_a_wrong_argument_is_an_error(options, words):
    with pytest.raises(ValueError, match=words):
        choose_tokens(torch.zeros(2, 4), Axis("tp", 0, (0, 1)), **{"vocab_size": 8, **options})
