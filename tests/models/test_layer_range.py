"""Layer ranges as Python slices, on models of several makers."""

from collections.abc import Iterable
from pathlib import Path

import pytest
from torch import nn

from lit_encoders.models.layer_range import LayerRange, map_layers, parse_range


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


def test_number_in_a_list_is_refused_too() -> None:
    for layers in (568, [568], ["0:1", 568]):
        with pytest.raises(TypeError, match=r"in quotes.* got 568"):
            LayerRange(layers)  # type: ignore[arg-type]


def test_commas_are_a_list(bert: nn.Module) -> None:
    assert LayerRange("0:1, embeddings,-1:").texts == ["0:1", "embeddings", "-1:"]
    assert LayerRange(["0:1,embeddings", "-1:"]).texts == ["0:1", "embeddings", "-1:"]
    together = LayerRange("0:1,head").parameters(bert)
    assert together.keys() == {**LayerRange("0:1").parameters(bert), **LayerRange("head").parameters(bert)}.keys()
    assert str(LayerRange("0:1,head", "mlp")) == "0:1, head (mlp)"
    for text in ("0:1,", ",", "0:1,,2:3", "0:1;2:3"):
        with pytest.raises(ValueError, match="layers must be like"):
            LayerRange(text)
    with pytest.raises(ValueError, match="layers must name at least one range, got none"):
        LayerRange([])


@pytest.mark.parametrize("text", ["0:4", "-4:", "4:", ":-4", "1:99", "-99:2"])
def test_ranges_beyond_the_model_are_refused(bert: nn.Module, text: str) -> None:
    """Python would cut them off, and another range than asked for would be used."""
    with pytest.raises(ValueError, match=rf"layers must lie within the model's 3 layers \(0:3\), got '{text}'"):
        LayerRange(text).parameters(bert)


@pytest.mark.parametrize("part", ["mlps", "", "norm"])
def test_unknown_part(part: str) -> None:
    with pytest.raises(ValueError, match=f"part must be one of all, attention, mlp, got '{part}'"):
        LayerRange("0:1", part)  # type: ignore[arg-type]


def test_parts_stand_in_layers_only(bert: nn.Module) -> None:
    with pytest.raises(ValueError, match="part 'mlp' is looked for in layers only"):
        LayerRange("embeddings", "mlp").parameters(bert)
    with pytest.raises(
        ValueError, match=r"layers must match something that the model has \(layers, embeddings, head\)"
    ):
        LayerRange("final_norm").parameters(bert)


def test_head_that_is_nothing_but_the_tied_decoder() -> None:
    with pytest.raises(ValueError, match="its head is nothing but the tied decoder: name embeddings"):
        LayerRange("head").parameters(make("gpt2"))


SMALL = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 48}
IDS = {"pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 3, "cls_token_id": 2, "sep_token_id": 3}
GROUPED = {**SMALL, **IDS, "num_key_value_heads": 2, "head_dim": 8}
BERT_LAYER = {
    "attention": {"attention.self.query", "attention.self.key", "attention.self.value", "attention.output.dense",
                  "attention.output.LayerNorm"},
    "mlp": {"intermediate.dense", "output.dense", "output.LayerNorm"},
    "": set(),
}  # fmt: skip
GROUPED_LAYER = {
    "attention": {f"self_attn.{name}_proj" for name in "qkvo"},
    "mlp": {"mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"},
    "": {"input_layernorm", "post_attention_layernorm"},
}
TABLES = {"word_embeddings", "position_embeddings", "token_type_embeddings", "LayerNorm"}
# model type: settings, the list of layers, the modules of each named part, and of each part of a layer
ARCHITECTURES: dict[str, tuple[dict[str, object], str, dict[str, set[str]], dict[str, set[str]]]] = {
    "bert": (
        SMALL, "bert.encoder.layer",
        {"embeddings": {f"bert.embeddings.{name}" for name in TABLES},
         "head": {"cls.predictions", "cls.predictions.transform.dense", "cls.predictions.transform.LayerNorm"}},
        BERT_LAYER,
    ),
    "roberta": (
        SMALL, "roberta.encoder.layer",
        {"embeddings": {f"roberta.embeddings.{name}" for name in TABLES},
         "head": {"lm_head", "lm_head.dense", "lm_head.layer_norm"}},
        BERT_LAYER,
    ),
    "electra": (
        {**SMALL, "embedding_size": 16}, "electra.encoder.layer",
        {"embeddings": {*(f"electra.embeddings.{name}" for name in TABLES), "electra.embeddings_project"},
         "head": {"generator_predictions.dense", "generator_predictions.LayerNorm", "generator_lm_head"}},
        BERT_LAYER,
    ),
    "distilbert": (
        {"dim": 32, "n_layers": 3, "n_heads": 4, "hidden_dim": 48}, "distilbert.transformer.layer",
        {"embeddings": {f"distilbert.embeddings.{name}" for name in TABLES - {"token_type_embeddings"}},
         "head": {"vocab_transform", "vocab_layer_norm", "vocab_projector"}},
        {"attention": {f"attention.{name}_lin" for name in ("q", "k", "v", "out")}, "mlp": {"ffn.lin1", "ffn.lin2"},
         "": {"sa_layer_norm", "output_layer_norm"}},
    ),
    "modernbert": (
        {**SMALL, **IDS}, "model.layers",
        {"embeddings": {"model.embeddings.tok_embeddings", "model.embeddings.norm"}, "final_norm": {"model.final_norm"},
         "head": {"head.dense", "head.norm", "decoder"}},
        {"attention": {"attn.Wqkv", "attn.Wo"}, "mlp": {"mlp.Wi", "mlp.Wo"}, "": {"attn_norm", "mlp_norm"}},
    ),
    "gpt2": (
        {"n_embd": 32, "n_layer": 3, "n_head": 4}, "transformer.h",
        {"embeddings": {"transformer.wte", "transformer.wpe"}, "final_norm": {"transformer.ln_f"}},
        {"attention": {"attn.c_attn", "attn.c_proj"}, "mlp": {"mlp.c_fc", "mlp.c_proj"}, "": {"ln_1", "ln_2"}},
    ),
    "gemma3_text": (
        GROUPED, "model.layers",
        {"embeddings": {"model.embed_tokens"}, "final_norm": {"model.norm"}},
        {**GROUPED_LAYER, "attention": GROUPED_LAYER["attention"] | {"self_attn.q_norm", "self_attn.k_norm"},
         "": GROUPED_LAYER[""] | {"pre_feedforward_layernorm", "post_feedforward_layernorm"}},
    ),
    "ultrabert": (
        {**GROUPED, "prediction_head_size": 24}, "model.layers",
        {"embeddings": {"model.embed_tokens"}, "final_norm": {"model.norm"},
         "head": {"head.linear1", "head.linear2", "head.decoder"}},
        GROUPED_LAYER,
    ),
    "nomic_bert": (
        {**SMALL, **IDS}, "nomic_bert.layers",
        {"embeddings": {f"nomic_bert.embeddings.{name}" for name in TABLES - {"position_embeddings"}},
         "head": {"cls.predictions", "cls.predictions.transform.dense", "cls.predictions.transform.layer_norm"}},
        {**GROUPED_LAYER, "": {"post_attention_layernorm", "post_mlp_layernorm"}},
    ),
    "llama": (
        {**GROUPED, "tie_word_embeddings": False}, "model.layers",
        {"embeddings": {"model.embed_tokens"}, "final_norm": {"model.norm"}, "head": {"lm_head"}},
        GROUPED_LAYER,
    ),
}  # fmt: skip


def make(name: str) -> nn.Module:
    """A language model on the meta device."""
    from transformers import AutoConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    from lit_encoders.models.skeleton import skeleton

    if name not in CONFIG_MAPPING_NAMES:
        pytest.skip(f"this version of transformers has no {name}")
    ids = dict.fromkeys(("bos_token_id", "eos_token_id"))
    settings = {"vocab_size": 64, **(ids if name == "gpt2" else {}), **ARCHITECTURES[name][0]}
    return skeleton(AutoConfig.for_model(name, **settings))


def modules_of(names: Iterable[str]) -> set[str]:
    return {name.rpartition(".")[0] for name in names}


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_named_parts_of_architectures(name: str) -> None:
    model = make(name)
    _, path, named, _ = ARCHITECTURES[name]
    layer_map = map_layers(model)
    assert (layer_map.path, layer_map.num_layers) == (path, 3)
    for part in ("embeddings", "final_norm", "head"):
        found = {n for n, place in layer_map.places.items() if place == part}
        assert modules_of(found) == named.get(part, set())
        if found:
            assert set(LayerRange(part).names(layer_map)) == found


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_parameter_stands_in_exactly_one_place(name: str) -> None:
    model = make(name)
    layer_map = map_layers(model)
    assert list(layer_map.places) == [n for n, _ in model.named_parameters()]
    chosen = [
        n
        for text in ("embeddings", "0:1", "1:2", "2:3", "final_norm", "head")
        if text[0].isdigit() or text in layer_map.places.values()
        for n in LayerRange(text).names(layer_map)
    ]
    assert len(chosen) == len(set(chosen))
    assert set(chosen) == set(layer_map.places)
    every = dict(model.named_parameters(remove_duplicate=False))
    assert layer_map.ties.keys() == every.keys() - layer_map.places.keys()
    assert all(every[name] is every[listed] for name, listed in layer_map.ties.items())


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_attention_and_feed_forward_of_architectures(name: str) -> None:
    layer_map = map_layers(make(name))
    _, path, _, wanted = ARCHITECTURES[name]
    inside = {number: f"{path}.{number}." for number in range(3)}
    whole = set(LayerRange("1:2").names(layer_map))
    found = {part: set(LayerRange("1:2", part).names(layer_map)) for part in ("attention", "mlp")}
    found[""] = whole - found["attention"] - found["mlp"]
    assert not found["attention"] & found["mlp"]
    assert {part: modules_of(n.removeprefix(inside[1]) for n in names) for part, names in found.items()} == wanted
    for part in ("attention", "mlp"):
        assert len(LayerRange("all", part).names(layer_map)) == 3 * len(found[part])
