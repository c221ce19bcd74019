"""The README's table of what the repository does names tests that exist."""

import ast
import re

import pytest
from capabilities import ROOT, table, written


def test_the_table_is_not_stale():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert readme == written(readme), "run: python tests/capabilities.py"


def test_a_test_that_is_gone_or_needs_a_gpu_is_seen(tmp_path):
    (tmp_path / "test_a.py").write_text(
        "import pytest\n\n@pytest.mark.gpu\ndef test_one(): ...\n\ndef test_two(): ...\n"
    )
    assert "(skipped without a GPU)" in table(tmp_path, {"x": ["test_a.py::test_one"]})
    both = table(tmp_path, {"x": ["test_a.py::test_one", "test_a.py::test_two"]})
    assert "GPU" not in both and "[a](test_a.py)" in both
    with pytest.raises(ValueError, match=r"test_a\.py has no test_three: correct the name"):
        table(tmp_path, {"x": ["test_a.py::test_three"]})
    with pytest.raises(ValueError, match=r"test_b\.py has no test_one"):
        table(tmp_path, {"x": ["test_b.py::test_one"]})


def test_ranks_find_the_same_modules_whichever_test_comes_first() -> None:
    """The first spawn of a process decides, and some workers begin with a test of the app."""
    files = [ROOT / "tests/loaded_ranks.py", ROOT / "apps/train/tests/conftest.py"]
    found = [re.findall(r"^LOADED = \(.*?^\)", path.read_text(), re.M | re.S) for path in files]
    here, there = (ast.literal_eval(one.removeprefix("LOADED = ")) for [one] in found)
    assert {*here} >= {*there}
