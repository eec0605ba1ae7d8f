"""Layer ranges as Python slices, on models of several makers."""

from collections.abc import Iterable
from pathlib import Path

import pytest
from torch import nn

from lit_encoders.models.layer_range import LayerRange, parse_range


@pytest.fixture(scope="module")
def bert(bert_folder: Path) -> nn.Module:
    """Three layers, decoder tied to the word embeddings."""
    from transformers import AutoModelForMaskedLM

    return AutoModelForMaskedLM.from_pretrained(bert_folder)


def layers_of(names: Iterable[str], prefix: str = "bert.encoder.layer.") -> set[int]:
    assert all(name.startswith(prefix) for name in names)
    return {int(name.removeprefix(prefix).partition(".")[0]) for name in names}


@pytest.mark.parametrize("text", ["0:1", "0:2", "1:", ":2", "-1:", "-2:", ":-1", "1:-1", ":", "0:3", "-3:-1"])
def test_ranges_are_python_slices(bert: nn.Module, text: str) -> None:
    chosen = LayerRange([text]).parameters(bert)
    places = eval(f"list(range(3))[{text}]")
    assert layers_of(chosen) == set(places)
    # Whole layers, by the names of the model.
    everything = dict(bert.named_parameters())
    inside = [name for name in everything if name.startswith("bert.encoder.layer.")]
    assert [name for name in inside if layers_of([name]) <= set(places)] == list(chosen)
    assert all(chosen[name] is everything[name] for name in chosen)


def test_layer_one_is_not_layer_ten() -> None:
    stack = nn.ModuleDict({"layers": nn.ModuleList([nn.Linear(1, 1) for _ in range(12)])})
    assert list(LayerRange(["1:2"]).parameters(stack)) == ["layers.1.weight", "layers.1.bias"]


def test_all_is_every_layer_and_nothing_else(bert: nn.Module) -> None:
    assert LayerRange(["all"]).parameters(bert).keys() == LayerRange([":"]).parameters(bert).keys()
    assert layers_of(LayerRange(["all"]).parameters(bert)) == {0, 1, 2}


def test_embeddings_are_the_tables_with_the_norm_beside_them(bert: nn.Module) -> None:
    assert list(LayerRange(["embeddings"]).parameters(bert)) == [
        f"bert.embeddings.{name}"
        for name in (
            "word_embeddings.weight",
            "position_embeddings.weight",
            "token_type_embeddings.weight",
            "LayerNorm.weight",
            "LayerNorm.bias",
        )
    ]


def test_f08_tied_decoder_appears_once(bert: nn.Module) -> None:
    tied = bert.get_output_embeddings().weight
    chosen = LayerRange(["embeddings", "all"]).parameters(bert)
    assert [name for name, parameter in chosen.items() if parameter is tied] == [
        "bert.embeddings.word_embeddings.weight"
    ]


def test_ranges_add_up_and_overlap_counts_once(bert: nn.Module) -> None:
    chosen = LayerRange(["0:2", "1:", "embeddings"]).parameters(bert)
    assert len(chosen) == len({id(parameter) for parameter in chosen.values()})
    assert layers_of([name for name in chosen if "encoder" in name]) == {0, 1, 2}
    outside = {name for name, _ in bert.named_parameters()} - chosen.keys()
    assert all(name.startswith("cls.") for name in outside)


def test_modernbert_embeddings_and_layers() -> None:
    from transformers import ModernBertConfig, ModernBertForMaskedLM

    ends = {"pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 3, "cls_token_id": 2, "sep_token_id": 3}
    sizes = {"hidden_size": 16, "num_hidden_layers": 4, "num_attention_heads": 2, "intermediate_size": 24}
    model = ModernBertForMaskedLM(ModernBertConfig(vocab_size=40, **sizes, **ends))
    assert list(LayerRange(["embeddings"]).parameters(model)) == [
        "model.embeddings.tok_embeddings.weight",
        "model.embeddings.norm.weight",
    ]
    assert layers_of(LayerRange(["-2:"]).parameters(model), "model.layers.") == {2, 3}


def test_names_are_those_of_the_module_that_holds_the_model(bert: nn.Module) -> None:
    holder = nn.ModuleDict({"backbone": bert})
    assert layers_of(LayerRange(["0:1"]).parameters(holder), "backbone.bert.encoder.layer.") == {0}


def test_frozen_parameters_can_be_chosen_too() -> None:
    stack = nn.ModuleDict({"layers": nn.ModuleList([nn.Linear(1, 1), nn.Linear(1, 1)])}).requires_grad_(False)
    assert len(LayerRange(["all"]).parameters(stack)) == 4


def test_layers_path_names_the_list_where_two_are_alike() -> None:
    def stack() -> nn.ModuleList:
        return nn.ModuleList([nn.Linear(1, 1) for _ in range(3)])

    model = nn.ModuleDict({"encoder": stack(), "decoder": stack()})
    with pytest.raises(ValueError, match="layers_path="):
        LayerRange(["0:1"]).parameters(model)
    assert layers_of(LayerRange(["-1:"]).parameters(model, layers_path="decoder"), "decoder.") == {2}


@pytest.mark.parametrize("text", ["3:", "2:1", "0:0", "-1:0"])
def test_range_that_matches_no_layer_is_an_error(bert: nn.Module, text: str) -> None:
    with pytest.raises(ValueError, match=rf"at least one of the model's 3 layers, got '{text}'"):
        LayerRange(["0:1", text]).parameters(bert)


def test_embeddings_of_a_model_without_any_are_an_error() -> None:
    stack = nn.ModuleDict({"layers": nn.ModuleList([nn.Linear(1, 1)])})
    with pytest.raises(ValueError, match="got 'embeddings'"):
        LayerRange(["embeddings"]).parameters(stack)


@pytest.mark.parametrize("text", ["", "0", "0-8", "0:8:2", "a:b", "layers", "0 :8", "1.0:2", "All"])
def test_what_is_no_range_is_an_error(text: str) -> None:
    with pytest.raises(ValueError, match="layers must be like '0:8' or '-6:', or one of"):
        parse_range(text)


def test_integer_is_refused_with_the_advice_to_quote() -> None:
    """YAML 1.1 reads an unquoted 9:28 as 9 x 60 + 28."""
    import yaml

    read = yaml.safe_load("layers: 9:28")["layers"]
    assert read == 568
    with pytest.raises(TypeError, match=r'in quotes, such as "9:28".* got 568'):
        parse_range(read)
