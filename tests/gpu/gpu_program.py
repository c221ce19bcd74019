"""Items on the training program itself, which needs pydantic, PyYAML and rich."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib import resources
from pathlib import Path

from gpu_items import Result, Setting, check, item

NEEDS = ("pydantic", "yaml", "rich", "xxhash")
APP = Path(__file__).resolve().parents[2] / "apps" / "train"


def changes(setting: Setting, steps: int) -> list[str]:
    """Return ``key=value`` for one process, synthetic tokens and no files but the checkpoint."""
    return [
        "data_stages.0.data.dataset=null",
        "parallelism.tp=1",
        "parallelism.tp_mode=ALL_REDUCE",
        f"tokens.train_steps={steps}",
        "optimizer.learning_rate_scheduler.lr_warmup_steps=1",
        f"checkpoints.checkpoints_path={setting.scratch / 'run'}",
    ]


def config_file() -> Path:
    """Return the default config of apps/train."""
    return Path(str(resources.files("kenotron_config").joinpath("default.yaml")))


@item("apps/train", 90, needs=NEEDS, gpu="the tests of apps/train run it on the CPU")
def program(setting: Setting) -> Iterator[Result]:
    """The program as its users start it: the default model, some steps, a checkpoint."""
    steps = setting.pick(20, 2)
    command = [sys.executable, str(APP), "--config-file", str(config_file())]
    for change in changes(setting, steps):
        command += ["--set", change]
    done = subprocess.run(command, capture_output=True, text=True, cwd=setting.scratch, check=False)
    text = done.stdout + done.stderr
    check(done.returncode == 0, text[-2000:])
    losses = [float(each) for each in re.findall(r"lm_loss: ([\d.]+)", text)]
    yield {"steps": len(losses), "first loss": losses[0], "last loss": losses[-1]}
    devices = re.findall(r"device (\w+)", text)
    yield {"device": devices[0] if devices else "unknown"}
    check(len(losses) == steps, f"{len(losses)} steps were reported, not {steps}")
    check(devices[:1] == [setting.device], f"it computes on {devices}, not on {setting.device}")


@item("lines that synchronise in apps/train", 90, needs=NEEDS)
def waiting_lines(setting: Setting) -> Iterator[Result]:
    """File and line, and how often between the ends of two steps of the training program."""
    import yaml
    from gpu_watcher import WARM, Watcher

    from kenotron_train import train

    config = yaml.safe_load(config_file().read_text())
    for change in changes(setting, WARM + 2):
        keys, _, value = change.partition("=")
        *folders, last = keys.split(".")
        place = config
        for key in folders:
            place = place[int(key) if isinstance(place, list) else key]
        place[last] = yaml.safe_load(value)
    written, lines = setting.scratch / "config.yaml", setting.scratch / "lines.json"
    written.write_text(yaml.safe_dump(config))
    train(written, hooks=[Watcher(str(lines), setting.device)])
    found = json.loads(lines.read_text())
    yield {"synchronisations in a step": sum(found.values())}
    yield {line: {"times": count} for line, count in found.items()}
