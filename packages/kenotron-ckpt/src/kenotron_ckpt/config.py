"""The arguments of saving and resuming, as a plain dataclass (no torch, no YAML here)."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class DataStatesConfig:
    """Host memory and threads of saving in the background; see the engine ``datastates``.

    Raises:
        ValueError: one line for each problem: field, value given, what is needed.
    """

    host_cache_size: float = 16
    """Host memory for copies of a rank's values, in GB (1e9 bytes); what does not fit is copied as
    files reach the disk."""
    parser_threads: int = 2
    """Files that a rank writes at a time."""
    pin_host_cache: bool = True
    """Page-locked memory, so that an accelerator copies while it computes."""

    @property
    def pool_bytes(self) -> int:
        """``host_cache_size`` in bytes, at least one."""
        return max(1, int(self.host_cache_size * 10**9))

    def __post_init__(self) -> None:
        """Check all fields at once."""
        found = []
        if not self.host_cache_size > 0:
            found.append(f"host_cache_size: {self.host_cache_size} was given; it must be positive")
        if self.parser_threads < 1:
            found.append(f"parser_threads: {self.parser_threads} was given; it must be at least 1")
        if found:
            raise ValueError("\n".join(found))


@dataclass(frozen=True, kw_only=True)
class CheckpointsConfig:
    """Settings of checkpoints: steps and folder of saves, and the one that training starts from.

    Raises:
        ValueError: one line for each problem: field, value given, what is needed.
    """

    checkpoints_path: str
    """Folder that gets one sub-folder for each saved step."""
    checkpoint_interval: int
    """Training steps from one checkpoint to the next."""
    save_initial_state: bool = False
    """True: also save before the first step."""
    save_final_state: bool = True
    """True: also save after the last step."""
    resume_checkpoint_path: str | None = None
    """A checkpoint, a folder of them, or a URL of either, to start from; None: start afresh."""
    load_optimizer: bool = True
    """False: resume parameters only, with fresh optimizer state."""
    load_lr_scheduler: bool = True
    """False: start the learning-rate schedule again from step 1 when resuming."""
    checkpoints_path_is_shared_file_system: bool = False
    """No effect: every rank writes its own files, and one rank commits them."""
    checkpointing_engine: Literal["torch", "datastates"] = "torch"
    """``torch``: training waits until a checkpoint is on the disk. ``datastates``: it continues at
    once, and files are written from a copy in host memory."""
    datastates: DataStatesConfig | None = None
    """Of the engine ``datastates``; None: its defaults."""
    memory_every: int | None = None
    """Training steps from one copy in memory to the next: so many are made again at most when a
    process dies, or one of several hosts; twice as many with ``datastates``. None: no copies."""
    memory_path: str = "/dev/shm"
    """Folder in the memory of the host, with room for two checkpoints; of several hosts each needs
    room for two copies of its own part and of that of the host before it. Variables of the
    environment (``$NAME``) are those of each host."""
    keep_last: int | None = None
    """So many of the newest checkpoints stay; None: all."""
    keep_every: int | None = None
    """Checkpoints of multiples of this step stay, too."""
    verify_after_write: bool = False
    """True: read every file back from the disk before the checkpoint counts."""
    on_save_failure: Literal["warn", "raise"] = "warn"
    """``raise``: a checkpoint that cannot be written ends the training."""
    accept_changed_rope: bool = False
    """True: resume a model with other rope_theta or rope_scaling, optimizer included, to extend its
    context. Step and place in the data continue as in any resume."""
    accept_changed_data: bool = False
    """True: resume although the data of a stage are not those that the checkpoint was trained with;
    false: an error."""

    def __post_init__(self) -> None:
        """Check all fields at once."""
        found = []
        if not self.checkpoints_path:
            found.append("checkpoints_path: nothing was given; it must name a folder")
        if "://" in self.checkpoints_path:
            found.append(
                f"checkpoints_path: {self.checkpoints_path} was given; it must be a folder that "
                "all hosts share; copies go to a URL with s3_upload.upload_s3_path"
            )
        if self.checkpoint_interval < 1:
            found.append(
                f"checkpoint_interval: {self.checkpoint_interval} was given; it must be at least "
                "1 step; a number above train_steps saves only at the end"
            )
        if self.memory_every is not None and not 0 < self.memory_every < self.checkpoint_interval:
            found.append(
                f"memory_every: {self.memory_every} was given; it must be at least 1 step and less "
                f"than checkpoint_interval ({self.checkpoint_interval}), or null"
            )
        for name, number in (("keep_last", self.keep_last), ("keep_every", self.keep_every)):
            if number is not None and number < 1:
                found.append(f"{name}: {number} was given; it must be at least 1, or null")
        if self.resume_checkpoint_path == "":
            found.append(
                "resume_checkpoint_path: nothing was given; it must name a folder, or be null"
            )
        if found:
            raise ValueError("\n".join(found))
