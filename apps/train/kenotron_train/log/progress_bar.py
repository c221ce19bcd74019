"""The progress bar of a training on a terminal: one line of any width."""

from __future__ import annotations

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn
from rich.table import Column
from rich.text import Text


class _Left(ProgressColumn):
    """Time to the end, from the steps of the last minutes; ``eta -`` before there are any."""

    def render(self, task: Task) -> Text:
        """``eta 1:02:03``."""
        if task.finished or task.time_remaining is None:
            return Text("done" if task.finished else "eta -", no_wrap=True)
        minutes, seconds = divmod(int(task.time_remaining), 60)
        hours, minutes = divmod(minutes, 60)
        clock = f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
        return Text(f"eta {clock}", no_wrap=True)


class ProgressBar:
    """Step, loss, tokens a second, share of the device's peak, and the time that is left.

    What does not fit is cut: the bar first. Colours follow ``NO_COLOR`` and the terminal.
    """

    def __init__(self, console: Console, steps: int, first_step: int) -> None:
        width = len(str(steps))
        self._progress = Progress(
            _text("{task.completed:>" + str(width) + "}/{task.total}"),
            BarColumn(bar_width=None, table_column=Column(min_width=4, ratio=1)),
            _text("loss {task.fields[loss]}"),
            _text("{task.fields[speed]}"),
            _text("{task.fields[work]}"),
            _Left(table_column=Column(no_wrap=True)),
            console=console,
            expand=True,
            speed_estimate_period=600,
        )
        fields = {"loss": "-", "speed": "", "work": ""}
        self._task = self._progress.add_task(
            "training", total=steps, completed=first_step - 1, **fields
        )
        self._progress.start()

    def update(self, step: int, loss: str, speed: str, work: str) -> None:
        """Show a finished step."""
        self._progress.update(self._task, completed=step, loss=loss, speed=speed, work=work)

    def stop(self) -> None:
        """Draw it for the last time."""
        self._progress.stop()


def _text(pattern: str) -> TextColumn:
    return TextColumn(pattern, table_column=Column(no_wrap=True))
