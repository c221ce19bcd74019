"""``python -m kenotron_command``: the command ``kenotron``."""

import sys

from kenotron_command.command import run

if __name__ == "__main__":
    sys.argv[0] = "kenotron"
    run()
