"""Every command of every document runs, or is marked as needing what a test has not.

All run in one folder, in reading order. Trainings are made small: flags that shrink the model go
before a command's own.
"""

from __future__ import annotations

import json
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import runs
from doc_commands import Command, complaints, missing, to_run
from warm import Worker

from kenotron_config import DEFAULT_CONFIG, config_reference
from kenotron_train.cli import main

ROOT = runs.APP.parents[1]
DOCS = runs.APP / "docs"
FOUND = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *ROOT.glob("apps/*/README.md")]
FOUND = sorted([*FOUND, *ROOT.glob("packages/*/README.md"), *ROOT.glob("apps/*/docs/*.md")])
FOUND += sorted(ROOT.glob("apps/*/configs/*/README.md"))
BEGINNING = ("apps/train/docs/first-training.md", "README.md", "apps/train/README.md")
NAMES = [path.relative_to(ROOT).as_posix() for path in FOUND]
NAMES = [*BEGINNING, *(name for name in NAMES if name not in BEGINNING)]  # in reading order
SMALL = [
    "model.model_config.hidden_size=32",
    "model.model_config.intermediate_size=48",
    "model.model_config.num_hidden_layers=2",
    "tokens.sequence_length=32",
    "tokens.micro_batch_size=2",
    "tokens.limit_val_batches=2",
]
SEQUEL = ("first-training.md",)  # its commands go on from one another, with the steps that it says
FIRST = "python apps/train"  # the run with which most documents begin, made once in a folder
ELSEWHERE = {  # examples that another test runs
    "custom_dataloader/train.py": "test_train_own_data.py",
    "own_program/train.py": "test_train_library.py",
}
EXACT = (
    "--check",
    "--dry-run",
    "apps/plan",
    "kenotron_pp",
    "own_schedule",
)  # prints the same everywhere


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    folder = tmp_path_factory.mktemp("worker")
    worker = Worker(folder, KENOTRON_CACHE=str(folder / "cache"))
    yield worker
    worker.close()


@pytest.fixture(scope="module")
def printed() -> dict[str, str]:
    """What the run of FIRST printed; made again it has nothing to do."""
    return {}


@pytest.fixture(scope="module")
def here(trained: Path, printed: dict[str, str], request: pytest.FixtureRequest) -> Path:
    """The folder of a reader of all documents; a reader of later ones alone has a run before."""
    folder = trained.with_name("here")
    begins = any(f"run[{BEGINNING[0]}" in item.nodeid for item in request.session.items)
    if not begins:
        printed[FIRST] = trained.with_name("printed.txt").read_text()
    skipped = shutil.ignore_patterns("checkpoints") if begins else None
    shutil.copytree(trained, folder, symlinks=True, ignore=skipped)
    return folder


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, worker: Worker) -> Path:
    """What readers have: the repository's programs, a config, a run, a model of Hugging Face."""
    from tokenizers import Tokenizer, models

    folder = tmp_path_factory.mktemp("trained")
    for name in ("apps", "packages"):
        (folder / name).symlink_to(ROOT / name)
    shutil.copy(DEFAULT_CONFIG, folder / "my.yaml")
    flags = [part for each in [*SMALL, "parallelism.tp=1"] for part in ("--set", each)]
    for program, arguments in (
        ("apps/train", flags),
        ("apps/convert", ["kenotron-to-hf", "--ckpt", "checkpoints", "--out", "model"]),
    ):
        done = worker.run(folder, program, arguments)
        assert done.returncode == 0, done.stderr
        if program == "apps/train":
            folder.with_name("printed.txt").write_text(done.stdout)
    letters = {chr(place): place for place in range(256)}
    Tokenizer(models.WordLevel(letters, unk_token=chr(0))).save(
        str(folder / "model/tokenizer.json")
    )
    for name in ("Llama-3.2-1B", "models/Llama-3.2-1B"):
        shutil.copytree(folder / "model", folder / name)
    for name in ("runs/a", "runs/b"):
        shutil.copytree(folder / "checkpoints", folder / name)
    rows = [json.dumps({"text": f"a line of text, number {i}"}) for i in range(400)]
    (folder / "mine.jsonl").write_text("\n".join(rows) + "\n")
    (folder / "prompts.jsonl").write_text('{"prompt": "def "}\n{"prompt": "class "}\n')
    return folder


def shrunk(arguments: list[str], name: str) -> list[str]:
    """The arguments of a training, made small."""
    few = [] if name in SEQUEL else ["tokens.train_steps=3"]
    return [*(part for each in [*SMALL, *few] for part in ("--set", each)), *arguments]


def is_training(words: list[str]) -> bool:
    is_command = bool(words[1:2]) and words[1][0].isalpha()
    return words[:1] == ["apps/train"] and not (
        is_command or {"--check", "--dry-run", "--json-schema"} & set(words)
    )


def execute(command: Command, name: str, folder: Path, worker: Worker) -> tuple[int, str]:
    """Run one command in ``folder``: exit status, and what it printed."""
    words = shlex.split(command.text, comments=True)
    target = folder / words[-1] if words[-2:-1] == [">"] else None
    words = words[:-2] if target else words
    if words[0] == "python" and not {"|", "&&", "||"} & set(words):
        program, rest = words[1], words[2:]
        if program == "-m":
            program, rest = rest[0], rest[1:]
        if program in ("apps/train", "apps/generate", "apps/convert", "apps/plan", "kenotron_pp"):
            if rest[:1] == ["new"]:  # readers have none yet; other documents begin with it
                shutil.rmtree(folder / rest[1], ignore_errors=True)
            rest = shrunk(rest, name) if is_training([program, *rest]) else rest
            done = worker.run(folder, program, rest)
            if target:
                target.write_text(done.stdout)
            return done.returncode, done.stdout + done.stderr
    at = next((i for i, word in enumerate(words) if is_training(words[i:])), None)
    text = command.text
    if at is not None:
        text = shlex.join([*words[: at + 1], *shrunk(words[at + 1 :], name)])
        text = re.sub(r"^'([A-Z_]+=\w+)'", r"\1", text)
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-c", text], cwd=folder, capture_output=True, text=True, timeout=120, check=False,
        env=os.environ | {"PATH": path},
    )  # fmt: skip
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize("name", NAMES)
def test_commands_are_run_or_marked(name: str) -> None:
    assert not complaints(ROOT / name)


@pytest.mark.parametrize("name", [name for name in NAMES if name.startswith("packages/")])
def test_install_lines_name_the_version_of_torch(name: str) -> None:
    lines = (ROOT / name).read_text().splitlines()
    lines = [line for line in lines if line.startswith("pip install ") and "./packages/" in line]
    if name.startswith("packages/kenotron-command/"):
        assert lines
        return  # it needs no torch
    assert lines and all(line.startswith("pip install torch==2.13.0 ") for line in lines), (
        "the newest torch, with CUDA, is 3 GB"
    )


@pytest.mark.xdist_group("docs")  # one after the other, in one folder
@pytest.mark.parametrize("name", [name for name in NAMES if to_run(ROOT / name)])
def test_commands_run(name: str, here: Path, worker: Worker, printed: dict[str, str]) -> None:
    document = ROOT / name
    for command in to_run(document):
        words = " ".join(shlex.split(command.text, comments=True))
        if any(each in words for each in ELSEWHERE):
            continue
        status, said = execute(command, document.name, here, worker)
        place = f"{name}:{command.line}: {command.text}"
        assert status == 0, f"{place}\n{said}"
        if words == FIRST:
            before = printed.setdefault(words, said)
            said = said if document.name in SEQUEL else before
        exact = any(each in command.text for each in EXACT)
        line = missing(command.output, said, exact)
        assert not line, f"{place}\nthe document has {line!r}, and it printed\n{said}"


def folder_of(words: list[str]) -> str:
    """The run folder of a command that trains, as its flags or its example's config name it."""
    given = [word for word in words if word.startswith("checkpoints.checkpoints_path=")]
    if given:
        return given[-1].partition("=")[2]
    script, own = next(word for word in words if "apps/train" in word), ""
    if "/examples/" in script:
        config = (ROOT / script).with_name("config.yaml")
        if not config.exists():  # the script names its folder, which is called as its own
            return config.parent.name
        own = re.findall(r"checkpoints_path: (\S+)", config.read_text())[0]
    return own or "checkpoints"


def test_each_documented_training_has_a_folder_of_its_own() -> None:
    """Read in one folder, one document after the other, no command finds another one's run."""
    found: dict[str, list[str]] = {}
    for name in NAMES:
        for command in to_run(ROOT / name):
            words = shlex.split(command.text, comments=True)
            at = next((i for i, word in enumerate(words) if word.startswith("apps/train")), None)
            aside = ("own_schedule", "/benchmarks/")  # these train nothing
            if at is None or any(each in words[at] for each in aside) or words[0] == "cp":
                continue
            if "apps/plan" in words:  # of a config below apps/train
                continue
            if words[at] == "apps/train" and not is_training(words[at:]):
                continue
            if words[at:] != ["apps/train"]:  # the default run, with which most documents begin
                found.setdefault(folder_of(words), []).append(f"{name}: {' '.join(words)}")
    several = {folder: lines for folder, lines in found.items() if len(lines) > 1}
    assert set(several) == {"runs/replayed", "runs/custom_dataloader"}  # a sequel, and a repetition
    assert [line for line in found["checkpoints"] if "first-training.md" not in line] == []


def test_examples_run_after_a_first_training_in_one_folder(tmp_path: Path) -> None:
    first = runs.train(tmp_path, *runs.arguments(tmp_path, tokens__train_steps=3))
    assert first.returncode == 0, first.stderr
    for script, *flags in (
        ("custom_dataloader/train.py", "--set", "tokens.train_steps=2", "--config-file"),
        ("own_model/gpt2.py",),
        ("own_program/train.py",),
    ):
        path = runs.APP / "examples" / script
        done = runs.start(
            sys.executable, str(path), *flags, str(path.with_name("config.yaml")), cwd=tmp_path
        )
        assert done.returncode == 0, f"{script}: {done.stdout}{done.stderr}"


@pytest.mark.parametrize(("example", "test"), ELSEWHERE.items())
def test_examples_that_other_tests_run_are_run_there(example: str, test: str) -> None:
    folder, script = example.split("/")
    source = Path(__file__).with_name(test).read_text()
    assert (runs.APP / "examples" / example).is_file()
    assert f'"examples/{folder}"' in source and f'EXAMPLE / "{script}"' in source


PLANTED = [
    ("```\npython x.py\n```\n", "'python x.py' is a command: call the fence bash"),
    ("```text\n  $ pip install x\n```\n", "'$ pip install x' is a command"),
    ("```bash someday\nls\n```\n", "'someday' is no mark of a fence; known are network"),
    ("```sh\nls\n```\n", "'sh' is none of bash, console"),
    ("```yaml network\na: 1\n```\n", "'network' is no mark of a fence"),
]


@pytest.mark.parametrize(("text", "words"), PLANTED)
def test_a_planted_offender_is_found(text: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "a.md").write_text(text)
    assert any(words in each for each in complaints(tmp_path / "a.md"))


def test_what_a_document_shows_is_compared() -> None:
    printed = "step 3 / 150 | loss: 2.5\nblocked  3 ms\nwritten: a/b\n"
    assert missing(("step 1 / 8 | loss: 5.64", "...", "written: ..."), printed, False) == ""
    assert missing(("blocked 4 ms",), printed, False) == ""
    assert missing(("blocked 4 ms",), printed, True) == "blocked 4 ms"
    assert missing(("written: a/b", "blocked 3 ms"), printed, False) == "blocked 3 ms"
    assert missing(("step 1 / 8 | cost: 5.64",), printed, False) == "step 1 / 8 | cost: 5.64"


def test_the_reference_of_keys_is_not_stale() -> None:
    assert (DOCS / "configuration.md").read_text(encoding="utf-8") == f"{config_reference()}\n", (
        "run: python apps/train config-reference > apps/train/docs/configuration.md"
    )


def test_the_pictures_are_not_stale() -> None:
    pictures = runpy.run_path(str(DOCS / "pictures/draw.py"))["PICTURES"]
    for name, draw in pictures.items():
        assert (DOCS / "pictures" / name).read_text() == draw(), "run docs/pictures/draw.py"
    assert {path.name for path in (DOCS / "pictures").glob("*.svg")} == {*pictures}


def test_links_lead_to_files() -> None:
    for path in FOUND:
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", path.read_text(encoding="utf-8")):
            assert (path.parent / target).exists(), f"{path}: {target}"


def test_the_table_of_flags_is_that_of_the_parsers(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["flag-reference"]) == 0
    shown = capsys.readouterr().out
    assert (DOCS / "flags.md").read_text(encoding="utf-8") == shown, (
        "run: python apps/train flag-reference > apps/train/docs/flags.md"
    )
    for flag in ("--stall-limit SECONDS", "--stop-before SECONDS", "--x X", "RUN_DIR"):
        assert f"| `{flag}` | " in shown
