"""The entry point: trainer verbs through LightningCLI, every other verb a typed function."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from importlib import import_module

from lit_encoders import __version__
from lit_encoders.mistakes import UsageError, in_one_line

TRAINER_VERBS = {
    "fit": "train a model: a CLM detour, MLM, or whatever the configuration says",
    "validate": "held-out losses of a model or a checkpoint",
    "test": "Lightning's test loop",
    "predict": "Lightning's predict loop",
    "preview": "what fit would read: figures of the text, and packs with their targets",
}


@dataclass(frozen=True)
class Verb:
    """A command that is a typed function: its parameters are the options, what it returns is printed.

    Attributes:
        description: one line for the list of verbs.
        function: "module:name", imported only when the verb is used.
        positional: names of the parameters that are given without a flag, in order; a list takes all that is left.
    """

    description: str
    function: str
    positional: tuple[str, ...] = ()


FUNCTION_VERBS = {
    "configs": Verb(
        "list the shipped recipes and models, or print one", "lit_encoders.recipes:configs_verb", ("name",)
    ),
    "examples": Verb(
        "list real models and texts to try, or fetch some", "lit_encoders.data.examples:examples_verb", ("names",)
    ),
    "export": Verb("turn a training checkpoint into a Hugging Face folder", "lit_encoders.weights.export:export_verb"),
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
    """Run a command; return its exit code: 0, or 2 for a mistake of the user's, said in one line."""
    # Before torch is imported: threads that spin at barriers make a step 70 times slower beside another process.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    arguments = list(sys.argv[1:] if argv is None else argv)
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


def _run_function(name: str, verb: Verb, arguments: list[str]) -> None:
    from jsonargparse import ArgumentParser

    module, _, function_name = verb.function.partition(":")
    with in_one_line():
        function = getattr(import_module(module), function_name)
        parser = ArgumentParser(prog=f"lit-encoders {name}", description=verb.description, exit_on_error=False)
        parser.add_function_arguments(function, as_positional=False, skip=set(verb.positional))
        for parameter in verb.positional:
            parser.add_argument(parameter, nargs="*")
        text = function(**parser.instantiate(parser.parse_args(arguments)).as_dict())
    try:
        print(text, flush=True)
    except BrokenPipeError:  # The reader (`| head`) has seen enough.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
