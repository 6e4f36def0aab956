"""What every command does alike: one-line errors, exit codes, Ctrl-C, a pipe that closes.

Owns the way from an exception to an exit code: 0 done, 2 a mistake of the caller, 130 interrupted, 141 nobody reads
the output any more. Invariant: results go to stdout, everything else to stderr.
"""

import argparse
import os
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import NoReturn

from flashmoe_jax.errors import FlashMoEError

BAD_INPUT, INTERRUPTED, BROKEN_PIPE = 2, 130, 141


class OneLineParser(argparse.ArgumentParser):
    """An argument parser whose errors are one line, like all others."""

    def error(self, message: str) -> NoReturn:
        self.exit(BAD_INPUT, f"error: {message} (see {self.prog} --help)\n")


def guarded(body: Callable[[], int]) -> int:
    """Runs a command and returns its exit code."""
    try:
        status = body()
        sys.stdout.flush()
        return status
    except FlashMoEError as error:
        say(f"error: {' '.join(str(error).split())}")
        _drop_unwritable()
        return BAD_INPUT
    except KeyboardInterrupt:
        say("interrupted")
        return INTERRUPTED
    except BrokenPipeError:
        _drop_unwritable()
        return BROKEN_PIPE


def say(line: str) -> None:
    """One line for the person at the terminal."""
    print(line, file=sys.stderr, flush=True)


def prepare_stdout() -> None:
    """Makes a terminal that cannot show a character show `?` instead of ending the program."""
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    if encoding.lower().replace("-", "") != "utf8" and hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")


class StopRequest:
    """While entered, the first Ctrl-C sets `is_set` and the second raises KeyboardInterrupt.

    A step of a model takes long and must not be left half-way, so the loop over tokens looks at `is_set` between two
    of them. Has no effect outside the main thread, where Python delivers no signals.
    """

    def __init__(self, message: str):
        self.is_set = False
        self._message = message
        self._previous: object = None

    def __enter__(self) -> "StopRequest":
        if threading.current_thread() is threading.main_thread():
            self._previous = signal.signal(signal.SIGINT, self._on_interrupt)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._previous is not None:
            signal.signal(signal.SIGINT, self._previous)  # type: ignore[arg-type]

    def _on_interrupt(self, number: int, frame: FrameType | None) -> None:
        if self.is_set:
            raise KeyboardInterrupt
        self.is_set = True
        # The handler may have interrupted a write to the same buffered stream, so it writes past the buffer.
        os.write(2, f"\n{self._message}\n".encode())


def _drop_unwritable() -> None:
    """Discards output that cannot be written, about which the interpreter would complain once more at exit."""
    try:
        sys.stdout.flush()
    except OSError:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stdout.fileno())
        os.close(null)
