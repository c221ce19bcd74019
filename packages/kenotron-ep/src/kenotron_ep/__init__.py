"""Expert parallelism: tokens are sent to the ranks of their experts, and results come back."""

from kenotron_ep.capacity import within_capacity
from kenotron_ep.combining import combine, start_combine
from kenotron_ep.dispatching import dispatch, start_dispatch
from kenotron_ep.exchange import DispatchWay, Exchange, plan_exchange
from kenotron_ep.exchange_in_flight import Pending
from kenotron_ep.expert_layer import Compute, mix_experts
from kenotron_ep.traffic import ExchangeSize, ExchangeTraffic, exchange_traffic, planned_traffic

__all__ = [
    "Compute",
    "Exchange",
    "ExchangeSize",
    "Pending",
    "ExchangeTraffic",
    "DispatchWay",
    "combine",
    "dispatch",
    "exchange_traffic",
    "mix_experts",
    "plan_exchange",
    "planned_traffic",
    "start_combine",
    "start_dispatch",
    "within_capacity",
]
