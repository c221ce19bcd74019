"""Full size of a communication, and the bytes of it that leave this rank.

Bytes are payload, without headers. Where this package sends pieces itself (every exchange on gloo,
and transfers) they are those that are sent: ``all_reduce`` of x among n ranks sends (n - 1) |x| up
to 16,384 elements, and 2 (n - 1) / n |x| above. Where the backend has an algorithm of its own they
are those of the usual ring: ``all_reduce`` 2 (n - 1) / n |x|; ``all_gather`` (n - 1) |x|;
``reduce_scatter`` (n - 1) / n |x|; ``all_to_all`` what goes to others; ``broadcast`` (n - 1) |x|
from its source and nothing from others. A receiver sends nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor

from kenotron_dist.axis import Axis
from kenotron_dist.in_flight import Entry, Ticket

_HOW = {"broadcast": "from {}", "shift": "by {}"}


def of_verb(
    axis: Axis,
    ticket: Ticket,
    x: Tensor | Sequence[Tensor],
    how: object,
    verb: Callable[..., object],
    args: Sequence[Any],
) -> Entry:
    """A call of torch's ``verb``, whose first arguments are the tensors that it fills and sends.

    Tensors are of any shape.
    """
    n, gives, takes = axis.size, None, None
    if verb is dist.all_reduce:
        sent = 2 * (n - 1) * args[0].nbytes // n
    elif verb is dist.broadcast:
        sent = (n - 1) * args[0].nbytes if axis.ranks[axis.rank] == args[1] else 0
    elif verb is dist.all_to_all_single and len(args) > 2:
        row = math.prod(args[1].shape[1:]) * args[1].element_size()
        takes, gives = (tuple(count * row for count in counts) for counts in args[2:4])
        sent = sum(gives) - gives[axis.rank]
    elif verb is dist.all_to_all_single:
        sent = (n - 1) * args[1].nbytes // n
    else:  # a gather fills n times what it is given, a scatter the n-th part
        filled, given = (x.nbytes if isinstance(x, Tensor) else _nbytes(x) for x in args[:2])
        sent = abs(filled - given)
    return Entry(ticket, _shown(ticket, how), *_form(x), sent, gives, takes)


def of_exchange(
    axis: Axis,
    ticket: Ticket,
    x: Tensor | Sequence[Tensor],
    how: object,
    sent: Sequence[Sequence[Tensor]],
    received: Sequence[Sequence[Tensor]],
) -> Entry:
    """Tensors for each rank, and from each, of any shape."""
    gives, takes = (
        tuple(_nbytes(ys) if i != axis.rank else 0 for i, ys in enumerate(lists))
        for lists in (sent, received)
    )
    return Entry(ticket, _shown(ticket, how), *_form(x), sum(gives), gives, takes)


def of_transfer(ticket: Ticket, x: Tensor, *, sends: bool) -> Entry:
    """A tensor of any shape from ``ticket.ranks[0]`` to ``ticket.ranks[1]``."""
    if sends:
        return Entry(ticket, "", _name(x), tuple(x.shape), x.nbytes, (0, x.nbytes), (0, 0))
    return Entry(ticket, "", _name(x), tuple(x.shape), 0, (0, 0), (x.nbytes, 0))


def _shown(ticket: Ticket, how: object) -> str:
    return "" if how is None else _HOW.get(ticket.operation, "{}").format(how)


def _form(x: Tensor | Sequence[Tensor]) -> tuple[str, tuple[int, ...]]:
    """Dtype and shape; of several tensors all dtypes, and their number of elements."""
    if isinstance(x, Tensor):
        return _name(x), tuple(x.shape)
    return " and ".join(dict.fromkeys(map(_name, x))), (sum(y.numel() for y in x),)


def _nbytes(tensors: Sequence[Tensor]) -> int:
    return sum(x.nbytes for x in tensors)


def _name(x: Tensor) -> str:
    return str(x.dtype).removeprefix("torch.")
