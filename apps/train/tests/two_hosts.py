"""Two hosts on one machine: network namespaces with a cable between them, each with its name."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from launchers import environment, until

NEEDED = ("ip", "unshare", "mount", "hostname")
ADDRESSES = {"hosta": "10.77.0.1", "hostb": "10.77.0.2"}
ENTER = 'mount --bind "$0" /etc/hosts && hostname "$1" && shift && exec "$@"'


class NoHosts(Exception):
    """Why there can be none here."""


@dataclass(frozen=True)
class Hosts:
    """Both hosts; they share all files."""

    spaces: dict[str, str]
    """Name of a host to that of its network namespace."""
    names: Path
    """What they have for /etc/hosts."""

    def start(self, host: str, *command: str, cwd: Path) -> subprocess.Popen[str]:
        """Start a command on a host, in a shell that knows of no launcher."""
        inside = ("ip", "netns", "exec", self.spaces[host], "unshare", "--uts")
        enter = ("sh", "-c", ENTER, str(self.names), host)
        return subprocess.Popen(
            [*inside, *enter, *command],
            cwd=cwd,
            env=environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def received(self, host: str) -> int:
        """Bytes that a host has got over the cable."""
        counter = "/sys/class/net/cable/statistics/rx_bytes"
        return int(_ip("netns", "exec", self.spaces[host], "cat", counter))


@contextlib.contextmanager
def two_hosts(folder: Path) -> Iterator[Hosts]:
    """Make them, and end all that runs on them. Raises NoHosts where nobody can."""
    missing = [name for name in NEEDED if shutil.which(name) is None]
    if missing or os.geteuid() != 0:
        raise NoHosts(f"{', '.join(missing)} missing" if missing else "only root makes namespaces")
    mark = uuid.uuid4().hex[:8]
    spaces = {host: f"kenotron-{mark}-{host}" for host in ADDRESSES}
    names = folder / "hosts"
    lines = [f"{address} {host}\n" for host, address in ADDRESSES.items()]
    names.write_text("127.0.0.1 localhost\n" + "".join(lines))
    made: list[str] = []
    try:
        try:
            for space in spaces.values():
                _ip("netns", "add", space)
                made.append(space)
            a, b = made
            cable = ("name", "cable")
            _ip("link", "add", *cable, "netns", a, "type", "veth", "peer", *cable, "netns", b)
            for host, space in spaces.items():
                _ip("-n", space, "address", "add", f"{ADDRESSES[host]}/30", "dev", "cable")
                for link in ("lo", "cable"):
                    _ip("-n", space, "link", "set", link, "up")
        except OSError as error:
            raise NoHosts(str(error)) from error
        yield Hosts(spaces, names)
    finally:
        for space in made:
            _empty(space)
            _ip("netns", "delete", space)


def _empty(space: str) -> None:
    """Kill all processes of a namespace: workers outlive a torchrun that was killed."""

    def kill() -> bool:
        found = _ip("netns", "pids", space).split()
        for pid in map(int, found):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return not found

    until(kill, lambda: f"processes are left in {space}", 30)


def _ip(*words: str) -> str:
    done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(f"ip {' '.join(words)}: {done.stderr.strip()}")
    return done.stdout
