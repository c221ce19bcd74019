"""Losses of tokens in the order of training, in a file that is mapped: those of a reference model.

A file has S losses of each sample, fp32 and little-endian, samples in their order; next to it lies
a description in JSON, which is written last. R: rows, S: sequence length.
"""

import contextlib
import json
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

FORMAT = 1
"""Number of the format."""
LOSSES = np.dtype("<f4")
"""Type of a loss in the file."""
KEPT_EVERY = 60.0
"""Seconds after which a writer describes again what is there, so that little is lost with it."""


class StoredLosses:
    """Losses of the first samples of a stage's order, as `LossWriter` has written them.

    Args:
        path: the file; its description is `<path>.json`.

    Raises:
        FileNotFoundError: there is no description.
        ValueError: the file is of another format, shorter than it is described, or the description
            is damaged.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        found = _read_description(self.path)
        self.samples, self.sequence = int(found["samples"]), int(found["sequence"])
        self.about: dict[str, Any] = found["about"]
        """Model and data of the losses, as given to the writer."""
        size, needed = self.path.stat().st_size, self.samples * self.sequence * LOSSES.itemsize
        if size < needed:
            raise ValueError(
                f"{self.path} has {size} bytes, but {self.samples} samples of {self.sequence} "
                f"tokens need {needed}: it is cut off; write the losses again"
            )
        shape = (self.samples, self.sequence)
        self._losses = np.memmap(self.path, LOSSES, "r", shape=shape) if needed else None

    def rows(self, first: int, count: int) -> NDArray[np.float32]:
        """Return the losses of `count` samples from sample `first` on: (R, S), a copy.

        Raises:
            ValueError: the file ends before.
        """
        if self._losses is None or first + count > self.samples:
            raise ValueError(
                f"{self.path} has losses of {self.samples} samples, but samples [{first}, "
                f"{first + count}) are needed: write those that are missing"
            )
        return np.array(self._losses[first : first + count], dtype=np.float32)


class LossWriter:
    """Write losses in the order of samples; use it as a context manager.

    What was added counts from `finish` on, or when a minute is over. Without it an earlier
    description stays valid. Readers of an earlier file keep it.

    Args:
        path: the file; its folder is made.
        sequence: S.
        about: what the losses are of, as JSON values.
        begin: samples that the file keeps; more are added after them.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        sequence: int,
        about: Mapping[str, Any],
        begin: int = 0,
    ) -> None:
        self._path, self._about = Path(path), dict(about)
        self.samples, self._sequence = begin, sequence
        self._path.parent.mkdir(parents=True, exist_ok=True)
        if not begin:  # another file: who reads or writes the former one has it for itself
            _description(self._path).unlink(missing_ok=True)
            self._path.unlink(missing_ok=True)
        self._file = self._path.open("r+b" if begin else "wb")
        self._file.seek(begin * sequence * LOSSES.itemsize)
        self._described = time.monotonic()

    def add(self, losses_RS: NDArray[np.floating]) -> None:
        """Add the losses of the next samples.

        Raises:
            ValueError: they are not (R, S).
        """
        if losses_RS.ndim != 2 or losses_RS.shape[1] != self._sequence:
            raise ValueError(
                f"losses of shape {losses_RS.shape} were given; {self._path} has "
                f"{self._sequence} losses of each sample: give (samples, {self._sequence})"
            )
        with self._named():
            self._file.write(losses_RS.astype(LOSSES).tobytes())
        self.samples += len(losses_RS)
        if time.monotonic() - self._described > KEPT_EVERY:
            self.finish()

    def finish(self) -> None:
        """Write to the disk, then describe what is there."""
        with self._named():
            self._file.flush()
            os.fsync(self._file.fileno())
        described = {
            "format": FORMAT,
            "samples": self.samples,
            "sequence": self._sequence,
            "about": self._about,
        }
        target = _description(self._path)
        fresh = target.with_name(f"new.{target.name}")
        fresh.write_text(json.dumps(described, indent=1) + "\n", encoding="utf-8")
        fresh.replace(target)
        self._described = time.monotonic()

    @contextlib.contextmanager
    def _named(self) -> Iterator[None]:
        """Give an error of the file its name, which a full disk leaves out."""
        try:
            yield
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self._path)) from error

    def __enter__(self) -> "LossWriter":
        """Return itself."""
        return self

    def __exit__(self, _: object, error: BaseException | None, *__: object) -> None:
        """Close the file; an error that is under way stays the one that is raised."""
        with contextlib.suppress(OSError) if error is not None else contextlib.nullcontext():
            self._file.close()


def _description(path: Path) -> Path:
    return path.with_name(f"{path.name}.json")


def _read_description(path: Path) -> dict[str, Any]:
    """Return the description of a file. Raises as `StoredLosses`."""
    file = _description(path)
    text = file.read_text(encoding="utf-8")
    try:
        found = json.loads(text)
        known = found["format"]
        if known == FORMAT:
            return {key: found[key] for key in ("samples", "sequence", "about")}
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{file} is damaged ({error!r}): write the losses again") from error
    raise ValueError(
        f"{path} has format {known!r}, but this release reads {FORMAT}: write the losses again"
    )
