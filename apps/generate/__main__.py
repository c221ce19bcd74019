"""``python apps/generate`` and ``torchrun apps/generate``."""

from kenotron_generate.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
