"""Pictures of schedules: as text, as SVG, as PNG, and from the command line."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from kenotron_pp import Times, draw, draw_svg, draw_text, one_f_one_b, simulate, zero_bubble_v
from kenotron_pp.__main__ import main


def test_text_has_a_line_for_each_rank_and_shows_the_bubble() -> None:
    assert draw_text(simulate(one_f_one_b, 2, 2)).splitlines() == [
        "  0 F0 F1       B0---    B1---",
        "  1    F0 B0--- F1 B1---",
    ]


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
        with pytest.raises(ImportError, match=r"needs matplotlib: pip install 'kenotron-pp\[draw"):
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
    assert main(["--schedule", "best"]) == 1
    assert "error: no schedule 'best'" in capsys.readouterr().err
