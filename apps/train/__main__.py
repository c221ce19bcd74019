"""``python apps/train`` and ``torchrun apps/train``."""

from kenotron_train.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
