"""The proof of 200 steps is there, and its command tells one bit from another."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import bits_proof
import grid_table
import numpy as np
from grid_run import measure, write_documents

from kenotron_train.config_file import parse_config  # noqa: F401 - loaded before ranks are timed


def test_the_table_has_every_layout_and_no_other_bits() -> None:
    rows = re.findall(r"^\| (.+?) \| (\d+) \| \S+ \| (.+) \|$", grid_table.read("long"), re.M)
    ranks = {name: str(row.ranks) for name, row in bits_proof.LAYOUTS.items()}
    assert {name: each for name, each, _ in rows} == ranks
    assert len(ranks) == 12 + len({bits_proof.WHOLE, bits_proof.CUT})
    assert {said for _, _, said in rows} == {"bitwise", "-"}


def test_a_short_proof_and_a_resumption(tmp_path: Path) -> None:
    found = bits_proof.prove([bits_proof.RESUMED], 2, tmp_path, log=False)
    assert found[bits_proof.RESUMED][1] == []
    again = bits_proof.prove([bits_proof.WHOLE], 2, tmp_path, log=False)  # as it was measured
    want = bits_proof.prove([bits_proof.WHOLE], 2, tmp_path, log=False)
    assert again == want


def test_one_bit_is_a_difference(tmp_path: Path) -> None:
    write_documents(tmp_path)
    name = bits_proof.WHOLE
    want = measure(bits_proof.LAYOUTS[name], tmp_path, "one", 2, keys=bits_proof.keys_of(name, 2))
    assert bits_proof.differing(want, want) == []
    later = replace(want, losses=[want.losses[0], float(np.nextafter(want.losses[1], 9.0))])
    assert bits_proof.differing(later, want) == ["step 2", "losses"]
    tensor, values = next(iter(want.last.items()))
    bit = replace(want, last={**want.last, tensor: np.nextafter(values, np.float32(9.0))})
    assert bits_proof.differing(bit, want) == [tensor]
    assert "1 steps, not 2" in bits_proof.differing(replace(want, losses=want.losses[:1]), want)
