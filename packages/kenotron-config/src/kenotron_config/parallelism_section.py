"""The section `parallelism`: how many ranks share the work, and how."""

import math
from dataclasses import dataclass
from typing import Literal

from kenotron_config.field_checks import below, raise_all
from kenotron_models import Recompute
from kenotron_pp import Schedule, schedule_named
from kenotron_tp import TPMode

CPAttention = Literal["auto", "ring", "gather", "ulysses"]
"""Method of attention over ranks that share the tokens of a sample."""


@dataclass(frozen=True, kw_only=True)
class ParallelismConfig:
    """Ranks that share the work, and the ways they do; there are pp x dp x cp x tp of them."""

    dp: int
    """Ranks that share the samples (data parallel). auto: as many as there are processes for, see
    elastic.md; a run whose process dies continues with those that are left."""
    dp_auto: bool = False
    """True where dp is auto, which a saved config has as a number."""
    leave_out_slow: int | None = None
    """With dp: auto: after so many steps in a row in which the others waited for one rank during
    more than a third of the step, the run continues without that process, under torchrun without
    its host. Under other launchers it is a warning. None: never."""
    pp: int
    """Ranks that share the layers (pipeline parallel)."""
    tp: int
    """Ranks that share every layer (tensor parallel)."""
    pp_engine: Literal["afab", "1f1b", "interleaved", "zb-h1", "zb-v"] = "afab"
    """Order of the pipeline: all forwards first, one forward one backward, that over several parts
    of the model a rank, or zero-bubble with one part or two."""
    pp_chunks: int | None = None
    """Parts of the model that each pp rank has when pp_engine is interleaved; None: 2."""
    tp_mode: Literal["ALL_REDUCE", "REDUCE_SCATTER"] = "ALL_REDUCE"
    """Activations between layers: whole on every tp rank, or cut along the sequence."""
    tp_linear_async_communication: bool = False
    """Communication over tp travels while pieces are multiplied; the numbers are the same."""
    recompute_layer: bool = False
    """True: activations are computed again in the backward instead of being kept."""
    recompute: Recompute | None = None
    """Parts that decoder layers compute again: none; full, all but their input; selective, what is
    cheap between matrix products; mixer (attention) or feed_forward, that part of each. None: full
    with recompute_layer, else none."""
    recompute_layers: int | None = None
    """Number of decoder layers that do so, from the first one on; None: all."""
    recompute_memory_gb: float | None = None
    """Instead of both: GB of a rank for what decoder layers keep for the backward. They compute as
    little again as fits: selective in the first layers, then in all, then full."""
    tp_recompute_allgather: bool = True
    """With REDUCE_SCATTER: gather activations again in the backward instead of keeping them."""
    ep: int = 1
    """Ranks that share the experts (expert parallel): a part of the dp x cp x tp ranks of a
    pipeline stage, which it divides. Nanotron's name for it, expert_parallel_size, is understood;
    there it multiplies the number of processes."""
    ep_chunks: int = 1
    """Parts of a rank's tokens: one is sent over ep while another is computed. Gradients of experts
    are equal to rounding. With ep 1 nothing is sent, and it has no effect."""
    cp: int = 1
    """Ranks that share the tokens of each sample (context parallel). Nanotron's name for it,
    context_parallel_size, is understood."""
    cp_attention: CPAttention = "auto"
    """Method of attention over cp: keys travel round a ring, keys are gathered, or heads are
    exchanged for tokens (ulysses). auto: what model_config.attn_implementation names (ring,
    ring_flash_triton; llama3_ring_attention gathers); else ulysses where it sends less than the
    ring, or the ring."""
    cp_layout: Literal["zigzag", "contiguous"] = "zigzag"
    """Tokens of a cp rank: an early and a late piece, which balances the work, or one."""
    cp_stride: int | None = None
    """Key heads that are gathered at a time; only where keys are gathered. None: what
    model_config.ring_attn_heads_k_stride says, or 1."""
    cp_block: int = 512
    """Most tokens of the blocks in which attention over cp is computed; a GPU wants larger ones."""
    moe_layer_recompute: bool = False
    """True: in layers with experts the feed-forward is computed again in the backward, where
    recompute says nothing of it."""

    def __post_init__(self) -> None:
        """Check all fields at once."""
        found = []
        for name in ("dp", "pp", "tp", "cp", "cp_block", "ep", "ep_chunks"):
            found += below(name, getattr(self, name), 1)
        if (steps := self.leave_out_slow) is not None:
            found += below("leave_out_slow", steps, 1)
            if not self.dp_auto:
                found.append(
                    f"leave_out_slow: {steps} was given; only a run with dp: auto continues with "
                    "fewer ranks: set dp: auto (with tokens.global_batch_size), or leave it out"
                )
        if self.cp_stride is not None:
            found += below("cp_stride", self.cp_stride, 1)
        if self.recompute_layer and self.recompute not in (None, "full"):
            found.append(
                f"recompute: {self.recompute} was given; recompute_layer: true means full; keep one"
            )
        if (room := self.recompute_memory_gb) is not None:
            if not 0 < room < math.inf:
                found.append(f"recompute_memory_gb: {room} was given; it must be above 0")
            if self.recompute_layer or self.recompute or self.recompute_layers is not None:
                found.append(
                    f"recompute_memory_gb: {room} was given; it decides what is computed again: "
                    "remove recompute, recompute_layer and recompute_layers"
                )
        if self.recompute_layers is not None:
            found += below("recompute_layers", self.recompute_layers, 0)
        try:
            schedule_named(self.pp_engine, self.pp_chunks)
        except ValueError as error:
            found.append(f"pp_chunks: {self.pp_chunks} was given; {error}")
        stage = self.dp * self.cp * self.tp
        if self.ep > 1 and stage % self.ep:
            found.append(
                f"ep: {self.ep} was given; it must divide dp x cp x tp ({stage}), the ranks of a "
                "pipeline stage (in Nanotron it multiplies them); change one of them"
            )
        raise_all(found)

    @property
    def schedule(self) -> Schedule:
        """The order of the pipeline that `pp_engine` and `pp_chunks` name."""
        return schedule_named(self.pp_engine, self.pp_chunks)

    def recompute_of(self, layer: int) -> Recompute:
        """Return what a decoder layer computes again in the backward."""
        if self.recompute_layers is not None and layer >= self.recompute_layers:
            return "none"
        return self.recompute or ("full" if self.recompute_layer else "none")

    @property
    def world_size(self) -> int:
        """Processes that train together."""
        return math.prod(self.grid.values())

    @property
    def grid(self) -> dict[str, int]:
        """Ranks of each axis, in the order in which ranks are numbered."""
        return {"pp": self.pp, "dp": self.dp, "cp": self.cp, "tp": self.tp}

    @property
    def described(self) -> str:
        """The sizes in words: `pp 1 x dp 2 x tp 1`, with cp and ep where they are more than 1."""
        cp = f"x cp {self.cp} " if self.cp > 1 else ""
        ep = f", ep {self.ep}" if self.ep > 1 else ""
        return f"pp {self.pp} x dp {self.dp} {cp}x tp {self.tp}{ep}"

    @property
    def mode(self) -> TPMode:
        """Communication of the layers over tp."""
        return TPMode(
            sequence_parallel=self.tp_mode == "REDUCE_SCATTER" and self.tp > 1,
            overlap=self.tp_linear_async_communication,
            regather=self.tp_recompute_allgather,
        )
