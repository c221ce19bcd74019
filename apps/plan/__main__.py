"""``python apps/plan``, and ``torchrun apps/plan calibrate``."""

from kenotron_dist import shutdown
from kenotron_plan.cli import main

if __name__ == "__main__":
    try:
        raise SystemExit(main())
    finally:
        shutdown()
