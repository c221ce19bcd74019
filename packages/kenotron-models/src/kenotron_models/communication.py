"""Bytes that a rank sends for a block and a micro-batch, by axis.

What travels over tp and ep is measured: the block's forward and backward run on device meta, over
axes without processes. What attention sends over cp follows from its cut (``kenotron_cp``).

Shapes: B rows, S tokens of a row, D hidden.
"""

from __future__ import annotations

from functools import lru_cache

from kenotron_cp import AttentionWay, Cut
from kenotron_dist.diagnosis import shape_axes
from kenotron_models.block import BlockSpec
from kenotron_models.meta_block import MetaMicroBatch, OneKernel, block_on_meta, run_backward
from kenotron_models.part import SendsOverSequence
from kenotron_models.transformers_block import TransformersBlock


@lru_cache(maxsize=256)
def sent_bytes(
    block: BlockSpec | TransformersBlock,
    width: int,
    batch: MetaMicroBatch,
    *,
    cut: Cut | None = None,
    way: AttentionWay = "ring",
    backend: str = "nccl",
) -> dict[str, int]:
    """Return the bytes that leave the first rank in forward and backward of a block, by axis.

    Counts of exchanges and the gradients of weights are left out. Experts are expected to have an
    even load and to be reached by ``alltoall``, and rows to be one document. What layers of
    transformers send over cp is not counted.

    Args:
        block: what it is made of.
        width: D.
        batch: the micro-batch of one rank.
        cut: how rows are cut over cp; None: they are whole.
        way: how attention over cut rows shares the work.
        backend: whose algorithms are counted, ``nccl`` or ``gloo``.
    """
    axes, recorder = shape_axes({"tp": batch.tp, "ep": batch.ep}, backend)
    layer, x, context = block_on_meta(block, width, batch, axes)
    with recorder, OneKernel(norms=False):
        run_backward(layer(x, context))
    found = {name: sent for name, sent in recorder.bytes_per_axis().items() if sent}
    if cut is None or cut.ranks == 1 or isinstance(block, TransformersBlock):
        return found
    return found | {"cp": sequence_bytes(block, batch, cut, way)}


def sequence_bytes(block: BlockSpec, batch: MetaMicroBatch, cut: Cut, way: AttentionWay) -> int:
    """Return the bytes that leave the first rank of cp; arguments are those of ``sent_bytes``."""
    sent = 0
    for part in block.parts:
        if isinstance(part, SendsOverSequence):
            forward, backward = part.sent_over_sequence(
                batch.rows, cut, way, tp=batch.tp, dtype=batch.dtype
            )
            again = batch.recompute in ("full", "mixer" if part is block.mixer else "feed_forward")
            sent += forward * (1 + again) + backward
    return sent
