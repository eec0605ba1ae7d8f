"""Budgets in tokens, as text, as numbers, and through a command line of anybody's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from lit_encoders.optim.budgets import Tokens, parse_tokens


@pytest.mark.parametrize(
    ("value", "tokens"),
    [
        (10e9, 10e9),
        (10_000_000_000, 10e9),
        ("10e9", 10e9),
        ("10_000_000_000", 10e9),
        ("10B", 10e9),
        (" 100M ", 100e6),
        ("64K", 64_000.0),
        ("64k", 64_000.0),
        ("2.5b", 2.5e9),
        ("1T", 1e12),
        ("0", 0.0),
        ("-1B", -1e9),
    ],
)
def test_as_people_write_them(value: float | str, tokens: float) -> None:
    assert parse_tokens(value) == tokens


@pytest.mark.parametrize("value", ["many", "", "B", "10 GB", "10e9e9", "nan", "inf", "1e400", True, None, "10,000"])
def test_no_number(value: Any) -> None:
    with pytest.raises(ValueError, match=r"^must be a number of tokens such as 10e9 or 10B, got "):
        parse_tokens(value)


@dataclass
class Budget:
    tokens: Tokens | None = None
    milestones: list[Tokens] | None = None


def make_parser() -> Any:
    jsonargparse = pytest.importorskip("jsonargparse")
    parser = jsonargparse.ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(Budget, "budget")
    return parser


@pytest.mark.parametrize("text", ["many", ".nan", ".inf", "true", "[1]"])
def test_any_command_line_refuses_what_is_no_number(text: str) -> None:
    parser = make_parser()
    for parse, given in (
        (parser.parse_args, [f"--budget.tokens={text}"]),
        (parser.parse_string, f"budget: {{tokens: {text}}}"),
    ):
        with pytest.raises(Exception, match="must be a number of tokens such as 10e9 or 10B, got "):
            parse(given)


@pytest.mark.parametrize("text", ["10e9", "10_000_000_000", "10B", "10000000000"])
def test_any_command_line_reads_them_and_saves_what_it_reads(text: str) -> None:
    parser = make_parser()
    for settings in (
        parser.parse_args([f"--budget.tokens={text}", f"--budget.milestones=[1B, {text}]"]),
        parser.parse_string(f"budget:\n  tokens: {text}\n  milestones: [1B, {text}]\n"),
    ):
        assert settings.budget.tokens == 10e9
        assert settings.budget.milestones == [1e9, 10e9]
        assert type(settings.budget.tokens) is float, "checkpoints hold plain types"
        saved = parser.dump(settings)
        assert "tokens: 10000000000\n" in saved
        assert parser.parse_string(saved).budget == settings.budget
