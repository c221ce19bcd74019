"""Pictures of schedules: as text, as SVG, as PNG, and from the command line."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from kenotron_pp import (
    SCHEDULES,
    Times,
    draw,
    draw_svg,
    draw_text,
    interleaved,
    one_f_one_b,
    simulate,
    zero_bubble_h1,
    zero_bubble_v,
)
from kenotron_pp.__main__ import main


def test_text_has_a_line_for_each_rank_and_shows_the_bubble() -> None:
    assert draw_text(simulate(one_f_one_b, 2, 2)).splitlines() == [
        "  0 F0 F1       B0---    B1---",
        "  1    F0 B0--- F1 B1---",
    ]


def test_long_and_short_actions_are_readable_beside_each_other() -> None:
    trace = simulate(one_f_one_b, 2, 2, Times(F=1, B=1000))
    assert draw_text(trace).splitlines() == [
        "  0 F0 F1                   B0------------------ B1---------------",
        "  1    F0 B0--------------- F1 B1---------------",
        "not to scale: short actions are drawn longer, long waits shorter",
    ]
    assert "not to scale" not in draw_text(simulate(one_f_one_b, 2, 3, Times(F=0.1, B=0.6)))


def test_actions_that_take_no_time_are_left_out_and_counted() -> None:
    assert draw_text(simulate(zero_bubble_h1, 2, 2, Times(W=0))).splitlines() == [
        "  0 F0 F1    I0    I1",
        "  1    F0 I0 F1 I1",
        "not drawn, for they take no time: 4 W",
    ]
    nothing = simulate(one_f_one_b, 2, 2, Times(F=0, B=0))
    rows = ["  0", "  1", "not drawn, for they take no time: 4 B, 4 F"]
    assert draw_text(nothing).splitlines() == rows
    assert "<rect" in draw_svg(nothing)


def test_a_transfer_longer_than_everything_is_a_wait_of_a_few_columns() -> None:
    assert draw_text(simulate(one_f_one_b, 2, 1, Times(transfer=1e9))).splitlines() == [
        "  0 F0                                              B0---",
        "  1                      F0 B0---",
        "not to scale: short actions are drawn longer, long waits shorter",
    ]


EXTREMES = [
    Times(F=1, B=1000, I=500, W=500),
    Times(F=1000, B=1, I=1e-3, W=1e-6, transfer=1e7),
    Times(F=0, B=0, I=0, W=1e-9),
    Times(F=5e-324, B=1e300, I=1e300, W=5e-324, transfer=1e300),
    Times(F=1e-300, B=5e-324, I=5e-324, W=0, transfer=1e6),
    Times(F=[1e-9, 1, 1e9, 0, 3, 1e-9], B=2, I=[0, 1, 0, 1e5, 0, 1], W=0.7, transfer=0.3),
]


@pytest.mark.parametrize("times", EXTREMES)
def test_pictures_are_bounded_by_the_number_of_actions(times: Times) -> None:
    for schedule in [*SCHEDULES.values(), interleaved(3)]:
        ranks = 6 // schedule.chunks
        trace = simulate(schedule, ranks, 7, times)
        drawn = [event for event in trace.timeline if event.end > event.start]
        rows = draw_text(trace).splitlines()[:ranks]
        for rank, row in enumerate(rows):  # each label is there, whole, and in order
            labels = [word.rstrip("-") for word in row.split()[1:]]
            assert labels == [str(event.action) for event in drawn if event.rank == rank]
        columns = 2 * 6 * len(trace.timeline)  # six for each moment at which something happens
        assert max(map(len, rows)) <= 4 + 5 * columns
        root = ET.fromstring(draw_svg(trace))
        assert float(root.attrib["width"]) <= 1000 + 22 * columns
        boxes = [
            float(each.attrib["width"]) for each in root.iter() if each.find("{*}title") is not None
        ]
        assert len(boxes) == len(drawn) and all(21.9 <= box <= 22 * columns for box in boxes)


def test_a_png_has_a_bounded_size(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    for i, times in enumerate(EXTREMES):
        draw(simulate(one_f_one_b, 6, 3, times), tmp_path / f"{i}.png")
    draw(simulate(one_f_one_b, 400, 1), tmp_path / "large.png")  # of 1,200 columns
    header = (tmp_path / "large.png").read_bytes()[16:24]
    wide, high = int.from_bytes(header[:4], "big"), int.from_bytes(header[4:], "big")
    assert 20_000 < wide < 31_000 and high < 3_000


def test_svg_is_xml_with_a_box_for_every_action(tmp_path: Path) -> None:
    trace = simulate(zero_bubble_v, 3, 4, Times(I=1.5, transfer=0.2))
    root = ET.fromstring(draw_svg(trace))
    boxes = [each for each in root.iter() if each.tag.endswith("title")]
    assert len(boxes) == len(trace.timeline)
    draw(trace, tmp_path / "v.svg")
    assert (tmp_path / "v.svg").read_text() == draw_svg(trace)


def test_png_needs_matplotlib_and_other_suffixes_are_refused(tmp_path: Path) -> None:
    trace = simulate(one_f_one_b, 2, 2)
    if importlib.util.find_spec("matplotlib"):
        draw(trace, tmp_path / "s.png")
        assert (tmp_path / "s.png").read_bytes().startswith(b"\x89PNG")
    else:
        with pytest.raises(ImportError, match=r"needs matplotlib: pip install matplotlib"):
            draw(trace, tmp_path / "s.png")
    with pytest.raises(ValueError, match=r"cannot draw to s.gif: the name must end in .svg or"):
        draw(trace, tmp_path / "s.gif")


def test_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = str(tmp_path / "s.svg")
    command = ["--schedule", "1f1b", "--stages", "4", "--microbatches", "8", "--out", out]
    run = [sys.executable, "-m", "kenotron_pp", *command]
    done = subprocess.run(run, capture_output=True, text=True, check=True, cwd=tmp_path)
    assert "33 ticks, bubble 27.3%" in done.stdout and Path(out).is_file()
    assert main(["--schedule", "interleaved", "--chunks", "3", "--w", "0.5"]) == 0
    assert "interleaved-3, 4 ranks" in capsys.readouterr().out
    shell = f"{sys.executable} -m kenotron_pp --microbatches 4000 | head -1"  # which reads no more
    done = subprocess.run(shell, shell=True, capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("1f1b, 4 ranks, 4000 micro-batches\n", "")


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("--schedule best", "no schedule 'best': choose one of"),
        ("--stages 0", "n_ranks is 0: give a whole number of at least 1"),
        ("--microbatches -3", "n_microbatches is -3: give a whole number of at least 1"),
        ("--schedule interleaved --chunks 0", "chunks is 0: give a whole number of at least 1"),
        ("--f nan", "Times: F is nan: give a finite number from 0 up"),
        ("--transfer -1", "Times: transfer is -1.0: give a finite number from 0 up"),
        ("--b two", "argument --b: invalid float value: 'two'"),
        ("--rank 3", "unrecognized arguments: --rank 3"),
        ("--out s.gif", "cannot draw to s.gif: the name must end in .svg or .png"),
        ("--out no/such/folder/s.svg", "No such file or directory: 'no/such/folder/s.svg'"),
    ],
)
def test_the_command_line_says_what_is_wrong_in_one_line(
    command: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        status = main(command.split())
    except SystemExit as end:  # of argparse
        status = end.code
    out, err = capsys.readouterr()
    assert status == 2 and out == ""
    assert err.startswith("error: ") and words in err and err.count("\n") == 1
