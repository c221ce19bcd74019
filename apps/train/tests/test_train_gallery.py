"""The gallery: each example does what its page says, and draws; here with a few steps."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import runs

EXAMPLES = runs.APP / "examples"
STEPS = {
    "two_layouts": 3,
    "hugging_face": 4,
    "experts_load": 3,
    "long_context": 2,
    "hybrid": 2,
    "own_loss_and_mixer": 3,
}
MOST_BYTES = 60_000


@pytest.mark.parametrize("name", STEPS)
def test_an_example_computes_what_it_compares_and_draws(name: str, tmp_path: Path) -> None:
    script = EXAMPLES / name / "run.py"
    done = runs.start(
        sys.executable, str(script), "--steps", str(STEPS[name]), cwd=tmp_path, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "e-" in done.stdout or "e+00" in done.stdout, "it prints a difference"
    assert [each.name for each in tmp_path.iterdir()] == [f"{name}.svg"]
    check_picture(tmp_path / f"{name}.svg")


def check_picture(file: Path) -> None:
    """A small SVG with a light ground and with texts."""
    drawn = file.read_text(encoding="utf-8")
    assert len(drawn) < MOST_BYTES and drawn.count("<text") > 8
    assert re.search(r'd="M 0 [\d.]+ *\nL [^"]*"\s+style="fill: #ffffff"', drawn)


@pytest.mark.parametrize("name", STEPS)
def test_an_example_has_a_page_a_picture_and_one_command(name: str) -> None:
    page = (EXAMPLES / name / "README.md").read_text(encoding="utf-8")
    command = f"python apps/train/examples/{name}/run.py"
    assert re.findall(r"^```bash\n(.*?)\n```$", page, re.MULTILINE | re.DOTALL) == [command]
    assert "](picture.svg)" in page and len(page.splitlines()) <= 40
    assert f"| [{page.splitlines()[0][2:]}]({name}/README.md) | `{command}` |" in (
        EXAMPLES / "README.md"
    ).read_text(encoding="utf-8")
    check_picture(EXAMPLES / name / "picture.svg")
