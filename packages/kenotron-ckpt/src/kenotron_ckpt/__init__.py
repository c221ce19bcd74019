"""Training state that outlives the process: sharded checkpoints that any mesh reads."""

from kenotron_ckpt.blocking import BlockingSaver
from kenotron_ckpt.config import CheckpointsConfig, DataStatesConfig
from kenotron_ckpt.downloading import Download, download, fetch, newest_step
from kenotron_ckpt.folder import latest_step, passed_over, read_manifest, resolve
from kenotron_ckpt.index import FileEntry, Manifest, Piece, Record
from kenotron_ckpt.loading import Checkpoint, Loaded, load, open_checkpoint, verify_files
from kenotron_ckpt.nanotron import NanotronCheckpoint, read_nanotron
from kenotron_ckpt.nanotron_import import import_nanotron
from kenotron_ckpt.plain import load_plain, plain_state, plain_tensors
from kenotron_ckpt.random_state import random_state, restore_random_state
from kenotron_ckpt.reader import read_box, read_record
from kenotron_ckpt.remote import RemoteError, is_url
from kenotron_ckpt.report import SaveFailed, SaveReport
from kenotron_ckpt.retention import prune
from kenotron_ckpt.s3_config import S3UploadConfig
from kenotron_ckpt.safetensors_file import TensorSize, write_safetensors
from kenotron_ckpt.safetensors_folder import SafetensorsFolder, open_safetensors
from kenotron_ckpt.saver import Saver
from kenotron_ckpt.saving import save
from kenotron_ckpt.streamed import Source, save_streamed
from kenotron_ckpt.uploader import Uploader, UploadReport, start_uploader

__all__ = [
    "write_safetensors",
    "save_streamed",
    "read_box",
    "open_safetensors",
    "TensorSize",
    "Source",
    "SafetensorsFolder",
    "BlockingSaver",
    "Checkpoint",
    "CheckpointsConfig",
    "DataStatesConfig",
    "Download",
    "FileEntry",
    "Loaded",
    "Manifest",
    "NanotronCheckpoint",
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
    "import_nanotron",
    "is_url",
    "latest_step",
    "load",
    "load_plain",
    "newest_step",
    "open_checkpoint",
    "passed_over",
    "plain_state",
    "plain_tensors",
    "prune",
    "random_state",
    "read_manifest",
    "read_nanotron",
    "read_record",
    "resolve",
    "restore_random_state",
    "save",
    "start_uploader",
    "verify_files",
]
