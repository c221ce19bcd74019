"""Messages over tp of the embedding and of the output layer with its loss, for a micro-batch.

They are measured on device meta, over an axis without processes, as those of blocks are.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

import torch

from kenotron_dist.diagnosis import shape_axes
from kenotron_models.build import Build
from kenotron_models.context import Context
from kenotron_models.decoder import Head, build_decoder
from kenotron_models.meta_block import MetaMicroBatch, run_backward
from kenotron_models.spec import DecoderSpec
from kenotron_tp import cross_entropy


class Messages(NamedTuple):
    """Collectives of one direction."""

    calls: int = 0
    sent: int = 0
    """Bytes that leave the rank."""

    def times(self, uses: int) -> Messages:
        """Return those of so many uses."""
        return Messages(uses * self.calls, uses * self.sent)


@lru_cache(maxsize=64)
def end_messages(
    spec: DecoderSpec, batch: MetaMicroBatch, divisible_by: int = 1
) -> dict[str, tuple[Messages, Messages]]:
    """Return those of ``embedding`` and ``head`` over tp, forward and backward.

    The gradients of weights and the sum of the loss over data ranks are left out.

    Args:
        spec: a model of this repository's layers.
        batch: the micro-batch of one rank.
        divisible_by: the vocabulary is padded to a multiple of this times tp.
    """
    axes, recorder = shape_axes({"tp": batch.tp})
    tp, tokens = axes["tp"], batch.rows * batch.sequence
    build = Build(tp, batch.mode, dtype=batch.dtype, shapes_only=True)
    one = replace(spec, blocks=spec.blocks[:1], mtp_weight=0.0)
    layers = dict(build_decoder(one, build, vocab_divisible_by=divisible_by))
    places = torch.arange(batch.sequence, device="meta").expand(batch.rows, batch.sequence)
    samples = torch.arange(batch.rows, device="meta")
    context = Context(places, samples, dropout_key=0, to_loss=True)
    ids = torch.zeros(tokens, dtype=torch.int64, device="meta")

    def counted() -> Messages:
        entries = recorder.cut()
        return Messages(len(entries), recorder.bytes_per_axis(entries).get("tp", 0))

    with recorder:
        x = layers["embedding"](ids, context)
        ahead = counted()
        run_backward(x)
        found = {"embedding": (ahead, counted())}
        # The loss makes the logits.
        head = layers["head"]
        assert isinstance(head, Head)
        y = head(layers["norm"](x.detach().requires_grad_(), context), context)
        loss = cross_entropy(
            y, ids, tp, weight=head.weight, reduction="sum", times=1.0, cap=head.cap,
            vocab_size=spec.vocab_size, z_loss=spec.z_loss,
            sequence_parallel=head.sequence_parallel,
        )[0]  # fmt: skip
        ahead = counted()
        run_backward(loss)
        return found | {"head": (ahead, counted())}
