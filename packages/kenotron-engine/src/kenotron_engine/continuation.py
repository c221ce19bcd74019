"""Continue texts on any layout: dp ranks share them, and every rank gets all of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from kenotron_dist import gather_objects
from kenotron_engine.model_on_mesh import ModelOnMesh
from kenotron_engine.row_scores import check_tokens
from kenotron_models import Context, Sampling, cache_problem, generate


def continue_texts(
    model: ModelOnMesh,
    prompts: Sequence[Sequence[int]],
    *,
    window: int,
    max_new_tokens: int,
    batch_size: int,
    sampling: Sampling,
    ends: Callable[[int, int], bool],
) -> list[list[int]]:
    """Return the new tokens of each text, the same on every rank and for every layout.

    The ranks of dp and cp share the texts. Where they communicate in their passes, each of them
    continues all texts.

    Args:
        model: the model. One without a cache, or a reproducible one, reads all for each token.
        prompts: tokens of each text.
        window: longest text that the model reads, in tokens; see ``kenotron_models.generate``.
        max_new_tokens: how many to add at most.
        batch_size: texts that such a rank continues together.
        sampling: how tokens are chosen.
        ends: asked about each new token on all ranks that continue its text: (text, token) ->
            whether the text ends with it. It must answer the same on all of them.

    Collective over the mesh. Raises ValueError as ``generate``, on all ranks.
    """
    _check(prompts, model.plan.spec.vocab_size)
    mesh, apart = model.mesh, model.replicas_are_apart
    replicas = mesh["dp", "cp"]  # each text is whole on one of them
    share = -(-len(prompts) // replicas.size) if apart else len(prompts)
    first = replicas.rank * share if apart else 0
    own = prompts[first : first + share]
    new: list[list[int]] = []

    def forward(tokens: Tensor, context: Context) -> Tensor | None:
        logits = model.model.pipeline.forward([tokens], [context])
        return logits[0] if logits else None

    for begin in range(0, len(own), batch_size):
        texts = own[begin : begin + batch_size]
        number = first + begin
        steps = generate(
            forward,
            texts,
            mesh,
            window=window,
            vocab_size=model.plan.spec.vocab_size,
            max_new_tokens=max_new_tokens,
            sampling=sampling,
            ends=lambda text, token, number=number: ends(number + text, token),
            cached=not model.plan.reproducible and cache_problem(model.plan.spec) is None,
            first_text=number,
            source=model.model.pipeline.last_rank,
        )
        found = [list(each) for each in zip(*steps, strict=True)] or [[] for _ in texts]
        new += [[token for token in each if token is not None] for each in found]
    if not apart:
        return new
    return [tokens for part in gather_objects(new, replicas) for tokens in part]


def _check(prompts: Sequence[Sequence[int]], vocab_size: int) -> None:
    """Refuse on every rank what only the rank that continues a text would refuse."""
    for number, prompt in enumerate(prompts):
        if not prompt:
            raise ValueError(f"text {number} has no tokens: give at least one")
        check_tokens(f"text {number}", prompt, vocab_size)
