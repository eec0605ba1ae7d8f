"""What a run has logged for TensorBoard: scalars that survive a resume, and the newest image of each name."""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

# Logged by `LitEncoder` and callbacks at the number of steps done; Lightning places all else at the step before that.
AT_STEPS_DONE = ("val/", "drift/", "cka/", "probe/")
# The same values once more, with tokens in the place of steps.
AGAINST_TOKENS = "tokens/"
# The last figures once more, beside the settings.
AT_THE_END = "final/"
TOKENS = "train/tokens"

# (step, value), in order.
Logged = Sequence[tuple[int, float]]


@dataclass(frozen=True)
class Point:
    """A value of a curve.

    Attributes:
        step: optimizer steps done.
        tokens: real tokens over all ranks, None where the run does not say.
        value: in the scalar's own unit.
    """

    step: int
    tokens: float | None
    value: float


@dataclass(frozen=True)
class EventLog:
    """Scalars and images by tag.

    Attributes:
        scalars: as they were logged.
        images: step and bytes of the newest one.
        last_time: of the newest scalar, in seconds since 1970; None without any.
    """

    scalars: Mapping[str, Logged] = field(default_factory=dict)
    images: Mapping[str, tuple[int, bytes]] = field(default_factory=dict)
    last_time: float | None = None


def without_overwritten(points: Iterable[tuple[int, float]]) -> list[tuple[int, float]]:
    """Drop what a run that went on from a checkpoint has logged again.

    Args:
        points: (step, value) in the order in which they were written.

    >>> without_overwritten([(1, 0.5), (2, 0.4), (3, 0.3), (2, 0.2)])
    [(1, 0.5), (2, 0.2)]
    """
    kept: list[tuple[int, float]] = []
    for step, value in points:
        while kept and kept[-1][0] >= step:
            kept.pop()
        kept.append((step, value))
    return kept


def read_events(folder: Path) -> EventLog:
    """Read the event files of a folder; nothing where there are none. A file that was cut off counts as far as it goes.

    Args:
        folder: ``logs/`` of a run.
    """
    if not any(folder.glob("events.out.tfevents*")):
        return EventLog()
    from tensorboard.backend.event_processing.event_accumulator import IMAGES, SCALARS, EventAccumulator

    # It tells of damaged files and of restarts, which are known here.
    logging.getLogger("tensorboard").setLevel(logging.ERROR)
    # Its own purge compares steps: after a resume it would drop what was logged against tokens. 0 keeps all scalars.
    log = EventAccumulator(str(folder), size_guidance={SCALARS: 0, IMAGES: 1}, purge_orphaned_data=False)
    log.Reload()
    tags = log.Tags()
    scalars, times = {}, []
    for tag in tags[SCALARS]:
        events = log.Scalars(tag)
        scalars[tag] = without_overwritten((event.step, event.value) for event in events)
        times.append(max(event.wall_time for event in events))
    newest = {tag: log.Images(tag)[-1] for tag in tags[IMAGES]}
    images = {tag: (image.step, image.encoded_image_string) for tag, image in newest.items()}
    return EventLog(scalars, images, max(times, default=None))


def steps_done(tag: str, step: int) -> int:
    """The number of optimizer steps behind a logged value."""
    return step if tag.startswith(AT_STEPS_DONE) else step + 1


@dataclass(frozen=True)
class Clock:
    """How many tokens a run had read at which step: known at some steps, in proportion between them.

    >>> Clock(((0, 0), (10, 500))).tokens(4), Clock(()).tokens(4)
    (200.0, None)
    """

    marks: Sequence[tuple[int, float]]

    def tokens(self, step: int) -> float | None:
        """Tokens after a number of steps; None outside of what is known."""
        if not self.marks or not self.marks[0][0] <= step <= self.marks[-1][0]:
            return None
        place = bisect_left(self.marks, step, key=lambda mark: mark[0])
        (after, most) = self.marks[place]
        if after == step:
            return most
        (before, least) = self.marks[place - 1]
        return least + (most - least) * (step - before) / (after - before)


def make_clock(scalars: Mapping[str, Logged], ends: Mapping[int, float]) -> Clock:
    """Put together what a run says of its tokens.

    Args:
        scalars: as they were logged.
        ends: tokens at some steps, as the summary has them.
    """
    marks: dict[int, float] = {}
    for tag, points in scalars.items():
        twin = scalars.get(AGAINST_TOKENS + tag, ())
        # Training losses are not logged against tokens at the very steps at which they are logged.
        if tag.startswith(AT_STEPS_DONE) and len(twin) == len(points):
            marks |= {step: float(tokens) for (step, _), (tokens, _) in zip(points, twin, strict=True)}
    marks |= {steps_done(TOKENS, step): value for step, value in scalars.get(TOKENS, ())}
    marks |= dict(ends)
    if not marks:
        return Clock(())
    ordered = sorted({0: 0.0, **marks}.items())
    # A module of somebody else's may mean another thing by the name.
    grows = all(before <= after for (_, before), (_, after) in pairwise(ordered))
    return Clock(ordered if grows else ())


def make_curves(scalars: Mapping[str, Logged], clock: Clock) -> dict[str, list[Point]]:
    """The scalars as curves against steps done and tokens; those against tokens alone, and of the end, are left out."""
    return {
        tag: [Point(done := steps_done(tag, step), clock.tokens(done), value) for step, value in points]
        for tag, points in scalars.items()
        if not tag.startswith((AGAINST_TOKENS, AT_THE_END))
    }
