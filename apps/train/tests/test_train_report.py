"""``python apps/train report``: pages and pictures of runs."""

from __future__ import annotations

import json
import re
import struct
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from pathlib import Path

import pytest
import runs

from kenotron_command.charts import Chart, Line, heat_map, line_chart, picture
from kenotron_train.cli import main
from kenotron_train.report import cli as report_cli
from kenotron_train.report import evaluation_tables, page
from kenotron_train.report.curves import MOST_POINTS, ReportedRun, read_runs, summary


def write_run(folder: Path, losses: list[float | None], **more: list) -> Path:
    folder.mkdir(parents=True)
    lines = []
    for i, loss in enumerate(losses):
        step = {"step": i + 1, "lm_loss": loss, "lr": 1e-3, "consumed_tokens": (i + 1) * 100}
        step |= {"tokens_per_sec": 100.0 * (i + 1), "step_time_s": 0.5, "data_wait_s": 0.05}
        step |= {"communication_s": 0.125}
        lines.append(json.dumps(step | {key: values[i] for key, values in more.items()}))
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    return folder


def pictures(text: str) -> list[ElementTree.Element]:
    return [ElementTree.fromstring(svg) for svg in re.findall(r"<svg.*?</svg>", text, re.DOTALL)]


def drawn(svg: ElementTree.Element, kind: str = "curve") -> list[ElementTree.Element]:
    """The curves or shades of a picture."""
    return [each for each in svg.iter("g") if each.get("class") == kind]


def corners(path: ElementTree.Element) -> list[tuple[float, float]]:
    """The points that a path goes to."""
    found = re.findall(r"[ML] ([-\d.]+) ([-\d.]+)", path.get("d"))
    return [(float(x), float(y)) for x, y in found]


def box(shape: ElementTree.Element) -> tuple[float, float, float, float]:
    """Left, top, right and bottom of a curve or a shade."""
    places = [corner for path in shape.findall("path") for corner in corners(path)]
    places += [(float(use.get("x")), float(use.get("y"))) for use in shape.iter("use")]
    xs, ys = zip(*places, strict=True)
    return min(xs), min(ys), max(xs), max(ys)


def test_a_report_of_a_real_run(tmp_path: Path) -> None:
    assert runs.train(tmp_path, *runs.arguments(tmp_path)).returncode == 0
    done = runs.train(tmp_path, "report", "checkpoints")
    assert done.returncode == 0, done.stderr
    assert re.search(r"steps +6\b", done.stdout)
    assert "Written: checkpoints/report.html and checkpoints/report.png" in done.stdout
    text = (tmp_path / "checkpoints/report.html").read_text()
    loss, *others = pictures(text)
    assert [len(drawn(svg)) for svg in (loss, *others)] == [2, *[1] * 4]  # one validation
    assert "(dashed: validation)" in text and "reserved" not in text  # which a CPU has not
    assert "pp 1 x dp 1 x tp 1; " in text and "seed 42; last written 20" in text
    assert "<pre>general:" in text and "norm of the gradient" in text
    assert not re.search(r'src="|href="(?!#)|@import|url\((?!#)', text)
    for svg in pictures(text):  # which a dark page shows in its own ink
        fills = {re.search(r"fill: ([^;]*)", each.get("style"))[1] for each in svg.iter("text")}
        assert fills == {"currentColor"} and not {"width", "height"} & {*svg.keys()}
    data = (tmp_path / "checkpoints/report.png").read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    assert struct.unpack(">II", data[16:24]) == (1320, 1237)


def test_runs_are_compared_by_names_that_differ(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one = write_run(tmp_path / "a<b>/checkpoints", [4.0, 3.0], memory_gb=[1.0, 2.5])
    two = write_run(tmp_path / "c/checkpoints", [5.0, 2.0, 1.0], mfu=[0.25, 0.5, 0.5])
    assert main(["report", str(one), str(two), "--output", str(tmp_path / "out")]) == 0
    said = capsys.readouterr().out
    assert re.search(r"last loss +3.0000 +1.0000", said)
    text = (tmp_path / "out/report.html").read_text()
    assert "a&lt;b&gt;/checkpoints, c/checkpoints" in text
    assert "a<b>" not in text
    paths = [curve.find("path") for curve in drawn(pictures(text)[0])]
    assert [len(corners(path)) for path in paths] == [2, 3]
    styles = [re.search(r"stroke: (#\w{6})", path.get("style"))[1] for path in paths]
    assert styles[0] != styles[1]


def test_the_table_has_what_is_known(tmp_path: Path) -> None:
    folder = write_run(
        tmp_path / "a", [4.0, 3.0, 3.5], memory_gb=[1, 2.5, 2], validation_loss=[None, 3.2, 3.3]
    )
    titles, line = summary(read_runs([str(folder)]))
    assert dict(zip(titles, line, strict=True)) == {
        "run": "a", "steps": "3", "tokens": "300", "last loss": "3.5000",
        "best validation": "3.2000", "tokens/s (median)": "200", "MFU (median)": "-",
        "peak memory GB": "2.50", "hours in steps": "0.000417", "waiting for data": "10.0%",
        "blocked by saves": "-", "communication": "25.0%",
        "sent a step (median)": "-",
    }  # fmt: skip


@pytest.mark.parametrize("after", [{"save_after_s": [0.0, 2.0, 0.0]}, {}], ids=["new", "old"])
def test_saves_block_a_share_of_all_the_time(after: dict, tmp_path: Path) -> None:
    blocked = [0.0, 2.25, 0.0]  # of steps that took 1.5 s together, and a quarter was in them
    folder = write_run(tmp_path / "a", [4.0, 3.0, 3.5], save_blocked_s=blocked, **after)
    titles, line = summary(read_runs([str(folder)]))
    share = dict(zip(titles, line, strict=True))["blocked by saves"]
    assert share == ("64.3%" if after else "60.0%")


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (None, "has no metrics.jsonl: give a run's checkpoints_path"),
        ("", "holds no step"),
        ('[1]\n{"loss": 2}\nnot json\n', "holds no step"),
    ],
)
def test_a_folder_without_a_run(
    content: str | None, sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if content is not None:
        (tmp_path / "metrics.jsonl").write_text(content)
    assert main(["report", str(tmp_path)]) == 1
    assert sentence in capsys.readouterr().err
    assert not (tmp_path / "report.html").exists()


def test_goodput_counts_what_losses_cost(tmp_path: Path) -> None:
    lost = {"losses": 2, "lost_steps": 3, "lost_s": 1.0, "meeting_s": 0.4, "loading_s": 0.1}
    one = write_run(tmp_path / "a", [4.0, 3.0, 3.5], recovery=[None, lost, {"losses": "many"}])
    two = write_run(tmp_path / "b", [4.0, 3.0, 3.5])
    titles, *lines = summary(read_runs([str(one), str(two)]))
    assert titles[-3:] == ["lost processes", "steps made again", "goodput"]
    assert [line[-3:] for line in lines] == [["2", "3", "50.0%"], ["0", "0", "100.0%"]]


def loads(*layers: tuple[float, float, int]) -> dict[str, dict[str, float]]:
    """Figures of layers 1, 3, 5... as metrics.jsonl has them."""
    keys = ("max_over_mean", "entropy", "unused")
    named = [dict(zip(keys, each, strict=True)) for each in layers]
    return {f"layer_{2 * i + 1}": each for i, each in enumerate(named)}


def test_loads_of_experts_are_drawn_by_layer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    steps = [
        loads((4.0, 0.5, 3), (1.0, 1.0, 0)),
        loads((2.0, 0.75, 1), (2.5, 0.7, 1)),
        loads((1.0, 1.0, 0), (1.5, 0.9, 0)),
    ]
    one = write_run(tmp_path / "moe/checkpoints", [4.0, 3.0, 2.0], experts=steps)
    two = write_run(tmp_path / "dense/checkpoints", [4.0, 3.5, 3.0])
    assert main(["report", str(one), str(two), "--x", "tokens"]) == 0
    said = capsys.readouterr().out
    assert re.search(r"last expert load max/mean +1.50 in layer_3 +-", said)
    assert re.search(r"last entropy of loads +0.900 in layer_3 +-", said)
    assert re.search(r"last unused experts +0 +-", said)
    *_, worst, entropy, shades, first, last = pictures((one / "report.html").read_text())
    assert [len(drawn(svg)) for svg in (worst, entropy)] == [1, 1]
    rows = [rect.find("title").text for rect in drawn(shades, "shade")]
    assert rows == [
        *("layer_1, to 100: 4", "layer_1, to 200: 2", "layer_1, to 300: 1"),
        *("layer_3, to 100: 1", "layer_3, to 200: 2.5", "layer_3, to 300: 1.5"),
    ]
    assert opacities(shades) == [1.0, 0.3, 0.0, 0.0, 0.5, 0.2]
    for chart, name in ((first, "layer_1"), (last, "layer_3")):
        assert chart.get("aria-label") == f"{name}: load max/mean (dashed: entropy)"
        assert len(drawn(chart)) == 2
    data = (one / "report.png").read_bytes()
    assert struct.unpack(">II", data[16:24]) == (1320, 1650)


def opacities(heat: ElementTree.Element) -> list[float]:
    """Of the shades of a heat map."""
    styles = [rect.find("path").get("style") for rect in drawn(heat, "shade")]
    found = [re.search(r"(?:^|; )opacity: ([\d.]+)", style) for style in styles]
    return [float(each[1]) if each else 1.0 for each in found]


def test_neighbours_of_one_shade_are_one_rectangle() -> None:
    rows = [(f"layer_{i}", [(float(x), 1.0 + (x > 50)) for x in range(100)]) for i in range(40)]
    svg = ElementTree.fromstring(picture("t", heat_map("t", "step", rows, 1.0)))
    boxes = [box(rect) for rect in drawn(svg, "shade")]
    assert len(boxes) == 80
    assert all(0 < x < right < 360 and 0 < y < low < 209 for x, y, right, low in boxes)
    tops = [y for _, y, _, _ in boxes]
    assert tops == sorted(tops) and len(set(tops)) == 40
    names = [text.text for text in svg.iter("text") if text.text.startswith("layer")]
    assert names == [f"layer_{i}" for i in range(0, 40, 3)]
    flat = ElementTree.fromstring(picture("t", heat_map("t", "s", [("layer_0", [(1.0, 0.0)])], 1)))
    assert opacities(flat) == [0.0]


def test_without_matplotlib_there_are_the_figures_and_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_run(tmp_path / "a", [4.0, 3.0])
    monkeypatch.setattr(report_cli, "can_draw", lambda: False)
    assert main(["report", str(folder)]) == 1
    said = capsys.readouterr()
    assert "last loss" in said.out and "pip install matplotlib" in said.err
    assert {path.name for path in folder.iterdir()} == {"metrics.jsonl"}


WRONG = [
    [],
    "x",
    {},
    None,
    True,
    1e999,
    float("nan"),
    10**400,
    [[[]]],
    {"a": []},
    {"a": {"b": "c"}},
]
EVALUATED = {"evaluated_step": 2, "tasks": {"t": {"acc": 0.5}}, "sources": {"s": {"loss": 1.0}}}
LOADS = {"l": {"max_over_mean": 1.0, "entropy": 1.0, "unused": 0}}


def places(value: object) -> list[list[str]]:
    """Where a mapping has values, at any depth."""
    items = value.items() if isinstance(value, dict) else ()
    return [place for key, each in items for place in ([key], *([key, *d] for d in places(each)))]


def once(draw: Callable[[str, Chart], str], seen: set[str]) -> Callable[[str, Chart], str]:
    """Draw what nobody has drawn yet: a curve is known by its points."""

    def picture_of(title: str, chart: Chart) -> str:
        what = repr([cell.cell_contents for cell in chart.__closure__ or ()])
        if what in seen:
            return ""
        seen.add(what)
        return draw(title, chart)

    return picture_of


def test_a_file_with_anything_in_it_is_a_report_or_an_error_in_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: set[str] = set()
    for module in (page, evaluation_tables):
        monkeypatch.setattr(module, "picture", once(picture, seen))
    monkeypatch.setattr(report_cli, "write_picture", lambda *_: None)
    good = {"step": 2, "lm_loss": 1.0, "lr": 1.0, "step_time_s": 0.0, "data_wait_s": 0.1}
    good |= {"evaluation": EVALUATED, "experts": LOADS, "communication_bytes": {"dp": 5}}
    folder = write_run(tmp_path / "run", [2.0])
    lines, results = folder / "metrics.jsonl", folder / "evaluations/2.json"
    results.parent.mkdir()
    first = lines.read_text()
    for wrong in WRONG:
        for place in places(good):
            changed = json.loads(json.dumps(good))
            owner = changed
            for key in place[:-1]:
                owner = owner[key]
            owner[place[-1]] = wrong
            lines.write_text(f"{first}{json.dumps(changed)}\n")
            results.write_text(json.dumps(changed.get("evaluation")))
            assert main(["report", str(folder)]) == 0, (place, wrong)
    lines.write_text(first + "[" * 100_000 + "\n")
    results.write_text('{"evaluated_step": ' + "[" * 100_000)
    assert main(["report", str(folder)]) == 0
    assert "Traceback" not in capsys.readouterr().err


def test_long_curves_are_means_of_neighbours() -> None:
    steps = [{"step": i, "lm_loss": float(i % 2)} for i in range(1, 2 * MOST_POINTS + 1)]
    points = ReportedRun("a", steps).points("lm_loss")
    assert points == [(2.0 * i, 0.5) for i in range(1, MOST_POINTS + 1)]


@pytest.mark.parametrize("ends", [(5.0, -5.0), (1e299, -1e299), (1e-300, 2e-300), (5.0, 5.0)])
def test_curves_stay_inside_their_chart_and_a_flat_one_is_drawn(ends: tuple[float, float]) -> None:
    flat = Line("flat", [(1.0, ends[0]), (2.0, ends[0])], "#123456")
    slope = Line("a<$b$>", [(1.0, ends[0]), (2.0, ends[1]), (9.0, 0.0)], "#123456", dashed=True)
    for lines in ([flat], [flat, slope], [Line("one", [(1.0, ends[1])], "#123456")]):
        svg = ElementTree.fromstring(picture("<t>", line_chart("t", "step", lines)))
        assert [each.find("title").text for each in drawn(svg)] == [line.name for line in lines]
        for left, top, right, low in map(box, drawn(svg)):
            assert 0 < left <= right < 360 and 0 < top <= low < 209
    svg = ElementTree.fromstring(picture("t", line_chart("t", "step", [Line("none", [], "#000")])))
    assert not drawn(svg) and "no figures" in [text.text for text in svg.iter("text")]
