"""Origin of a run, so that it can be made again: code, packages, interpreter."""

from __future__ import annotations

import platform
import shutil
import socket
import subprocess
import sys
import time
from importlib.metadata import distributions
from pathlib import Path
from typing import Any


def provenance(command: list[str], cwd: Path) -> dict[str, Any]:
    """The command, where and when it was given, and the state of the code; ready for JSON."""
    return {
        "command": command,
        "cwd": str(cwd),
        "host": socket.gethostname(),
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "python": f"{platform.python_version()} at {sys.executable}",
        "code": code_state(Path(__file__)),
    }


def code_state(file: Path) -> dict[str, Any]:
    """Git commit of the repository that has ``file``, and whether files differ from it.

    Empty where there is no git, or where the file is in no repository (an installed package).
    """
    if shutil.which("git") is None or _git(file, "ls-files", "--error-unmatch", str(file)) is None:
        return {}
    changed = _git(file, "status", "--porcelain") or ""
    return {
        "commit": (_git(file, "rev-parse", "HEAD") or "").strip(),
        "dirty": bool(changed),
        "changed": changed.splitlines(),
    }


def packages() -> str:
    """Installed packages as lines ``name==version``, sorted."""
    found = {f"{each.name}=={each.version}" for each in distributions() if each.name}
    return "\n".join(sorted(found, key=str.lower)) + "\n"


def _git(file: Path, *words: str) -> str | None:
    """Output of git in the folder of ``file``; None when it fails."""
    command = ["git", "-C", str(file.parent), *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout if done.returncode == 0 else None
