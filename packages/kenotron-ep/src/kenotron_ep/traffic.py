"""Bytes of an exchange that leave a rank: a planner needs them, a recorder can check them."""

from __future__ import annotations

from math import comb
from typing import NamedTuple

import torch

from kenotron_ep.exchange import DispatchWay, Exchange, check_way
from kenotron_ep.routes import ByChoice, leaving

_INDEX = torch.int64.itemsize


class ExchangeTraffic(NamedTuple):
    """Bytes that leave a rank."""

    plan: float
    """Counts, and choices for ways other than ``alltoall``; forward only."""
    forward: float
    """Tokens and results."""
    backward: float
    """Gradients of both."""


class ExchangeSize(NamedTuple):
    """Sizes of an exchange on one rank."""

    tokens: int
    """T of a rank."""
    top_k: int
    """K."""
    features: int
    """D of a token and of a result."""
    experts: int
    """E."""
    dtype: torch.dtype = torch.bfloat16


def exchange_traffic(
    size: ExchangeSize, ranks: int, way: DispatchWay = "alltoall"
) -> ExchangeTraffic:
    """Return the expected bytes of a balanced router, whose every set of K experts is as likely.

    With T tokens of a rank, K choices, D features of b bytes, E experts and n ranks, forward and
    backward each move

    * alltoall: 2 T K D b (n-1)/n, so 4 T K D b (n-1)/n together;
    * once_per_rank: T K D b (n-1)/n for results, and for tokens T D b (n-1) times the probability
      1 - C(E - E/n, K) / C(E, K) that a rank has one of K experts;
    * allgather: T K D b (n-1)/n for results and T D b (n-1) for tokens.

    Raises:
        ValueError: n does not divide E, K is above E, or an unknown way.
    """
    check_way("exchange_traffic", way)
    tokens, top_k, features, experts, dtype = size
    if experts % ranks or top_k > experts:
        raise ValueError(
            f"exchange_traffic: {top_k} of {experts} experts on {ranks} ranks: the ranks must "
            "divide the experts, and a token has at most all of them"
        )
    others, own = ranks - 1, experts // ranks
    results = tokens * top_k * others / ranks
    if ranks == 1:
        return ExchangeTraffic(0, 0, 0)
    if way == "alltoall":
        sent = results
    elif way == "once_per_rank":
        sent = tokens * others * (1 - comb(experts - own, top_k) / comb(experts, top_k))
    else:
        sent = tokens * others
    plan = others * (own + 1) * _INDEX + (0 if way == "alltoall" else results * _INDEX)
    moved = (sent + results) * features * dtype.itemsize
    return ExchangeTraffic(plan, moved, moved)


def planned_traffic(
    exchange: Exchange, features: int, dtype: torch.dtype, result_features: int | None = None
) -> ExchangeTraffic:
    """Return the bytes that leave this rank in one exchange, as a recorder counts them.

    Args:
        exchange: the plan.
        features: D of a token.
        dtype: of tokens and results.
        result_features: D of a result; None: that of a token.

    Returns:
        Whole numbers. With chunks, the numbers of the chunks are added; all of them are planned
        together, which makes no difference.
    """
    axis = exchange.axis
    token = features * dtype.itemsize
    result = token if result_features is None else result_features * dtype.itemsize
    sent, received = leaving(axis, exchange.send), leaving(axis, exchange.receive)
    forward, backward = exchange.route.leaving()
    plan = (axis.size - 1) * (exchange.counts.shape[0] + 1) * _INDEX
    if not isinstance(exchange.route, ByChoice):
        plan += sent * _INDEX
    return ExchangeTraffic(
        plan, forward * token + received * result, sent * result + backward * token
    )
