"""The recipe of the container images, by its structure: nothing is built."""

import re
import subprocess

import pytest
from nox_environments import TORCH, project
from packaging.requirements import Requirement
from test_packages import units
from test_rooms import ROOT

RECIPE = ROOT / ".containers/Dockerfile"
IMAGES = ("cpu", "cuda")


def instructions():
    """Instructions of each stage, by its name: (keyword, text), continued lines joined."""
    text = re.sub(r"^#.*\n", "", RECIPE.read_text(encoding="utf-8"), flags=re.M)
    found = {}
    for line in re.sub(r"\s*\\\n\s*", " ", text).splitlines():
        keyword, _, rest = line.partition(" ")
        if keyword == "FROM":
            image, name = re.fullmatch(r"(\S+) AS (\w+)", rest).groups()
            found[name] = [("FROM", image)]
        elif keyword:
            found[name].append((keyword, rest))
    return found


def test_stages_come_from_one_pinned_python():
    stages = instructions()
    assert list(stages) == ["wheels", "base", *IMAGES]
    begun = {name: stage[0][1] for name, stage in stages.items()}
    assert begun == {"wheels": begun["base"], "base": begun["base"], "cpu": "base", "cuda": "base"}
    version = re.fullmatch(r"python:(3\.\d+\.\d+)-slim-[a-z]+", begun["base"])[1]
    assert all(version in Requirement(f"x{project(ROOT / u.path)['requires-python']}").specifier
               for u in units(ROOT))  # fmt: skip


@pytest.mark.parametrize("image", IMAGES)
def test_an_image_has_the_torch_that_is_tested_then_the_others_then_ours(image):
    runs = [text for keyword, text in instructions()[image] if keyword == "RUN"]
    installs = [text.partition("pip install ")[2] for text in runs if "pip install" in text]
    assert installs[0].split()[-1] == TORCH and installs[1:] == ["transformers /wheels/*.whl"]
    assert ("download.pytorch.org/whl/cpu" in installs[0]) == (image == "cpu")
    assert not [text for text in runs if re.search(r"\b(curl|wget|sudo)\b", text)]


@pytest.mark.parametrize("image", IMAGES)
def test_an_image_runs_the_program_as_a_user_without_rights(image):
    stages = instructions()
    assert [keyword for keyword, _ in stages[image]][-4:] == [
        "USER",
        "WORKDIR",
        "ENTRYPOINT",
        "CMD",
    ]
    (user,) = (text for keyword, text in stages[image] if keyword == "USER")
    (made,) = (text for keyword, text in stages["base"] if keyword == "RUN")
    name = re.search(r"useradd --create-home --uid (\d+) (\w+)", made)
    assert user == f"{name[1]}:{name[1]}" and f"--owner={name[2]} /work" in made
    entry = dict(stages[image])["ENTRYPOINT"]
    assert entry == '["kenotron"]'
    assert "kenotron" in project(ROOT / "packages/kenotron-command")["scripts"]


def test_what_is_copied_is_in_the_context():
    copied = [text.split()[0] for stage in instructions().values() for keyword, text in stage
              if keyword == "COPY"]  # fmt: skip
    ignored = (RECIPE.parent / "Dockerfile.dockerignore").read_text(encoding="utf-8").split("\n")
    assert sorted(copied) == sorted(line[1:] for line in ignored if line.startswith("!"))
    assert all((ROOT / path).exists() for path in copied) and "*" in ignored
    (wheels,) = (text for keyword, text in instructions()["wheels"] if keyword == "RUN")
    patterns = re.findall(r"\./(\w+/\*)", wheels)
    assert sorted(p for each in patterns for p in ROOT.glob(f"{each}/pyproject.toml")) == sorted(
        ROOT / unit.path / "pyproject.toml" for unit in units(ROOT)
    )


def test_constraints_are_the_versions_of_the_lock():
    (made,) = (text for keyword, text in instructions()["base"] if keyword == "RUN")
    script = re.match(r"sed -E '([^']+)'", made)[1]
    lock = ROOT / ".ci/requirements.lock"
    command = ["sed", "-E", script, str(lock)]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    names = re.findall(r"^(\S+)==", lock.read_text(encoding="utf-8"), re.M)
    found = [Requirement(line) for line in lines if not line.startswith("#")]
    assert [each.name for each in found] == [re.sub(r"\[.*", "", name) for name in names]
    assert all(re.fullmatch(r"==[^*]+", str(each.specifier)) for each in found)
