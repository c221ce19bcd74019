"""Inputs that every layer of a micro-batch may read; the same on every pipeline stage."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from kenotron_models.kv_cache import KVCache
from kenotron_models.sequence_cut import SequenceCut


@dataclass(frozen=True, eq=False)
class Context:
    """The places of a micro-batch's tokens, and what dropout needs. B rows of S tokens.

    Where rows are cut over ranks, S is the number of this rank's tokens of a row.
    """

    positions_BS: Tensor
    """Place of every token in its text, int64."""
    samples_B: Tensor | None = None
    """Global number of every row's sample, int64; dropout needs it."""
    dropout_key: int | None = None
    """``kenotron_dist.counter_key`` of seed and step; None: nothing is dropped."""
    to_loss: bool = False
    """The head hands on what it is given: the loss computes its product, a few tokens at a time."""
    outputs: Tensor | None = None
    """Numbers of the tokens, among T, whose logits are wanted, int64; None: all."""
    cache: KVCache | None = None
    """Key-value cache of a text that is continued; None: nothing is kept."""
    host_positions_BS: Tensor | None = None
    """The same positions on the host, where the lengths of documents are read from.
    Without them an accelerator's are read back once per micro-batch, and the host waits for it."""
    cut: SequenceCut | None = None
    """Cut of rows over ranks, the same for all layers; None: this rank has whole rows."""
    chunks: int = 0
    """Virtual chunks of this rank, one after the other in its tokens (``virtual_chunks``); 0: there
    are none."""
    padding_BS: Tensor | None = None
    """True at padding tokens, bool: no expert receives them; None: there is no padding."""
    loss_weight: Tensor | None = None
    """Weight of a layer's own loss: 1 over the tokens of the global batch; a scalar. None: there is
    no loss to add to."""
    next_tokens_BS: Tensor | None = None
    """Token after each one, int64, for the module that predicts the one after it; None: the module
    computes nothing."""
    kept: dict[Any, Any] = field(default_factory=dict, repr=False)
    """Results of the forward that layers keep for the recomputation in the backward."""
    _made: dict[Any, Any] = field(default_factory=dict, repr=False)

    @property
    def tokens(self) -> int:
        """T = B * S."""
        return self.positions_BS.numel()

    def once(self, key: Any, make: Callable[[], Any]) -> Any:
        """Return the result of the first call of ``make`` under ``key``, shared by all layers."""
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]

    @property
    def made(self) -> list[Any]:
        """Results that ``once`` keeps."""
        return [*self._made.values()]

    def forget(self) -> None:
        """Free what layers made of this micro-batch: no layer will read it again."""
        self._made.clear()
        self.kept.clear()
