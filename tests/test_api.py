"""``API.md`` of each package: made from its docstrings, and not behind them."""

import api
import pytest


@pytest.mark.parametrize("unit", api.documented_packages(), ids=lambda unit: unit.name)
def test_the_page_is_what_the_docstrings_say(unit):
    assert unit.text("API.md") == api.render(unit), "run python tests/api.py"


@pytest.mark.parametrize("unit", api.documented_packages(), ids=lambda unit: unit.name)
def test_every_public_name_is_there(unit):
    top = unit.name.replace("-", "_")
    names = api.exported(api.all_modules(unit.root)[top][1])
    page = unit.text("API.md").splitlines()
    assert [name for name in names if f"### {name}" not in page] == []
