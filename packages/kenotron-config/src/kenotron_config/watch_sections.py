"""The sections `profiler` and `metrics_logging`: a training that is looked at closely."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class ProfilerConfig:
    """torch's profiler over some steps.

    Raises:
        ValueError: one line for each problem: field, value given, what is needed.
    """

    profiler_export_path: str | None
    """Folder of the traces; None: `profiler` in checkpoints_path."""
    wait: int = 1
    """Steps of a round that are passed over."""
    warmup: int = 1
    """Steps of a round that the profiler runs and forgets."""
    active: int = 1
    """Steps of a round that are kept."""
    repeat: int = 1
    """Rounds; 0: to the end."""
    skip_first: int = 3
    """Steps before the first round."""
    record_shapes: bool = False
    """True: shapes are kept."""
    profile_memory: bool = False
    """True: memory is followed; on CUDA a snapshot is written, too."""
    with_stack: bool = True
    """True: lines of code are kept."""
    export_chrome_trace: bool = False
    """No effect: every trace can be opened in a browser."""

    def __post_init__(self) -> None:
        """Check all fields at once."""
        least = {"wait": 0, "warmup": 0, "active": 1, "repeat": 0, "skip_first": 0}
        found = [
            f"{name}: {getattr(self, name)} was given; it must be at least {low}"
            for name, low in least.items()
            if getattr(self, name) < low
        ]
        if found:
            raise ValueError("\n".join(found))

    @property
    def steps(self) -> int:
        """Steps until all rounds are done."""
        return self.skip_first + (self.wait + self.warmup + self.active) * max(self.repeat, 1)


@dataclass(frozen=True, kw_only=True)
class MetricsLoggingConfig:
    """Figures of every layer in the log."""

    log_level: int = 0
    """0: of the whole model; 1: of every layer."""
    log_detail_interval: int = 10
    """Training steps from one detailed report to the next."""

    def __post_init__(self) -> None:
        """Check all fields at once."""
        found = []
        if self.log_level not in (0, 1):
            found.append(f"log_level: {self.log_level} was given; it must be 0 or 1")
        if self.log_detail_interval < 1:
            found.append(
                f"log_detail_interval: {self.log_detail_interval} was given; it must be at least 1"
            )
        if found:
            raise ValueError("\n".join(found))
