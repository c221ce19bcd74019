"""Random numbers that no layout changes, and named streams for everything else.

``uniform`` and ``keep_mask`` are pure functions of a key and of *global* coordinates (sample,
position, feature): no generator, no state, so the same numbers come out on every layout, for every
split into micro-batches, when activations are recomputed and after a resume.

Elements are hashed with SplitMix64 (Steele, Lea and Flood, OOPSLA 2014) in wrapping int64.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping

import torch
from torch import Tensor

from kenotron_dist.hashing import key

__all__ = [
    "RngStreams",
    "counter_key",
    "dropout",
    "keep_mask",
    "key",
    "uniform",
]


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value


_GAMMA = _signed(0x9E3779B97F4A7C15)
_MULTIPLIERS = (_signed(0xBF58476D1CE4E5B9), _signed(0x94D049BB133111EB))


def counter_key(*parts: int | str) -> int:
    """A 64-bit key, signed as torch stores it, from a seed, a step, a layer's name..."""
    return _signed(key(*parts, bits=64))


def uniform(base: int, *coordinates: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Numbers in (0, 1), neither end included, one for each element of the ``coordinates``.

    Equal key and indices give equal numbers, whatever the shape around them.

    Args:
        base: a ``counter_key``.
        coordinates: int64 tensors of global indices, of any shapes that broadcast together, the
            innermost last.
        dtype: fp32 (2^23 different numbers) or fp64 (2^52).

    Raises:
        ValueError: there are no coordinates.
    """
    return in_unit_interval(_bits(base, coordinates), dtype)


def in_unit_interval(bits: Tensor, dtype: torch.dtype) -> Tensor:
    """Map 64 random bits (int64, of any shape) to (0, 1), fp32 or fp64.

    Together with the half that keeps 0 out, the steps fill the fraction exactly: with one bit more
    the largest number would be rounded to 1.
    """
    steps = 52 if dtype == torch.float64 else 23
    return (_shift(bits, 64 - steps).to(dtype) + 0.5) * 2.0**-steps


def keep_mask(
    p: float,
    base: int,
    samples_B: Tensor,
    positions_BS: Tensor,
    first_feature: int,
    features: int,
) -> Tensor:
    """Return the elements that a dropout with probability ``p`` keeps: bool (B, S, features).

    Args:
        p: in [0, 1).
        base: a ``counter_key`` of seed, step and layer name.
        samples_B: (B,) int64, global sample numbers.
        positions_BS: (B, S) int64, global positions.
        first_feature: first global feature (or head) held here.
        features: number of them.

    Raises:
        ValueError: p is outside [0, 1).
    """
    if not 0 <= p < 1:
        raise ValueError(f"dropout probability {p} is not within [0, 1)")
    feature = torch.arange(first_feature, first_feature + features, device=samples_B.device)
    rows = samples_B[:, None, None], positions_BS[:, :, None]
    return uniform(base, *rows, feature[None, None, :]) >= p


def dropout(x_BSF: Tensor, p: float, mask: Tensor) -> Tensor:
    """``x`` (B, S, F) where ``mask`` keeps it, scaled by 1 / (1 - p); zero elsewhere."""
    return x_BSF * mask * (1 / (1 - p))


class RngStreams:
    """Named ``torch.Generator``s, each seeded by (seed, name), for random choices of one process.

    Unlike a mask these depend on how often they were asked, so their state is saved.
    """

    def __init__(self, seed: int, device: torch.device | str = "cpu") -> None:
        self.seed, self.device = seed, torch.device(device)
        self._generators: dict[str, torch.Generator] = {}

    def __getitem__(self, name: str) -> torch.Generator:
        """The stream called ``name``; made when first asked for."""
        if name not in self._generators:
            made = torch.Generator(self.device)
            self._generators[name] = made.manual_seed(key(self.seed, name, bits=48))
        return self._generators[name]

    def capture(self) -> dict[str, str]:
        """State of every stream asked for so far, as JSON."""
        return {
            name: base64.b64encode(bytes(generator.get_state().tolist())).decode()
            for name, generator in sorted(self._generators.items())
        }

    def restore(self, states: Mapping[str, str]) -> None:
        """Continue the streams as they stood when captured; others start afresh.

        Raises ValueError naming the stream whose state is not one; nothing is changed then.
        """
        restored = RngStreams(self.seed, self.device)
        for name, text in states.items():
            try:
                state = torch.tensor(list(base64.b64decode(text)), dtype=torch.uint8)
                restored[name].set_state(state)
            except (ValueError, RuntimeError) as error:
                raise ValueError(
                    f"state of random stream {name!r} cannot be restored: {error}"
                ) from error
        self._generators = restored._generators


def _bits(base: int, coordinates: tuple[Tensor, ...]) -> Tensor:
    """64 hashed bits; every coordinate but the last makes a new SplitMix64 stream."""
    if not coordinates:
        raise ValueError("uniform: give at least one tensor of global indices")
    state: Tensor | int = base
    for coordinate in coordinates:
        state = _mix(state + (coordinate + 1) * _GAMMA)
    assert isinstance(state, Tensor)  # there was a coordinate
    return state


def _mix(x: Tensor) -> Tensor:
    x = (x ^ _shift(x, 30)) * _MULTIPLIERS[0]
    x = (x ^ _shift(x, 27)) * _MULTIPLIERS[1]
    return x ^ _shift(x, 31)


def _shift(x: Tensor, bits: int) -> Tensor:
    """Logical shift to the right."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)
