"""Draw the pictures of docs/parallelism.md: ``python draw.py [FOLDER]``, by default this one.

Ranks, schedules and bytes are computed by the packages that a training uses; only boxes and arrows
are placed here.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from kenotron_cost import cost_plan, stage_sizes
from kenotron_dist import MeshConfig, coords_of
from kenotron_pp import SCHEDULES, Times, draw_svg, simulate
from kenotron_train.config_file import load_config

BLUE, GREEN, ORANGE, PURPLE, GREY, PALE = (
    "#4278c8", "#3c965a", "#e18c32", "#8a63b5", "#777777", "#eef1f6",
)  # fmt: skip
COSTS = Times(F=1, B=2, I=1, W=1)
BILLION = Path(__file__).parents[2] / "configs/billion.yaml"


def box(x: float, y: float, wide: float, high: float, text: str, colour: str = PALE) -> str:
    """A rectangle with text in its middle."""
    ink = "black" if colour == PALE else "white"
    return (
        f'<rect x="{x:g}" y="{y:g}" width="{wide:g}" height="{high:g}" fill="{colour}" '
        f'stroke="#555" rx="3"/>' + label(x + wide / 2, y + high / 2 + 4, text, ink)
    )


def label(x: float, y: float, text: str, colour: str = "black", anchor: str = "middle") -> str:
    """A line of text."""
    return f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" fill="{colour}">{text}</text>'


def arrow(x1: float, y1: float, x2: float, y2: float, colour: str = "#333") -> str:
    """A line with a head."""
    return (
        f'<line x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}" stroke="{colour}" '
        'stroke-width="1.5" marker-end="url(#head)"/>'
    )


def picture(wide: float, high: float, parts: list[str]) -> str:
    """The text of an SVG file."""
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{wide:g}" height="{high:g}" '
        'font-family="sans-serif" font-size="12">\n'
        '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" '
        'markerHeight="7" orient="auto"><path d="M0,0 L8,4 L0,8 z" fill="#333"/></marker></defs>\n'
        '<rect width="100%" height="100%" fill="white"/>'
    )
    return "\n".join([head, *parts, "</svg>", ""])


def layout() -> str:
    """Eight ranks of pp 2 x dp 2 x tp 2, and what each pair of them says to one another."""
    sizes = MeshConfig(pp=2, dp=2, tp=2)
    parts = []
    for rank in range(sizes.world_size):
        at = coords_of(sizes.sizes, rank)
        pp, dp, tp = at["pp"], at["dp"], at["tp"]
        x, y = 120 + dp * 270 + tp * 115, 60 + pp * 110
        parts += [
            box(x, y, 90, 54, f"rank {rank}", (BLUE, ORANGE)[dp]),
            label(x + 45, y + 46, f"half {tp} of each layer", "white").replace(
                "<text", '<text font-size="8"'
            ),
        ]
    for pp, what in enumerate(("first layers", "last layers")):
        parts.append(label(60, 92 + pp * 110, f"pp {pp}:"))
        parts.append(label(60, 107 + pp * 110, what, GREY))
    for dp in range(2):
        x = 120 + dp * 270
        parts.append(label(x + 102, 24, f"dp {dp}: its own samples"))
        parts.append(label(x + 102, 48, "tp: every layer, twice each way", GREY))
        for tp in range(2):
            parts.append(arrow(x + tp * 115 + 45, 114, x + tp * 115 + 45, 170))
            parts.append(label(x + tp * 115 + 50, 146, "activations", GREY, "start"))
    parts.append(label(297, 256, "dp: the same row and half, once a step: gradients", GREY))
    parts.append('<path d="M165,232 L165,240 L435,240 L435,232" fill="none" stroke="#333"/>')
    return picture(640, 270, parts)


def tensor() -> str:
    """The feed-forward of one layer on two tp ranks, in both modes."""
    parts = []
    modes = (
        ("ALL_REDUCE", "whole tokens", "norm of all tokens", "as it is", "all-reduce"),
        ("REDUCE_SCATTER", "half of the tokens", "norm of its tokens", "all-gather",
         "reduce-scatter"),
    )  # fmt: skip
    for row, (name, kept, norm, before, after) in enumerate(modes):
        top = 30 + row * 170
        parts.append(label(10, top - 8, f"tp_mode: {name}", "black", "start"))
        for rank in range(2):
            y = top + 10 + rank * 62
            parts += [
                label(10, y + 24, f"tp rank {rank}", GREY, "start"),
                box(80, y, 120, 40, kept),
                box(215, y, 125, 40, norm),
                box(425, y, 110, 40, f"half {rank} of up", BLUE),
                box(550, y, 110, 40, f"half {rank} of down", GREEN),
                box(775, y, 120, 40, kept),
                arrow(200, y + 20, 215, y + 20),
                arrow(340, y + 20, 425, y + 20),
                arrow(535, y + 20, 550, y + 20),
                arrow(660, y + 20, 775, y + 20),
            ]
        parts.append(box(347, top + 51, 68, 20, before, ORANGE if row else GREY))
        parts.append(box(668, top + 51, 98, 20, after, ORANGE))
    return picture(905, 350, parts)


def zero() -> str:
    """Bytes of a rank with each stage of ZeRO, of a model of a billion parameters on dp 8."""
    colours = {
        "parameters": BLUE,
        "gradients": GREEN,
        "fp32 masters": ORANGE,
        "optimizer": PURPLE,
    }
    parts = []
    for row, stage in enumerate(range(4)):
        config = load_config(BILLION, [f"optimizer.zero_stage={stage}"])
        (size,) = stage_sizes(cost_plan(config))
        # Bytes are those that the planner counts; a gigabyte is 30 units wide.
        x, y, total = 110.0, 30 + row * 50, 0.0
        parts.append(label(100, y + 24, f"zero_stage: {stage}", "black", "end"))
        for name, colour in colours.items():
            gigabytes = size.bytes_of[name] / 1e9
            text = f"{gigabytes:.1f}" if gigabytes > 1 else ""
            parts.append(box(x, y, gigabytes * 30, 38, text, colour))
            x, total = x + gigabytes * 30, total + gigabytes
        parts.append(label(x + 8, y + 24, f"{total:.1f} GB a rank", "black", "start"))
    for place, (name, colour) in enumerate(colours.items()):
        parts.append(box(110 + place * 150, 235, 14, 14, "", colour))
        parts.append(label(130 + place * 150, 247, name, "black", "start"))
    text = f"{size.parameters / 1e9:.2f} billion parameters in bfloat16, AdamW, dp 8"
    parts.append(label(110, 18, text, GREY, "start"))
    return picture(870, 265, parts)


def tied() -> str:
    """Embedding and head of a tied model on the first and the last of three pipeline ranks."""
    parts = []
    names = (("embedding", "layers 0, 1"), ("layers 2, 3, 4", ""), ("layers 5, 6", "norm", "head"))
    for rank, own in enumerate(names):
        x = 20 + rank * 250
        parts.append(label(x + 95, 20, f"pp rank {rank}", GREY))
        parts.append(f'<rect x="{x}" y="28" width="190" height="92" fill="none" stroke="#999"/>')
        for place, name in enumerate(filter(None, own)):
            shared = name in ("embedding", "head")
            parts.append(box(x + 15, 34 + place * 28, 160, 24, name, PURPLE if shared else PALE))
        if rank < 2:
            parts.append(arrow(x + 190, 74, x + 250, 74))
    parts.append('<path d="M115,122 L115,150 L615,150 L615,122" fill="none" stroke="#8a63b5"/>')
    parts.append(label(365, 145, "after the last backward: both gradients are added", PURPLE))
    parts.append(label(365, 168, "two leaves, one logical tensor: embedding.weight", GREY))
    return picture(730, 180, parts)


def schedule(name: str) -> Callable[[], str]:
    """One of kenotron_pp's schedules, played on four ranks with eight micro-batches."""
    return lambda: draw_svg(simulate(SCHEDULES[name], 4, 8, COSTS))


PICTURES: dict[str, Callable[[], str]] = {
    "layout.svg": layout,
    "tensor.svg": tensor,
    "zero.svg": zero,
    "tied.svg": tied,
    **{f"schedule-{name}.svg": schedule(name) for name in SCHEDULES},
}

if __name__ == "__main__":
    folder = Path(sys.argv[1]) if sys.argv[1:] else Path(__file__).parent
    for name, draw in PICTURES.items():
        (folder / name).write_text(draw(), encoding="utf-8")
        print(folder / name)
