"""The benchmark verb: what it refuses, what it says where data are out of reach, and whole runs on local data."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from huggingface_hub import constants

from lit_encoders.evaluation import benchmark_verb as verb
from lit_encoders.evaluation import reach, suites
from lit_encoders.evaluation.benchmark_verb import benchmark_verb, tables
from lit_encoders.evaluation.reach import answers, hub_or_cache, reaching
from lit_encoders.evaluation.suites import Measured, alone, over_items


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verb, "check_package", lambda suite: None)


@pytest.fixture
def decoder(tmp_path_factory: pytest.TempPathFactory, make_tokenizer: Any) -> Path:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("decoder") / "llama"
    ids = {"vocab_size": 95, "pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 3}
    sizes = {"hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 48, "num_hidden_layers": 2}
    torch.manual_seed(1)
    LlamaForCausalLM(LlamaConfig(**ids, **sizes, initializer_range=0.3)).save_pretrained(folder)
    make_tokenizer(mask_token=None).save_pretrained(folder)
    return folder


def said(**given: Any) -> str:
    """The one line that the verb stops with."""
    arguments: dict[str, Any] = {"model": "nowhere", "suite": "mteb", "tasks": ["beir"], **given}
    with pytest.raises(ValueError) as caught:
        benchmark_verb(**arguments)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# What is refused


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"suite": "glue"}, "suite must be one of mteb, lm_eval, got 'glue'"),
        ({"tasks": []}, "tasks must be at least one, got none"),
        ({"tasks": ["beir", "SciFact", "beir"]}, "tasks must differ, got 'beir' twice"),
        ({"shots": -1}, "shots must be at least 0, got -1"),
        ({"limit": 0}, "limit must be at least 1, got 0"),
        ({"limit": 5}, "limit must not be given with suite mteb, got 5"),
        (
            {"suite": "lm_eval", "fine_tune_on": "p.jsonl"},
            "fine_tune_on must not be given with suite lm_eval, got p.jsonl",
        ),
        ({"sequence_length": 0}, "sequence_length must be at least 1, got 0"),
        ({"epochs": 0}, "epochs must be at least 1, got 0"),
    ],
)
def test_mistakes_stop_before_anything_is_imported(given: dict[str, Any], message: str) -> None:
    assert said(**given) == message


def test_output_must_be_new(tmp_path: Path) -> None:
    assert said(output=tmp_path) == f"output must be a file that does not exist yet, got '{tmp_path}'"


@pytest.mark.parametrize("suite", ["mteb", "lm_eval"])
def test_missing_package_is_named_with_its_command(monkeypatch: pytest.MonkeyPatch, suite: str) -> None:
    monkeypatch.setattr(suites, "find_spec", lambda name: None)
    assert said(suite=suite) == f"suite {suite} needs {suite}: pip install -c constraints.txt -e '.[benchmarks]'"


@pytest.mark.usefixtures("installed")
def test_model_and_pairs_are_checked_before_tasks(bert_folder: Path, tmp_path: Path) -> None:
    assert said().startswith("model.backbone must be a folder or hub name of a Hugging Face model, got 'nowhere'")
    (tmp_path / "pairs.jsonl").write_text('{"query": "w1"}\n')
    assert "'document'" in said(model=str(bert_folder), fine_tune_on=str(tmp_path / "pairs.jsonl"))


@pytest.mark.usefixtures("installed")
def test_model_for_mlm_is_no_language_model(bert_folder: Path) -> None:
    assert said(model=str(bert_folder), suite="lm_eval", tasks=["belebele"]).startswith(
        "model must be causal (objective 'clm') for lm_eval, got one for MLM"
    )


# What is out of reach


def fake_mteb(load: Any) -> Any:
    """A package with one task, whose data come from ``load``."""
    package: Any = ModuleType("mteb")
    task = SimpleNamespace(metadata=SimpleNamespace(name="SciFact"), is_aggregate=False, load_data=load)

    def get_task(name: str) -> Any:
        if name != "SciFact":
            raise KeyError(f"KeyError: '{name}' not found. Did you mean: 'SciFact'?")
        return task

    package.get_task = get_task
    package.get_benchmark = lambda name: SimpleNamespace(tasks=[task])
    return package


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(("asked", "named"), [("SciFact", "SciFact"), ("beir", "beir (SciFact)")])
def test_data_out_of_reach_are_said_in_one_line(
    bert_folder: Path, monkeypatch: pytest.MonkeyPatch, asked: str, named: str
) -> None:
    def load() -> None:
        raise ConnectionError("Couldn't reach 'mteb/scifact'\non the Hub")

    monkeypatch.setitem(sys.modules, "mteb", fake_mteb(load))
    reason = "Couldn't reach 'mteb/scifact' on the Hub"
    expected = f"tasks: the data of {named!r} cannot be reached ({reason})"
    assert said(model=str(bert_folder), tasks=[asked]) == expected


@pytest.mark.usefixtures("installed")
def test_unknown_task_is_named_with_the_nearest(bert_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mteb", fake_mteb(None))
    expected = "tasks must be beir, names of mteb's or folders in BEIR's form, got 'SciFac'; SciFact?"
    assert said(model=str(bert_folder), tasks=["SciFac"]) == expected


def from_a_client() -> Exception:
    """What a client of the hub raises, which the caller has made its own error of."""
    error = KeyError("README.md")
    error.__context__ = type("HTTPStatusError", (Exception,), {"__module__": "httpx._exceptions"})("502")
    return error


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (RuntimeError("scripts are no longer supported"), "read (scripts are no longer supported)"),
        (TimeoutError(), "reached (TimeoutError)"),
        (from_a_client(), "reached ('README.md')"),
    ],
)
def test_kinds_of_failure_are_told_apart(error: Exception, said: str) -> None:
    with pytest.raises(ValueError) as caught, reaching("flores"):
        raise error
    assert str(caught.value) == f"tasks: the data of 'flores' cannot be {said}"


@contextmanager
def server(status: int) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.send_response(status)
            self.end_headers()

        def log_message(self, *given: Any) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as served:
        Thread(target=served.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{served.server_port}"
        served.shutdown()


@pytest.mark.parametrize("status", [200, 403, 503])
def test_whoever_answers_is_in_reach(status: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with server(status) as address:
        assert answers(address)
    assert not answers(address)


def test_hub_without_an_answer_is_asked_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(reach, "answers", lambda address: bool(asked.append(address)))
    with hub_or_cache(needed=True):
        assert constants.HF_HUB_OFFLINE
    assert not constants.HF_HUB_OFFLINE
    with hub_or_cache(needed=False):
        assert not constants.HF_HUB_OFFLINE
    assert asked == [constants.ENDPOINT]
    monkeypatch.setattr(reach, "answers", lambda address: True)
    with hub_or_cache(needed=True):
        assert not constants.HF_HUB_OFFLINE


# Tables


def strict(text: str) -> Any:
    """JSON without the numbers that it does not have."""

    def refuse(name: str) -> Any:
        raise ValueError(name)

    return json.loads(text, parse_constant=refuse)


def test_results_are_written_in_plain_types(tmp_path: Path) -> None:
    raw = {"a": np.float32(0.5), "b": [float("nan"), (np.int64(3), True)], "c": Path("x"), 1: None}
    verb._write(
        tmp_path / "new" / "found.json", {"model": "m"}, "torch", [Measured("n", "t", {"acc": alone(0.5)})], raw
    )
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["found.json"]
    found = strict((tmp_path / "new" / "found.json").read_text())
    assert found["results"] == {"a": 0.5, "b": [None, [3, True]], "c": "x", "1": None}
    row = {"name": "n", "task": "t", "items": None, "metrics": {"acc": {"value": 0.5, "half_width": None}}}
    assert found["measured"] == [row]


def test_tables_show_intervals_and_means() -> None:
    interval = over_items(0.5, [0.0, 1.0, 1.0, 0.0])
    measured = [
        Measured("pair", "one", {"acc": interval, "chrf": alone(40.0)}, 4),
        Measured("pair", "two", {"acc": alone(0.7)}, 1),
        Measured("lone", "lone", {"ndcg_at_10": alone(0.25)}),
    ]
    assert tables(measured).splitlines() == [
        "pair",
        "",
        "| task | acc           | chrf   | items |",
        "|------|--------------:|-------:|------:|",
        "| one  | 0.500 ± 0.919 | 40.000 | 4     |",
        "| two  | 0.700         | -      | 1     |",
        "| mean | 0.600         | 40.000 |       |",
        "",
        "lone",
        "",
        "| task | ndcg_at_10 | items |",
        "|------|-----------:|------:|",
        "| lone | 0.250      | -     |",
    ]


# With the packages


@pytest.fixture(scope="module")
def index() -> Any:
    """The index of all tasks of lm_eval, which takes 20 s."""
    return pytest.importorskip("lm_eval.tasks").TaskManager()


@pytest.fixture
def indexed(index: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lm_eval.tasks.TaskManager", lambda include_defaults: index)


def local_choice(folder: Path) -> Path:
    """A YAML task of questions with two answers, over JSON lines beside it."""
    rows = [{"question": f"w{n}", "answers": [f"w{n + 1}", f"w{n + 9}"], "label": n % 2} for n in range(12)]
    for split, part in (("train", rows[:4]), ("test", rows[4:])):
        (folder / f"{split}.json").write_text("\n".join(map(json.dumps, part)) + "\n")
    path = folder / "choice.yaml"
    path.write_text(
        f"task: local_two_answers\ndataset_path: json\ndataset_kwargs:\n  cache_dir: {folder / 'cache'}\n"
        "  data_files:\n"
        f"    train: {folder / 'train.json'}\n    test: {folder / 'test.json'}\n"
        "output_type: multiple_choice\nfewshot_split: train\ntraining_split: train\ntest_split: test\n"
        'doc_to_text: "{{question}}"\ndoc_to_choice: "{{answers}}"\ndoc_to_target: label\n'
        "metric_list:\n  - metric: acc\n    aggregation: mean\n    higher_is_better: true\n"
    )
    return path


def test_lm_eval_run_is_printed_and_written(decoder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("lm_eval")
    task, output = local_choice(tmp_path), tmp_path / "results" / "found.json"
    text = benchmark_verb(str(decoder), "lm_eval", [str(task)], output, limit=6)
    assert capsys.readouterr().out == ""
    assert "| local_two_answers | " in text
    assert text.endswith(f"Written: {output}")
    found = strict(output.read_text())
    (row,) = found["measured"]
    assert (row["items"], found["protocol"]["shots"], found["results"]["n-shot"]) == (6, 2, {"local_two_answers": 2})
    assert row["metrics"]["acc"]["value"] == found["results"]["results"]["local_two_answers"]["acc,none"]
    assert row["metrics"]["acc"]["half_width"] > 0
    assert set(found["versions"]) == {"lit_encoders", "torch", "transformers", "lm_eval"}


def test_encoder_may_be_read_as_a_language_model(bert_folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("lm_eval")
    text = benchmark_verb(str(bert_folder), "lm_eval", [str(local_choice(tmp_path))], causal=True)
    assert "| local_two_answers | " in text


def test_overlapping_tasks_are_refused(decoder: Path, tmp_path: Path) -> None:
    pytest.importorskip("lm_eval")
    task = local_choice(tmp_path)
    (tmp_path / "again.yaml").write_text(task.read_text())
    names = [str(task), str(tmp_path / "again.yaml")]
    expected = f"tasks must not overlap, got 'local_two_answers' in both {names[0]!r} and {names[1]!r}"
    assert said(model=str(decoder), suite="lm_eval", tasks=names) == expected


def test_mteb_run_fine_tunes_first(bert_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("mteb")
    folder = tmp_path / "small"
    (folder / "qrels").mkdir(parents=True)
    for name, side in (("corpus", 40), ("queries", 0)):
        rows = [{"_id": str(n), "text": f"w{n + side}"} for n in range(16)]
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    judged = "".join(f"{n}\t{n}\t1\n" for n in range(16))
    (folder / "qrels" / "test.tsv").write_text(f"query-id\tcorpus-id\tscore\n{judged}")
    pairs = tmp_path / "pairs.jsonl"
    pairs.write_text("\n".join(json.dumps({"query": f"w{n}", "document": f"w{n + 40}"}) for n in range(16)) + "\n")
    scores = []
    for place, tuned in enumerate((None, str(pairs))):
        output = tmp_path / f"{place}.json"
        text = benchmark_verb(
            str(bert_folder), "mteb", [str(folder)], output, tuned, epochs=30, batch=16, learning_rate=2e-3
        )
        assert capsys.readouterr().out == ""
        assert "| small | " in text
        (row,) = strict(output.read_text())["measured"]
        scores.append(row["metrics"]["ndcg_at_10"]["value"])
    assert scores[1] > max(0.8, scores[0])


@pytest.fixture
def hub_is_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(reach, "answers", lambda address: False)


@pytest.mark.usefixtures("indexed", "hub_is_silent")
@pytest.mark.parametrize(
    ("task", "named"),
    [
        ("belebele", "belebele"),
        ("global_piqa", "global_piqa (global_piqa_cloze)"),
        ("flores", "flores (flores_ca)"),
        ("belebele_fra_Latn", "belebele_fra_Latn"),
    ],
)
def test_known_task_of_lm_eval_without_its_data(decoder: Path, task: str, named: str) -> None:
    start = time.monotonic()
    expected = f"tasks: the data of {named!r} cannot be reached (Couldn't reach '"
    assert said(model=str(decoder), suite="lm_eval", tasks=[task]).startswith(expected)
    # One try to reach the hub, left to its client, takes 24 s.
    assert time.monotonic() - start < 20


@pytest.mark.usefixtures("indexed")
def test_short_names_are_tasks_of_lm_eval(index: Any) -> None:
    assert all(part in index.task_index for parts in suites.SHORT_NAMES.values() for part in parts)


@pytest.mark.usefixtures("indexed")
def test_unknown_task_of_lm_eval_is_named_with_the_nearest(decoder: Path) -> None:
    expected = "tasks must be names of lm_eval's or YAML files, got 'belebelle'; belebele?"
    assert said(model=str(decoder), suite="lm_eval", tasks=["belebelle"]) == expected


@pytest.mark.usefixtures("hub_is_silent")
def test_benchmark_of_mteb_without_its_data(bert_folder: Path) -> None:
    pytest.importorskip("mteb")
    expected = "tasks: the data of 'beir (TRECCOVID)' cannot be reached (Couldn't reach 'mteb/trec-covid' on the Hub"
    assert said(model=str(bert_folder), tasks=["beir"]).startswith(expected)
