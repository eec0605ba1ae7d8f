"""A reader that has seen enough does not end what it was reading."""

from __future__ import annotations

import io
import os
import subprocess
import sys

import pytest

from lit_encoders.output import readers_may_leave


def unread() -> io.TextIOWrapper:
    reader, writer = os.pipe()
    os.close(reader)
    return os.fdopen(writer, "w")


@pytest.mark.parametrize("name", ["stdout", "stderr"])
def test_prints_go_nowhere_once_the_reader_is_gone(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    stream = unread()
    monkeypatch.setattr(sys, name, stream)
    with readers_may_leave():
        for _ in range(3):
            print("x" * 10_000, file=getattr(sys, name), flush=True)
        assert getattr(sys, name).fileno() == stream.fileno()
    assert getattr(sys, name) is stream
    stream.close()


def test_what_is_still_read_arrives(capsys: pytest.CaptureFixture[str]) -> None:
    with readers_may_leave():
        print("a line")
    assert capsys.readouterr().out == "a line\n"


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["configs", "clm_detour"]])
def test_commands_end_well(arguments: list[str]) -> None:
    stream = unread()
    command = [sys.executable, "-m", "lit_encoders", *arguments]
    done = subprocess.run(command, stdout=stream, stderr=subprocess.PIPE, text=True)
    stream.close()
    assert (done.returncode, done.stderr) == (0, "")
