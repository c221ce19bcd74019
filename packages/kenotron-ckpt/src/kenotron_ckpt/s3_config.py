"""The arguments of uploading, as a plain dataclass (no torch, no fsspec, no YAML here)."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class S3UploadConfig:
    """Destination of the copies of checkpoints made during training.

    Raises:
        ValueError: one line for each problem: field, value given, what is needed.
    """

    upload_s3_path: str | None
    """URL of the folder that gets a copy of every checkpoint; None: nothing is uploaded."""
    remove_after_upload: bool = False
    """True: a local checkpoint is removed once its copy is complete and was compared with it."""
    read_back: bool | None = None
    """True: the copy is read and its checksums compared, not its lengths only; None: when the
    local checkpoint is to be removed."""
    s5cmd_numworkers: int | None = None
    """No effect: the training process uploads, without s5cmd."""
    s5cmd_concurrency: int | None = None
    """No effect: the training process uploads, without s5cmd."""
    s5cmd_path: str | None = None
    """No effect: the training process uploads, without s5cmd."""

    def __post_init__(self) -> None:
        """Check all fields at once."""
        found = []
        url = self.upload_s3_path
        if url is not None and not all(url.partition("://")):
            found.append(
                f"upload_s3_path: {url} was given; it must be a URL such as s3://bucket/run, "
                "or null"
            )
        for name in ("s5cmd_numworkers", "s5cmd_concurrency"):
            value = getattr(self, name)
            if value is not None and value < 1:
                found.append(f"{name}: {value} was given; it must be at least 1")
        if found:
            raise ValueError("\n".join(found))
