"""The arguments of saving and resuming, as a plain dataclass (no torch, no YAML here)."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class CheckpointsConfig:
    """When and where checkpoints are written, and which one training starts from.

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
    """A checkpoint, or a folder of them, to start from; None: start afresh."""
    load_optimizer: bool = True
    """False: resume parameters only, with fresh optimizer state."""
    load_lr_scheduler: bool = True
    """False: start the learning-rate schedule anew when resuming."""
    checkpoints_path_is_shared_file_system: bool = False
    """No effect: every rank writes its own files, and one rank commits them."""

    def __post_init__(self) -> None:
        """Check all fields at once."""
        found = []
        if not self.checkpoints_path:
            found.append("checkpoints_path: nothing was given; it must name a folder")
        if self.checkpoint_interval < 1:
            found.append(
                f"checkpoint_interval: {self.checkpoint_interval} was given; it must be at least "
                "1 step; a number above train_steps saves only at the end"
            )
        if self.resume_checkpoint_path == "":
            found.append(
                "resume_checkpoint_path: nothing was given; it must name a folder, or be null"
            )
        if found:
            raise ValueError("\n".join(found))
