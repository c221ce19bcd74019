"""Logits and a gradient of a model here, and of the folder that transformers loads, in float32."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from kenotron_dist import Mesh
from kenotron_dist.placement import TensorLayout, materialize, named_parameters, parameter_layouts
from kenotron_models.build import Build
from kenotron_models.context import Context
from kenotron_models.decoder import LayerStack, build_decoder
from kenotron_models.hf_probe import Probe, probes_of, with_documents
from kenotron_models.hf_tensors import EMBEDDING, cast, stays_fp32
from kenotron_models.spec import DecoderSpec

Wanted = dict[str, tuple[Tensor, TensorLayout]]
"""Tensors to fill, of any shape, and how each is cut."""
Load = Callable[[Wanted], None]
"""Fills the parameters of a model in place."""
BOUND = 1e-4
"""Largest deviation of a logit, in units of the largest logit, and likewise of a gradient."""
ROUNDING = 4
"""Largest deviation of theirs, in a model that magnifies rounding, relative to the distance of ours
from itself with weights changed by their last bit; that is 4 to 8 times as far as theirs usually
is."""
CHOICE = "e_score_correction_bias"
"""Parameter that stays in float32 there, whatever the dtype of the others is."""


class OtherModel(ValueError):
    """A model here is not what transformers makes of a folder."""


class ModelOutcome(NamedTuple):
    """Results of a model for a text."""

    logits: Tensor
    """(B, S, V)."""
    gradient: Tensor | None
    """(V, D), of the embedding; None: it was not asked for."""


def compare(
    load: Load,
    spec: DecoderSpec,
    folder: Path,
    *,
    dtype: torch.dtype | None = None,
    keys: Mapping[str, Any] | None = None,
    gradient: bool = True,
) -> float:
    """Compare a model here with a folder of Hugging Face; returns the largest deviation.

    One model is in memory at a time. The deviation is in units of the largest logit or gradient.

    Args:
        load: fills the parameters of ours.
        spec: what ours is made of.
        folder: of transformers.
        dtype: what weights of both are rounded to first; None: nothing is rounded.
        keys: of its config.json that are others for transformers.
        gradient: whether that of the embedding is compared, too: not where a multiplier was folded
            into its weights, which then have another gradient.

    Raises:
        OtherModel: transformers does not load the folder, or finds other tensors in it than it
            needs, or a deviation is above ``BOUND`` and that of rounding.
        ValueError: ``load`` does.
        ImportError: transformers is not installed.
    """
    from transformers import AutoModelForCausalLM  # before anything is computed

    assert AutoModelForCausalLM
    ours, texts = our_outcomes(load, spec, folder, dtype)
    theirs = their_outcomes(load_theirs(folder, keys), texts, dtype, tied=spec.tie_word_embeddings)
    found = _deviations(texts, ours, theirs, gradient=gradient)
    if all(far <= BOUND for far in found.values()):  # a NaN is no agreement
        return max(found.values())
    again, _ = our_outcomes(_nudged(load), spec, folder, dtype)
    rounding = _deviations(texts, ours, again, gradient=gradient)
    for name, far in found.items():
        if not far <= max(BOUND, ROUNDING * rounding[name]):
            raise OtherModel(
                f"{name}: those of transformers differ from ours by {far:.2e} of the largest, more "
                f"than {BOUND:.0e}: it is not the same model"
            )
    return max(found.values())


def _deviations(
    texts: list[Probe], ours: list[ModelOutcome], theirs: list[ModelOutcome], *, gradient: bool
) -> dict[str, float]:
    """Return the largest deviation of everything that is compared, in units of the largest."""
    found = {}
    for text, a, b in zip(texts, ours, theirs, strict=True):
        found[f"logits of {text.name}"] = _deviation(a.logits, b.logits)
        if gradient and a.gradient is not None and b.gradient is not None:
            found[text.name] = _deviation(a.gradient, b.gradient)
    return found


def _nudged(load: Load) -> Load:
    """Load parameters, then change each by as much as rounding does."""

    def fill(wanted: Wanted) -> None:
        load(wanted)
        draw = torch.Generator().manual_seed(0)
        for parameter, _ in wanted.values():
            way = torch.randint(0, 2, parameter.shape, generator=draw) * 2 - 1
            parameter.mul_(1 + way * torch.finfo(torch.float32).eps)

    return fill


def load_theirs(folder: Path, keys: Mapping[str, Any] | None = None) -> Any:
    """Load a folder with transformers, in float32; ``keys`` replace those of its config.json.

    Raises:
        OtherModel: it cannot be loaded, or tensors are missing, unexpected or of another shape.
    """
    from transformers import AutoModelForCausalLM

    try:
        with _without_bars():
            model, found = AutoModelForCausalLM.from_pretrained(
                folder,
                dtype=torch.float32,
                trust_remote_code=False,
                output_loading_info=True,
                **(keys or {}),
            )
    except Exception as error:  # of any of its parts
        raise OtherModel(f"transformers does not load {folder}: {error}") from error
    kinds = ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs")
    lines = [
        f"{kind.partition('_')[0]}: {', '.join(sorted(map(str, found[kind]))[:20])}"
        for kind in kinds
        if found.get(kind)
    ]
    if lines:
        raise OtherModel(
            "\n  ".join([f"transformers finds other tensors in {folder} than it needs:", *lines])
        )
    return model.eval()


@contextmanager
def _without_bars() -> Iterator[None]:
    """Let transformers draw no progress bar."""
    from transformers.utils import logging as messages

    shown = messages.is_progress_bar_enabled()
    messages.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            messages.enable_progress_bar()


def our_outcomes(
    load: Load, spec: DecoderSpec, folder: Path, dtype: torch.dtype | None = None
) -> tuple[list[ModelOutcome], list[Probe]]:
    """Return what ours makes of its texts, on this process alone, and the texts.

    ``folder`` is named where a weight is too large for ``dtype``.
    """
    stack, wanted = _built(spec)
    load(wanted)
    if dtype is not None:
        for parameter, layout in wanted.values():
            if not stays_fp32(layout.name):
                parameter.copy_(cast(folder, layout.name, parameter, dtype))
    texts = probes_of(spec, sum(each.numel() for each, _ in wanted.values()))
    apart = stack
    if any(text.lengths for text in texts):
        apart, shared = _built(with_documents(spec))
        for path, parameter in named_parameters(apart).items():
            parameter.data = wanted[path][0]
        del shared
    found = []
    for text in texts:
        own = apart if text.lengths else stack
        found.append(_outcome(text, _ours(own, spec), _embeddings(wanted, own)))
    return found, texts


def their_outcomes(
    model: Any, texts: list[Probe], dtype: torch.dtype | None = None, *, tied: bool = False
) -> list[ModelOutcome]:
    """Return what a model of transformers makes of texts.

    Args:
        model: of transformers.
        texts: to compare.
        dtype: what its weights are rounded to first; None: nothing is rounded.
        tied: the head is the embedding in ours: a head of its own here has a share of the gradient.
    """
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(False)
        if dtype is not None and not name.endswith(CHOICE):
            parameter.copy_(parameter.to(dtype))
    embedding = model.get_input_embeddings()
    embedding.padding_idx = None  # its row would have no gradient
    found, head = [embedding.weight], model.get_output_embeddings().weight
    if tied and head is not embedding.weight:
        found.append(head)
    return [_outcome(text, lambda each: _theirs(model, each), found) for text in texts]


def _built(spec: DecoderSpec) -> tuple[LayerStack, Wanted]:
    """Return a model whose values are 0, and its parameters."""
    mesh = Mesh.alone()
    stack = LayerStack(build_decoder(spec, Build(mesh["tp"], dtype=torch.float32)))
    layouts = parameter_layouts(stack, mesh.axis_sizes)
    materialize(stack, "cpu")
    stack.fill_buffers(torch.device("cpu"))
    found = named_parameters(stack)
    for parameter in found.values():
        parameter.requires_grad_(False)
    return stack.eval(), {path: (p.detach().zero_(), layouts[path]) for path, p in found.items()}


def _embeddings(wanted: Wanted, stack: LayerStack) -> list[Tensor]:
    """The parameters that hold the embedding: a tied head has a copy of its own."""
    found = named_parameters(stack)
    return [found[path] for path, (_, layout) in wanted.items() if layout.name == EMBEDDING]


def _ours(stack: LayerStack, spec: DecoderSpec) -> Callable[[Probe], Tensor]:
    def run(text: Probe) -> Tensor:
        logits = stack(text.tokens.flatten(), Context(text.positions))
        return logits[:, : spec.vocab_size].unflatten(0, text.tokens.shape)

    return run


def _theirs(model: Any, text: Probe) -> Tensor:
    """Each document by itself; never with a cache, which not all models have."""
    if text.lengths:
        parts = text.tokens.split(text.lengths, 1)
        return torch.cat([model(each, use_cache=False).logits for each in parts], 1)
    places: dict[str, Tensor] = {}
    if not torch.equal(text.positions[0], torch.arange(text.tokens.shape[1])):
        # With a mask: without one, positions with a gap are those of two documents.
        places = {
            "position_ids": text.positions,
            "attention_mask": torch.ones_like(text.positions),
        }
    return model(text.tokens, use_cache=False, **places).logits


def _outcome(text: Probe, run: Callable[[Probe], Tensor], embeddings: list[Tensor]) -> ModelOutcome:
    if not text.gradient or not embeddings:
        with torch.no_grad():
            return ModelOutcome(run(text), None)
    for each in embeddings:
        each.requires_grad_(True)
    logits = run(text)
    loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), text.tokens[:, 1:].flatten())
    gradients = torch.autograd.grad(loss, embeddings)
    for each in embeddings:
        each.requires_grad_(False)
    whole = torch.stack(gradients).sum(0)
    return ModelOutcome(logits.detach(), whole[: logits.shape[-1]])


def _deviation(ours: Tensor, theirs: Tensor) -> float:
    """Return the largest deviation in units of the largest."""
    return float((theirs - ours).abs().max() / ours.abs().max().clamp(min=1e-30))
