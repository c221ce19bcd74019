"""Train on data of one's own: sums, written down by a function of the sample's number."""

from kenotron_data import encode
from kenotron_dist import shutdown
from kenotron_train.cli import main
from kenotron_train.data.own_data import OwnData

SEQUENCE = 32
SAMPLES = 10_000


def sums(i: int) -> list[int]:
    """Sample ``i``: SEQUENCE + 1 ids of lines such as ``37+64=101``, the same in every run."""
    lines = []
    while sum(map(len, lines)) <= SEQUENCE:
        a, b = i * 7 % 89 + len(lines), i * 13 % 97
        lines.append(f"{a}+{b}={a + b}\n")
    return encode(["".join(lines)], vocab_size=256)[: SEQUENCE + 1].tolist()


if __name__ == "__main__":
    try:
        raise SystemExit(main(loader=OwnData(sums, samples=SAMPLES)))
    finally:
        shutdown()
