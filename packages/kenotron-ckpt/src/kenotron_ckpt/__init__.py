"""Training state that outlives the process: sharded checkpoints that any mesh reads."""

from kenotron_ckpt.config import CheckpointsConfig
from kenotron_ckpt.folder import latest_step, passed_over, prune, read_manifest, resolve
from kenotron_ckpt.index import FileEntry, Manifest, Piece, Record
from kenotron_ckpt.reader import load, verify_files
from kenotron_ckpt.saver import save

__all__ = [
    "CheckpointsConfig",
    "FileEntry",
    "Manifest",
    "Piece",
    "Record",
    "latest_step",
    "load",
    "passed_over",
    "prune",
    "read_manifest",
    "resolve",
    "save",
    "verify_files",
]
