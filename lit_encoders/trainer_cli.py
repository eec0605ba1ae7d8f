"""Lightning's verbs (fit, validate, ...) over the packaged ``base.yaml``, in run folders that are never overwritten."""

from __future__ import annotations

import os
import shutil
import sys
import zipfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml
from jsonargparse import Namespace
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI, SaveConfigCallback
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.utilities import rank_zero_info, rank_zero_only
from rich.console import Console
from typing_extensions import override

from lit_encoders import callbacks
from lit_encoders.callbacks.exact_resume import CHECKPOINTS
from lit_encoders.callbacks.objective_schedule import ObjectiveSchedule, find_schedule
from lit_encoders.callbacks.run_summary import print_stored_summary
from lit_encoders.data.datamodule import TextDataModule
from lit_encoders.mistakes import UsageError, in_one_line
from lit_encoders.modules.fsdp2 import FSDP2Strategy as FSDP2Strategy
from lit_encoders.modules.lit_clm import LitCLM as LitCLM
from lit_encoders.modules.lit_encoder import LitEncoder
from lit_encoders.modules.lit_mlm import LitMLM as LitMLM
from lit_encoders.modules.precision import automatic_precision
from lit_encoders.optim.budgets import Tokens
from lit_encoders.preview import preview
from lit_encoders.quiet import quieten
from lit_encoders.recipes import config_folder, replace_names
from lit_encoders.resume.run_folder import RunLock, differences
from lit_encoders.resume.store import PART, check_checkpoint, newest_checkpoint
from lit_encoders.weights.sharded import consolidate, is_sharded
from lit_encoders.whole_lists import replace_lists

# What a run leaves in its folder; any of them means that the folder is taken.
RUN_FILES = ("config.yaml", "logs", "checkpoints", "export", "summary.json")
# For ``ckpt_path``: go on from the newest sound checkpoint of the run folder, if there is one.
AUTO = "auto"
# Strategies that read a sharded checkpoint as it is.
SHARDED = ("FSDP2Strategy", "ModelParallelStrategy")


class RunFinishedError(Exception):
    """There is nothing left to do in this run folder."""


class RunFolder(SaveConfigCallback):
    """Save the resolved configuration into the run folder, once it is sure that training begins."""

    started = False
    # Whether the checkpoint to go on from was found, and not asked for by its name.
    found = False

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Save nothing yet: data and model have not been looked at, and a mistake would leave a used folder."""

    @override
    def on_sanity_check_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._begin(trainer)

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._begin(trainer)

    def _begin(self, trainer: Trainer) -> None:
        if type(self).started:
            return
        type(self).started = True
        if not trainer.is_global_zero or trainer.state.fn != "fit":
            return
        root = Path(trainer.default_root_dir)
        root.mkdir(parents=True, exist_ok=True)
        config = self.config.clone()
        if type(self).found:
            config.ckpt_path = AUTO
        text = self.parser.dump(config, skip_unset=False)
        path, number = root / "config.yaml", 1
        while path.exists():  # A resumed run keeps the configuration of the run before.
            if path.read_text(encoding="utf-8") == text:
                return
            path, number = root / f"config-{number}.yaml", number + 1
        beside = root / f".{path.name}"
        beside.write_text(text, encoding="utf-8")
        beside.replace(path)


def use_stand_in(settings: Namespace) -> None:
    """Replace backbone and teacher that ``stand_ins`` has other models for, and the tokenizer; the rest is left alone.

    Args:
        settings: of a trainer verb; changed in place.
    """
    stand_ins, settings.stand_ins = settings.stand_ins or {}, None
    init_args = settings.model.get("init_args") or {}
    backbone = init_args.get("backbone")
    if isinstance(backbone, str) and backbone in stand_ins:
        configuration = dict(stand_ins[backbone])
        init_args["tokenizer"] = configuration.pop("tokenizer", init_args.get("tokenizer"))
        init_args["backbone"] = configuration
        rank_zero_info(f"model.backbone: a tiny stand-in for {backbone}, without its weights")
    teacher = init_args.get("teacher")
    if isinstance(teacher, str) and teacher in stand_ins:
        init_args["teacher"] = {key: value for key, value in stand_ins[teacher].items() if key != "tokenizer"}
        rank_zero_info(f"model.teacher: a tiny stand-in for {teacher}, without its weights")


def check_devices(accelerator: Any, devices: Any) -> None:
    """Refuse far more processes on a processor than it has cores: they would all be started, whatever the data says.

    Args:
        accelerator: as the trainer takes it.
        devices: as the trainer takes it.

    Raises:
        ValueError: with the number.
    """
    cores = max(2, os.cpu_count() or 1)
    if accelerator == "cpu" and str(devices).isdigit() and int(devices) > cores:
        raise ValueError(f"trainer.devices must be at most {cores} on this machine's processors, got {devices}")


def _rank() -> int:
    """The rank of this process as its launcher has set it: 0 before there is one."""
    return getattr(rank_zero_only, "rank", 0) or 0


def check_named_checkpoint(path: str | Path, key: str) -> None:
    """Refuse a checkpoint that is not there, or not sound.

    Args:
        path: as the user gave it.
        key: the setting.

    Raises:
        ValueError: with the reason.
    """
    if not (zipfile.is_zipfile(path) or is_sharded(Path(path))):
        raise ValueError(f"{key} must be a checkpoint that exists, got {str(path)!r}")
    try:
        check_checkpoint(Path(path))
    except ValueError as error:
        raise ValueError(f"{key} must be a sound checkpoint, got {str(path)!r}: {error}") from None


class EncoderCLI(LightningCLI):
    """LightningCLI with the keys ``schedule``, ``validate_every`` and ``stand_ins``, and a run folder.

    The run folder is ``trainer.default_root_dir``, else ``runs/NAME`` with the name of the first ``--config``: what is
    laid over a configuration does not name the run.
    """

    # Set once the configuration is parsed; a command may fail before that.
    root = Path()
    made: Sequence[Path] = ()
    forked = False
    lock: RunLock | None = None
    # The step that a run goes on from.
    resumed_step: int | None = None

    @override
    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.add_subclass_arguments(ObjectiveSchedule, "schedule", required=False)
        parser.add_argument(
            "--validate_every",
            type=int | None,
            default=None,
            help="Optimizer steps between two validations; None validates at the start and at each phase's end.",
        )
        parser.add_argument(
            "--fork",
            type=str | None,
            default=None,
            help="A checkpoint to begin a new run from, in a new folder: weights, moments and data position are kept, "
            "phases still to come may be others.",
        )
        parser.add_argument(
            "--stand_ins",
            type=dict[str, dict[str, Any]] | None,
            default=None,
            help="For a backbone's name, the configuration of a model without weights to use in its place.",
        )

    @override
    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        self.config = parser.parse_args(args)

    @override
    def _parse_ckpt_path(self) -> None:
        # Lightning would let the hyper-parameters of a checkpoint beat the configuration and the command line.
        return

    @override
    def before_instantiate_classes(self) -> None:
        settings = self.config[self.subcommand]
        if not isinstance(settings.trainer, Namespace):
            raise ValueError(f"trainer must be settings by name, got {settings.trainer!r}")
        accumulate = settings.trainer.accumulate_grad_batches
        if accumulate < 1:
            raise ValueError(f"trainer.accumulate_grad_batches must be at least 1, got {accumulate}")
        check_devices(settings.trainer.accelerator, settings.trainer.devices)
        every = settings.validate_every
        if every is not None:
            if every < 1:
                raise ValueError(f"validate_every must be at least 1, got {every}")
            # Lightning counts micro-batches, within an epoch unless told otherwise.
            settings.trainer.val_check_interval = every * accumulate
            settings.trainer.check_val_every_n_epoch = None
        if settings.trainer.precision is None:
            settings.trainer.precision = automatic_precision(settings.trainer.accelerator)
            rank_zero_info(f"precision: {settings.trainer.precision}")
        use_stand_in(settings)
        self._use_fork()
        self.root = self._name_root()
        if self.subcommand != "fit":
            if settings.get("ckpt_path") == AUTO:
                settings.ckpt_path = None
            return
        self._make_root()
        self._claim_root()
        self._put_together()

    def _put_together(self) -> None:
        """Make a file of the pieces of a sharded run, where this one is not sharded."""
        settings = self.config["fit"]
        path = settings.get("ckpt_path")
        strategy = settings.trainer.strategy
        name = strategy if isinstance(strategy, str) else strategy.class_path
        if path is None or not is_sharded(Path(path)) or name == "fsdp2" or name.endswith(SHARDED):
            return
        # Cleared away with what a killed run leaves, once training has begun.
        whole = self.root / CHECKPOINTS / f".whole-{_rank()}.ckpt{PART}"
        whole.parent.mkdir(parents=True, exist_ok=True)
        consolidate(Path(path), whole)
        settings.ckpt_path = str(whole)

    def _make_root(self) -> None:
        # The folders that this command makes, innermost first.
        self.made = [folder for folder in [self.root, *self.root.parents] if not folder.exists()]
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            if _rank() == 0:
                self.lock = RunLock(self.root)
        except OSError as error:
            raise ValueError(
                f"trainer.default_root_dir must be a folder that can be made and written, got '{self.root}'"
            ) from error

    def _use_fork(self) -> None:
        settings = self.config[self.subcommand]
        fork, settings.fork = settings.fork, None
        if fork is None:
            return
        if settings.get("ckpt_path") not in (None, AUTO):
            raise ValueError(f"fork and ckpt_path exclude each other, got {fork!r} and {settings.ckpt_path!r}")
        check_named_checkpoint(fork, "fork")
        settings.ckpt_path = fork
        self.forked = True

    def remove_what_was_made(self) -> None:
        """Take away what a logger left in a folder of this very command; a folder with a run in it stays."""
        if not self.made or any((self.root / name).exists() for name in RUN_FILES if name != "logs"):
            return
        shutil.rmtree(self.root / "logs", ignore_errors=True)
        if self.lock is not None:
            self.lock.release()
        for folder in self.made:
            with suppress(OSError):  # Not empty, or never made.
                folder.rmdir()

    def _name_root(self) -> Path:
        settings = self.config[self.subcommand]
        root = settings.trainer.default_root_dir
        if root is None:
            given = settings.get("config") or []
            config = Path(str(given[0])) if given else Path("run")
            # A configuration that a run has saved stands for that run.
            root = Path("runs") / (config.resolve().parent.name if config.name == "config.yaml" else config.stem)
        return Path(root)

    def _claim_root(self) -> None:
        """Decide whether a run begins here, goes on, or is over."""
        settings = self.config[self.subcommand]
        taken = [name for name in RUN_FILES if (self.root / name).exists()]
        if settings.get("ckpt_path") == AUTO and not self.forked:
            settings.ckpt_path = str(path) if taken and (path := self._go_on()) else None
            RunFolder.found = True
            return
        if settings.get("ckpt_path") is not None and not self.forked:
            check_named_checkpoint(settings.ckpt_path, "ckpt_path")
            # A run that was cut off may go on in its folder; one that has ended is a result.
            taken = [name for name in taken if name == "summary.json"]
        if taken:
            raise ValueError(
                f"trainer.default_root_dir must be a folder without a run, got '{self.root}' (it holds {taken[0]}); "
                "choose another one or move it away"
            )

    def _go_on(self) -> Path | None:
        """The checkpoint that the run in this folder goes on from; None where it has none yet.

        Raises:
            ValueError: the folder holds another run.
            RunFinishedError: the run is over.
        """
        saved = self.root / "config.yaml"
        if not saved.is_file():
            raise ValueError(
                f"trainer.default_root_dir must be a folder without a run, or with this very one, got '{self.root}' "
                "(it has no config.yaml to tell); choose another one or move it away"
            )
        before = yaml.safe_load(saved.read_text(encoding="utf-8"))
        now = yaml.safe_load(self._parser("fit").dump(self.config["fit"], skip_unset=False))
        other = differences(before, now)
        if other:
            raise ValueError(
                f"trainer.default_root_dir must be a folder without a run, or with this very one: '{self.root}' has "
                f"{'; '.join(other)}; choose another one, or give this one's settings"
            )
        longer = before.get("schedule") != now.get("schedule") or before["trainer"] != now["trainer"]
        if (self.root / "summary.json").is_file():
            if before.get("schedule") != now.get("schedule"):
                raise ValueError(
                    f"trainer.default_root_dir must be a new folder for a schedule that a finished run did not have, "
                    f"got '{self.root}'; go on from one of its checkpoints with --fork"
                )
            raise RunFinishedError
        found = newest_checkpoint(self.root / CHECKPOINTS, rank_zero_info, with_ended=longer)
        if found is None:
            rank_zero_info(f"'{self.root}' holds no checkpoint to go on from yet: the run begins again")
            return None
        self.resumed_step = found.manifest.step
        rank_zero_info(f"going on from '{found.path}' (step {found.manifest.step})")
        return found.path

    @override
    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        settings = self._get(self.config_init, "trainer")
        kwargs["default_root_dir"] = str(self.root)
        if settings.get("logger") in (None, True):
            fit = self.subcommand == "fit"
            # What a run that was cut off logged beyond its checkpoint is logged again.
            again: dict[str, Any] = {} if self.resumed_step is None else {"purge_step": self.resumed_step}
            # The settings are logged with figures at the end; before that there are none.
            again["default_hp_metric"] = False
            kwargs["logger"] = TensorBoardLogger(str(self.root), name="logs", version="", **again) if fit else False
        schedule = self._get(self.config_init, "schedule")
        if schedule is not None:
            settings["callbacks"] = [*(settings.get("callbacks") or []), schedule]
        settings["callbacks"] = newest_alone(settings.get("callbacks") or [])
        return super().instantiate_trainer(**kwargs)


# A run has one of each of these; `callbacks+` with another one is how to set it otherwise than base.yaml does.
ALONE = (
    callbacks.ExactResume,
    callbacks.NumericsGuard,
    callbacks.RunSummary,
    callbacks.Throughput,
    callbacks.TrainingProgress,
)


def newest_alone(found: Sequence[Any]) -> list[Any]:
    """Callbacks without those that a later one of the same kind takes the place of, in their order.

    >>> first, second = callbacks.ExactResume(), callbacks.ExactResume(every_n_steps=5)
    >>> newest_alone([first, second]) == [second]
    True
    """
    last = {type(callback): callback for callback in found if type(callback) in ALONE}
    return [callback for callback in found if last.get(type(callback), callback) is callback]


class PreviewCLI(EncoderCLI):
    """Takes what ``fit`` takes, and prints what a run would read and predict; no folder is claimed or made."""

    @override
    def _make_root(self) -> None:
        """Make nothing."""

    @override
    def _claim_root(self) -> None:
        self.config[self.subcommand].ckpt_path = None

    @override
    def _run_subcommand(self, subcommand: str) -> None:
        trainer, module, data = self.trainer, self.model, self.datamodule
        if not isinstance(module, LitEncoder):
            raise TypeError(f"model must be a LitEncoder to be previewed, got {type(module).__name__}")
        trainer.strategy.connect(module)
        data.trainer = module.trainer = trainer
        # As fit would: a schedule in tokens asks for the size of its packs.
        trainer.datamodule = data  # type: ignore[attr-defined]
        data.prepare_data()
        data.setup("fit")
        slots_per_step = data.slots * trainer.accumulate_grad_batches * trainer.world_size
        steps = None if trainer.max_steps < 0 else trainer.max_steps
        schedule = find_schedule(trainer)
        if schedule is not None:
            schedule.setup(trainer, module, "fit")
            steps = schedule.total_steps
        print(preview(module, data, steps, slots_per_step))


class PlanCLI(PreviewCLI):
    """Takes what ``fit`` takes, and prints what a run would take and what would stop it; no text is read."""

    @override
    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        super().add_arguments_to_parser(parser)
        parser.add_argument(
            "--devices",
            type=int | None,
            default=None,
            help="Ranks to plan for; None takes trainer.devices x trainer.num_nodes, and 1 where these are no numbers.",
        )
        parser.add_argument(
            "--tokens-per-second",
            type=Tokens | None,
            default=None,
            help="Slots that all devices together train on in a second, for hours.",
        )

    @override
    def before_instantiate_classes(self) -> None:
        settings = self.config[self.subcommand]
        if settings.devices is not None and settings.devices < 1:
            raise ValueError(f"devices must be at least 1, got {settings.devices}")
        if settings.tokens_per_second is not None and settings.tokens_per_second <= 0:
            raise ValueError(f"tokens_per_second must be above 0, got {settings.tokens_per_second:g}")
        super().before_instantiate_classes()

    @override
    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        # One process, whatever the run is for and wherever this is asked: only its settings count here.
        alone: dict[str, Any] = {"accelerator": "cpu", "devices": 1, "num_nodes": 1, "strategy": "auto"}
        return super().instantiate_trainer(**kwargs, **alone, plugins=[LightningEnvironment()])

    @override
    def _run_subcommand(self, subcommand: str) -> None:
        from lit_encoders.performance.plan import describe, make_plan

        asked = self.config[subcommand]
        devices, num_nodes, strategy = (asked.trainer[key] for key in ("devices", "num_nodes", "strategy"))
        plan = make_plan(
            self.trainer,
            self.model,
            self.datamodule,
            ranks=asked.devices,
            devices=devices,
            num_nodes=num_nodes,
            strategy=strategy,
        )
        print(describe(plan, asked.tokens_per_second))
        if plan.problems:
            ways = "1 way" if len(plan.problems) == 1 else f"{len(plan.problems)} ways"
            raise UsageError(f"the run would go wrong in {ways} (listed above)")


def run_trainer(verb: str, arguments: list[str]) -> None:
    """Run one of Lightning's verbs, or show what ``fit`` would read or take.

    Args:
        verb: "fit", "validate", "test", "predict", "preview" or "plan".
        arguments: what the user typed after it.

    Raises:
        UsageError: a mistake that shows before training; the run folder is left as it was.
    """
    base = config_folder() / "base.yaml"
    if not base.is_file():
        raise FileNotFoundError(f"the packaged configuration is missing: {base}")
    from transformers.utils.logging import disable_progress_bar

    quieten()
    disable_progress_bar()
    for name in callbacks.__all__:
        getattr(callbacks, name)  # Known to the parser by their bare names, and listed in its help.
    RunFolder.started = RunFolder.found = False
    looks: dict[str, type[EncoderCLI]] = {"preview": PreviewCLI, "plan": PlanCLI}
    kind = looks.get(verb, EncoderCLI)
    cli = kind.__new__(kind)  # Its constructor runs the command, and has to be tidied up after where that fails.
    try:
        with in_one_line(started=lambda: RunFolder.started):
            cli.__init__(  # type: ignore[misc]
                LightningModule,
                TextDataModule,
                subclass_mode_model=True,
                save_config_callback=RunFolder,
                seed_everything_default=0,
                auto_configure_optimizers=False,
                args=["fit" if verb in looks else verb, *replace_lists(replace_names(arguments), base)],
                parser_kwargs={
                    "exit_on_error": False,
                    **{
                        name: {"default_config_files": [str(base)], "exit_on_error": False}
                        for name in kind.subcommands()
                    },
                },
            )
    except RunFinishedError:
        if _rank() == 0:
            print(f"The run in '{cli.root}' is over; this is its table.")
            print_stored_summary(cli.root, Console(width=None if sys.stdout.isatty() else 120))
    except BaseException:
        if not RunFolder.started:
            cli.remove_what_was_made()
        raise
    finally:
        if cli.lock is not None:
            cli.lock.release()
