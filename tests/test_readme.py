"""Every command, configuration and piece of Python that the README shows is run, on tiny models and texts."""

from __future__ import annotations

import json
import os
import random
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from lit_encoders.cli import main

pytestmark = pytest.mark.xdist_group("readme")

REPOSITORY = Path(__file__).parents[1]
README = (REPOSITORY / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
SMOKE = "--config smoke --trainer.default_root_dir="

# What is shown -> what is run. A smaller model has fewer layers, so that ranges differ; None names where it is run.
SHOWN: dict[str, str | None] = {
    "lit-encoders fit --config cli_configs/quickstart.yaml": None,  # tests/notebooks, and by hand: three minutes
    "lit-encoders fit": None,
    "lit-encoders fit --config my.yaml": "fit --config my.yaml",
    "lit-encoders fit --config C": None,  # for the fixture, as those of the family's section
    "lit-encoders preview --config C": "preview --config tiny.yaml",
    "lit-encoders plan --config C": "plan --config tiny.yaml --devices 1 --tokens-per-second 1000",
    "lit-encoders fit --config C --fork P": "fit --config tiny.yaml --schedule.decay_share=0.9 "
    "--fork runs/my/checkpoints/detour.ckpt --trainer.default_root_dir=runs/fork",
    "lit-encoders validate --config C --ckpt_path P": "validate --config tiny.yaml "
    "--ckpt_path runs/my/checkpoints/detour.ckpt",
    "lit-encoders export --checkpoint P --output FOLDER": "export --checkpoint runs/my/checkpoints/detour.ckpt "
    "--output models/exported",
    "lit-encoders layers MODEL": "layers base",
    "lit-encoders layers $base": "layers base",
    "lit-encoders revert --base B --tuned T --layers 9:28 --output FOLDER": "revert --base base --tuned runs/my/export "
    "--layers 1:2 --output models/reverted",
    "lit-encoders soup M1 M2 ... --output FOLDER": "soup runs/my/export base --output models/soup-two",
    "lit-encoders interpolate --base B --tuned T --alpha 0,.5,1 --output FOLDER": "interpolate --base base "
    "--tuned runs/my/export --alpha 0,.5,1 --output models/between",
    "lit-encoders transplant --from A --into B --layers 0:8 --output FOLDER": "transplant --from base "
    "--into runs/my/export --layers 0:2 --output models/transplanted",
    "lit-encoders prune --model M --text FILE --layers 6 --output FOLDER": "prune --model base --text text.txt "
    "--layers 2 --output models/pruned",
    "lit-encoders prune --model M --text corpus.txt --layers 6 --mlp 1024 --output O": "prune --model base "
    "--text text.txt --layers 2 --mlp 16 --output models/pruned-more",
    "lit-encoders drift BASE M1 [M2 ...]": "drift base runs/my/export",
    "lit-encoders alpha-sweep --base B --tuned T --layers 0:9,9:28 --val.NAME=FILE --output FOLDER": "alpha-sweep "
    "--base base --tuned runs/my/export --layers 0:1,1:3 --alpha 0,1 --packs 1 --val.text=text.txt "
    "--sequence_length 48 --slots 96 --output sweep-one",
    "lit-encoders evaluate --model M1 M2 --tasks T": None,  # the line below
    "lit-encoders evaluate --model answerdotai/ModernBERT-base runs/my/export --tasks tasks.yaml "
    "--output evaluation.json": "evaluate --model base runs/my/export --tasks tasks.yaml --seeds 0 "
    "--output evaluation.json",
    "lit-encoders evaluate --model runs/my --tasks tasks.yaml": "evaluate --model runs/my --tasks tasks.yaml --seeds 0",
    "lit-encoders benchmark --model M --suite mteb --tasks beir": None,  # tests/evaluation/test_benchmark_verb.py
    "lit-encoders benchmark": None,
    "lit-encoders cka A B --control C --text FILE --output FOLDER": "cka runs/my/export base --control base "
    "--text text.txt --texts 50 --sequence_length 48 --output cka",
    "lit-encoders cka A B --control C": None,  # the same
    "lit-encoders needle --model M --output FOLDER": None,  # tests/analysis/test_needle.py: it needs real sentences
    "lit-encoders report RUN1 RUN2 --output page.html": "report runs/my runs/c --output page.html",
    "lit-encoders study detour": None,  # tests/studies
    "lit-encoders study alignment": None,
    "lit-encoders study mask-ratio": None,
    "lit-encoders configs [NAME]": "configs clm_detour",
    "lit-encoders configs clm_detour > my.yaml": "configs clm_detour",
    "lit-encoders examples [NAME]": "examples",
    "lit-encoders examples": "examples",
    "lit-encoders examples NAME": "examples minilm",
    "lit-encoders fit --help": "fit --help",
    "lit-encoders fit --config dense_cpt": None,  # tests/cli/test_recipes.py, as every recipe
    "lit-encoders fit --config family_expert": None,
    "lit-encoders fit --config layer_freezing": None,
    "lit-encoders fit --config layer_range_l2sp": None,
    "lit-encoders revert --layers 9:28": None,  # short for a line above
    "lit-encoders soup": None,
    "lit-encoders export --head high": None,  # tests/weights/test_export.py
    "lit-encoders soup runs/{slavic,germanic,indic,austronesian,romance}/export --output models/soup": None,
    "lit-encoders revert --base $base --tuned runs/slavic/export --layers 9:28 "
    "--output models/slavic-reverted": "revert --base runs/indic/export --tuned runs/slavic/export --layers 9:28 "
    "--output models/slavic-reverted",
    "lit-encoders interpolate --base $base --tuned models/soup --alpha 0,.25,.5,.75,1 "
    "--output models/soup-on-the-way": "interpolate --base runs/indic/export --tuned models/soup "
    "--alpha 0,.25,.5,.75,1 --output models/soup-on-the-way",
    "lit-encoders drift $base runs/slavic/export runs/indic/export --layers 0:9,9:28,28:34 --output drift": "drift "
    "runs/indic/export runs/slavic/export models/soup --layers 0:9,9:28,28:34 --output drift",
    "lit-encoders alpha-sweep --base $base --tuned runs/slavic/export --layers 0:9,9:28,28:34 "
    "--val.slavic=text/slavic/held-out.jsonl.gz --val.unseen=text/unseen.jsonl.gz --output sweep": "alpha-sweep "
    "--base runs/indic/export --tuned runs/slavic/export --layers 0:9,9:28,28:34 --alpha 0,1 --packs 1 "
    "--sequence_length 32 --slots 32 --val.slavic=text.txt --val.unseen=text.txt --output sweep",
    "lit-encoders validate --config family_expert --model.backbone=models/soup "
    "--data.val.slavic=text/slavic/held-out.jsonl.gz --data.val.unseen=text/unseen.jsonl.gz": "validate "
    "--config family_expert --config smoke --model.backbone=models/soup --data.val.slavic=text.txt "
    "--data.val.unseen=text.txt --trainer.limit_val_batches=1",
}


def shown_commands() -> list[str]:
    """Commands of blocks, line by line, and those within sentences and tables; each once, in order."""
    found = []
    for language, block in BLOCKS:
        if language in ("", "bash"):
            lines = re.sub(r"\\\n\s*", "", block).splitlines()
            found += [line[line.index("lit-encoders ") :] for line in lines if "lit-encoders " in line]
    prose = re.sub(r"^```.*?^```", "", README, flags=re.MULTILINE | re.DOTALL)
    found += re.findall(r"`(lit-encoders [^`]*)`", prose)
    return list(dict.fromkeys(" ".join(command.split()) for command in found))


def block_with(text: str) -> str:
    """The one block of the README that holds a text."""
    (block,) = [block for _, block in BLOCKS if text in block]
    return block


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with a tiny model, texts and tasks, and the run of the README's own my.yaml in it."""
    folder = tmp_path_factory.mktemp("readme")
    before = os.getcwd()
    os.chdir(folder)
    try:
        make_world(folder)
        make_run()
        make_tasks()
        # Here, so that every test below stands by itself, in whatever order and process.
        run("fit --config my.yaml")
        run(f"fit --config family_expert {SMOKE}runs/slavic")
        run(f"fit --config layer_freezing {SMOKE}runs/indic")
        run("soup runs/slavic/export runs/indic/export --output models/soup")
        run("fit --config tiny.yaml --trainer.default_root_dir=runs/c")
        yield folder
    finally:
        os.chdir(before)


def make_world(folder: Path) -> None:
    from transformers import BertConfig, BertForMaskedLM

    words = [f"w{number}" for number in range(90)]
    draw = random.Random(0)

    def sentence() -> str:
        return " ".join(draw.choices(words, k=draw.randint(3, 20)))

    sizes: dict[str, Any] = {"hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 32}
    model = BertForMaskedLM(BertConfig(vocab_size=95, num_hidden_layers=4, pad_token_id=0, **sizes))
    model.save_pretrained("base")
    save_tokenizer(words, folder / "base")
    Path("corpus").mkdir()
    for path in ("text.txt", "corpus/a.txt", "held_out.txt", "news.txt", "code.txt"):
        Path(path).write_text("\n".join(sentence() for _ in range(250)) + "\n")
    write_lines("notes.jsonl", ({"text": sentence()} for _ in range(20)))
    for name, count in (("train", 40), ("test", 200)):
        items = [(sentence(), place % 2) for place in range(count)]
        write_lines(f"{name}.jsonl", ({"text": text, "label": label, "source": f"s{label}"} for text, label in items))
        tagged = [(text.split(), ["B-x" if len(word) == 2 else "O" for word in text.split()]) for text, _ in items]
        write_lines(f"tagged-{name}.jsonl", ({"tokens": tokens, "tags": tags} for tokens, tags in tagged))
    write_lines("labelled.jsonl", ({"text": sentence(), "label": place % 2} for place in range(60)))
    write_lines("pairs.jsonl", ({"query": sentence(), "document": sentence()} for _ in range(200)))


def write_lines(path: str, records: Any) -> None:
    Path(path).write_text("".join(json.dumps(record) + "\n" for record in records))


def save_tokenizer(words: list[str], folder: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    specials = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    vocabulary = {token: number for number, token in enumerate([*specials, *words])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    ends = [("[CLS]", 2), ("[SEP]", 3)]
    backend.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=ends)
    names = {f"{name}_token": f"[{name.upper()}]" for name in ("pad", "unk", "cls", "sep", "mask")}
    PreTrainedTokenizerFast(tokenizer_object=backend, **names).save_pretrained(folder)


def smaller(text: str) -> dict[str, Any]:
    """A configuration of the README at the size of a test: another model and fewer tokens, all else as shown."""
    settings: dict[str, Any] = yaml.safe_load(text)
    return settings


def write_yaml(path: str, settings: dict[str, Any]) -> None:
    Path(path).write_text(yaml.safe_dump(settings))


def run(command: str) -> None:
    assert main(shlex.split(command)) == 0, command


def make_run() -> None:
    """The README's own run: my.yaml with its callbacks; and tiny.yaml, the same without them."""
    settings = smaller(block_with("# my.yaml"))
    model, data = settings["model"]["init_args"], settings["data"]
    assert {"backbone", "learning_rate"} == set(model)
    model["backbone"] = "base"
    data |= {"train": ["corpus/*.txt", "notes.jsonl"], "sequence_length": 48, "slots": 96}
    settings["schedule"]["init_args"]["tokens"] = 2000
    settings["trainer"]["accumulate_grad_batches"] = 2
    callbacks = smaller(block_with("lit_encoders.callbacks.DownstreamProbe"))["trainer"]["callbacks+"]
    by_name = {entry["class_path"].rpartition(".")[2]: entry for entry in callbacks}
    # Four layers in place of twenty-two; milestones within 2,000 tokens.
    by_name["HFExport"]["init_args"]["at_tokens"] = [200, 400]
    by_name["LayerFreezing"]["init_args"]["layers"] = "0:1"
    by_name["L2SP"]["init_args"]["strength"] = {"1:3": 0.05, "rest": 0.001}
    by_name["WeightReversion"]["init_args"]["layers"] = "1:3"
    by_name["RepresentationCKA"]["init_args"] |= {"every_n_steps": 5, "sequence_length": 48}
    by_name["DownstreamProbe"]["init_args"]["every_n_steps"] = 5
    settings["trainer"]["callbacks+"] = callbacks
    write_yaml("my.yaml", settings)
    plain = {**settings, "trainer": {"accumulate_grad_batches": 2}}
    write_yaml("tiny.yaml", plain)


def make_tasks() -> None:
    """The README's own tasks.yaml, at the size of a test."""
    tasks = smaller(block_with("# tasks.yaml"))
    assert {settings.get("kind", "preset") for settings in tasks.values()} == {
        *("classification", "tagging", "retrieval", "perplexity", "preset")
    }
    for settings in tasks.values():
        if settings.get("kind") in ("classification", "tagging", "retrieval"):
            settings["fine_tuning"] = {**settings.get("fine_tuning", {}), "epochs": 1, "sequence_length": 32}
        elif settings.get("kind") == "perplexity":
            settings |= {"sequence_length": 32, "documents": 200}
    # The preset reads real text, of which this vocabulary knows no word.
    assert tasks.pop("phenotypes") == {"preset": "hpo_branches", "limit": 2000}
    write_yaml("tasks.yaml", tasks)


def test_the_configuration_of_a_run(world: Path) -> None:
    made = {path.name for path in Path("runs/my").iterdir()}
    assert {"config.yaml", "logs", "checkpoints", "export", "summary.json", "export-reverted", "drift.csv"} <= made
    assert {"cka.csv", "probe-probe.csv"} <= made
    assert {"detour", "tokens-200", "tokens-400"} <= {path.name for path in Path("runs/my/export").iterdir()}


def test_the_configuration_of_a_mixture(world: Path) -> None:
    settings = smaller(block_with("weights: {wiki: 0.7, code: 0.3}"))["data"]
    write_lines("wiki.jsonl", [{"text": line} for line in Path("corpus/a.txt").read_text().splitlines()])
    settings["train"] = {"wiki": "wiki.jsonl", "code": "code.txt"}
    settings["val"] = {"wiki": "news.txt", "code": "code.txt"}
    whole = {**yaml.safe_load(Path("tiny.yaml").read_text())}
    whole["data"] = {**settings, "sequence_length": 48, "slots": 96}
    write_yaml("mixture.yaml", whole)
    run("fit --config mixture.yaml")
    records = json.loads(Path("runs/mixture/summary.json").read_text())
    assert {"wiki", "code"} <= set(records["epochs"])


def test_the_configuration_of_streams(world: Path) -> None:
    settings = smaller(block_with("teacher: models/teacher"))
    init = settings["model"]["init_args"]
    init |= {"backbone": "base", "teacher": "base"}
    whole = yaml.safe_load(Path("tiny.yaml").read_text())
    whole["model"] = settings["model"]
    whole["schedule"]["init_args"]["decay_mask_ratio"] = None
    write_yaml("streams.yaml", whole)
    run("fit --config streams.yaml")
    assert Path("runs/streams/export/config.json").is_file()


@pytest.mark.parametrize("command", SHOWN)
def test_commands(world: Path, command: str) -> None:
    given = SHOWN[command]
    if given == "fit --help":
        with pytest.raises(SystemExit) as stopped:
            main(["fit", "--help"])
        assert stopped.value.code == 0
    elif given is not None and not command.endswith("--config my.yaml"):
        run(given)


def test_every_command_has_its_line_here() -> None:
    assert set(shown_commands()) == set(SHOWN)


def test_on_several_processes(world: Path) -> None:
    """The line of the array script, on two processes in place of four GPUs."""
    (block,) = [block for _, block in BLOCKS if "torchrun" in block]
    line = re.sub(r"\\\n\s*", "", block[block.index("torchrun") :]).strip()
    for shown, small in (
        ("--nproc-per-node=4 -m", "--nproc-per-node=2 -m"),
        ("--config family_expert", "--config family_expert --config smoke --trainer.accelerator=cpu"),
        ("text/$family/train/*.jsonl.gz", "text.txt"),
        ("text/$family/held-out.jsonl.gz", "held_out.txt"),
        ("runs/$family", "runs/sharded"),
        ("--trainer.accumulate_grad_batches=9", "--trainer.accumulate_grad_batches=1"),
        ("--trainer.devices=4", "--trainer.devices=2"),
    ):
        assert shown in line
        line = line.replace(shown, small)
    words = shlex.split(line)
    assert words[0] == "torchrun"
    command = [sys.executable, "-m", "torch.distributed.run", *words[1:]]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert Path("runs/sharded/export/config.json").is_file()


def test_python(world: Path) -> None:
    code = block_with("from lightning.pytorch import Trainer")
    for shown, small in (
        ("path/to/encoder", "base"),
        ('"corpus.txt"', '"text.txt"'),
        ("sequence_length=512, slots=4096", "sequence_length=48, slots=96"),
        ("steps=1000", "steps=2"),
        ("max_epochs=-1", 'max_epochs=-1, default_root_dir="runs/python", logger=False'),
    ):
        assert shown in code
        code = code.replace(shown, small)
    exec(compile(code, "README.md", "exec"), {})
    assert Path("runs/python/export/config.json").is_file()


def test_the_index_names_files_that_exist() -> None:
    named = re.findall(r"`((?:lit_encoders|callbacks|tests|notebooks|cli_configs)/[\w/.]*)`", README)
    assert len(named) > 60
    for name in named:
        assert (REPOSITORY / name).exists(), name


def test_links_within_lead_somewhere() -> None:
    heads = {
        re.sub(r"[^\w\- ]", "", line.lstrip("# ").lower()).replace(" ", "-")
        for line in README.splitlines()
        if line.startswith("#")
    }
    for target in re.findall(r"\]\(#([^)]*)\)", README):
        assert target in heads, target
