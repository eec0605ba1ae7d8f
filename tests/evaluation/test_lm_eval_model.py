"""Requests of lm_eval out of packs: what plain transformers says of one text at a time."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lit_encoders import LitCLM, LitMLM
from lit_encoders.evaluation.lm_eval_model import PackedLanguageModel, continuation_scores, lm_eval_model
from lit_encoders.evaluation.suites import run_lm_eval

PAIRS = [
    ("w1 w2 w3", " w4"),
    ("w1 w2 w3", " w5"),
    ("w1 w2 w3", " w4 w9 w11"),
    (" ".join(f"w{(7 * place) % 90}" for place in range(60)), " w1 w2"),
    ("", "w7 w8 w9"),
    ("w3 ", "w4"),
    ("w5", " " + " ".join(f"w{(3 * place) % 90}" for place in range(33))),
]


def requests(*arguments: tuple[Any, ...]) -> list[Any]:
    return [SimpleNamespace(args=given) for given in arguments]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory, make_tokenizer: Any) -> dict[str, Path]:
    """Saved tiny decoders: one whose tokenizer opens texts, and one whose tokenizer only has an end token."""
    from tokenizers import processors
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

    root = tmp_path_factory.mktemp("decoders")
    ids = {"vocab_size": 95, "pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 3}
    sizes = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 48}
    # Large weights: a tiny model that is new otherwise says the same of every token.
    torch.manual_seed(1)
    llama = LlamaConfig(**ids, **sizes, num_hidden_layers=2, max_position_embeddings=128, initializer_range=0.3)
    LlamaForCausalLM(llama).save_pretrained(root / "llama")
    make_tokenizer(mask_token=None).save_pretrained(root / "llama")
    gpt2 = GPT2Config(**ids, n_embd=32, n_head=4, n_layer=2, n_positions=128, initializer_range=0.3)
    GPT2LMHeadModel(gpt2).save_pretrained(root / "gpt2")
    tokenizer = make_tokenizer(mask_token=None)
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(single="$A", special_tokens=[])
    tokenizer.eos_token = "[SEP]"
    tokenizer.save_pretrained(root / "gpt2")
    return {name: root / name for name in ("llama", "gpt2")}


def plain(folder: Path, ids: Sequence[int], first: int) -> tuple[float, bool]:
    """Log-probability of a text from a token on, and whether greedy decoding gives it, without packs."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(folder).eval()
    with torch.no_grad():
        scores = model(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
    wanted = torch.tensor(ids[1:])
    said = scores.gather(1, wanted[:, None])[:, 0]
    return said[first - 1 :].sum().item(), bool((scores.argmax(1) == wanted)[first - 1 :].all())


def words(text: str) -> list[int]:
    return [int(word[1:]) + 5 for word in text.split()]


def opening(name: str, context: str) -> list[int]:
    """[CLS] opens every text of the one; of the other [SEP] stands where there would be nothing."""
    return [2] if name == "llama" else [] if context else [3]


@pytest.mark.parametrize("name", ["llama", "gpt2"])
@pytest.mark.parametrize("slots", [128, 4096])
def test_continuations_are_as_likely_as_plain_transformers_says(
    folders: dict[str, Path], name: str, slots: int
) -> None:
    model = PackedLanguageModel(LitCLM(str(folders[name])), slots=slots)
    found = model.loglikelihood(requests(*PAIRS))
    for (context, continuation), (score, greedy) in zip(PAIRS, found, strict=True):
        before = [*opening(name, context), *words(context)]
        expected, best = plain(folders[name], [*before, *words(continuation)], len(before))
        assert (score, greedy) == (pytest.approx(expected, abs=1e-4), best)


def test_likeliest_continuation_is_greedy(folders: dict[str, Path]) -> None:
    model = PackedLanguageModel(LitCLM(str(folders["llama"])))
    written = model.generate_until(requests(("w1 w2 w3", {"max_gen_toks": 3})))[0]
    found = model.loglikelihood(requests(("w1 w2 w3", f" {written}"), ("w1 w2 w3", " w0 w0 w0")))
    assert [greedy for _, greedy in found] == [True, False]
    assert model.loglikelihood(requests(("w1", ""))) == [(0.0, True)]


def test_shared_contexts_are_read_once(folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    module = LitCLM(str(folders["llama"]))
    model = PackedLanguageModel(module)
    read: list[int] = []
    backbone: Any = module.backbone
    encode = backbone.encode
    monkeypatch.setattr(backbone, "encode", lambda ids, *rest: read.append(len(ids)) or encode(ids, *rest))
    model.loglikelihood(requests(*[("w1 w2 w3", f" w{choice}") for choice in range(4)]))
    assert read == [4]


def test_long_context_loses_its_beginning(folders: dict[str, Path]) -> None:
    model = PackedLanguageModel(LitCLM(str(folders["llama"])), sequence_length=8)
    context, continuation = PAIRS[3]
    ids = [2, *words(context), *words(continuation)][-9:]
    ((score, _),) = model.loglikelihood(requests((context, continuation)))
    assert score == pytest.approx(plain(folders["llama"], ids, 7)[0], abs=1e-4)
    with pytest.raises(ValueError, match=r"sequence_length must hold a whole continuation \(33 tokens\), got 8$"):
        model.loglikelihood(requests(PAIRS[6]))


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_rolling_predicts_every_token_once_from_full_windows(folders: dict[str, Path], name: str) -> None:
    texts = [" ".join(f"w{(11 * place + shift) % 90}" for place in range(size)) for shift, size in ((0, 21), (3, 4))]
    model = PackedLanguageModel(LitCLM(str(folders[name])), sequence_length=8)
    found = model.loglikelihood_rolling(requests(*[(text,) for text in texts]))
    first = 2 if name == "llama" else 3
    # lm_eval: 8 tokens are read, the next window predicts the 8 after them, the last one reads 8 before its end.
    whole = [first, *words(texts[0])]
    parts = [(whole[:9], 1), (whole[8:17], 1), (whole[13:22], 4)]
    expected = sum(plain(folders[name], ids, start)[0] for ids, start in parts)
    assert found == pytest.approx([expected, plain(folders[name], [first, *words(texts[1])], 1)[0]], abs=1e-4)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_generation_is_that_of_transformers(folders: dict[str, Path], name: str) -> None:
    from transformers import AutoModelForCausalLM

    contexts = ["w1 w2 w3", "w40", "", "w7 w8"]
    model = PackedLanguageModel(LitCLM(str(folders[name])))
    found = model.generate_until(requests(*[(context, {"until": ["\n"], "max_gen_toks": 6}) for context in contexts]))
    loaded: Any = AutoModelForCausalLM.from_pretrained(folders[name]).eval()
    for context, text in zip(contexts, found, strict=True):
        ids = torch.tensor([[*opening(name, context), *words(context)]])
        mask = torch.ones_like(ids)
        written = loaded.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=6)[0, ids.shape[1] :]
        expected = model.module.tokenizer.decode(written, skip_special_tokens=True)
        assert text == expected


def test_generation_stops_before_a_stop_text(folders: dict[str, Path]) -> None:
    model = PackedLanguageModel(LitCLM(str(folders["llama"])))
    (whole,) = model.generate_until(requests(("w1 w2 w3", {"max_gen_toks": 6})))
    second = whole.split()[1]
    settings = {"until": second, "max_new_tokens": 6, "temperature": 0.0}
    assert model.generate_until(requests(("w1 w2 w3", settings))) == [whole[: whole.index(second)]]


def test_training_mode_and_gradients_are_left_as_they_were(folders: dict[str, Path]) -> None:
    module = LitCLM(str(folders["llama"]))
    model = PackedLanguageModel(module)
    model.loglikelihood(requests(*PAIRS))
    assert module.backbone is not None
    assert module.backbone.training
    assert all(parameter.grad is None for parameter in module.parameters())


def test_encoder_trained_by_clm_never_looks_ahead(bert_folder: Path) -> None:
    module = LitMLM(str(bert_folder))
    with pytest.raises(ValueError, match=r"^model must be causal \(objective 'clm'\) for lm_eval, got one for MLM"):
        PackedLanguageModel(module)
    module.objective = "clm"
    module.configure_model()
    rows = [([2, 6, 7, 8], 2), ([2, 6, 7, 8, 9, 10], 2)]
    (short, _), (long, _) = continuation_scores(module, rows, 64)
    ((rest, _),) = continuation_scores(module, [([2, 6, 7, 8, 9, 10], 4)], 64)
    assert long == pytest.approx(short + rest, abs=1e-4)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"do_sample": True}, r"a task must generate greedily \(do_sample: false\), got \{'do_sample': True\}$"),
        ({"temperature": 0.7}, "a task must generate greedily"),
        ({}, r"sequence_length must be above the tokens that a task generates \(256\), got 128$"),
    ],
)
def test_what_cannot_be_generated_is_refused(folders: dict[str, Path], settings: dict[str, Any], message: str) -> None:
    model = PackedLanguageModel(LitCLM(str(folders["llama"])))
    with pytest.raises(ValueError, match=message):
        model.generate_until(requests(("w1", settings)))


@pytest.mark.parametrize("length", [1, 129])
def test_length_is_checked(folders: dict[str, Path], length: int) -> None:
    message = rf"sequence_length must be from 2 to the positions of the model \(128\), got {length}$"
    with pytest.raises(ValueError, match=message):
        PackedLanguageModel(LitCLM(str(folders["llama"])), sequence_length=length)


# With the package


def write_task(folder: Path, name: str, rows: dict[str, list[dict[str, Any]]], settings: str) -> Path:
    """A YAML task over JSON files beside it."""
    for split, records in rows.items():
        (folder / f"{name}-{split}.json").write_text("\n".join(map(json.dumps, records)) + "\n")
    files = "".join(f"    {split}: {folder / f'{name}-{split}.json'}\n" for split in rows)
    text = f"task: {name}\ndataset_path: json\ndataset_kwargs:\n  cache_dir: {folder / 'cache'}\n  data_files:\n{files}"
    path = folder / f"{name}.yaml"
    path.write_text(text + settings)
    return path


def choice_task(folder: Path, items: int = 12) -> Path:
    """Questions with four answers to choose from, in the form of Belebele."""
    rows = {
        split: [
            {
                "question": f"w{place} w{place + 1}",
                "answers": [f"w{(place + shift) % 90}" for shift in (2, 30, 50, 70)],
                "label": place % 4,
            }
            for place in range(start, start + count)
        ]
        for split, start, count in (("train", 0, 5), ("test", 20, items))
    }
    settings = (
        "output_type: multiple_choice\ntraining_split: train\nfewshot_split: train\ntest_split: test\n"
        "fewshot_config:\n  sampler: first_n\n"
        'doc_to_text: "{{question}}"\ndoc_to_choice: "{{answers}}"\ndoc_to_target: label\nfewshot_delimiter: " "\n'
        "metric_list:\n  - metric: acc\n    aggregation: mean\n    higher_is_better: true\n"
    )
    return write_task(folder, "local_choice", rows, settings)


def translation_task(folder: Path) -> Path:
    """Sentences to translate, scored by chrF, in the form of FLORES."""
    rows = {
        split: [{"source": f"w{place} w{place + 3}", "target": f"w{place + 1} w{place + 2}"} for place in places]
        for split, places in (("dev", range(4)), ("devtest", range(20, 26)))
    }
    settings = (
        "output_type: generate_until\nvalidation_split: dev\nfewshot_split: dev\ntest_split: devtest\n"
        "fewshot_config:\n  sampler: first_n\n"
        'doc_to_text: "{{source}}"\ndoc_to_target: "{{target}}"\nfewshot_delimiter: " "\n'
        'generation_kwargs:\n  until: ["\\n"]\n  max_gen_toks: 4\n'
        "metric_list:\n  - metric: chrf\n    aggregation: chrf\n    higher_is_better: true\n"
    )
    return write_task(folder, "local_translation", rows, settings)


def test_local_choice_task_is_scored_as_by_hand(folders: dict[str, Path], tmp_path: Path) -> None:
    pytest.importorskip("lm_eval")
    from lm_eval.api.model import LM

    module = LitCLM(str(folders["llama"]))
    assert isinstance(lm_eval_model(module), LM)
    measured, raw = run_lm_eval(module, [str(choice_task(tmp_path))], shots=2, limit=None)
    (found,) = measured
    assert (found.task, found.items, set(found.metrics)) == ("local_choice", 12, {"acc"})
    solved = "".join(f"w{place} w{place + 1} w{place + (2, 30, 50, 70)[place % 4]} " for place in range(2))
    correct = []
    for place in range(20, 32):
        before = [2, *words(f"{solved}w{place} w{place + 1}")]
        scores = [
            plain(folders["llama"], [*before, *words(f"w{(place + shift) % 90}")], len(before))[0]
            for shift in (2, 30, 50, 70)
        ]
        correct.append(scores.index(max(scores)) == place % 4)
    assert found.metrics["acc"].mean == pytest.approx(sum(correct) / 12)
    assert found.metrics["acc"].num_values == 12
    assert raw["n-shot"] == {"local_choice": 2}


def test_local_translation_task_is_scored_by_chrf(folders: dict[str, Path], tmp_path: Path) -> None:
    pytest.importorskip("lm_eval")
    import sacrebleu

    module = LitCLM(str(folders["llama"]))
    ((found,), _) = run_lm_eval(module, [str(translation_task(tmp_path))], shots=2, limit=5)
    assert (found.items, found.metrics["chrf"].num_values) == (5, 1)
    solved = "".join(f"w{place} w{place + 3} w{place + 1} w{place + 2} " for place in range(2))
    prompts = [(f"{solved}w{place} w{place + 3}", {"max_gen_toks": 4}) for place in range(20, 25)]
    written = PackedLanguageModel(module).generate_until(requests(*prompts))
    references = [f"w{place + 1} w{place + 2}" for place in range(20, 25)]
    assert any(written)
    assert found.metrics["chrf"].mean == pytest.approx(sacrebleu.corpus_chrf(written, [references]).score)
