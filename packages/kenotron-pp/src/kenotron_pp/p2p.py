"""Activations and gradients between neighbouring stages.

One channel carries one direction of one boundary. Its tensors have the same shape for every
micro-batch of one token shape, so shape and dtype are sent once, before the first of them.
Operations are plain ordered sends and receives: batched ones hang on gloo outside simple rings.
"""

from __future__ import annotations

from collections.abc import Hashable

import torch
from torch import Tensor

from kenotron_dist import Axis, Handle, receive, send

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64)
_HEADER = 8  # dtype, number of dims, sizes
_TAGS = 1 << 20  # tags below are micro-batches going down, above it gradients going up


class Channel:
    """Tensors from one stage to a neighbour. Both ends must make the same calls in order."""

    def __init__(self, axis: Axis, peer: int, *, upstream: bool, device: torch.device) -> None:
        self.axis, self.peer, self.device = axis, peer, device
        self._base = _TAGS if upstream else 0
        self._known: dict[Hashable, tuple[torch.dtype, tuple[int, ...]]] = {}

    def send(self, x: Tensor, microbatch: int, key: Hashable) -> list[Handle]:
        """Start sending ``x``; wait for the handles before it is freed.

        ``key`` is anything that both stages know and that fixes the shape of ``x``: the shape of
        the micro-batch's tokens. Raises ValueError when a later ``x`` breaks that promise.
        """
        handles = []
        described = (x.dtype, tuple(x.shape))
        if key not in self._known:
            self._known[key] = described
            header = _pack(x).to(self.device)
            handles.append(send(header, self.axis, self.peer, self._base + 2 * microbatch + 1))
        elif self._known[key] != described:
            raise ValueError(
                f"stage {self.axis.rank} sends {described} for micro-batch {microbatch}, but "
                f"{self._known[key]} before for tokens of the same shape"
            )
        handles.append(send(x, self.axis, self.peer, self._base + 2 * microbatch))
        return handles

    def receive(self, microbatch: int, key: Hashable) -> Handle:
        """Start receiving what the neighbour sends for ``microbatch``."""
        if key not in self._known:
            header = torch.zeros(_HEADER, dtype=torch.int64, device=self.device)
            tag = self._base + 2 * microbatch + 1
            self._known[key] = _unpack(receive(header, self.axis, self.peer, tag).wait())
        dtype, shape = self._known[key]
        out = torch.empty(shape, dtype=dtype, device=self.device)
        return receive(out, self.axis, self.peer, self._base + 2 * microbatch)


def _pack(x: Tensor) -> Tensor:
    if x.dtype not in _DTYPES or x.ndim > _HEADER - 2:
        raise ValueError(
            f"a stage returned {x.dtype} with {x.ndim} dims: between stages a tensor has one of "
            f"{', '.join(map(str, _DTYPES))} and at most {_HEADER - 2} dims"
        )
    sizes = [*x.shape, *[0] * (_HEADER - 2 - x.ndim)]
    return torch.tensor([_DTYPES.index(x.dtype), x.ndim, *sizes])


def _unpack(header: Tensor) -> tuple[torch.dtype, tuple[int, ...]]:
    dtype, ndim, *sizes = header.tolist()
    return _DTYPES[dtype], tuple(sizes[:ndim])
