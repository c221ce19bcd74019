"""Whether an exported model computes what ours computes: logits of a few texts, both in float32."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from kenotron_ckpt import Checkpoint
from kenotron_dist import Mesh, materialize, named_parameters, parameter_layouts
from kenotron_models import (
    Build,
    Context,
    DecoderSpec,
    LayerStack,
    TransformersLayer,
    build_decoder,
)

BOUND = 1e-4
"""Largest deviation of a logit, in units of the largest logit."""
ROWS, LENGTH, LONGEST = 2, 64, 512
"""Texts of the probe; their tokens; what a window may make of that."""


def probe_tokens(spec: DecoderSpec) -> Tensor:
    """(rows, S) int64: a text that is longer than a short window, the same every time."""
    length = LENGTH if spec.window is None else max(LENGTH, min(spec.window + 16, LONGEST))
    length = min(length, spec.max_position_embeddings)
    places = torch.arange(ROWS * length)
    return ((places * 7919 + places * places * 31) % spec.vocab_size).view(ROWS, length)


def check_export(checkpoint: Checkpoint, spec: DecoderSpec, folder: Path) -> float:
    """Largest deviation of the logits of the model in ``folder`` from the checkpoint's.

    In units of the largest logit. One model is in memory at a time, in float32. Raises ValueError
    when it is above BOUND, or transformers is not there.
    """
    try:
        from transformers import AutoModelForCausalLM
    except ImportError as error:
        raise ValueError(
            f"the export is compared by transformers, which cannot be imported ({error}): pip "
            "install transformers, or give --no-check"
        ) from error
    tokens = probe_tokens(spec)
    ours = our_logits(checkpoint, spec, tokens)
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, trust_remote_code=False
    )
    with torch.no_grad():
        theirs = model.eval()(tokens).logits
    deviation = float((theirs - ours).abs().max() / ours.abs().max().clamp(min=1e-30))
    if not deviation <= BOUND:  # a NaN is no agreement
        raise ValueError(
            f"the logits of the exported model differ from ours by {deviation:.2e} of the largest, "
            f"more than {BOUND:.0e}: it is not the same model, and was not kept. Please report "
            "this; --no-check writes it all the same"
        )
    return deviation


def our_logits(checkpoint: Checkpoint, spec: DecoderSpec, tokens: Tensor) -> Tensor:
    """Logits (B, S, V) fp32 of tokens (B, S) from a checkpoint, on this process alone."""
    mesh = Mesh.connect()
    stack = LayerStack(build_decoder(spec, Build(mesh["tp"], dtype=torch.float32)))
    layouts = parameter_layouts(stack, mesh.axis_sizes)
    materialize(stack, "cpu")
    for layer in stack:
        if isinstance(layer, TransformersLayer):
            layer.fill_buffers(torch.device("cpu"))
    wanted = {
        path: (p.detach().zero_(), layouts[path]) for path, p in named_parameters(stack).items()
    }
    checkpoint.load(wanted, verify=False)  # it was, when it was opened
    positions = torch.arange(tokens.shape[1]).expand(tokens.shape)
    with torch.no_grad():
        logits = stack.eval()(tokens.flatten(), Context(positions))
    return logits[:, : spec.vocab_size].unflatten(0, tokens.shape)
