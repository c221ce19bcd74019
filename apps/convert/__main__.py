"""``python apps/convert``."""

from kenotron_convert.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
