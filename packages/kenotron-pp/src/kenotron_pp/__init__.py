"""Pipeline parallelism: a list of layers over ranks, in an order that is plain data."""

from kenotron_pp.pipeline import Pipeline
from kenotron_pp.schedule import SCHEDULES, Action, Schedule, gpipe, one_f_one_b
from kenotron_pp.simulate import Trace, simulate
from kenotron_pp.split import NamedLayers, Stages, split_layers

__all__ = [
    "SCHEDULES",
    "Action",
    "NamedLayers",
    "Pipeline",
    "Schedule",
    "Stages",
    "Trace",
    "gpipe",
    "one_f_one_b",
    "simulate",
    "split_layers",
]
