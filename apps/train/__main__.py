"""``python apps/train`` and ``torchrun apps/train``."""

from kenotron_train.start import run

if __name__ == "__main__":
    run()
