"""``python apps/train`` and ``torchrun apps/train``."""

from kenotron_dist import shutdown
from kenotron_train.cli import main

if __name__ == "__main__":
    try:
        raise SystemExit(main())
    finally:
        shutdown()
