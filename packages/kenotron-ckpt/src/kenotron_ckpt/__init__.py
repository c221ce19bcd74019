"""Training state that outlives the process: sharded checkpoints that any mesh reads."""

from kenotron_ckpt.agreement import contradiction, unfinished
from kenotron_ckpt.checkpoint import Checkpoint, DamagedCheckpoint, Loaded
from kenotron_ckpt.collective_errors import on_each, on_first, on_first_at_length
from kenotron_ckpt.committing import prefer_step, replace_text
from kenotron_ckpt.config import CheckpointsConfig, DataStatesConfig
from kenotron_ckpt.folder import (
    LATEST,
    MANIFEST,
    complete_manifest,
    defect,
    has_manifests,
    latest_step,
    manifest_at,
    newest_save,
    passed_over,
    read_manifest,
    resolve_step,
    steps_in,
)
from kenotron_ckpt.generation import SUPERSEDED, Generation
from kenotron_ckpt.host_copies import HostCopies
from kenotron_ckpt.host_saver import HostSaver
from kenotron_ckpt.hosts import hosts_of
from kenotron_ckpt.index import Manifest, Record, seal_of
from kenotron_ckpt.loading import (
    NoCheckpoint,
    load,
    open_checkpoint,
    read_preferred,
    verify_files,
)
from kenotron_ckpt.lock import LOCK, FolderLock
from kenotron_ckpt.plain import load_plain, plain_state, plain_tensors
from kenotron_ckpt.random_state import random_state, restore_random_state
from kenotron_ckpt.reader import read_box, read_record
from kenotron_ckpt.remote import FsspecStore, is_url
from kenotron_ckpt.retention import prune, remove_steps
from kenotron_ckpt.s3_config import S3UploadConfig
from kenotron_ckpt.safetensors_file import TensorSize, write_safetensors
from kenotron_ckpt.safetensors_folder import SafetensorsFolder, open_safetensors
from kenotron_ckpt.save_report import SaveFailed, SaveReport
from kenotron_ckpt.saver import Saver
from kenotron_ckpt.saving import save
from kenotron_ckpt.store import LocalStore, Location, Store, store_at
from kenotron_ckpt.streamed import StreamedTensor, save_streamed
from kenotron_ckpt.uploader import Uploader, UploadReport, start_uploader

__all__ = [
    "Checkpoint",
    "CheckpointsConfig",
    "DamagedCheckpoint",
    "DataStatesConfig",
    "FolderLock",
    "FsspecStore",
    "Generation",
    "HostCopies",
    "HostSaver",
    "LATEST",
    "LOCK",
    "Loaded",
    "LocalStore",
    "Location",
    "MANIFEST",
    "Manifest",
    "NoCheckpoint",
    "Record",
    "S3UploadConfig",
    "SUPERSEDED",
    "SaveFailed",
    "SaveReport",
    "Saver",
    "StreamedTensor",
    "Store",
    "SafetensorsFolder",
    "TensorSize",
    "UploadReport",
    "Uploader",
    "contradiction",
    "complete_manifest",
    "defect",
    "has_manifests",
    "hosts_of",
    "is_url",
    "latest_step",
    "load",
    "load_plain",
    "manifest_at",
    "on_each",
    "on_first",
    "on_first_at_length",
    "open_checkpoint",
    "open_safetensors",
    "passed_over",
    "plain_state",
    "plain_tensors",
    "prefer_step",
    "prune",
    "random_state",
    "read_box",
    "newest_save",
    "read_manifest",
    "read_preferred",
    "read_record",
    "remove_steps",
    "replace_text",
    "resolve_step",
    "restore_random_state",
    "save",
    "save_streamed",
    "seal_of",
    "start_uploader",
    "steps_in",
    "store_at",
    "unfinished",
    "verify_files",
    "write_safetensors",
]
