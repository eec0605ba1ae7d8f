"""A run folder as plain data: settings, phases, curves, pictures, and whether the run is over."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from lit_encoders.report.event_log import Clock, EventLog, Point, make_clock, make_curves, read_events
from lit_encoders.report.settings import flatten

CONFIG, SUMMARY, LOGS = "config.yaml", "summary.json", "logs"
NONFINITE, EVALUATION = "nonfinite.json", "evaluation.json"
OBJECTIVE = "train/objective"
# What `train/objective` logs for each of them.
OBJECTIVES = {0.0: "mlm", 1.0: "clm"}
# Beyond this many bytes a picture makes the page heavy for a phone.
LARGEST_PICTURE = 4_000_000
_KINDS = {b"\x89PNG\r\n\x1a\n": "image/png", b"\xff\xd8\xff": "image/jpeg", b"GIF8": "image/gif"}


@dataclass(frozen=True)
class PhaseSpan:
    """A phase of a run: optimizer steps ``start`` to ``stop``.

    Attributes:
        name: of the phase.
        objective: "mlm", "clm", or "" where the run does not say.
        start: steps done before it.
        stop: steps done at its end, or so far.
        tokens: it has read, None where unknown.
        tokens_per_second: None where unknown.
        losses: held-out losses (at its start, at its end) by name, nats per target.
        ended: whether the run has come to its end.
    """

    name: str
    objective: str
    start: int
    stop: int
    tokens: float | None = None
    tokens_per_second: float | None = None
    losses: Mapping[str, tuple[float | None, float | None]] = field(default_factory=dict)
    ended: bool = True


@dataclass(frozen=True)
class Picture:
    """An image of a run: its title, media type and bytes."""

    title: str
    kind: str
    data: bytes


@dataclass(frozen=True)
class RunRecord:
    """What a run has left in its folder.

    Attributes:
        name: short, and not that of another run of the page.
        folder: as the user gave it.
        state: "finished", or what became of it instead.
        steps: optimizer steps done, as far as known.
        settings: the newest configuration by flat keys.
        config_file: name of its file, "" without one.
        summary: of ``summary.json``, empty for an unfinished run.
        curves: scalars by tag.
        clock: tokens by step.
        phases: in order.
        pictures: in the folder, and in the logs.
        evaluation: of ``evaluation.json``, None without one.
        last_time: of the newest scalar, in seconds since 1970.
    """

    name: str
    folder: str
    state: str
    steps: int
    settings: Mapping[str, str] = field(default_factory=dict)
    config_file: str = ""
    summary: Mapping[str, Any] = field(default_factory=dict)
    curves: Mapping[str, Sequence[Point]] = field(default_factory=dict)
    clock: Clock = field(default_factory=lambda: Clock(()))
    phases: Sequence[PhaseSpan] = ()
    pictures: Sequence[Picture] = ()
    evaluation: Any = None
    last_time: float | None = None


def summary_phases(phases: Sequence[Mapping[str, Any]], ends: Mapping[str, int]) -> list[PhaseSpan]:
    """Phases of a finished run.

    Args:
        phases: of its summary.
        ends: steps done at the ends of phases, by name: a summary leaves out phases that were not validated.
    """
    spans: list[PhaseSpan] = []
    for phase in phases:
        stop = ends.get(phase["name"], (spans[-1].stop if spans else 0) + phase["steps"])
        losses = {name: (first, last) for name, (first, last) in phase["losses"].items()}
        spans.append(
            PhaseSpan(
                phase["name"],
                phase["objective"],
                stop - phase["steps"],
                stop,
                phase["tokens"],
                phase["tokens_per_second"],
                losses,
            )
        )
    return spans


def logged_phases(curves: Mapping[str, Sequence[Point]], ends: Mapping[str, int], clock: Clock) -> list[PhaseSpan]:
    """Phases of an unfinished run: those that have a checkpoint, and what has been logged since, by objective.

    Args:
        curves: scalars by tag.
        ends: steps done at the ends of phases, by name.
        clock: tokens by step.
    """
    objectives = curves.get(OBJECTIVE, ())

    def span(name: str, start: int, stop: int, ended: bool) -> PhaseSpan:
        inside = [OBJECTIVES.get(point.value, "") for point in objectives if start < point.step <= stop]
        first, last = clock.tokens(start), clock.tokens(stop)
        held_out = {tag: {p.step: p.value for p in points} for tag, points in curves.items() if is_held_out_loss(tag)}
        losses = {}
        for tag, values in held_out.items():
            # Of a phase that goes on, what was measured last.
            last_step = stop if ended else max((step for step in values if step > start), default=stop)
            losses[tag] = values.get(start), values.get(last_step)
        objective = inside[-1] if inside else ""
        tokens = None if first is None or last is None else last - first
        return PhaseSpan(name or objective, objective, start, stop, tokens, None, losses, ended)

    spans: list[PhaseSpan] = []
    for name, stop in sorted(ends.items(), key=lambda item: item[1]):
        start = spans[-1].stop if spans else 0
        if stop > start:
            spans.append(span(name, start, stop, ended=True))
    start = spans[-1].stop if spans else 0
    rest = [point for point in objectives if point.step > start]
    for place, point in enumerate(rest):
        if place + 1 == len(rest) or rest[place + 1].value != point.value:
            spans.append(span("", start, point.step, ended=place + 1 < len(rest)))
            start = point.step
    return spans


def is_held_out_loss(tag: str) -> bool:
    """Whether a scalar is a held-out loss."""
    return tag.startswith("val/") and tag.endswith("loss")


def read_run(folder: str, name: str) -> RunRecord:
    """Read a run folder.

    Args:
        folder: of the run, finished or not.
        name: of the run on the page.

    Raises:
        ValueError: the folder does not exist, is no run, or holds a file that cannot be read.
    """
    root = Path(folder)
    if not root.is_dir():
        raise ValueError(f"runs must be folders that exist, got '{folder}'")
    if not any((root / left).exists() for left in (CONFIG, SUMMARY, LOGS)):
        raise ValueError(f"runs must be folders with a {CONFIG}, a {SUMMARY} or {LOGS}/ in them, got '{folder}'")
    newest = _newest_config(root)
    config = {} if newest is None else _load(newest)
    summary = _load(root / SUMMARY) if (root / SUMMARY).is_file() else {}
    nonfinite = _load(root / NONFINITE) if (root / NONFINITE).is_file() else None
    evaluation = _load(root / EVALUATION, mapping=False) if (root / EVALUATION).is_file() else None
    events, checkpoints = read_events(root / LOGS), _checkpoints(root)
    ends = {stem: step for stem, step in checkpoints.items() if not stem.startswith("step-")}
    try:
        phases = summary_phases(summary.get("phases", ()), ends)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"'{root / SUMMARY}' must have phases as a run writes them, got {error!r}") from None
    marks = _token_marks(phases)
    clock = make_clock(events.scalars, marks)
    curves = make_curves(events.scalars, clock)
    logged = [points[-1].step for tag, points in curves.items() if tag != "hp_metric"]
    steps = summary.get("steps") or max([*logged, *checkpoints.values()], default=0)
    return RunRecord(
        name,
        folder,
        _state(summary, nonfinite),
        steps,
        flatten(config) if config else {},
        newest.name if newest else "",
        summary,
        curves,
        clock,
        phases or logged_phases(curves, ends, clock),
        read_pictures(root, events),
        evaluation,
        events.last_time,
    )


def read_pictures(root: Path, events: EventLog) -> list[Picture]:
    """PNG and JPEG files of a folder, and logged images that are not among them."""
    files = [path for path in sorted(root.iterdir()) if path.is_file() and path.suffix in (".png", ".jpg", ".jpeg")]
    found = [(path.name, path.read_bytes()) for path in files if not path.name.startswith(".")]
    known = {path.stem for path in files}
    found += [(f"{tag}, step {step}", data) for tag, (step, data) in events.images.items() if tag not in known]
    pictures = []
    for title, data in found:
        kind = next((kind for magic, kind in _KINDS.items() if data.startswith(magic)), None)
        if kind is not None and len(data) <= LARGEST_PICTURE:
            pictures.append(Picture(title, kind, data))
    return pictures


def run_names(folders: Sequence[str]) -> list[str]:
    """Short names for runs: the ends of their paths, as long as it takes for no two to be alike.

    Raises:
        ValueError: none is given, or one twice.

    >>> run_names(["/runs/a", "/runs/b"]), run_names(["/x/seed-1/a", "/x/seed-2/a"])
    (['a', 'b'], ['seed-1/a', 'seed-2/a'])
    """
    if not folders:
        raise ValueError("runs must be at least one run folder, got none")
    paths = [Path(folder).resolve() for folder in folders]
    for place, path in enumerate(paths):
        if path in paths[:place]:
            raise ValueError(f"runs must be folders that differ, got '{folders[place]}' twice")
    length = 1
    while len({path.parts[-length:] for path in paths}) < len(paths):
        length += 1
    return ["/".join(path.parts[-length:]) for path in paths]


def _state(summary: Mapping[str, Any], nonfinite: Mapping[str, Any] | None) -> str:
    if summary:
        return "finished"
    if nonfinite is not None:
        return f"unfinished: stopped by a number that is not finite, at step {nonfinite.get('step')}"
    return "unfinished"


def _newest_config(root: Path) -> Path | None:
    """A run that went on under other settings has ``config-1.yaml`` and so on beside its first."""
    later = {int(n): p for p in root.glob("config-*.yaml") if (n := p.stem.removeprefix("config-")).isdigit()}
    if later:
        return later[max(later)]
    return root / CONFIG if (root / CONFIG).is_file() else None


def _checkpoints(root: Path) -> dict[str, int]:
    """Steps done at checkpoints, by their names, out of their manifests: those of phases stand at their ends."""
    found = {path.stem: _load(path).get("step") for path in (root / "checkpoints").glob("[!.]*.json")}
    return {stem: step for stem, step in found.items() if isinstance(step, int)}


def _token_marks(phases: Sequence[PhaseSpan]) -> dict[int, float]:
    """Tokens at the ends of phases that follow on each other from the start of a run."""
    marks, done, total = {}, 0, 0.0
    for phase in phases:
        if phase.start != done or phase.tokens is None:
            break
        done, total = phase.stop, total + phase.tokens
        marks[done] = total
    return marks if total else {}


def _load(path: Path, mapping: bool = True) -> Any:
    kind = "JSON" if path.suffix == ".json" else "YAML"
    try:
        text = path.read_text(encoding="utf-8")
        value = json.loads(text) if kind == "JSON" else yaml.safe_load(text)
    except (OSError, ValueError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"'{path}' must be a file of {kind} that can be read, got: {reason}") from None
    if mapping and not isinstance(value, Mapping):
        raise ValueError(f"'{path}' must hold keys and values, got {type(value).__name__}")
    return value
