"""``python apps/train`` and ``torchrun apps/train``."""

from kenotron_train.program import program

if __name__ == "__main__":
    program()
