"""The entry point: trainer verbs through LightningCLI, every other verb a typed function."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

from lit_encoders import __version__
from lit_encoders.mistakes import UsageError, in_one_line

if TYPE_CHECKING:
    from jsonargparse import ArgumentParser

TRAINER_VERBS = {
    "fit": "train a model: a CLM detour, MLM, or whatever the configuration says",
    "validate": "held-out losses of a model or a checkpoint",
    "test": "Lightning's test loop",
    "predict": "Lightning's predict loop",
}
FUNCTION_VERBS = {"export": "turn a training checkpoint into a Hugging Face folder"}


def overview() -> str:
    """What ``lit-encoders --help`` prints."""
    verbs = {**TRAINER_VERBS, **FUNCTION_VERBS}
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


def _run(verb: str, arguments: list[str]) -> None:
    verbs = [*TRAINER_VERBS, *FUNCTION_VERBS]
    if verb not in verbs:
        near = get_close_matches(verb, verbs, n=1)
        raise UsageError(f"verb must be one of {', '.join(verbs)}, got {verb!r}" + (f"; {near[0]}?" if near else ""))
    if verb in TRAINER_VERBS:
        from lit_encoders.trainer_cli import run_trainer

        run_trainer(verb, arguments)
    else:
        _function_verb(verb, arguments)


def _function_verb(verb: str, arguments: list[str]) -> None:
    from jsonargparse import ArgumentParser

    parser = ArgumentParser(prog=f"lit-encoders {verb}", description=FUNCTION_VERBS[verb], exit_on_error=False)
    run = {"export": _export}[verb](parser)
    with in_one_line():
        settings = parser.parse_args(arguments)
        run(**parser.instantiate_classes(settings).as_dict())


def _export(parser: ArgumentParser) -> Callable[..., None]:
    from lit_encoders.weights.export import export_checkpoint

    parser.add_function_arguments(export_checkpoint, as_positional=False)

    def run(**settings: Any) -> None:
        folder = export_checkpoint(**settings)
        print(f'Export: {folder}\nLoad:   transformers.AutoModelForMaskedLM.from_pretrained("{folder}")')

    return run
