"""``lit-encoders evaluate`` as a user types it: every kind of task, milestones of a run, mistakes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

# Imported here, so that its log handler writes to the session's standard error and not to that of the first test.
import lightning.pytorch  # noqa: F401
import pytest
import yaml

from lit_encoders.cli import main
from lit_encoders.evaluation import tasks as kinds
from lit_encoders.evaluation.verb import read_tasks

Draw = Callable[[int, int], list[dict[str, Any]]]
Run = Callable[..., tuple[int, str, str]]
QUICK = {"epochs": 1, "batch": 16, "learning_rate": 1e-3, "sequence_length": 32}


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Run the verb; give exit code, standard output and standard error."""

    def command(*arguments: object) -> tuple[int, str, str]:
        capsys.readouterr()
        code = main(["evaluate", *(str(argument) for argument in arguments)])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return command


@pytest.fixture
def files(
    tmp_path: Path, write: Any, labelled_records: Draw, tagged_records: Draw, pair_records: Draw
) -> dict[str, str]:
    """Settings of files for each kind of task, 200 test items each."""
    (tmp_path / "held_out.txt").write_text("".join(record["text"] + "\n" for record in labelled_records(200, 5)))
    found = {"text": str(tmp_path / "held_out.txt")}
    for name, draw in (("labelled", labelled_records), ("tagged", tagged_records), ("pairs", pair_records)):
        found[f"{name}-train"] = write(f"{name}-train.jsonl", draw(32, 0))
        found[f"{name}-test"] = write(f"{name}-test.jsonl", draw(200, 1))
    return found


def task_file(path: Path, tasks: Any) -> Path:
    path.write_text(tasks if isinstance(tasks, str) else yaml.safe_dump(tasks, sort_keys=False))
    return path


def test_every_kind_runs_and_is_compared_item_by_item(
    run: Run, files: dict[str, str], tmp_path: Path, bert_folder: Path, other_bert: Path
) -> None:
    sides = {
        name: {side: files[f"{name}-{side}"] for side in ("train", "test")} for name in ("labelled", "tagged", "pairs")
    }
    given = {
        "held-out": {"kind": "perplexity", "text": {"one": files["text"]}, "sequence_length": 64, "documents": 200},
        "topics": {"kind": "classification", **sides["labelled"], "group": "part", "fine_tuning": QUICK},
        "spans": {"kind": "tagging", **sides["tagged"], "fine_tuning": QUICK, "limit": 16},
        "found": {"kind": "retrieval", "test": sides["pairs"]["test"], "drop_self_matches": True},
        "tuned": {"kind": "retrieval", **sides["pairs"], "mode": "fine-tune", "fine_tuning": QUICK},
        "probed": {"kind": "classification", **sides["labelled"], "mode": "probe", "fine_tuning": QUICK},
    }
    given["found"]["fine_tuning"] = {"sequence_length": 16, "pooling": "first"}
    models = [str(bert_folder), str(other_bert)]
    output = tmp_path / "results" / "all.json"
    options = ["--tasks", task_file(tmp_path / "tasks.yaml", given), "--seeds", "0,1", "--output", output]
    code, out, err = run("--model", *models, *options)
    assert code == 0, err
    result = json.loads(output.read_text())
    assert (result["models"], result["seeds"], result["tokens"]) == (models, [0, 1], None)
    assert result["versions"].keys() == {"lit_encoders", "torch", "transformers", "lightning"}
    tasks = result["tasks"]
    assert list(tasks) == ["held-out.one", "topics", "spans", "found", "tuned", "probed"]
    seeded = {"topics", "spans", "tuned"}
    for name, task in tasks.items():
        assert task["num_items"] == 200
        for entry in task["models"]:
            figure = entry["metrics"][task["main_metric"]]
            assert len(figure["values"]) == (2 if name in seeded else 1)
            assert (figure["half_width"] is None) == (name not in seeded)
            assert figure["mean"] == pytest.approx(sum(figure["values"]) / len(figure["values"]))
        (comparison,) = task["comparisons"]
        assert (comparison["first"], comparison["second"]) == (models[1], models[0])
        found = comparison["differences"][task["main_metric"]]
        assert found["low"] <= found["value"] <= found["high"]
        means = [entry["metrics"][task["main_metric"]]["mean"] for entry in task["models"]]
        assert found["value"] == pytest.approx(means[1] - means[0])
        whole = comparison["items"][0]
        assert whole["won"] + whole["lost"] + whole["tied"] == 200
    # What a figure depends on stands beside it: E01's scheme, E03's self matches.
    assert tasks["spans"]["protocol"]["scheme"] == "IOB2"
    assert tasks["spans"]["protocol"]["limit"] == 16
    assert tasks["found"]["protocol"] == {
        "mode": "zero-shot",
        "drop_self_matches": True,
        "sequence_length": 16,
        "pooling": "first",
    }
    assert tasks["tuned"]["protocol"]["drop_self_matches"] is False
    assert tasks["held-out.one"]["protocol"] == {"sequence_length": 64, "stride": 32, "mask_ratio": 0.15}
    assert tasks["held-out.one"]["kind"] == "perplexity"
    groups = tasks["topics"]["comparisons"][0]["items"]
    assert [group["group"] for group in groups] == ["", "a", "b"]
    # The table has all that the file has.
    for name in tasks:
        assert f"\n{name} (200 items; " in f"\n{out}"
    assert f"{models[1]} against {models[0]}: difference with its 95 % interval over items (paired bootstrap)" in out
    assert "items in 'a': " in out
    assert out.rstrip().endswith(f"Written: {output}")
    assert err.count("seed 1") == 2 * len(seeded)


def test_models_are_compared_unless_told_otherwise(
    run: Run, files: dict[str, str], tmp_path: Path, bert_folder: Path, other_bert: Path
) -> None:
    task = {"kind": "retrieval", "test": files["pairs-test"], "test_limit": 20, "fine_tuning": {"sequence_length": 16}}
    tasks = task_file(tmp_path / "tasks.yaml", {"few": task})
    models = ["--model", bert_folder, other_bert, "--tasks", tasks]
    code, out, err = run(*models)
    assert (code, out) == (2, "")
    assert err.splitlines() == [
        "lit-encoders: error: tasks.few must have at least 200 items to compare models on (or --no-compare), got 20"
    ]
    code, out, _ = run(*models, "--no-compare")
    assert code == 0
    assert "few (20 items; mode zero-shot, drop_self_matches False" in out
    assert "against" not in out
    assert run("--model", bert_folder, "--tasks", tasks)[0] == 0, "one model has none to be compared with"


def test_milestones_of_a_run_make_a_table_with_the_last_doubling(
    run: Run, files: dict[str, str], tmp_path: Path, bert_folder: Path, other_bert: Path
) -> None:
    export = tmp_path / "run" / "export"
    shutil.copytree(bert_folder, export)
    for name, folder in (("tokens-1K", other_bert), ("tokens-2K", other_bert), ("tokens-3.5K", bert_folder)):
        shutil.copytree(folder, export / name)
    (tmp_path / "run" / "summary.json").write_text(json.dumps({"tokens": 4096}))
    tasks = task_file(
        tmp_path / "tasks.yaml",
        {
            "text": {"kind": "perplexity", "text": files["text"], "sequence_length": 64, "documents": 200},
            "pairs": {"kind": "retrieval", "test": files["pairs-test"], "fine_tuning": {"sequence_length": 16}},
        },
    )
    output = tmp_path / "out.json"
    code, out, err = run("--model", tmp_path / "run", "--tasks", tasks, "--output", output)
    assert code == 0, err
    result = json.loads(output.read_text())
    assert result["tokens"] == [1000, 2000, 3500, 4096]
    assert result["models"] == [
        *(str(export / name) for name in ("tokens-1K", "tokens-2K", "tokens-3.5K")),
        str(export),
    ]
    for task in result["tasks"].values():
        (comparison,) = task["comparisons"]
        # Half of 4,096 tokens or fewer: the second of the four.
        assert (comparison["first"], comparison["second"]) == (str(export), str(export / "tokens-2K"))
    first = [line.split("|")[1].strip() for line in out.splitlines() if line.startswith("|")]
    assert first == 2 * ["tokens", first[1], "1,000", "2,000", "3,500", "4,096"]
    assert "4,096 against 2,000: difference" in out
    assert out.count("gain of the last doubling: ") == 2


def test_a_last_doubling_that_gained_nothing_is_called_saturated(
    run: Run, files: dict[str, str], tmp_path: Path, bert_folder: Path
) -> None:
    for name in ("tokens-1K", "tokens-2K"):
        shutil.copytree(bert_folder, tmp_path / "run" / "export" / name)
    task = {"kind": "perplexity", "text": files["text"], "sequence_length": 64, "documents": 200}
    code, out, _ = run("--model", tmp_path / "run", "--tasks", task_file(tmp_path / "tasks.yaml", {"text": task}))
    assert code == 0
    assert "  gain of the last doubling: perplexity, loss, bits_per_byte cannot be told from saturated" in out
    assert "  items: 0 won, 0 lost, 200 tied" in out


def test_several_runs_stand_for_their_last_exports(
    run: Run, files: dict[str, str], tmp_path: Path, bert_folder: Path, other_bert: Path
) -> None:
    for name, folder in (("one", bert_folder), ("two", other_bert)):
        shutil.copytree(folder, tmp_path / name / "export")
    task = {"kind": "retrieval", "test": files["pairs-test"], "fine_tuning": {"sequence_length": 16}}
    output = tmp_path / "out.json"
    options = ["--tasks", task_file(tmp_path / "tasks.yaml", {"t": task}), "--output", output]
    assert run("--model", tmp_path / "one", tmp_path / "two", *options)[0] == 0
    assert json.loads(output.read_text())["models"] == [str(tmp_path / name / "export") for name in ("one", "two")]


# Files of tasks


def test_presets_stand_beside_files_and_may_be_changed(tmp_path: Path) -> None:
    given = {
        "short": {"preset": "hpo_branches", "mode": "fine-tune", "limit": 50, "fine_tuning": {"epochs": 1}},
        "own": {"kind": "retrieval", "test": "pairs.csv"},
    }
    first, second, third = read_tasks(["hpo_branches", str(task_file(tmp_path / "t.yaml", given))])
    assert (first.name, second.name, third.name) == ("hpo_branches", "short", "own")
    assert isinstance(first, kinds.Classification)
    assert isinstance(second, kinds.Classification)
    assert (first.mode, second.mode) == ("probe", "fine-tune")
    assert second.read is first.read
    assert (second.limit, second.fine_tuning.epochs, second.fine_tuning.sequence_length) == (50, 1, 128)


@pytest.mark.parametrize("text", ["5e-5", "5.0e-5", "5E-5", ".5e-4", "+5e-05"])
def test_small_numbers_may_be_written_as_people_write_them(tmp_path: Path, text: str) -> None:
    """YAML takes 5e-5 for text."""
    lines = f"t: {{kind: tagging, train: a, test: 1e-5.csv, fine_tuning: {{learning_rate: {text}}}}}"
    (task,) = read_tasks([str(task_file(tmp_path / "t.yaml", lines))])
    assert isinstance(task, kinds.Tagging)
    assert (task.fine_tuning.learning_rate, task.test) == (5e-5, "1e-5.csv")


def test_validation_sets_by_name_are_tasks_of_their_own(tmp_path: Path) -> None:
    given = {"val": {"kind": "perplexity", "text": {"en": "en.txt", "nl": "nl.txt"}, "documents": 300}}
    found = read_tasks([str(task_file(tmp_path / "t.yaml", given))])
    assert [(task.name, task.text, task.documents) for task in found if isinstance(task, kinds.Perplexity)] == [
        ("val.en", "en.txt", 300),
        ("val.nl", "nl.txt", 300),
    ]


# Mistakes


@pytest.fixture
def refused(run: Run, files: dict[str, str], tmp_path: Path, bert_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Run a file of tasks that is wrong; give the one line that is said, before anything is run."""

    def fail(*arguments: object, **options: object) -> None:
        raise AssertionError("something was run")

    for kind in kinds.KINDS.values():
        monkeypatch.setattr(kind, "run", fail)
    # A fit task comes first: what is wrong with the second shows before the first is run.
    fit = {"kind": "retrieval", "test": files["pairs-test"], "fine_tuning": {"sequence_length": 16}}

    def refuse(task: Any, *options: object, model: object = bert_folder) -> str:
        tasks = task if isinstance(task, str) else {"fit": fit, "t": task}
        before = sorted(tmp_path.rglob("*"))
        path = task_file(tmp_path / "t.yaml", tasks)
        code, out, err = run("--model", model, "--tasks", path, *options)
        assert (code, out) == (2, "")
        (line,) = err.splitlines()
        assert sorted(tmp_path.rglob("*")) == sorted({*before, path}), "nothing is left behind"
        return line.removeprefix("lit-encoders: error: ").replace(str(tmp_path), "HERE")

    return refuse


TOPICS = {"kind": "classification", "train": "labelled-train", "test": "labelled-test", "fine_tuning": QUICK}
SPANS = {"kind": "tagging", "train": "tagged-train", "test": "tagged-test", "fine_tuning": QUICK}
PAIRS = {"kind": "retrieval", "test": "pairs-test"}
BAD_TASKS: dict[str, tuple[Any, str]] = {
    "unknown kind": ({**TOPICS, "kind": "ner"}, "tasks.t.kind must be one of perplexity, classification, tagging, "),
    "misspelled setting": ({**TOPICS, "lable": "x"}, "tasks.t.lable is no setting of classification; label?"),
    "unknown preset": ({"preset": "hpo"}, "tasks.t.preset must be one of hpo_branches, "),
    "preset that is a list": ({"preset": ["hpo"]}, "tasks.t.preset must be one of hpo_branches, "),
    "missing file": ({**TOPICS, "test": "none.csv"}, "tasks.t.test must name files that exist, got 'none.csv'"),
    "missing column": (
        {**TOPICS, "label": "class"},
        "tasks.t.train: line 1 of 'HERE/labelled-train.jsonl' must have the column 'class' (tasks.t.label), got text, ",
    ),
    "missing group": (
        {**TOPICS, "group": "genre"},
        "must have the column 'genre' (tasks.t.group), got text, label, part",
    ),
    "unseen label": (
        {**TOPICS, "label": "text"},
        "tasks.t.test must have only labels that are in tasks.t.train, got '",
    ),
    "tag outside the scheme": (
        {**SPANS, "scheme": "IOE2"},
        "tasks.t.scheme IOE2 must have tags that begin with one of ",
    ),
    "words that are none": ({**SPANS, "tokens": "tags", "tags": "none"}, "must have the column 'none' (tasks.t.tags)"),
    "epochs": ({**SPANS, "fine_tuning": {"epochs": 0}}, "tasks.t.fine_tuning.epochs must be at least 1, got 0"),
    "rate": (
        {**SPANS, "fine_tuning": {"learning_rate": 0}},
        "tasks.t.fine_tuning.learning_rate must be above 0, got 0",
    ),
    "warm-up": (
        {**SPANS, "fine_tuning": {"warmup_share": 2}},
        "tasks.t.fine_tuning.warmup_share must be in [0, 1], got 2",
    ),
    "positions": (
        {**PAIRS, "fine_tuning": {"sequence_length": 129}},
        "tasks.t.fine_tuning.sequence_length must be at most the 128 positions of '",
    ),
    "positions of windows": (
        {"kind": "perplexity", "text": "text", "sequence_length": 129},
        "tasks.t.sequence_length must be at most the 128 positions of '",
    ),
    "stride": (
        {"kind": "perplexity", "text": "text", "sequence_length": 64, "stride": 64},
        "tasks.t.stride must be in [1, 63], got 64",
    ),
    "too few documents": (
        {"kind": "perplexity", "text": "text", "sequence_length": 64, "documents": 500},
        "tasks.t.text must hold at least 500 texts (tasks.t.documents), got 200 in 'HERE/held_out.txt'",
    ),
    "not YAML": ("t: {kind: tagging\nu: ]", "tasks must be YAML, got 'HERE/t.yaml' ("),
    "not a mapping": ("[t]", "tasks must be a mapping of names to tasks, got list in 'HERE/t.yaml'"),
    "empty": ("", "tasks must be a mapping of names to tasks, got NoneType in 'HERE/t.yaml'"),
    "name twice": (
        "t: {kind: retrieval, test: a}\nt: {kind: retrieval, test: b}",
        "tasks must name each thing once, got 't' twice in 'HERE/t.yaml'",
    ),
    "setting twice": (
        "t: {kind: retrieval, test: a, test: b}",
        "tasks must name each thing once, got 'test' twice in 'HERE/t.yaml'",
    ),
}


@pytest.mark.parametrize("case", BAD_TASKS)
def test_bad_task_is_said_in_one_line_before_anything_is_run(refused: Any, files: dict[str, str], case: str) -> None:
    task, message = BAD_TASKS[case]
    if isinstance(task, dict):
        named = {key: files.get(task[key], task[key]) for key in ("train", "test", "text") if key in task}
        task = {**task, **named}
    assert message in refused(task)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--seeds", "1,x"], "seeds must be whole numbers with commas, got '1,x'"),
        (["--seeds", "1,1"], "seeds must differ, got '1,1'"),
        (["--seeds=-1"], "seeds must be from 0 to 4294967295, got '-1'"),
        (["--seeds", f"{2**70}"], "seeds must be from 0 to 4294967295, got "),
        (["--output", "{here}/held_out.txt"], "output must be a file that does not exist yet, got 'HERE/held_out.txt'"),
        (["--output", "{here}/held_out.txt/o.json"], "output must be in a folder that can be made, got 'HERE/held_out"),
        (["--tasks", "none.yaml"], "tasks must be files or presets (hpo_branches, "),
        (["--tasks", "hpo_branch"], "got 'hpo_branch'; hpo_branches?"),
        (["--tasks", "hpo_branches", "hpo_branches"], "tasks must have names that differ, got 'hpo_branches' twice"),
        (["--taks", "x"], "--taks"),
    ],
)
def test_bad_option_is_said_in_one_line(refused: Any, tmp_path: Path, options: list[str], message: str) -> None:
    task = {"kind": "retrieval", "test": str(tmp_path / "pairs-test.jsonl"), "fine_tuning": {"sequence_length": 16}}
    assert message in refused(task, *(option.format(here=tmp_path) for option in options))


def test_bad_model_is_said_in_one_line(refused: Any, files: dict[str, str], tmp_path: Path, bert_folder: Path) -> None:
    task = {"kind": "retrieval", "test": files["pairs-test"], "fine_tuning": {"sequence_length": 16}}
    (tmp_path / "empty").mkdir()
    (tmp_path / "run" / "export").mkdir(parents=True)
    for name, pattern in (("mute", "*oken*"), ("light", "model*")):
        shutil.copytree(bert_folder, tmp_path / name, ignore=shutil.ignore_patterns(pattern))
    for folder, message in (
        ("none", "model.backbone must be a folder or hub name of a Hugging Face model, got 'HERE/none'"),
        ("empty", "model.backbone must be a folder or hub name of a Hugging Face model, got 'HERE/empty'"),
        ("mute", "model.tokenizer must be a folder or hub name with a tokenizer, got 'HERE/mute' (no tokenizer files)"),
        ("light", "HERE/light"),
        ("run", "model must be a run with exports in export/, got none in 'HERE/run'"),
    ):
        assert message in refused(task, model=tmp_path / folder)
