"""Stopping a run between two optimizer steps: signals set a flag, and the loop looks at it."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterable
from types import FrameType
from typing import Any

# "Temporary failure, try again" in sysexits.h: a scheduler or a loop in a shell can tell it from a crash.
STOPPED = 75


class RunStoppedError(Exception):
    """A run ended before its end, without a mistake of the user's; the message is one line.

    Attributes:
        exit_code: of the command.
    """

    def __init__(self, message: str, exit_code: int = 1) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def stop_signals() -> list[signal.Signals]:
    """What asks a run to stop: SIGTERM and Ctrl-C; SIGUSR1 too under SLURM, which sends it before the time is up."""
    slurm = "SLURM_JOB_ID" in os.environ and hasattr(signal, "SIGUSR1")
    return [signal.SIGTERM, signal.SIGINT, *([signal.SIGUSR1] if slurm else [])]


class StopFlag:
    """Remembers that a signal came; nothing is done inside the handler, where half a step may be in the weights.

    A second Ctrl-C stops at once.
    """

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self._before: dict[signal.Signals, Any] = {}

    @property
    def installed(self) -> bool:
        """Whether it has taken over signals."""
        return bool(self._before)

    def install(self, signals: Iterable[signal.Signals]) -> None:
        """Take over signals; in another thread than the main one, where Python allows no handlers, do nothing."""
        if threading.current_thread() is not threading.main_thread():
            return
        for number in signals:
            self._before[number] = signal.signal(number, self._handle)

    def restore(self) -> None:
        """Give the signals back to who had them before."""
        for number, handler in self._before.items():
            if signal.getsignal(number) == self._handle:
                signal.signal(number, handler)
        self._before.clear()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        again = self.received is not None
        self.received = signal.Signals(number)
        if again and number == signal.SIGINT:
            raise KeyboardInterrupt
        if number == signal.SIGINT:
            # Not print, which the signal may have interrupted.
            os.write(2, b"\nfinishing this step and saving; Ctrl-C again stops at once\n")
