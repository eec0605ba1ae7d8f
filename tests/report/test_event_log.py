"""Scalars and images out of event files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from torch.utils.tensorboard import SummaryWriter

from lit_encoders.report.event_log import make_clock, make_curves, read_events


def test_scalars_stand_at_the_steps_that_were_done(make_run: Callable[..., Path]) -> None:
    log = read_events(make_run() / "logs")
    curves = make_curves(log.scalars, make_clock(log.scalars, {}))
    assert [(p.step, p.tokens, p.value) for p in curves["train/clm_loss"]][:2] == [(1, 100, 9.0), (2, 200, 8.0)]
    assert [(p.step, p.tokens) for p in curves["val/mlm_loss"]] == [(0, 0), (2, 200), (4, 400), (6, 600)]
    assert not [tag for tag in curves if tag.startswith("tokens/")]
    assert log.last_time is not None


def test_a_resume_writes_over_what_came_after_its_checkpoint(tmp_path: Path) -> None:
    for number, (steps, value) in enumerate([(range(40), 1.0), (range(30, 50), 2.0)]):
        # Files are read in the order of their names; two of one second would be told apart by their numbers.
        with SummaryWriter(str(tmp_path), purge_step=steps.start, filename_suffix=f".{number}") as log:
            for step in steps:
                log.add_scalar("train/loss", value, step)
                log.add_scalar("tokens/train/loss", value, 10 * step)
    scalars = read_events(tmp_path).scalars
    assert scalars["train/loss"] == [(step, 1.0 if step < 30 else 2.0) for step in range(50)]
    # A resume at step 30 would purge all beyond 30 tokens.
    assert scalars["tokens/train/loss"] == [(10 * step, 1.0 if step < 30 else 2.0) for step in range(50)]


def test_a_file_that_was_cut_off_counts_as_far_as_it_goes(make_run: Callable[..., Path]) -> None:
    folder = make_run() / "logs"
    (file,) = folder.glob("events*")
    file.write_bytes(file.read_bytes()[:-20])
    assert len(read_events(folder).scalars["train/tokens"]) >= 5


def test_no_logs(tmp_path: Path) -> None:
    assert read_events(tmp_path / "none").scalars == {}


def test_the_newest_image_is_kept(make_run: Callable[..., Path], add_image: Callable[..., None]) -> None:
    folder = make_run()
    add_image(folder, "drift", 2)
    add_image(folder, "drift", 4)
    (step, data) = read_events(folder / "logs").images["drift"]
    assert step == 4
    assert data.startswith(b"\x89PNG")


def test_clock() -> None:
    clock = make_clock({"train/tokens": [(9, 1000.0), (19, 3000.0)]}, {})
    assert [clock.tokens(step) for step in (0, 5, 10, 15, 20, 21)] == [0, 500, 1000, 2000, 3000, None]
    # Few logged steps: the ends of phases, and validations, say it too.
    val = {"val/mlm_loss": [(0, 9.0), (4, 8.0)], "tokens/val/mlm_loss": [(0, 9.0), (400, 8.0)]}
    assert make_clock(val, {5: 500.0}).marks == [(0, 0.0), (4, 400.0), (5, 500.0)]
    # Tokens of a batch, as another module may log them, are no clock.
    assert make_clock({"train/tokens": [(0, 9.0), (1, 8.0)]}, {}).marks == ()
