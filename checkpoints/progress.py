"""What a long job tells its user: lines and a bar of bytes, on stderr. Results never pass through here."""

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Protocol

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

Advance = Callable[[int], None]


class Reporter(Protocol):
    """Where a job reports to."""

    def say(self, line: str) -> None: ...

    def bar(self, label: str, total_bytes: int) -> contextlib.AbstractContextManager[Advance]: ...


class SilentReporter:
    """Reports nothing."""

    def say(self, line: str) -> None:
        pass

    @contextlib.contextmanager
    def bar(self, label: str, total_bytes: int) -> Iterator[Advance]:
        yield lambda num_bytes: None


class ConsoleReporter:
    """Lines and a progress bar on stderr; only lines where stderr is not a terminal."""

    def say(self, line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    @contextlib.contextmanager
    def bar(self, label: str, total_bytes: int) -> Iterator[Advance]:
        console = Console(stderr=True)
        if not console.is_terminal:
            self.say(f"{label}: {format_bytes(total_bytes)}")
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(binary_units=True),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
        )
        with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
            task = progress.add_task(label, total=total_bytes)
            yield lambda num_bytes: progress.advance(task, num_bytes)


def format_bytes(num_bytes: float) -> str:
    """`12.9 GiB`, `640 KiB`, `17 B`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.0f} {unit}" if unit in ("B", "KiB") else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.1f} TiB"
