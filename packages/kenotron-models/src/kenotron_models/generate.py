"""Continue texts token by token.

Shapes: B texts, S tokens of the longest that are read at once, V vocabulary; ``/t`` is divided by
tp size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kenotron_dist import Mesh, broadcast, to_device
from kenotron_models.context import Context
from kenotron_models.kv_cache import KVCache
from kenotron_tp import check_sampling, choose_tokens

Forward = Callable[[Tensor, Context], Tensor | None]
"""(tokens (T,), context) -> logits (B, V/t) of the context's ``outputs`` on the last pipeline
stage, None on the others."""


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """Options for choosing a token from its probabilities.

    Raises ValueError for a number out of its bounds.
    """

    temperature: float = 0.0
    """0: the likeliest token; else logits are divided by it and a token is drawn."""
    top_k: int | None = None
    """Draw among the k likeliest only."""
    top_p: float | None = None
    """Draw among the likeliest that amount to this share only (arXiv 1904.09751)."""
    repetition_penalty: float = 1.0
    """Logits of tokens that the text has are divided by this, negative ones multiplied (CTRL,
    arXiv 1909.05858)."""
    seed: int = 0
    """Of the draws: text i, token n of equal seeds are drawn the same on every layout."""

    def __post_init__(self) -> None:
        """Check every number."""
        if not 0 < self.repetition_penalty < float("inf"):
            raise ValueError(
                f"repetition_penalty {self.repetition_penalty} is not a finite number above 0: 1 "
                "changes nothing"
            )
        check_sampling(self.temperature, self.top_k, self.top_p)


def generate(
    forward: Forward,
    prompts: Sequence[Sequence[int]],
    mesh: Mesh,
    *,
    window: int,
    vocab_size: int,
    max_new_tokens: int,
    sampling: Sampling = Sampling(),
    ends: Callable[[int, int], bool] = lambda text, token: False,
    cached: bool = True,
    first_text: int = 0,
    source: int | None = None,
) -> Iterator[list[int | None]]:
    """Yield a new token for each text, again and again; None for a text that has ended.

    The same on every rank and for every layout, and whatever texts share its batch, up to the
    rounding of other shapes.

    Arguments:
        forward: a forward pass of the model.
        prompts: tokens to continue, for each text.
        mesh: tp and pp ranks work together.
        window: longest text that the model reads, in tokens. A longer text continues from its
            last half window, which is read again.
        vocab_size: V.
        max_new_tokens: how many to add at most.
        sampling: how tokens are chosen.
        ends: asked on every rank, in order, about each new token: (text, token) -> whether that
            text ends with it. It must say the same on all of them.
        cached: keep keys and values; False reads the whole text again for each token.
        first_text: number of the first text among those that other ranks continue, for the draws.
        source: index along pp of the rank that has the last layer; None: the last one.

    Collective over tp and pp. Raises ValueError for no prompts, an empty one, tokens outside the
    vocabulary, or a window below 2.
    """
    _check(prompts, vocab_size, window)
    holder = mesh["pp"].size - 1 if source is None else source
    room = max_new_tokens if cached else 0
    reader = _Reader(forward, [list(prompt) for prompt in prompts], window, mesh.device, room)
    chooser = _Chooser(prompts, mesh, vocab_size, sampling, first_text)
    ended = [False] * len(prompts)
    for step in range(max_new_tokens):
        logits = reader.read()
        chosen = torch.zeros(len(prompts), dtype=torch.int64, device=mesh.device)
        if logits is not None:
            chosen = chooser.choose(logits, step)
        new = broadcast(chosen, mesh["pp"], holder).tolist()
        reader.add(new)
        yield [None if over else token for over, token in zip(ended, new, strict=True)]
        ended = [ended[text] or ends(text, token) for text, token in enumerate(new)]
        if all(ended):
            return


class _Reader:
    """The texts as far as they go, and what the model has read of them.

    ``room``: tokens that a cache leaves for what will come; 0: nothing is kept.
    """

    def __init__(
        self,
        forward: Forward,
        texts: list[list[int]],
        window: int,
        device: torch.device,
        room: int,
    ) -> None:
        self.forward, self.window, self.device, self.room = forward, window, device, room
        self.texts = [text if len(text) <= window else text[-(window // 2) :] for text in texts]
        self.cache: KVCache | None = None

    def add(self, new: list[int]) -> None:
        """One token for each text."""
        for text, token in zip(self.texts, new, strict=True):
            text.append(token)

    def read(self) -> Tensor | None:
        """Logits (B, V/t) after the last token of each text."""
        longest = max(map(len, self.texts))
        if longest > self.window:  # all together: what a text sees does not depend on others' ends
            self.texts = [
                text if len(text) <= self.window else text[-(self.window // 2) :]
                for text in self.texts
            ]
            self.cache, longest = None, max(map(len, self.texts))
        if self.room == 0:
            return self._run(None, 0)
        if self.cache is None:
            self.cache = KVCache(min(self.window, longest + self.room))
            return self._run(self.cache, 0)
        return self._run(self.cache, 1)

    def _run(self, cache: KVCache | None, last: int) -> Tensor | None:
        """Read whole texts, or their ``last`` token."""
        lengths = [len(text) for text in self.texts]
        width = last or max(lengths)
        begins = [length - width if last else 0 for length in lengths]
        rows = [text[-width:] if last else text for text in self.texts]
        tokens = torch.tensor([[*row, *[0] * (width - len(row))] for row in rows])
        positions = torch.tensor(begins)[:, None] + torch.arange(width)
        ends = torch.tensor([i * width + len(row) - 1 for i, row in enumerate(rows)])
        if cache is not None:
            cache.begin(max(lengths), equal_lengths=min(lengths) == max(lengths))
        padding = None  # no expert need see it
        if min(map(len, rows)) < width:
            padding = self._there(positions >= torch.tensor(lengths)[:, None])
        context = Context(
            self._there(positions), outputs=self._there(ends), cache=cache, padding_BS=padding
        )
        with torch.inference_mode():
            return self.forward(self._there(tokens.flatten()), context)

    def _there(self, x: Tensor) -> Tensor:
        return to_device(x, self.device)


class _Chooser:
    """Tokens from logits, on the ranks that have them."""

    def __init__(
        self,
        prompts: Sequence[Sequence[int]],
        mesh: Mesh,
        vocab_size: int,
        sampling: Sampling,
        first_text: int,
    ) -> None:
        self.prompts, self.axis, self.vocab_size = prompts, mesh["tp"], vocab_size
        self.sampling = sampling
        self.rows = torch.arange(first_text, first_text + len(prompts), device=mesh.device)
        self.seen: Tensor | None = None
        """Columns (B, V/t) of tokens that the text has."""

    def choose(self, logits: Tensor, step: int) -> Tensor:
        """(B, V/t) -> (B,) int64."""
        how = self.sampling
        if how.repetition_penalty != 1:
            logits = self._penalised(logits.float())
        chosen = choose_tokens(
            logits,
            self.axis,
            vocab_size=self.vocab_size,
            temperature=how.temperature,
            top_k=how.top_k,
            top_p=how.top_p,
            seed=how.seed,
            step=step,
            rows_B=self.rows,
        )
        if self.seen is not None:  # on the device: it is read once for each token, by ``generate``
            width = self.seen.shape[1]
            first = self.axis.rank * width
            columns = torch.arange(first, first + width, device=chosen.device)
            self.seen |= columns == chosen[:, None]
        return chosen

    def _penalised(self, logits: Tensor) -> Tensor:
        if self.seen is None:
            self.seen = torch.zeros_like(logits, dtype=torch.bool)
            self._mark(self.seen, self.prompts)
        penalty = self.sampling.repetition_penalty
        lowered = torch.where(logits > 0, logits / penalty, logits * penalty)
        return torch.where(self.seen, lowered, logits)

    def _mark(self, seen: Tensor, tokens: Sequence[Sequence[int]]) -> None:
        width = seen.shape[1]
        first = self.axis.rank * width
        for row, ids in enumerate(tokens):
            own = [i - first for i in ids if first <= i < first + width]
            seen[row, own] = True


def _check(prompts: Sequence[Sequence[int]], vocab_size: int, window: int) -> None:
    if not prompts:
        raise ValueError("there is nothing to continue: give at least one prompt")
    for number, prompt in enumerate(prompts):
        outside = [token for token in prompt if not 0 <= token < vocab_size]
        if not prompt or outside:
            raise ValueError(
                f"cannot continue prompt {number}, of {len(prompt)} tokens"
                + (f" with {outside[0]} among them" if outside else "")
                + f": give at least one, each within 0..{vocab_size - 1}"
            )
    if window < 2:
        raise ValueError(f"a window of {window} tokens is too short to continue a text: give 2")
