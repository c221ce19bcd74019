"""``python apps/generate`` and ``torchrun apps/generate``."""

from kenotron_dist import shutdown
from kenotron_generate.cli import main

if __name__ == "__main__":
    try:
        raise SystemExit(main())
    finally:
        shutdown()
