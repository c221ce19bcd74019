"""Checkpoints of Nanotron and Kénotron: read, and converted to checkpoints of this package.

``checkpoint`` reads them, from ``shard_files`` and ``metadata``; ``optimizer_state`` reads Adam's
state; ``conversion`` writes an ordinary checkpoint, with the names of ``tensor_names``. No file of
the package outside this folder knows their format. Public names are those of ``kenotron_ckpt``.
"""
