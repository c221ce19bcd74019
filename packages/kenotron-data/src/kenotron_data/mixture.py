"""Several data sets read in fixed shares, in an order that is computed per index.

Shares are rounded to q / 65,536. One period of 65,536 picks is built once by Tijdeman's solution
of the chairman assignment problem (Discrete Mathematics 32, 1980): after any number of picks each
source was taken within one sample of its share. Periods repeat, so the source of any sample, and
how many of that source came before it, are two table look-ups and a product.
"""

import heapq
import math
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from kenotron_data.order import shuffled
from kenotron_data.row_samples import Dataset, Int64Array
from kenotron_data.subsets import Concatenated

PERIOD = 1 << 16


class Mixture(Concatenated):
    """Read data sets in fixed shares; each is shuffled for itself and has epochs of its own.

    The n-th sample taken of a source is place n of that source's own endless shuffled order, keyed
    by seed, epoch, stage and the source's name; other sources and shares do not change it. A loader
    reads a mixture in its order; the cursor's epoch counts the samples of all sources together.

    Args:
        sources: data sets by name, all with samples of one length.
        weights: by name, 0 or more, in any unit; None: in proportion to the sources' samples. A
            source of weight 0 is never read.

    Raises:
        ValueError: a name is missing or unknown, a weight is no finite number of 0 or more, all
            are 0, or one is too small to be read at all.
    """

    def __init__(
        self, sources: Mapping[str, Dataset], weights: Mapping[str, float] | None = None
    ) -> None:
        super().__init__(sources)
        given = dict(zip(self.sources, self.sizes.tolist(), strict=True))
        self.quanta = round_shares(given if weights is None else weights, self.sources)
        """Samples of each source in a period: integers whose sum is 65,536."""
        self._picks = chairman(self.quanta)
        self._before = np.empty(PERIOD, dtype=np.int64)  # earlier picks of the same source
        for source, count in enumerate(self.quanta):
            self._before[self._picks == source] = np.arange(count)
        self._quanta = np.array(self.quanta, dtype=np.int64)

    @property
    def shares(self) -> dict[str, float]:
        """The shares as they are: by name, multiples of 1 / 65,536 whose sum is 1."""
        return {name: q / PERIOD for name, q in zip(self.sources, self.quanta, strict=True)}

    def locate(self, places: Int64Array) -> tuple[Int64Array, Int64Array]:
        """Return the source of each place of the order, and how many of it came before.

        Args:
            places: (R,) places from 0.

        Returns:
            (R,) int64 places in `sources`, and (R,) int64 numbers from 0.
        """
        periods, within = np.divmod(places, PERIOD)
        source = self._picks[within].astype(np.int64)
        return source, periods * self._quanta[source] + self._before[within]

    def order(self, places: Int64Array, seed: int, stage: int) -> Int64Array:
        """Return the samples at places of a stage's order: (R,) to (R,) int64."""
        source, count = self.locate(places)
        indices = np.empty_like(places)
        for number in np.unique(source).tolist():
            rows = source == number
            key = f"{stage}/{self.sources[number]}"
            local = shuffled(count[rows], int(self.sizes[number]), seed, key)
            indices[rows] = self.offsets[number] + local
        return indices


def round_shares(weights: Mapping[str, float], names: Sequence[str]) -> tuple[int, ...]:
    """Round weights to integers of sum 65,536, by the largest remainder.

    Args:
        weights: by name; finite, 0 or more, in any unit.
        names: the sources, in order; each has a weight, and there is no other.

    Returns:
        One integer for each name; each differs from its exact share by less than 1.

    Raises:
        ValueError: see `Mixture`.
    """
    if set(weights) != set(names):
        raise ValueError(
            f"weights are given for {sorted(weights)}, but the sources are {sorted(names)}: give "
            "one weight for each"
        )
    for name in names:
        if not (math.isfinite(weights[name]) and weights[name] >= 0):
            raise ValueError(
                f"the weight of source {name!r} must be a finite number of 0 or more, but "
                f"{weights[name]} was given"
            )
    total = math.fsum(weights.values())
    if not 0 < total < math.inf:
        raise ValueError(
            f"the weights add up to {total}: at least one must be above 0, and their sum finite"
        )
    exact = [weights[name] / total * PERIOD for name in names]
    quanta = [int(share) for share in exact]
    largest = sorted(range(len(names)), key=lambda i: (quanta[i] - exact[i], i))
    for i in largest[: PERIOD - sum(quanta)]:
        quanta[i] += 1
    for name, quantum in zip(names, quanta, strict=True):
        if weights[name] and not quantum:
            raise ValueError(
                f"the weight {weights[name]} of source {name!r} is a share of "
                f"{weights[name] / total:.2g}, too little to be read: raise it to 1 / {PERIOD} of "
                "the sum, or set it to 0"
            )
    return tuple(quanta)


def chairman(quanta: Sequence[int]) -> NDArray[np.int32]:
    """Order the picks of one period so that every prefix has each source's share.

    Source i comes quanta[i] times. After t picks it came x times with
    |x - t * quanta[i] / period| <= 1 - 1 / (2k - 2), where k >= 2 sources are read.

    Tijdeman's rule: the next pick of a source may come once it is due by 1 / (2k - 2), and of those
    that may, the one whose bound breaks first comes. All of it in integers.

    Returns:
        (sum of quanta,) int32 places in `quanta`.
    """
    period = sum(quanta)
    read = [i for i, q in enumerate(quanta) if q]
    if len(read) == 1:
        return np.full(period, read[0], dtype=np.int32)
    slack = 2 * len(read) - 2
    counts = dict.fromkeys(read, 0)
    ready: list[tuple[int, int]] = []  # (last time without this pick, source)
    waiting = [(_release(0, quanta[i], period, slack), i) for i in read]
    heapq.heapify(waiting)
    picks = np.empty(period, dtype=np.int32)
    for t in range(1, period + 1):
        while waiting and waiting[0][0] <= t:
            _, i = heapq.heappop(waiting)
            last = (period * (slack * counts[i] + slack - 1)) // (slack * quanta[i])
            heapq.heappush(ready, (last, i))
        _, i = heapq.heappop(ready)
        picks[t - 1] = i
        counts[i] += 1
        heapq.heappush(waiting, (_release(counts[i], quanta[i], period, slack), i))
    return picks


def _release(count: int, quantum: int, period: int, slack: int) -> int:
    """Return the first time at which a source that came `count` times may come again.

    That is the least t with t * quantum / period - count >= 1 / slack.
    """
    return -(-period * (slack * count + 1) // (slack * quantum))
