"""The entry point: trainer verbs through LightningCLI, every other verb a typed function."""

from __future__ import annotations

import logging
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from difflib import get_close_matches
from importlib import import_module
from typing import TYPE_CHECKING, Any, get_type_hints

from lit_encoders import __version__
from lit_encoders.mistakes import UsageError, in_one_line
from lit_encoders.output import readers_may_leave
from lit_encoders.quiet import quieten
from lit_encoders.resume.stops import RunStoppedError

if TYPE_CHECKING:
    from jsonargparse import ArgumentParser

TRAINER_VERBS = {
    "fit": "train a model: a CLM detour, MLM, or whatever the configuration says",
    "validate": "held-out losses of a model or a checkpoint",
    "test": "Lightning's test loop",
    "predict": "Lightning's predict loop",
    "preview": "what fit would read: figures of the text, and packs with their targets",
    "plan": "what fit would take: steps, FLOPs, hours, bytes, and what would stop it; no text is read",
}


@dataclass(frozen=True)
class Verb:
    """A command that is a typed function: its parameters are the options, what it returns is printed.

    Attributes:
        description: one line for the list of verbs.
        function: "module:name", imported only when the verb is used.
        positional: names of the parameters that are given without a flag, in order; a list takes all that is left.
        renamed: for a parameter whose option has a name that Python keeps for itself, that name.
        switches: parameters that are given as ``--name`` or ``--no-name``; neither leaves their default.
        several: parameters that take all values behind their option.
    """

    description: str
    function: str
    positional: tuple[str, ...] = ()
    renamed: Mapping[str, str] = field(default_factory=dict)
    switches: tuple[str, ...] = ()
    several: tuple[str, ...] = ()


FUNCTION_VERBS = {
    "configs": Verb(
        "list the shipped recipes and models, or print one", "lit_encoders.recipes:configs_verb", ("name",)
    ),
    "examples": Verb(
        "list real models and texts to try, or fetch some", "lit_encoders.data.examples:examples_verb", ("names",)
    ),
    "export": Verb("turn a training checkpoint into a Hugging Face folder", "lit_encoders.weights.export:export_verb"),
    "layers": Verb("list the layer ranges of a model", "lit_encoders.weights.layer_table:layers_verb", ("model",)),
    "revert": Verb("set layer ranges back to the base's weights", "lit_encoders.weights.revert:revert_verb"),
    "soup": Verb("average models", "lit_encoders.weights.soup:soup_verb", ("models",), switches=("normalise",)),
    "interpolate": Verb(
        "write models between a base and a trained one", "lit_encoders.weights.interpolate:interpolate_verb"
    ),
    "transplant": Verb(
        "move layers of one model into another",
        "lit_encoders.analysis.transplant:transplant_verb",
        renamed={"donor": "from"},
    ),
    "drift": Verb("how far trained models are from their base", "lit_encoders.weights.drift:drift_verb", ("models",)),
    "alpha-sweep": Verb(
        "held-out losses on the way from a base to a trained model, range by range",
        "lit_encoders.analysis.alpha_sweep:alpha_sweep_verb",
    ),
    "evaluate": Verb(
        "models on tasks: perplexity, classification, tagging, retrieval, with intervals",
        "lit_encoders.evaluation.verb:evaluate_verb",
        switches=("compare",),
        several=("model", "tasks"),
    ),
    "benchmark": Verb(
        "other people's benchmarks: BEIR by mteb; Belebele, Global PIQA, FLORES by lm_eval",
        "lit_encoders.evaluation.benchmark_verb:benchmark_verb",
        switches=("causal",),
        several=("tasks",),
    ),
    "cka": Verb(
        "where two models see the same texts differently, layer by layer",
        "lit_encoders.analysis.cka_verb:cka_verb",
        ("one", "other"),
    ),
    "needle": Verb(
        "is a hidden fact in a document's embedding: by length and position, with intervals and controls",
        "lit_encoders.analysis.needle_verb:needle_verb",
    ),
    "report": Verb(
        "one page of HTML about runs: settings, curves, tables, pictures",
        "lit_encoders.report.verb:report_verb",
        ("runs",),
    ),
    "prune": Verb("make a smaller model out of a larger one", "lit_encoders.analysis.pruning:prune_verb"),
    "study": Verb(
        "several runs and one table: alignment, detour, mask-ratio",
        "lit_encoders.studies.verb:study_verb",
        ("name",),
        switches=("fast", "keep_models"),
    ),
}


def overview() -> str:
    """What ``lit-encoders --help`` prints."""
    verbs = {**TRAINER_VERBS, **{name: verb.description for name, verb in FUNCTION_VERBS.items()}}
    width = max(map(len, verbs))
    lines = [f"  {verb:<{width}}  {text}" for verb, text in verbs.items()]
    return "\n".join(
        [
            "usage: lit-encoders VERB [options]",
            "",
            "(Continued) pretraining of transformer encoders.",
            "",
            *lines,
            "",
            "  lit-encoders VERB --help   options of a verb",
            "  lit-encoders --version     the version",
            "  --debug                    with any verb: the whole traceback of an error",
            "",
            "Start with: lit-encoders fit --config cli_configs/quickstart.yaml",
        ]
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; return its exit code.

    0, 2 for a mistake of the user's (said in one line), 75 for a run that a signal stopped and that can go on, 130
    where Ctrl-C stopped it at once.
    """
    with readers_may_leave():
        return _answer(list(sys.argv[1:] if argv is None else argv))


def verb_parser(name: str, verb: Verb, function: Callable[..., str]) -> ArgumentParser:
    """Options of a verb, from the annotations and the docstring of its function."""
    from jsonargparse import ActionYesNo, ArgumentParser

    parser = ArgumentParser(prog=f"lit-encoders {name}", description=verb.description, exit_on_error=False)
    apart: set[str | int] = {*verb.positional, *verb.renamed, *verb.switches, *verb.several}
    parser.add_function_arguments(function, as_positional=False, skip=apart)
    types = get_type_hints(function)
    texts = parameter_texts(function)
    for parameter in verb.positional:
        many = types[parameter] is not str
        parser.add_argument(parameter, **({"nargs": "*"} if many else {"type": str}), help=texts[parameter])
    for parameter, option in verb.renamed.items():
        parser.add_argument(f"--{option}", type=types[parameter], required=True, help=texts[parameter])
    for parameter in verb.several:
        parser.add_argument(f"--{parameter}", nargs="+", type=str, required=True, help=texts[parameter])
    for parameter in verb.switches:
        action = ActionYesNo(yes_prefix="", no_prefix="no-")
        parser.add_argument(f"--{parameter}", action=action, default=None, help=texts[parameter])
    return parser


def join_negatives(arguments: Sequence[str]) -> list[str]:
    """Join an option and a value that begins like a negative number, which would be taken for an option of its own.

    >>> join_negatives(["--layers", "-6:", "--output", "o"])
    ['--layers=-6:', '--output', 'o']
    """
    joined: list[str] = []
    for argument in arguments:
        if joined and re.match(r"-\d", argument) and joined[-1].startswith("--") and "=" not in joined[-1]:
            joined[-1] += f"={argument}"
        else:
            joined.append(argument)
    return joined


def parameter_texts(function: Callable[..., Any]) -> dict[str, str]:
    """What a docstring says of each parameter, in one line."""
    texts = re.findall(r"^ {8}(\w+): (.*(?:\n {12,}.*)*)", function.__doc__ or "", re.MULTILINE)
    return {name: " ".join(text.split()) for name, text in texts}


def _answer(arguments: list[str]) -> int:
    # Before torch is imported: threads that spin at barriers make a step 70 times slower beside another process.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    if os.getcwd() not in sys.path and "" not in sys.path:
        # As `python -m` has it: class paths may name the user's own modules. Last, so that it shadows nothing.
        sys.path.append(os.getcwd())
    debug = "--debug" in arguments
    arguments = [argument for argument in arguments if argument != "--debug"]
    if not arguments or arguments[0] in ("-h", "--help"):
        print(overview())
        return 0
    if arguments[0] == "--version":
        print(f"lit-encoders {__version__}")
        return 0
    try:
        _run(arguments[0], arguments[1:])
    except UsageError as error:
        if debug:
            raise
        print(f"lit-encoders: error: {error}", file=sys.stderr)
        return 2
    except RunStoppedError as error:
        if debug:
            raise
        print(f"lit-encoders: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        if debug:
            raise
        print("lit-encoders: interrupted", file=sys.stderr)
        return 130
    return 0


def _run(name: str, arguments: list[str]) -> None:
    if name in TRAINER_VERBS:
        from lit_encoders.trainer_cli import run_trainer

        run_trainer(name, arguments)
        return
    if name not in FUNCTION_VERBS:
        verbs = [*TRAINER_VERBS, *FUNCTION_VERBS]
        near = get_close_matches(name, verbs, n=1)
        raise UsageError(f"verb must be one of {', '.join(verbs)}, got {name!r}" + (f"; {near[0]}?" if near else ""))
    _run_function(name, FUNCTION_VERBS[name], arguments)


@contextmanager
def _trainers_quiet() -> Iterator[None]:
    """Hold back what a trainer has to say of itself: it is no part of a verb's answer."""
    quieten()
    logger = logging.getLogger("lightning.pytorch.utilities.rank_zero")
    level = logger.level
    logger.setLevel(logging.WARNING)
    try:
        yield
    finally:
        logger.setLevel(level)


def _run_function(name: str, verb: Verb, arguments: list[str]) -> None:
    with _trainers_quiet(), in_one_line():
        module, _, function_name = verb.function.partition(":")
        function = getattr(import_module(module), function_name)
        given = verb_parser(name, verb, function).parse_args(join_negatives(arguments)).as_dict()
        for parameter, option in verb.renamed.items():
            given[parameter] = given.pop(option)
        text = function(**given)
    print(text)
