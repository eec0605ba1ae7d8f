"""Signals are noted, not acted on; a second Ctrl-C is."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from lit_encoders.resume.stops import RunStoppedError, StopFlag, stop_signals


def test_signals_that_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    assert stop_signals() == [signal.SIGTERM, signal.SIGINT]
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    assert stop_signals() == [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1]


def test_a_signal_is_noted_and_handlers_are_given_back() -> None:
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    flag = StopFlag()
    flag.install(before)
    try:
        assert flag.received is None
        os.kill(os.getpid(), signal.SIGTERM)
        assert flag.received == signal.SIGTERM
        os.kill(os.getpid(), signal.SIGTERM)  # A scheduler may repeat it.
        assert flag.received == signal.SIGTERM
    finally:
        flag.restore()
    assert {number: signal.getsignal(number) for number in before} == before


def test_a_second_ctrl_c_stops_at_once(capfd: pytest.CaptureFixture[str]) -> None:
    flag = StopFlag()
    flag.install([signal.SIGINT])
    try:
        os.kill(os.getpid(), signal.SIGINT)
        assert "Ctrl-C again stops at once" in capfd.readouterr().err
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    finally:
        flag.restore()


def test_a_handler_that_came_later_is_left_alone() -> None:
    before = signal.getsignal(signal.SIGTERM)
    flag = StopFlag()
    flag.install([signal.SIGTERM])
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    flag.restore()
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_IGN
    signal.signal(signal.SIGTERM, before)


def test_in_another_thread_nothing_is_taken_over() -> None:
    before = signal.getsignal(signal.SIGTERM)
    thread = threading.Thread(target=lambda: StopFlag().install([signal.SIGTERM]))
    thread.start()
    thread.join()
    assert signal.getsignal(signal.SIGTERM) == before


def test_the_exit_code_is_the_error_s() -> None:
    assert (RunStoppedError("full").exit_code, RunStoppedError("stopped", 75).exit_code) == (1, 75)
