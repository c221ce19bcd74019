"""Small JSON values between ranks; nothing is ever unpickled."""

from __future__ import annotations

import json
from typing import Any

import torch
from torch import Tensor

from kenotron_dist.axis import Axis
from kenotron_dist.collectives import all_gather, broadcast, start_gather
from kenotron_dist.handle import Handle


def broadcast_object(value: Any, axis: Axis, source: int = 0) -> Any:
    """The value of the rank at index ``source``, on every rank of the axis.

    Returns a copy that went through JSON, also on ``source``: tuples come back as lists, keys as
    strings. Raises TypeError on all ranks when the value is not JSON (numbers, strings, booleans,
    None, lists, dicts).
    """
    good, data = _encode(value) if axis.rank == source else (True, b"")
    header = broadcast(_header(good, len(data), axis), axis, source).tolist()
    body = _bytes(data.ljust(header[1]), axis)
    return _decode("broadcast_object", source, header, broadcast(body, axis, source))


def gather_objects(value: Any, axis: Axis) -> list[Any]:
    """Every rank's value, in axis order, on every rank, as copies that went through JSON.

    Equal values are one object. Raises TypeError on all ranks when one of them is not JSON.
    """
    good, data = _encode(value)
    headers = all_gather(_header(good, len(data), axis), axis).view(axis.size, 2).tolist()
    longest = max(size for _, size in headers)
    rows = _gathered(_bytes(data.ljust(longest), axis), axis)
    bodies, known = rows.cpu().numpy(), dict[tuple[Any, ...], Any]()
    keys = [(*header, body.tobytes()) for header, body in zip(headers, bodies, strict=True)]
    for rank, key in enumerate(keys):
        if key not in known:
            known[key] = _decode("gather_objects", rank, headers[rank], rows[rank])
    return [known[key] for key in keys]


def _gathered(row: Tensor, axis: Axis) -> Tensor:
    """``row`` (n,) of all ranks: (ranks, n), recorded as ``gather_objects``."""
    rows = row.new_empty(axis.size, len(row))
    rows[axis.rank] = row
    if axis.size > 1:
        Handle(start_gather(rows, axis, "gather_objects"), rows).wait()
    return rows


def _encode(value: Any) -> tuple[bool, bytes]:
    """JSON, or why there is none: a rank that raised here would leave its peers waiting."""
    try:
        return True, json.dumps(value).encode()
    except (TypeError, ValueError, RecursionError) as error:
        return False, f"{type(error).__name__}: {error}".encode()


def _decode(verb: str, rank: int, header: list[int], body: Tensor) -> Any:
    good, size = header
    data = body[:size].cpu().numpy().tobytes()
    if not good:
        raise TypeError(f"{verb}: the value of rank {rank} is not JSON ({data.decode()})")
    return json.loads(data)


def _header(good: bool, size: int, axis: Axis) -> Tensor:
    return torch.tensor([good, size], dtype=torch.int64, device=axis.control_device)


def _bytes(data: bytes, axis: Axis) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).to(axis.control_device)
