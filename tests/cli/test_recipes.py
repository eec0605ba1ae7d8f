"""Shipped configurations: each is listed, printed whole, run with the smoke overlay, and changed by flags."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from lightning.pytorch import LightningModule

from lit_encoders.callbacks import L2SP, Phase
from lit_encoders.callbacks.objective_schedule import resolve_phases
from lit_encoders.data.examples import find_example
from lit_encoders.models.backbone import load_config
from lit_encoders.models.skeleton import skeleton
from lit_encoders.recipes import config_folder, lay_over, read_config, render, shipped

Run = Callable[..., tuple[int, str, str]]
Resolve = Callable[..., dict[str, Any]]

RECIPES = sorted(shipped("recipes"))
MODELS = sorted(shipped("models"))
# The recipes at a paper's size.
FULL_SIZE = [name for name in RECIPES if name != "quickstart"]
# What an overlay must keep: each model's type and depth, and each recipe's phases.
ARCHITECTURES = {
    "modernbert_base": ("modernbert", 22),
    "modernbert_large": ("modernbert", 28),
    "moderncamembert_base": ("modernbert", 22),
    "minilm": ("bert", 6),
    "gemma3_4b": ("gemma3_text", 34),
    "smollm2_135m": ("llama", 30),
}
RUNS = {
    "quickstart": ("minilm", ["head_warmup", "detour", "decay"]),
    "clm_detour": ("modernbert_base", ["detour", "decay"]),
    "mlm_twin": ("modernbert_base", ["twin", "decay"]),
    "mlm": ("modernbert_base", ["stable", "decay"]),
    "clm": ("smollm2_135m", ["stable", "decay"]),
    "family_expert": ("gemma3_4b", ["clm"]),
    "dense_cpt": ("gemma3_4b", ["clm"]),
    "layer_freezing": ("gemma3_4b", ["clm"]),
    "layer_range_l2sp": ("gemma3_4b", ["clm"]),
    "freeze_low_in_detour": ("modernbert_base", ["detour", "decay"]),
    "freeze_mid_in_detour": ("modernbert_base", ["detour", "decay"]),
    "freeze_low_in_decay": ("modernbert_base", ["detour", "decay"]),
    "mixed_shared_head": ("modernbert_base", ["stable", "decay"]),
    "single_ratio": ("modernbert_base", ["stable", "decay"]),
    "ultrabert_150m": ("", ["stable", "decay"]),
    "ultrabert_380m": ("", ["stable", "decay"]),
}
# Recipes that are another one with a callback more: which one, and the callback with what it is told.
INTERVENTIONS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "layer_freezing": ("family_expert", "LayerFreezing", {"layers": "9:28"}),
    "layer_range_l2sp": ("family_expert", "L2SP", {"strength": {"9:28": 0.05, "rest": 0.001}}),
    "freeze_low_in_detour": ("clm_detour", "LayerFreezing", {"layers": "0:8", "phases": ["detour"]}),
    "freeze_mid_in_detour": ("clm_detour", "LayerFreezing", {"layers": "8:15", "phases": ["detour"]}),
    "freeze_low_in_decay": ("clm_detour", "LayerFreezing", {"layers": "0:8", "phases": ["decay"]}),
}
# Of recipes that freeze: the frozen layers, and the steps of a smoke run in which they are; it has 4, and 1 of decay.
FROZEN = {
    "layer_freezing": (range(9, 28), {1, 2, 3, 4}),
    "freeze_low_in_detour": (range(8), {1, 2, 3, 4}),
    "freeze_mid_in_detour": (range(8, 15), {1, 2, 3, 4}),
    "freeze_low_in_decay": (range(8), {5}),
}
# The flag that sets the mask ratio that a recipe trains with; CLM has none, and validates with the module's.
MASK_RATIO = {
    "quickstart": "schedule.decay_mask_ratio",
    "clm_detour": "schedule.decay_mask_ratio",
    "mlm_twin": "schedule.detour_mask_ratio",
    "mlm": "model.mask_ratio",
    "clm": "model.val_mask_ratio",
    "family_expert": "model.val_mask_ratio",
    "dense_cpt": "model.val_mask_ratio",
    "single_ratio": "model.mask_ratio",
}
PLAIN = list(MASK_RATIO)


def demo_is_installed() -> bool:
    try:
        return all(find_example(name)[1].exists() for name in ("minilm", "hpo"))
    except ValueError:
        return False


demo = pytest.mark.skipif(not demo_is_installed(), reason="needs the demo extra: pip install -e '.[demo]'")


@pytest.fixture
def resolve(run: Run, capsys: pytest.CaptureFixture[str]) -> Resolve:
    """The configuration that a command would run with."""

    def settings(*arguments: object) -> dict[str, Any]:
        capsys.readouterr()
        with pytest.raises(SystemExit) as stop:
            run("fit", *arguments, "--print_config")
        assert stop.value.code == 0
        return yaml.safe_load(capsys.readouterr().out)  # type: ignore[no-any-return]

    return settings


def merged(below: Any, above: Any) -> Any:
    """What the command line makes of two files."""
    if not (isinstance(below, dict) and isinstance(above, dict)):
        return above
    result = dict(below)
    for key, value in above.items():
        name = key.removesuffix("+")
        result[name] = below[name] + value if key != name else merged(below.get(key), value)
    return result


def leaves(settings: Any, *path: str) -> dict[tuple[str, ...], Any]:
    if not isinstance(settings, dict):
        return {path: settings}
    return {leaf: value for key, below in settings.items() for leaf, value in leaves(below, *path, key).items()}


def load(path: Path) -> Any:
    return yaml.safe_load(path.read_text())


# ---- listing and printing --------------------------------------------------------------------------------------------


def test_the_list_has_every_file_with_its_first_line(run: Run) -> None:
    code, out, _ = run("configs")
    assert code == 0
    paths = {path for path in config_folder().rglob("*.yaml") if path.stem != "base"}
    assert {path.stem for path in paths} == set(shipped())
    assert len(paths) == len(shipped()), "names are unique over all kinds"
    for path in paths:
        line = path.read_text().splitlines()[0]
        assert line.startswith("# ")
        assert re.search(rf"^  {path.stem} +{re.escape(line[2:])}$", out, re.MULTILINE), path


@pytest.mark.parametrize("name", sorted(shipped()))
def test_a_printed_configuration_says_what_the_files_say(run: Run, name: str) -> None:
    code, out, _ = run("configs", name)
    assert code == 0
    expected = load(shipped()[name])
    if name in RECIPES:
        expected = merged(load(config_folder() / "base.yaml"), expected)
        # Each number keeps the source that stands beside it.
        assert set(re.findall(r"#.*", shipped()[name].read_text())) <= set(re.findall(r"#.*", out))
    assert yaml.safe_load(out) == expected


def test_a_list_is_replaced_or_appended_to(tmp_path: Path) -> None:
    below, above = tmp_path / "below.yaml", tmp_path / "above.yaml"
    below.write_text("a:\n  b:\n    - 1 # one\n  c: {d: 2}\nk: 0\n")
    above.write_text("# The upper.\na:\n  # Three.\n  b+:\n    - 3\n  c: {e: 4}\n")
    opening, entries = read_config(above)
    assert opening == ["# The upper."]
    both = render(lay_over(read_config(below)[1], entries))
    assert both == "a:\n  b:\n    - 1 # one\n    # Three.\n    - 3\n  c: {e: 4}\nk: 0"
    assert yaml.safe_load(both) == {"a": {"b": [1, 3], "c": {"e": 4}}, "k": 0}


@pytest.mark.parametrize("name", FULL_SIZE)
def test_a_recipe_states_only_what_differs(name: str) -> None:
    base, recipe = leaves(load(config_folder() / "base.yaml")), leaves(load(shipped()[name]))
    assert not {path for path in recipe if path in base and base[path] == recipe[path]}


@pytest.mark.parametrize("name", RECIPES)
def test_the_printed_recipe_resolves_to_the_same_from_any_folder(
    run: Run, resolve: Resolve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    expected = resolve("--config", name)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    Path("my.yaml").write_text(run("configs", name)[1])
    assert resolve("--config", "my.yaml") == expected


# ---- the paper's settings --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FULL_SIZE)
def test_what_all_recipes_share(resolve: Resolve, name: str) -> None:
    settings = resolve("--config", name)
    assert settings["trainer"]["precision"] == "bf16-mixed"
    assert settings["trainer"]["accelerator"] == "auto"
    assert settings["trainer"]["gradient_clip_val"] == 1.0
    assert settings["model"]["init_args"]["attention"] == "auto"
    num_callbacks = len(load(config_folder() / "base.yaml")["trainer"]["callbacks"]) + (name in INTERVENTIONS)
    assert len(settings["trainer"]["callbacks"]) == num_callbacks
    tokens = 294_912 if RUNS[name][0] == "gemma3_4b" else 384 * 8192
    assert settings["data"]["slots"] * settings["trainer"]["accumulate_grad_batches"] == tokens


@pytest.mark.parametrize("name", INTERVENTIONS)
def test_an_intervention_is_a_plain_recipe_and_one_callback(resolve: Resolve, name: str) -> None:
    below, callback, told = INTERVENTIONS[name]
    settings, plain = resolve("--config", name), resolve("--config", below)
    last = settings["trainer"]["callbacks"].pop()
    assert settings == plain
    assert last["class_path"] == f"lit_encoders.callbacks.{callback}"
    assert {key: last["init_args"][key] for key in told} == told
    opening = shipped()[name].read_text().partition("model:")[0]
    assert f"{below}" in opening, "the file says what it is built on"


def test_dense_and_expert_differ_in_budget_peak_and_warmup(resolve: Resolve) -> None:
    expert, dense = (leaves(resolve("--config", name)) for name in ("family_expert", "dense_cpt"))
    differing = {path for path in dense if dense[path] != expert[path]}
    assert {path[-1] for path in differing} == {"learning_rate", "tokens", "phases"}
    assert (expert["model", "init_args", "learning_rate"], dense["model", "init_args", "learning_rate"]) == (2e-5, 5e-5)


@pytest.mark.parametrize(
    ("name", "steps", "warmup_steps"), [("family_expert", 16_955, 200), ("dense_cpt", 84_772, 500)]
)
def test_a_decoders_run_in_optimizer_steps(resolve: Resolve, name: str, steps: int, warmup_steps: int) -> None:
    """The paper has 16,954 for an expert: the rest of the 5B tokens, a quarter of a step, gets a step too."""
    schedule = resolve("--config", name)["schedule"]["init_args"]
    (phase,) = resolve_phases(
        [Phase(**phase) for phase in schedule["phases"]], tokens=float(schedule["tokens"]), slots_per_step=294_912
    )
    assert (phase.steps, phase.warmup_steps) == (steps, warmup_steps)
    assert phase.factor(warmup_steps) == 1.0
    assert phase.factor(steps - 1) < 1e-8


def test_the_twin_differs_from_the_detour_in_the_objective_alone(resolve: Resolve) -> None:
    detour, twin = (leaves(resolve("--config", name)) for name in ("clm_detour", "mlm_twin"))
    assert {path[-1]: twin[path] for path in twin if twin[path] != detour[path]} == {"detour": "mlm"}
    assert twin["schedule", "init_args", "detour_mask_ratio"] == 0.3


# ---- running ---------------------------------------------------------------------------------------------------------


WATCHED = """
trainer:
  callbacks+:
    - class_path: lit_encoders.callbacks.WeightDrift
      init_args: {every_n_steps: 1}
"""


def moves(path: Path) -> dict[int, set[str]]:
    """Which layers and named parts moved in each step, from the distances in ``drift.csv``."""
    with path.open(encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row["measure"] == "relative_l2"]
    apart = {(int(row["step"]), row["range"]): row["value"] for row in rows}
    return {
        step: {label for at, label in apart if at == step and apart[step, label] != apart.get((step - 1, label), "0.0")}
        for step, _ in apart
    }


@demo
@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_runs_under_the_smoke_overlay(run: Run, name: str) -> None:
    Path("watched.yaml").write_text(WATCHED)
    watched = ["--config", "watched.yaml"] if name in INTERVENTIONS else []
    code, out, err = run("fit", "--config", name, "--config", "smoke", *watched)
    assert code == 0, err
    assert [path.name for path in Path("runs").iterdir()] == [name], "an overlay does not name the run"
    root, (card, phases) = Path("runs") / name, RUNS[name]
    model = load(root / "config.yaml")["model"]
    backbone = model["init_args"]["backbone"]
    if card:  # Students are made with `prune`, and have none.
        assert (backbone["model_type"], backbone["num_hidden_layers"]) == ARCHITECTURES[card]
        assert model["class_path"] == load(shipped()[card])["class_path"]
    assert [phase["name"] for phase in json.loads((root / "summary.json").read_text())["phases"]] == phases
    assert json.loads((root / "export" / "config.json").read_text())["model_type"] == backbone["model_type"]
    assert "Load:" in out
    if name in INTERVENTIONS:
        layers, steps = FROZEN.get(name, (range(0), set()))
        frozen = {f"{number}:{number + 1}" for number in layers}
        for step, moved in moves(root / "drift.csv").items():
            everything = {*(f"{number}:{number + 1}" for number in range(backbone["num_hidden_layers"])), "embeddings"}
            if step > 1:  # In a warm-up, the first step has a learning rate of 0.
                assert moved >= everything - (frozen if step in steps else set())
            assert not moved & (frozen if step in steps else set())


@pytest.mark.parametrize(
    ("name", "millions", "sizes"),
    [
        ("ultrabert_150m", 150, {"hidden_size": 768, "num_hidden_layers": 22, "intermediate_size": 960, "heads": 6}),
        ("ultrabert_380m", 380, {"hidden_size": 1024, "num_hidden_layers": 24, "intermediate_size": 2880, "heads": 8}),
    ],
)
def test_the_students_sizes_are_within_five_percent_of_their_names(
    name: str, millions: int, sizes: dict[str, int]
) -> None:
    """As the recipe says that `prune` makes them, with 32,000 tokens."""
    text = shipped()[name].read_text()
    flags = {"hidden_size": "hidden", "num_hidden_layers": "layers", "intermediate_size": "mlp", "heads": "heads"}
    assert all(f"--{flags[key]} {value}" in text for key, value in sizes.items())
    heads = sizes.pop("heads")
    both = {"num_attention_heads": heads, "num_key_value_heads": heads, "head_dim": 128}
    model = skeleton(load_config({"model_type": "ultrabert", "vocab_size": 32_000, **sizes, **both}))
    assert sum(parameter.numel() for parameter in model.parameters()) == pytest.approx(millions * 1e6, rel=0.05)


def test_layer_range_l2sp_anchors_every_weight_once(resolve: Resolve) -> None:
    """The embeddings, to which the decoder is tied, and the final norm as the first layers: with the rest."""
    settings = resolve("--config", "layer_range_l2sp", "--config", "smoke")
    stand_in = settings["stand_ins"][settings["model"]["init_args"]["backbone"]]
    del stand_in["tokenizer"]
    module = LightningModule()
    module.model = skeleton(load_config(stand_in))
    callback = L2SP(**settings["trainer"]["callbacks"][-1]["init_args"])
    chosen = callback.choose(SimpleNamespace(callbacks=[callback]), module)  # type: ignore[arg-type]
    assert set(chosen) == {name for name, _ in module.named_parameters()}
    middle = re.compile(r"\.layers\.(9|1\d|2[0-7])\.")
    assert set(callback.ranges["9:28"]) == {name for name in chosen if middle.search(name)}
    assert set(callback.ranges["rest"]) == {name for name in chosen if not middle.search(name)}
    assert any("norm" in name for name in callback.ranges["9:28"])
    assert {"model.model.embed_tokens.weight", "model.model.norm.weight"} <= set(callback.ranges["rest"])


@demo
@pytest.mark.parametrize("name", PLAIN)
def test_flags_set_budget_learning_rate_mask_ratio_and_model(run: Run, name: str) -> None:
    flags = ["--schedule.tokens=1.4K", "--model.learning_rate=3e-3", f"--{MASK_RATIO[name]}=0.25", "--model=minilm"]
    if name == "quickstart":
        flags.append("--schedule.head_warmup_steps=1")
    code, _, err = run("fit", "--config", name, "--config", "smoke", *flags)
    assert code == 0, err
    settings = load(Path("runs", name, "config.yaml"))
    assert settings["model"]["init_args"]["learning_rate"] == 3e-3
    section, key = MASK_RATIO[name].split(".")
    assert settings[section]["init_args"][key] == 0.25
    assert settings["model"]["init_args"]["backbone"]["model_type"] == "bert"
    phases = json.loads(Path("runs", name, "summary.json").read_text())["phases"]
    assert next(phase["steps"] for phase in phases if phase["name"] != "head_warmup") == 6  # 1,400 tokens of 256 slots


@demo
def test_the_printed_recipe_runs_in_another_folder(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flags = ["--config", "smoke", "--model=minilm"]
    assert run("fit", "--config", "clm_detour", *flags)[0] == 0
    first = Path("runs/clm_detour").absolute()
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    Path("my.yaml").write_text(run("configs", "clm_detour")[1])
    assert run("fit", "--config", "my.yaml", *flags)[0] == 0
    second = Path("runs/my")
    for file in ("config.yaml", "export/model.safetensors"):
        assert (first / file).read_bytes() == (second / file).read_bytes()


@demo
def test_a_decoder_takes_the_place_of_another(run: Run) -> None:
    """Of 30 layers, not 34: the recipe's range still lies within it."""
    code, _, err = run("fit", "--config", "layer_freezing", "--config", "smoke", "--model", "smollm2_135m")
    assert code == 0, err
    assert load(Path("runs/layer_freezing/config.yaml"))["model"]["init_args"]["backbone"]["model_type"] == "llama"


# ---- models ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
def test_every_model_has_a_stand_in_of_its_type_and_depth(name: str) -> None:
    stand_in = load(shipped()["smoke"])["stand_ins"][load(shipped()[name])["init_args"]["backbone"]]
    tokenizer = stand_in.pop("tokenizer")
    assert tokenizer == "example:minilm"
    config = load_config(stand_in)
    assert (config.model_type, config.num_hidden_layers) == ARCHITECTURES[name]
    assert config.hidden_size <= 32


@pytest.mark.parametrize("name", [name for name in FULL_SIZE if RUNS[name][0]])
def test_a_recipe_and_its_card_name_the_same_model(name: str) -> None:
    recipe, card = load(shipped()[name])["model"], load(shipped()[RUNS[name][0]])
    assert recipe["class_path"] == card["class_path"]
    assert recipe["init_args"]["backbone"] == card["init_args"]["backbone"]


@pytest.mark.parametrize("name", MODELS)
def test_a_card_replaces_the_model_and_nothing_else(resolve: Resolve, name: str) -> None:
    card = load(shipped()[name])
    before, after = (leaves(resolve("--config", "clm_detour", *flags)) for flags in ([], ["--model", name]))
    changed = {path[-1]: value for path, value in after.items() if value != before[path]}
    assert changed.items() <= {"backbone": card["init_args"]["backbone"], "class_path": card["class_path"]}.items()
    assert after["model", "init_args", "backbone"] == card["init_args"]["backbone"]


def test_a_recipe_of_ones_own_takes_a_card_by_its_path(resolve: Resolve) -> None:
    Path("cards").mkdir()
    Path("cards/mine.yaml").write_text(shipped()["modernbert_large"].read_text())
    Path("my.yaml").write_text("model: cards/mine.yaml\ndata:\n  train: example:hpo\n")
    assert resolve("--config", "my.yaml")["model"]["init_args"]["backbone"] == "answerdotai/ModernBERT-large"


def test_a_file_of_ones_own_wins_over_a_shipped_name(resolve: Resolve) -> None:
    Path("clm_detour").write_text(shipped()["clm"].read_text())
    assert resolve("--config", "clm_detour")["model"]["class_path"] == "lit_encoders.LitCLM"
    Path("clm_detour").unlink()
    Path("clm_detour").mkdir()
    assert resolve("--config", "clm_detour")["model"]["class_path"] == "lit_encoders.LitMLM"


# ---- mistakes --------------------------------------------------------------------------------------------------------

QUOTE = "must be text in quotes (YAML reads an unquoted 9:28 as the number 568), got 568"
TOKENS = "must be a number of tokens such as 10e9 or 10B, got 'many'"
MISTAKES: dict[str, tuple[list[str], str]] = {
    "unknown recipe": (
        ["--config=clm_detuor"],
        "config must be a file that exists or one of {recipes}, got 'clm_detuor'; clm_detour?",
    ),
    "nothing near": (["--config", "qqq"], "config must be a file that exists or one of {recipes}, got 'qqq'"),
    "a model is no recipe": (["--config", "minilm"], "got 'minilm'; mlm?"),
    "an overlay first": (
        ["--config=smoke", "--config=clm"],
        "config must name a recipe before what is laid over it, got 'smoke' first",
    ),
    "unknown model": (["--config=clm", "--model=gema3_4b"], "or one of {models}, got 'gema3_4b'; gemma3_4b?"),
    "option of another class": (
        ["--config=mlm", "--schedule.decay_share=0.2"],
        "schedule.decay_share is no option of ObjectiveSchedule",
    ),
    "phases of a preset": (
        ["--config=clm_detour", "--schedule.phases=[]"],
        "schedule.phases is no option of CLMDetour",
    ),
    "misspelt option": (["--config=clm", "--model.mask_ration=0.2"], "model.mask_ration is no option of LitCLM"),
    "budget": (["--config=clm_detour", "--schedule.tokens=many"], f"schedule.tokens {TOKENS}"),
    "budget of a phase": (["--config=mlm", "--config={files}/phase.yaml"], f"schedule.phases.tokens {TOKENS}"),
    "budget of 0": (
        ["--config=clm_detour", "--config=smoke", "--schedule.tokens=0"],
        "schedule.tokens must be above 0, got 0.0",
    ),
    "milestone": (["--config=clm", "--config={files}/milestone.yaml"], f"trainer.callbacks.at_tokens {TOKENS}"),
    "unquoted range": (["--config=clm", "--config={files}/range.yaml"], f"trainer.callbacks.layers {QUOTE}"),
    "unquoted range in a list": (["--config=clm", "--config={files}/ranges.yaml"], f"trainer.callbacks.layers {QUOTE}"),
    "mask ratio": (
        ["--config=mlm_twin", "--config=smoke", "--schedule.detour_mask_ratio=30"],
        "mask_ratio must be in (0, 1], got 30.0",
    ),
    "positions": (
        ["--config=clm_detour", "--config=smoke", "--model=minilm", "--data.sequence_length=600", "--data.slots=600"],
        "at most the model's 512 positions, got 600",
    ),
}


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """Overlays that something is wrong with."""

    def callback(name: str, argument: str) -> str:
        item = f"class_path: lit_encoders.callbacks.{name}\n      init_args: {{{argument}}}"
        return f"trainer:\n  callbacks+:\n    - {item}\n"

    (tmp_path / "range.yaml").write_text(callback("LayerFreezing", "layers: 9:28"))
    (tmp_path / "ranges.yaml").write_text(callback("LayerFreezing", "layers: [9:28, embeddings]"))
    (tmp_path / "milestone.yaml").write_text(callback("HFExport", "at_tokens: [1B, many]"))
    phases = "phases: [{name: a, objective: mlm, tokens: many}]"
    (tmp_path / "phase.yaml").write_text(f"schedule:\n  init_args:\n    {phases}\n")
    return tmp_path


@demo
@pytest.mark.parametrize("case", MISTAKES)
def test_a_mistake_is_one_line_and_leaves_nothing(run: Run, files: Path, case: str) -> None:
    flags, message = MISTAKES[case]
    names = {"recipes": ", ".join(shipped("recipes", "overlays")), "models": ", ".join(shipped("models"))}
    code, out, err = run("fit", *(flag.format(files=files) for flag in flags))
    lines = [line for line in err.splitlines() if line.startswith("lit-encoders: error: ")]
    assert code == 2
    assert lines == err.splitlines()[-1:]
    assert lines[0].endswith(message.format(**names))
    assert "Traceback" not in out + err
    assert not Path("runs").exists()


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["clm_detuor"], "lit-encoders: error: NAME must be one of {all}, got 'clm_detuor'; clm_detour?\n"),
        (["clm", "mlm"], "lit-encoders: error: NAME must be one name, got clm mlm\n"),
    ],
)
def test_names_that_cannot_be_printed(run: Run, names: list[str], message: str) -> None:
    assert run("configs", *names) == (2, "", message.format(all=", ".join(shipped())))
