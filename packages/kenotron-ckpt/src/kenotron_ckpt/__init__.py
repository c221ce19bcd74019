"""Training state that outlives the process: sharded checkpoints that any mesh reads."""

from kenotron_ckpt.config import CheckpointsConfig
from kenotron_ckpt.downloading import Download, download, fetch, newest_step
from kenotron_ckpt.folder import latest_step, passed_over, read_manifest, resolve
from kenotron_ckpt.index import FileEntry, Manifest, Piece, Record
from kenotron_ckpt.loading import Checkpoint, Loaded, load, open_checkpoint, verify_files
from kenotron_ckpt.reader import read_record
from kenotron_ckpt.remote import RemoteError, is_url
from kenotron_ckpt.report import SaveFailed, SaveReport
from kenotron_ckpt.retention import prune
from kenotron_ckpt.s3_config import S3UploadConfig
from kenotron_ckpt.saver import Saver
from kenotron_ckpt.saving import save
from kenotron_ckpt.uploader import Uploader, UploadReport, start_uploader

__all__ = [
    "Checkpoint",
    "CheckpointsConfig",
    "Download",
    "FileEntry",
    "Loaded",
    "Manifest",
    "Piece",
    "Record",
    "RemoteError",
    "S3UploadConfig",
    "SaveFailed",
    "SaveReport",
    "Saver",
    "UploadReport",
    "Uploader",
    "download",
    "fetch",
    "is_url",
    "latest_step",
    "load",
    "newest_step",
    "open_checkpoint",
    "passed_over",
    "prune",
    "read_manifest",
    "read_record",
    "resolve",
    "save",
    "start_uploader",
    "verify_files",
]
