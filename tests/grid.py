"""The grid: every axis along which a training may be varied, and rows that cover all pairs of them.

A row is one setting of all axes. Rows are made from the axes alone, so they are the same wherever
they are made.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, replace
from functools import partial
from typing import Any

Sizes = tuple[int, int, int]
"""Ranks along pp, dp and tp."""
GLOBAL_BATCH = 120
"""Samples of a step: as many on every row, though 1 to 5 micro-batches do not divide all others."""
ENGINES = ("1f1b", "afab", "interleaved", "zb-h1", "zb-v")
TRIES = 40
"""Rows that are thought of for each that is taken."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One way to compute one training."""

    sizes: Sizes = (1, 1, 1)
    engine: str = "1f1b"
    mode: str = "plain"
    """What tp communicates: plain, sp (sequence parallel), overlap, or sp+overlap."""
    zero: int = 1
    accumulate: str = "fp32"
    """What gradients of micro-batches are summed in: fp32, or the model's own format."""
    micro: int = 3
    """Micro-batches of a step on each dp rank."""
    arch: str = "llama"
    tied: bool = False
    layers: int = 5
    """6 are dealt evenly to 2 pp ranks, 5 to none."""
    vocab: int = 257
    """264 is divided by every tp, 257 is padded."""
    documents: str = "joined"
    """separate: a token sees its own document only."""
    dropout: float = 0.0
    recompute: str = "none"
    attention: str = "sdpa"
    saver: str = "torch"
    """Writes checkpoints while training waits (torch), or from a copy behind it (datastates)."""
    dtype: str = "fp32"
    cp: int = 1
    """Ranks along cp."""
    way: str = "ring"
    """How attention runs over cp."""
    order: str = "zigzag"
    """Which tokens a rank of cp has."""
    sequence: int = 16
    """Tokens of a sample."""
    ep: int = 1
    """Ranks that share the experts, of those along dp, cp and tp."""
    chunks: int = 1
    """Parts in which tokens are sent over ep."""
    reduce: str = "micro_batch"
    """When ZeRO 2 and 3 add gradients over data ranks: after each micro-batch, or once a step."""
    extra: str = ""
    """What is not in every training: mtp (further predictions), mup, or ramp (of the batch)."""

    @property
    def ranks(self) -> int:
        return math.prod(self.sizes) * self.cp

    @property
    def axes(self) -> dict[str, int]:
        """Ranks of each axis."""
        pp, dp, tp = self.sizes
        return {"pp": pp, "dp": dp, "cp": self.cp, "tp": tp, "ep": self.ep}

    @property
    def adds_first(self) -> bool:
        """Whether micro-batches are added before ranks are: the same order, the same bits."""
        alone = self.micro == 1 or self.sizes[1] * self.cp == 1
        return alone or self.zero < 2 or self.reduce == "step"

    @property
    def model(self) -> Row:
        """What one process does for it: rows with the same one have the same numbers.

        In bf16 it computes attention in the same way, in as many micro-batches: each rounds anew.
        """
        names = OF_THE_MODEL
        if self.dtype == "bf16":
            names += ("accumulate", "micro", "attention")
        return Row(**{name: getattr(self, name) for name in names})

    def __str__(self) -> str:
        pp, dp, tp = self.sizes
        words = [f"pp{pp}-dp{dp}-tp{tp}", *map(str, astuple(self)[1:])]
        words[1] = self.engine.replace("-", "")
        words[3:9] = [
            f"zero{self.zero}", f"sum-{self.accumulate}", f"m{self.micro}", self.arch,
            "tied" if self.tied else "untied", f"layers{self.layers}",
        ]  # fmt: skip
        words[9], words[11] = f"v{self.vocab}", f"drop{self.dropout:g}"
        words[-8:] = [f"cp{self.cp}", self.way, self.order] if self.cp > 1 else []
        words += [f"s{self.sequence}"] if self.sequence != Row.sequence else []
        words += [f"ep{self.ep}"] if self.ep > 1 else []
        words += [f"chunks{self.chunks}"] if self.chunks > 1 else []
        words += ["reduced-once"] if self.reduce == "step" else []
        words += [self.extra] if self.extra else []
        return "-".join(words)


OF_THE_MODEL = (
    "arch", "tied", "layers", "vocab", "documents", "dropout", "dtype", "sequence", "extra",
)  # fmt: skip
AXES: dict[str, tuple] = {
    "engine": ENGINES,
    "mode": ("plain", "sp", "overlap", "sp+overlap"),
    "zero": (0, 1),
    "accumulate": ("fp32", "own"),
    "micro": (1, 2, 3, 4, 5),
    "arch": ("llama", "mistral", "qwen2", "qwen3", "starcoder2"),
    "tied": (False, True),
    "layers": (6, 5),
    "vocab": (264, 257),
    "documents": ("joined", "separate"),
    "dropout": (0.0, 0.1),
    "recompute": ("none", "full", "selective"),
    "attention": ("sdpa", "blocked", "plain"),
    "saver": ("torch", "datastates"),
    "dtype": ("fp32", "bf16"),
}


SHARDS = {"zero": (0, 1, 2, 3), "reduce": ("micro_batch", "step")}
"""All stages of ZeRO, and when the last two add gradients."""


def factorisations(ranks: int) -> Iterator[Sizes]:
    """All (pp, dp, tp) with this product."""
    divisors = [n for n in range(1, ranks + 1) if ranks % n == 0]
    for pp, dp, tp in itertools.product(divisors, repeat=3):
        if pp * dp * tp == ranks:
            yield pp, dp, tp


HAND_PICKED = (
    Row(sizes=(2, 2, 2), mode="sp", tied=True, engine="zb-v", arch="qwen2", documents="separate"),
    Row(sizes=(2, 2, 2), mode="sp+overlap", engine="interleaved", arch="llama", recompute="full"),
    Row(sizes=(8, 1, 1), tied=True, layers=6, micro=5, accumulate="own", saver="datastates"),
    Row(sizes=(1, 8, 1), tied=True, zero=0, micro=5, arch="mistral", attention="blocked"),
    Row(sizes=(1, 1, 8), mode="sp", arch="qwen3", recompute="selective", micro=2),
    Row(sizes=(4, 2, 1), engine="zb-h1", tied=True, arch="starcoder2", dropout=0.1, micro=4),
    Row(sizes=(1, 2, 4), mode="overlap", tied=True, arch="qwen2", dtype="bf16"),
    Row(sizes=(2, 1, 4), engine="afab", mode="sp", arch="starcoder2", dropout=0.1, zero=0),
)
"""Rows of eight ranks that are always run: every axis is cut by two or more in one of them."""


def sample() -> list[Row]:
    """Rows for every change: all pairs on up to four ranks, and eight rows of eight ranks."""
    sizes = [each for ranks in (1, 2, 4) for each in factorisations(ranks)]
    return [*covering(sizes, familiar=3, more=SHARDS), *HAND_PICKED]


def full() -> list[Row]:
    """Rows with all pairs on every layout of one, two, four and eight ranks."""
    return covering([sizes for ranks in (1, 2, 4, 8) for sizes in factorisations(ranks)])


WAYS = {
    "cp": (2,),
    "way": ("ring", "gather", "ulysses"),
    "order": ("zigzag", "contiguous"),
}
"""Further axes of rows whose samples are cut over cp."""
CUT_LENGTH = 37
"""Tokens of a sample of theirs: a strip has three, and the last four have padding."""
DONE_WHEN = Row(
    sizes=(2, 1, 2), cp=2, mode="sp", tied=True, engine="zb-v", arch="qwen2", layers=6,
    documents="separate", sequence=CUT_LENGTH,
)  # fmt: skip
"""Cut over pp, cp and tp at once, with grouped key heads: it is also trained for 20 steps."""
CUT_BY_HAND = (
    DONE_WHEN,
    Row(sizes=(1, 2, 1), cp=4, way="ulysses", arch="starcoder2", dropout=0.1, zero=0, micro=5,
        sequence=CUT_LENGTH),
    Row(sizes=(1, 1, 1), cp=8, way="gather", arch="mistral", recompute="selective",
        sequence=CUT_LENGTH),
    Row(sizes=(2, 2, 1), cp=2, zero=3, engine="zb-v", arch="llama", tied=True, recompute="full",
        sequence=CUT_LENGTH),
)  # fmt: skip
"""Rows of eight ranks of which cp cuts the samples."""


def context() -> list[Row]:
    """Rows that cut samples over cp: each way with every setting of the other axes, up to 4 ranks.

    And by hand some of eight ranks.
    """
    sizes = [each for ranks in (1, 2) for each in factorisations(ranks)]
    found = covering(sizes, familiar=3, seed=6, among=WAYS)  # of few models
    return [*(replace(row, sequence=CUT_LENGTH) for row in found), *CUT_BY_HAND]


EXPERTS = {"arch": ("qwen2_moe", "deepseek"), "ep": (2, 4), "dtype": ("fp32",)}
"""Axes of rows with experts; in bf16 choices between nearly equal experts depend on rounding."""
EXPERTS_BY_HAND = (
    Row(sizes=(2, 1, 2), cp=2, ep=4, mode="sp", tied=True, engine="zb-v", arch="qwen2_moe",
        layers=6, documents="separate", sequence=CUT_LENGTH),
    Row(sizes=(2, 2, 2), ep=2, mode="sp+overlap", engine="interleaved", arch="deepseek",
        recompute="full"),
    Row(sizes=(1, 4, 2), ep=8, arch="deepseek", zero=0, accumulate="own", recompute="selective"),
    Row(sizes=(2, 2, 2), ep=2, zero=3, engine="zb-h1", arch="qwen2_moe", mode="sp", reduce="step"),
    Row(sizes=(1, 2, 2), ep=4, chunks=2, arch="qwen2_moe_limited", mode="sp", documents="separate",
        recompute="full"),
)  # fmt: skip
"""Rows of eight ranks with experts, and one whose router is noisy and whose experts are full."""


def experts() -> list[Row]:
    """Rows with experts: each architecture and ep with every setting of the others, to 4 ranks.

    And by hand some of eight ranks.
    """
    sizes = [each for ranks in (1, 2, 4) for each in factorisations(ranks)]
    return [*covering(sizes, familiar=3, among=EXPERTS), *EXPERTS_BY_HAND]


MIXERS = {"arch": ("mamba", "mamba2", "hybrid"), "dropout": (0.0,)}
"""Axes of rows with state spaces, alone and mixed with attention and feed-forwards (Nemotron-H)."""
MIXERS_BY_HAND = (
    Row(sizes=(2, 1, 2), mode="sp", tied=True, engine="zb-v", arch="mamba", layers=6,
        documents="separate", recompute="selective"),
    Row(sizes=(1, 1, 2), cp=2, arch="mamba", mode="sp+overlap", recompute="full",
        documents="separate", sequence=CUT_LENGTH),
    Row(sizes=(2, 1, 1), cp=2, arch="mamba2", order="contiguous", engine="zb-h1", tied=True,
        documents="separate", sequence=CUT_LENGTH),
    Row(sizes=(1, 2, 4), arch="mamba2", mode="sp", zero=0, recompute="selective", micro=2),
    Row(sizes=(1, 1, 2), cp=2, arch="hybrid", mode="sp", layers=6, documents="separate",
        recompute="selective", sequence=CUT_LENGTH),
)  # fmt: skip
"""Rows of state-space models: tp 4 has more ranks than Mamba-2's groups, cp cuts their rows."""


def mixers() -> list[Row]:
    """Rows with state spaces: each architecture with every setting of the others, to 2 ranks.

    And by hand some of more.
    """
    sizes = [each for ranks in (1, 2) for each in factorisations(ranks)]
    return [*covering(sizes, familiar=3, among=MIXERS), *MIXERS_BY_HAND]


def extras() -> list[Row]:
    """Rows with what is not in every training: further predictions, µP, a batch that grows."""
    cut, eight = CUT_LENGTH, (2, 2, 2)
    return [
        Row(sizes=(2, 1, 2), extra="mtp", mode="sp", engine="zb-v", tied=True, recompute="full"),
        Row(sizes=(1, 2, 1), extra="mtp", cp=2, arch="qwen2", documents="separate", zero=3,
            micro=1, sequence=cut),
        Row(sizes=eight, extra="mtp", ep=2, arch="deepseek", engine="interleaved", mode="overlap"),
        Row(sizes=(2, 2, 1), extra="mtp", engine="zb-h1", arch="mistral", dtype="bf16", zero=2),
        Row(sizes=eight, extra="mup", arch="qwen3", engine="zb-v", mode="sp+overlap", tied=True),
        Row(sizes=(1, 4, 1), extra="mup", zero=3, recompute="selective", layers=6, vocab=264),
        Row(sizes=(1, 1, 2), extra="mup", cp=2, arch="starcoder2", dropout=0.1, sequence=cut),
        Row(sizes=eight, extra="ramp", engine="zb-h1", arch="mistral", zero=2, reduce="step"),
        Row(sizes=(1, 2, 2), extra="ramp", mode="sp", zero=3, arch="qwen2", saver="datastates"),
    ]  # fmt: skip


SECTIONS = ("sample", "context", "experts", "mixers", "extras")
"""Functions of this file that make the rows of a section of ``GRID.md``."""
WITHOUT_ATTENTION = ("mamba", "mamba2")
SEPARATES = ("qwen2", "qwen2_moe", "qwen2_moe_limited", *WITHOUT_ATTENTION, "hybrid")
"""Architectures that may tell documents apart."""
CLASHES: tuple[tuple[str, str, Callable[..., object]], ...] = (
    ("sizes", "engine", lambda sizes, engine: sizes[0] == 1 and engine != "1f1b"),
    ("sizes", "engine", lambda sizes, engine: sizes[0] == 8 and engine in ("interleaved", "zb-v")),
    ("sizes", "mode", lambda sizes, mode: sizes[2] == 1 and mode != "plain"),
    ("sizes", "micro", lambda sizes, micro: GLOBAL_BATCH % (sizes[1] * micro)),
    (
        "arch",
        "documents",
        lambda arch, documents: documents == "separate" and arch not in SEPARATES,
    ),
    (
        "arch",
        "attention",
        lambda arch, attention: arch in WITHOUT_ATTENTION and attention != "sdpa",
    ),
    ("arch", "dropout", lambda arch, dropout: dropout and arch != "starcoder2"),
    ("arch", "attention", lambda arch, attention: arch == "starcoder2" and attention != "sdpa"),
    ("sizes", "ep", lambda sizes, ep: sizes[1] * sizes[2] % ep),
    ("zero", "reduce", lambda zero, reduce: zero < 2 and reduce == "step"),
    ("cp", "attention", lambda cp, attention: cp > 1 and attention == "blocked"),
)
"""Settings that no config can say together, or that would be another row's run."""


def clash(settings: Mapping[str, object]) -> bool:
    """Whether two of the settings cannot go together."""
    return any(
        one in settings and two in settings and bool(wrong(settings[one], settings[two]))
        for one, two, wrong in CLASHES
    )


def covering(
    sizes: Sequence[Sizes],
    familiar: int = 0,
    seed: int = 0,
    among: Mapping[str, tuple] | None = None,
    more: Mapping[str, tuple] | None = None,
) -> list[Row]:
    """Rows in which every two settings of two axes that can go together do so at least once.

    With further axes ``among``: only the pairs of which one is theirs; ``more`` has further ones,
    or settings, that count as the others do.

    Greedy: of a few rows that begin with a pair nobody has yet, the one with the most new pairs is
    taken (Cohen et al., The AETG system, 1997). That another row has its model, which one process
    then computes once for both, counts as ``familiar`` new pairs.
    """
    axes = {"sizes": tuple(sizes), **AXES, **(more or {}), **(among or {})}
    draw = random.Random(seed)
    open_pairs = {
        pair
        for pair in _pairs_of_axes(axes, draw)
        if among is None or any(name in among for name, _ in pair)
    }
    rows: list[Row] = []
    models: set[Row] = set()

    def worth(row: Row) -> int:
        return len(_pairs(row) & open_pairs) + familiar * (row.model in models)

    while open_pairs:
        first = min(open_pairs, key=lambda pair: sorted(map(repr, pair)))
        found = [_fill(dict(first), axes, open_pairs, draw) for _ in range(TRIES)]
        best = max((row for row in found if row), key=worth)
        rows.append(best)
        models.add(best.model)
        open_pairs -= _pairs(best)
    return sorted(rows, key=lambda row: (row.ranks, row.sizes, str(row)))


def drawn(axes: Mapping[str, tuple], draw: random.Random) -> Row | None:
    """A random row of these axes; None where the settings that were drawn fit no other."""
    return _fill({}, dict(axes), set(), draw)


Pair = frozenset[tuple[str, object]]


def _pairs(row: Row) -> set[Pair]:
    return {frozenset(two) for two in itertools.combinations(asdict(row).items(), 2)}


def _pairs_of_axes(axes: dict[str, tuple], draw: random.Random) -> set[Pair]:
    """Every pair that some row has."""
    settings = [(name, value) for name, values in axes.items() for value in values]
    pairs = [
        frozenset(two) for two in itertools.combinations(settings, 2) if two[0][0] != two[1][0]
    ]
    fitting = (pair for pair in pairs if not clash(dict(pair)))
    return {pair for pair in fitting if _fill(dict(pair), axes, set(), draw)}


def _fill(
    chosen: dict[str, Any], axes: dict[str, tuple], wanted: set[Pair], draw: random.Random
) -> Row | None:
    """A row with these settings and, greedily, as many of the wanted pairs; None: there is none."""
    names = [name for name in axes if name not in chosen]
    draw.shuffle(names)
    # First those that others clash with: each axis after them suits any choice of theirs.
    names.sort(key=lambda name: name not in ("arch", "sizes", "cp"))
    for name in names:
        fitting = [value for value in axes[name] if not clash({**chosen, name: value})]
        if not fitting:
            return None
        draw.shuffle(fitting)
        chosen[name] = max(fitting, key=partial(_gain, chosen, name, wanted))
    return Row(**chosen)


def _gain(chosen: dict[str, Any], name: str, wanted: set[Pair], value: object) -> int:
    return sum(frozenset(((name, value), other)) in wanted for other in chosen.items())
