"""Random trainings: layouts, models and optimizers that nobody has chosen, against one process.

``python tests/fuzz.py --count 200`` draws trainings from a seed, by default that of the day. Each
is run on its layout, resumed on another one, and compared with one process, in the reproducible
mode to the bit; some are given to ``verify``, generate texts, or are exported, too. What a config
refuses with a ValueError is drawn again. A training that departs, or ends with an error, is made
smaller while it still does, and the smallest one is printed. The exit status is 1 where there was
one.
"""

from __future__ import annotations

import argparse
import datetime
import json
import random
import shutil
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path

import grid
import grid_bits
import grid_check
import grid_run
from grid import Row

from kenotron_config import dump_config
from kenotron_convert.exporting import export_hf
from kenotron_dist import RankError
from kenotron_generate.cli import main as generate
from kenotron_models.hf import config_to_hf
from kenotron_train.cli import main as program

STEPS, MOST_RANKS, TRIES = 4, 4, 30
IN_MODE = 0.5
"""Share of trainings in the reproducible mode, before those are drawn again that it refuses."""
NOT_IN_MODE = ("optimizer.shard_ranks", "optimizer.offload")
"""Further keys that it refuses."""
ADAM, MUON = 2.0, 40.0
"""How many times as far off as in the grid a run may be. Adam divides gradients that are rounding
alone, as those of a bias of all keys, by their size; Muon's iteration magnifies the rounding of
small singular values: in 1, 2, 4 and 5 micro-batches one process is up to 4.2 times, with experts
28 times, as far from itself in 3."""
TIE = 1000.0
"""The same, where a token has chosen another of two experts that are nearly equal: one changed the
gradient of an expert by 146 times the bound, on tp 2 as on tp 4."""
AXES: dict[str, tuple] = {
    **grid.AXES,
    **grid.SHARDS,
    "sizes": tuple(sizes for ranks in (1, 2, 4) for sizes in grid.factorisations(ranks)),
    "arch": (*grid.AXES["arch"], "qwen2_moe", "deepseek", *grid.MIXERS["arch"]),
    "cp": (1, 1, 2),
    "way": grid.WAYS["way"],
    "order": grid.WAYS["order"],
    "ep": (1, 2),
    "chunks": (1, 2),
    "sequence": (Row.sequence, grid.CUT_LENGTH),
    "dtype": ("fp32", "fp32", "bf16"),
    "extra": ("", "", "mtp", "mup", "ramp"),
}
"""Settings of a row, the same number of times as they are drawn."""
NUMBERS: dict[str, tuple[dict[str, str], ...]] = {
    "optimizer": (
        {},
        {},
        {"optimizer.optimizer_factory": "{name: sgd, momentum: 0.9}"},
        {"optimizer.optimizer_factory": "{name: muon, torch_adam_is_fused: false}"},
    ),
    "average": ({}, {"optimizer.weight_average": "{decay: 0.9}"}),
    "clip": ({}, {"optimizer.clip_grad": "null"}),
}
"""Further keys that change numbers: one process has them, too."""
WAYS: dict[str, tuple[dict[str, str], ...]] = {
    "regather": ({}, {"optimizer.regather": "step"}),
    "shards": ({}, {"optimizer.shard_ranks": "1"}, {"optimizer.shard_ranks": "2"}),
    "offload": ({}, {"optimizer.offload": "true"}),
    "recompute": (
        {},
        {"parallelism.recompute": "mixer"},
        {"parallelism.recompute": "feed_forward"},
    ),
}
"""Further keys that change none."""


@dataclass(frozen=True)
class Draw:
    """A training: a row of the grid's axes, and further keys of its config."""

    row: Row
    numbers: dict[str, str] = field(default_factory=dict)
    ways: dict[str, str] = field(default_factory=dict)
    programs: tuple[str, ...] = ()
    """Of ``PROGRAMS``."""
    in_mode: bool = False
    """True: in the reproducible mode."""

    @property
    def keys(self) -> dict[str, str]:
        """All further keys."""
        mode = grid_bits.keys(self.row) if self.in_mode else {}
        return {**mode, **self.numbers, **self.ways}

    def __str__(self) -> str:
        changed = {
            name: value for name, value in asdict(self.row).items() if value != getattr(Row, name)
        }
        mode = ", True" * self.in_mode
        return f"Draw(Row(**{changed}), {self.numbers}, {self.ways}, {self.programs}{mode})"


def draws(seed: int, folder: Path) -> Iterator[Draw]:
    """Trainings that a config accepts, the same for a seed."""
    draw = random.Random(seed)
    while True:
        row = grid.drawn(AXES, draw)
        numbers, ways = (
            {key: value for options in each.values() for key, value in draw.choice(options).items()}
            for each in (NUMBERS, WAYS)
        )
        programs = tuple(name for name in PROGRAMS if draw.random() < 0.3)
        if row is None or row.ranks > MOST_RANKS:
            continue
        if row.extra == "ramp":
            row = replace(row, micro=Row.micro)
        row = fitting(row)
        if row.dtype == "bf16":  # texts depend on rounding
            programs = tuple(name for name in programs if name != "generate")
        if in_mode := draw.random() < IN_MODE:
            ways = {key: value for key, value in ways.items() if key not in NOT_IN_MODE}
        found = Draw(row, numbers, ways, programs, in_mode)
        if accepted(found, folder):
            yield found


def fitting(row: Row) -> Row:
    """The row without settings that mean nothing to it."""
    experts = row.arch in grid.EXPERTS["arch"]
    row = replace(row, ep=row.ep if experts else 1, dtype=Row.dtype if experts else row.dtype)
    return replace(row, chunks=row.chunks if row.ep > 1 else 1)


def accepted(draw: Draw, folder: Path) -> bool:
    """Whether the configs of a training and of one process are valid. Other errors are findings."""
    try:
        grid_run.configure(draw.row, folder, "run", STEPS, None, draw.keys)
        grid_run.configure(draw.row.model, folder, "run", STEPS, None, draw.numbers)
    except ValueError:
        return False
    return True


def faults(draw: Draw, folder: Path) -> list[str]:
    """Run a training, resume it elsewhere, and name what departs from one process.

    That one makes as many micro-batches as others do, or as the training: rounding chooses another
    of two experts that are nearly equal.
    """
    row = draw.row
    for run in ("many", "many-resumed", "again", "exported"):
        shutil.rmtree(folder / run, ignore_errors=True)
    try:
        if draw.in_mode:
            return other_bits(draw, folder) + refused_by_programs(draw, folder)
        got, again = grid_run.measure(row, folder, "many", STEPS, keys=draw.keys), None
        other = grid_check.elsewhere(row, MOST_RANKS)
        if accepted(replace(draw, row=other, ways={}), folder):
            again = grid_run.measure(
                other, folder, "again", STEPS, saved_in(draw, folder), draw.numbers
            )
            again = grid_check.continued(got, again)
        runs = {"": got} | ({f"resumed on {other}: ": again} if again else {})
        for model in dict.fromkeys((row.model, replace(row.model, micro=row.micro))):
            if not (found := departures(draw, model, runs, folder)):
                break
        found += refused_by_programs(draw, folder)
    except (RankError, AssertionError) as error:
        return [f"{type(error).__name__}: {error}"]
    return found


def other_bits(draw: Draw, folder: Path) -> list[str]:
    """Name what of a training in the reproducible mode has not the bits of one process."""
    shutil.rmtree(folder / "one", ignore_errors=True)

    def alone(row: Row, keys: grid_bits.Keys) -> grid_run.Measured:
        return grid_run.measure(row, folder, "one", grid_bits.STEPS, keys=keys)

    given = {"numbers": draw.numbers, "ways": draw.ways}
    return grid_bits.judge(draw.row, folder, alone, MOST_RANKS, name="many", **given)


def refused_by_programs(draw: Draw, folder: Path) -> list[str]:
    """Name what the programs find wrong with the training, or with its checkpoint."""
    return [line for name in draw.programs for line in PROGRAMS[name](draw, folder)]


def departures(
    draw: Draw, model: Row, runs: dict[str, grid_run.Measured], folder: Path
) -> list[str]:
    """What of a training's runs departs from one process's, which is ``model``."""
    for run in ("one", "exact"):
        shutil.rmtree(folder / run, ignore_errors=True)
    want, exact = grid_run.measure(model, folder, "one", STEPS, keys=draw.numbers), None
    if model.dtype == "bf16":
        plain = replace(model, dtype="fp32").model
        exact = grid_run.measure(plain, folder, "exact", STEPS, keys=draw.numbers)
    ties = any(other_choices(folder / "one", folder / run) for run in ("many", "again"))
    updated, gradients = MUON if "muon" in str(draw.numbers) else ADAM, 1.0
    if ties:
        updated, gradients = TIE, TIE
    return [
        f"{where}{fault}"
        for where, got in runs.items()
        for fault in grid_check.departures(got, want, exact, updated, gradients)
    ]


def other_choices(one: Path, other: Path) -> bool:
    """Whether a token of two runs has chosen other experts in a step that both have."""
    spread = []
    for run in (one, other):
        file = run / "metrics.jsonl"
        lines = file.read_text().splitlines() if file.exists() else []
        spread.append({step["step"]: step.get("experts", {}) for step in map(json.loads, lines)})
    return any(
        layer["entropy"] != spread[1][step][name]["entropy"]
        for step in spread[0].keys() & spread[1].keys()
        for name, layer in spread[0][step].items()
    )


def saved_in(draw: Draw, folder: Path) -> Path:
    """The checkpoint from which a training is resumed elsewhere."""
    steps = grid_bits.STEPS if draw.in_mode else STEPS
    return folder / "many" / str(grid_run.saved_after(steps))


def unverified(draw: Draw, folder: Path, most: int = MOST_RANKS) -> list[str]:
    """What ``verify`` on at most so many ranks says of the training's config, if anything."""
    config = grid_run.configure(draw.row, folder, "run", STEPS, None, draw.keys)
    path = folder / "verified.yaml"
    path.write_text(dump_config(config))
    words = ["verify", "--config-file", str(path), "--steps", "2", "--ranks", str(most)]
    status = program(words)
    return [f"verify ends with status {status}"] if status else []


PROMPTS = ["--prompt", "step 3", "--prompt", "m", "--temperature", "0", "--max-new-tokens", "12"]


def other_texts(draw: Draw, folder: Path) -> list[str]:
    """How texts of the run's ranks differ from those of one process."""
    axes = draw.row.axes
    layout = [word for axis in ("pp", "dp", "tp") for word in (f"--{axis}", str(axes[axis]))]
    texts = []
    for words in ([], layout):
        file = folder / "texts.jsonl"
        checkpoint = ["--ckpt-path", str(saved_in(draw, folder))]
        if generate([*checkpoint, "--jsonl", str(file), *PROMPTS, *words]):
            return ["generate ends with an error " + " ".join(words)]
        texts.append(file.read_text())
    return [] if texts[0] == texts[1] else ["texts of one process and of all: " + " ".join(texts)]


def unlike(draw: Draw, folder: Path) -> list[str]:
    """What is wrong with the export of the run, which compares itself with transformers."""
    config = grid_run.configure(draw.row, folder, "run", STEPS, None, draw.keys)
    try:
        config_to_hf(config.model.model_config)
    except ValueError:  # no architecture of Hugging Face computes it
        return []
    try:
        export_hf(saved_in(draw, folder), folder / "exported")
    except ValueError as error:
        return [f"export: {error}"]
    return []


PROGRAMS = {"verify": unverified, "generate": other_texts, "export": unlike}
"""What a training, or its checkpoint, is given to: each to three of ten."""


def smaller(draw: Draw) -> Iterator[Draw]:
    """The training with one setting less: at the default of a row, or without a further key."""
    for each in fields(Row):
        if getattr(draw.row, each.name) != each.default:
            yield replace(draw, row=fitting(replace(draw.row, **{each.name: each.default})))
    pp, dp, tp = draw.row.sizes
    for sizes in ((1, dp, tp), (pp, 1, tp), (pp, dp, 1)):
        if sizes != draw.row.sizes:
            yield replace(draw, row=replace(draw.row, sizes=sizes))
    for kind in ("numbers", "ways"):
        keys = getattr(draw, kind)
        for key in keys:
            yield replace(draw, **{kind: {k: v for k, v in keys.items() if k != key}})
    if draw.in_mode:
        yield replace(draw, in_mode=False)
    for name in draw.programs:
        yield replace(draw, programs=tuple(each for each in draw.programs if each != name))


def shrunk(draw: Draw, folder: Path, tries: int = TRIES) -> Draw:
    """The smallest training that still fails, after so many runs at most."""
    tried: set[str] = set()
    while True:
        for each in smaller(draw):
            clash = grid.clash(asdict(each.row))
            if str(each) in tried or clash or not accepted(each, folder):
                continue
            if len(tried) == tries:
                return draw
            tried.add(str(each))
            if faults(each, folder):
                draw = each
                break
        else:
            return draw


def main(words: list[str]) -> int:
    """Draw and compare trainings; print those that fail, as small as they were made."""
    parser = argparse.ArgumentParser(prog="tests/fuzz.py", description=__doc__)
    today = datetime.date.today().toordinal()
    parser.add_argument("--count", type=int, default=20, help="trainings (default: 20)")
    parser.add_argument("--seed", type=int, default=today, help="default: that of the day")
    given = parser.parse_args(words)
    failed = 0
    with tempfile.TemporaryDirectory(prefix="fuzz-") as name:
        folder = Path(name)
        grid_run.write_documents(folder)
        for number, draw in zip(range(given.count), draws(given.seed, folder), strict=False):
            found = faults(draw, folder)
            print(f"{number} {'FAIL' if found else 'ok'} {draw}", flush=True)
            if found:
                failed += 1
                least = shrunk(draw, folder)
                said = "\n  ".join(faults(least, folder) or found)
                print(f"seed {given.seed}, number {number}, made small: {least}\n  {said}")
    print(f"{given.count - failed} of {given.count} agree with one process (seed {given.seed})")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
