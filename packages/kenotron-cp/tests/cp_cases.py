"""Attentions that are compared between layouts, ways and one process with a dense mask."""

from typing import NamedTuple

import torch
from cp_dense import dense, inputs, whole

from kenotron_cp import FLASH_CPU, PLAIN, Dropout, Layout, Scoring, Visibility
from kenotron_dist.rng import uniform

SINKS = torch.linspace(-1, 3, 8)
WITH_SINKS = Scoring(0.25, sinks=SINKS)
WAYS = ("ring", "gather", "ulysses")


class Case(NamedTuple):
    """An attention of whole tensors."""

    sight: Visibility
    heads: int = 8
    kv_heads: int = 8
    options: dict = {}
    batch: int = 1
    depth: int = 16
    width: int = 16
    dtype: torch.dtype = torch.float32

    def tensors(self):
        """q, k, v and the gradient of the output."""
        shape = (self.heads, self.kv_heads, self.depth, self.width)
        return inputs(self.batch, self.sight.sequence, *shape, self.dtype)

    def expected(self):
        """Output and gradients in fp64."""
        scoring = self.options.get("scoring", Scoring(self.depth**-0.5))
        factors = None if scoring.dropout is None else self.factors(scoring.dropout)
        return dense(*self.tensors(), self.sight.dense_mask(), scoring, factors)

    def factors(self, dropout):
        """Dropout's factors of all probabilities."""
        places, batch = torch.arange(self.sight.sequence), torch.arange(self.batch)
        return dropout.keep(batch, torch.arange(self.heads), places, places) / (1 - dropout.p)


def keep(rows, heads, queries, keys):
    """Which probabilities stay: a function of global coordinates."""
    where = rows[:, None, None, None], heads[:, None, None], queries[:, None], keys
    return uniform(7, *where) >= 0.3


DROPPED = Scoring(0.25, dropout=Dropout(0.3, keep))


def cases():
    """All of them, by name."""
    rows = torch.tensor([[0, 2, 5, 40], [0, 13, 14, 50]])
    ids = (torch.arange(64) >= rows[:, :, None]).sum(1)
    unseen = torch.arange(40) // 9
    unseen[18:27] = -1
    return {
        "causal": Case(Visibility(96), options={"kernel": PLAIN}),
        "odd": Case(Visibility(37, window=7)),
        "fewer tokens than chunks": Case(Visibility(5)),
        "rows with other documents": Case(Visibility(64, documents=ids), 8, 2, batch=2),
        "a long document": Case(Visibility.of_lengths([50, 3, 11]), 8, 4),
        "documents of one token": Case(Visibility(33, documents=torch.arange(33))),
        "tokens that see nothing": Case(Visibility(40, 5, unseen), options={"kernel": PLAIN}),
        "several blocks a strip": Case(Visibility(200, 60), 8, 4, {"layout": Layout(block=4)}),
        "contiguous": Case(Visibility.of_lengths([30, 34]), 8, 4, {"layout": Layout("contiguous")}),
        "scale, wide values": Case(
            Visibility(48), 8, 4, {"scoring": Scoring(0.2), "stride": 3}, 2, 8, 24
        ),
        "cap": Case(Visibility(96), options={"scoring": Scoring(0.7, 0.8)}),
        "cap in a window of documents": Case(
            Visibility(64, 9, ids), 8, 2, {"scoring": Scoring(0.25, 1.5)}, 2
        ),
        "sinks": Case(Visibility(96, 40), 8, 4, {"scoring": WITH_SINKS, "stride": 3}),
        "sinks of tokens that see nothing": Case(
            Visibility(40, 5, unseen), options={"scoring": WITH_SINKS}
        ),
        "cap and sinks": Case(Visibility(37), 8, 1, {"scoring": Scoring(0.25, 1.0, SINKS)}),
        "dropout": Case(Visibility(48, 20), 8, 2, {"scoring": DROPPED}, 2),
        "bf16": Case(Visibility(64), 8, 2, {"kernel": FLASH_CPU}, dtype=torch.bfloat16),
        "copies of key heads": Case(Visibility(64, 50), 8, 2, {"copies": 4}, 2),
        "copies in bf16": Case(
            Visibility(37), 8, 1, {"copies": 8, "kernel": FLASH_CPU}, dtype=torch.bfloat16
        ),
        "fp64": Case(Visibility(50, 30), 8, 4, dtype=torch.float64),
    }


def on_this_rank(mesh):
    """Joined outputs and gradients of every case and way, by both."""
    return {
        (name, way): whole(mesh, case.tensors(), case.sight, way=way, **case.options)
        for name, case in cases().items()
        for way in WAYS
        if way != "ulysses" or case.heads % mesh["cp"].size == 0
    }
