"""Pipeline parallelism: a list of layers over ranks, in an order that is plain data."""

from kenotron_pp.activation import Activation
from kenotron_pp.draw import draw, draw_svg, draw_text
from kenotron_pp.failure import PipelineError
from kenotron_pp.losses import AuxiliaryLosses, Losses
from kenotron_pp.pipeline import Pipeline
from kenotron_pp.schedule import (
    SCHEDULES,
    Action,
    Schedule,
    gpipe,
    interleaved,
    one_f_one_b,
    rank_actions,
    schedule_named,
    zero_bubble_h1,
    zero_bubble_v,
)
from kenotron_pp.simulate import Event, Times, Trace, peak_live, pipeline_time, simulate
from kenotron_pp.split import NamedLayers, Stages, split_layers

__all__ = [
    "SCHEDULES",
    "Action",
    "Activation",
    "AuxiliaryLosses",
    "Event",
    "Losses",
    "NamedLayers",
    "Pipeline",
    "PipelineError",
    "Schedule",
    "Stages",
    "Times",
    "Trace",
    "draw",
    "draw_svg",
    "draw_text",
    "gpipe",
    "interleaved",
    "one_f_one_b",
    "peak_live",
    "pipeline_time",
    "rank_actions",
    "schedule_named",
    "simulate",
    "split_layers",
    "zero_bubble_h1",
    "zero_bubble_v",
]
