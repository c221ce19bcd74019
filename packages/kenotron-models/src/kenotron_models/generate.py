"""Continue a text token by token.

Shapes: S window of tokens the model sees, V vocabulary; ``/t`` is divided by tp size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from kenotron_dist import Mesh, broadcast
from kenotron_models.context import Context
from kenotron_tp import choose_tokens

Forward = Callable[[Tensor, Context], Tensor | None]
"""(tokens (S,), context) -> logits (S, V/t) on the last pipeline stage, None on the others."""


def generate(
    forward: Forward,
    prompt: Sequence[int],
    mesh: Mesh,
    *,
    window: int,
    vocab_size: int,
    max_new_tokens: int,
    temperature: float = 0.0,
    seed: int = 0,
    stop: int | None = None,
    source: int | None = None,
) -> Iterator[int]:
    """Yield new tokens, the same on every rank and for every layout.

    Arguments: a forward pass of the model; tokens to continue; the mesh; how many tokens the model
    sees at once (the last ones; fewer are padded on the right, which a causal model cannot see);
    V; how many to add at most; 0 for greedy or a temperature; the seed of the samples; a token
    that ends the text (yielded too); the index along pp of the rank that has the last layer (None:
    the last one).

    Collective over tp and pp. Each token costs a pass over the window: keys and values are not
    kept. Raises ValueError for an empty prompt or tokens outside the vocabulary.
    """
    outside = [token for token in prompt if not 0 <= token < vocab_size]
    if not prompt or outside:
        raise ValueError(
            f"cannot continue a prompt of {len(prompt)} tokens"
            + (f" with {outside[0]} among them" if outside else "")
            + f": give at least one, each within 0..{vocab_size - 1}"
        )
    holder = mesh["pp"].size - 1 if source is None else source
    tokens = list(prompt)
    width = window + -window % mesh.sizes["tp"]  # sequence parallelism cuts it in equal parts
    positions = torch.arange(width, device=mesh.device)[None]
    for step in range(max_new_tokens):
        seen = tokens[-window:]
        row = torch.tensor([*seen, *[0] * (width - len(seen))], device=mesh.device)
        with torch.no_grad():
            logits = forward(row, Context(positions))
        chosen = torch.zeros(1, dtype=torch.int64, device=mesh.device)
        if logits is not None:
            chosen = choose_tokens(
                logits[len(seen) - 1][None],
                mesh["tp"],
                vocab_size=vocab_size,
                temperature=temperature,
                seed=seed,
                step=step,
            )
        token = int(broadcast(chosen, mesh["pp"], holder))
        tokens.append(token)
        yield token
        if token == stop:
            return
