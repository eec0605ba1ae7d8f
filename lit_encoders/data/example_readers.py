"""What the packages of the examples hold, as documents or as a model folder that transformers loads."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Iterator
from contextlib import closing
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

from lit_encoders.data.ontology import read_obo_terms

if TYPE_CHECKING:
    from tokenizers import Tokenizer

# The pieces of a reaction SMILES: atoms in brackets, organic atoms, bonds, rings. Source: Schwaller et al. (2019),
# doi:10.1021/acscentsci.9b00576, as in rxnfp/tokenization.py.
SMILES = (
    r"\%\([0-9]{3}\)|\[[^\]]+]|Br?|Cl?|N|O|S|P|F|I|b|c|n|o|s|p|\||\(|\)|\.|=|#|-|\+|\\|\/|:|~|@|\?|>>?|\*|\$"
    r"|\%[0-9]{2}|[0-9]"
)
_PRE = re.compile(r"(<pre\b.*?</pre>)", re.DOTALL)
_SILENT = re.compile(r"<(script|style)\b.*?</\1>|<!--.*?-->", re.DOTALL)
_BLOCK = re.compile(r"</?(?:h[1-6]|p|pre|div|br|ul|ol|li|table|tr|td|th)\b[^>]*>")
_TAG = re.compile(r"<[^>]*>")


def read_obo_definitions(path: Path) -> Iterator[str]:
    """Yield the definition of every term of an OBO ontology that is in use, in file order."""
    return (term.definition for term in read_obo_terms(path) if term.definition)


def read_go_definitions(path: Path) -> Iterator[str]:
    """Yield the definition of every term of GO.sqlite that has one, by the number of the term.

    Obsolete terms stand in a table of their own and are left out.
    """
    import sqlite3  # Not every Python is built with it.

    with closing(sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro&immutable=1", uri=True)) as database:
        terms = database.execute("SELECT definition FROM go_term WHERE definition IS NOT NULL ORDER BY go_id")
        yield from (definition for (definition,) in terms)


def read_po_sources(path: Path) -> Iterator[str]:
    """Yield the text to translate of every entry of a gettext file, in file order."""
    return (source for source, _ in read_po_pairs(path))


def read_po_translations(path: Path) -> Iterator[str]:
    """Yield every translation of a gettext file, in file order; what is empty or marked fuzzy is left out."""
    return (translation for _, translation in read_po_pairs(path) if translation)


def read_po_pairs(path: Path) -> Iterator[tuple[str, str]]:
    """Yield text and translation of every entry of a gettext file but the header; a fuzzy translation is empty."""
    for entry in path.read_text(encoding="utf-8").split("\n\n"):
        fields = dict.fromkeys(("msgid", "msgstr"), "")
        for field, strings in re.findall(r'^(msgid|msgstr)((?:\s*"(?:[^"\\]|\\.)*")+)', entry, re.MULTILINE):
            # One string over several lines; its escapes are those of JSON.
            fields[field] = "".join(json.loads(string) for string in re.findall(r'"(?:[^"\\]|\\.)*"', strings)).strip()
        if fields["msgid"]:
            yield fields["msgid"], "" if re.search(r"^#,.*\bfuzzy\b", entry, re.MULTILINE) else fields["msgstr"]


def html_text(markup: str) -> str:
    """Text of a piece of HTML: a line for each block, breaks within code kept.

    >>> html_text("<h2>One</h2><p>two &amp;\\n <b>three</b></p><pre>a\\nb</pre>")
    'One\\ntwo & three\\na\\nb'
    """
    pieces = _PRE.split(_SILENT.sub("", markup))
    pieces[::2] = [re.sub(r"\s+", " ", piece) for piece in pieces[::2]]
    lines = html.unescape(_TAG.sub("", _BLOCK.sub("\n", "".join(pieces)))).splitlines()
    return "\n".join(line for line in map(str.strip, lines) if line)


def read_help_pages(path: Path) -> Iterator[str]:
    """Yield the content of every page of LibreOffice's help, by path: the same page at the same place in each language.

    Menus, search fields and the footer are left out; a page without text is an empty document.
    """
    for page in sorted(path.rglob("*.html"), key=lambda page: page.relative_to(path).as_posix()):
        content = page.read_text(encoding="utf-8").partition('<div id="DisplayArea"')[2].partition(">")[2]
        yield html_text(content.partition('<div id="SearchFrame">')[0])


def read_declarations(path: Path) -> Iterator[str]:
    """Yield preamble and articles of the declaration of human rights: of one language (file) or of all, by code."""
    for file in [path] if path.is_file() else sorted(path.glob("*.html")):
        for section in re.finditer(r"<(header|article)\b.*?</\1>", file.read_text(encoding="utf-8"), re.DOTALL):
            yield html_text(section[0])


def read_tab_records(path: Path) -> Iterator[tuple[str, str]]:
    """Yield class and text of a table of Orange, in file order; names, types and roles stand in its first three rows.

    Rows without text (R52 has one) are left out, which gives the usual counts.
    """
    with path.open(encoding="utf-8", newline="\n") as file:
        names = next(file).rstrip("\n").split("\t")
        label, column = names.index("Category"), names.index("Text")
        rows = (line.rstrip("\n").split("\t") for line in file)
        next(rows), next(rows)
        for row in rows:
            if len(row) > column and row[column].strip():
                yield row[label], row[column]


def read_tab_texts(path: Path) -> Iterator[str]:
    """Yield the texts of a table of Orange; see `read_tab_records`."""
    return (text for _, text in read_tab_records(path))


def read_tagged_sentences(path: Path) -> Iterator[tuple[list[str], list[str]]]:
    """Yield words and tags of a file with a token and a tag on each line, and an empty token between sentences."""
    words: list[str] = []
    tags: list[str] = []
    for line in [*path.read_text(encoding="utf-8").split("\n"), ""]:
        word, _, tag = line.partition("\t")
        if word.strip():
            words.append(word.strip())
            tags.append(tag.strip())
        elif words:
            yield words, tags
            words, tags = [], []


def read_tagged_lines(path: Path) -> Iterator[str]:
    """Yield the sentences of a file of tagged tokens as texts, without the tags."""
    return (" ".join(words) for words, _ in read_tagged_sentences(path))


def read_brown_sentences(path: Path) -> Iterator[tuple[str, list[str], list[str]]]:
    """Yield text, words and tags of every sentence of the Brown corpus; texts are ca01 to cr09."""
    for file in sorted(path.glob("c[a-r][0-9][0-9]")):
        for line in file.read_text(encoding="ascii").splitlines():
            pairs = [word.rpartition("/") for word in line.split()]
            if pairs:
                yield file.name, [word for word, _, _ in pairs], [tag for _, _, tag in pairs]


def read_brown_texts(path: Path) -> Iterator[str]:
    """Yield the texts of the Brown corpus, a line for each sentence; without the tags."""
    for _, sentences in groupby(read_brown_sentences(path), key=lambda sentence: sentence[0]):
        yield "\n".join(" ".join(words) for _, words, _ in sentences)


def read_go_synonyms(path: Path) -> Iterator[tuple[str, str]]:
    """Yield every synonym of a term of GO.sqlite with the term's definition, by the number of the term."""
    import sqlite3

    with closing(sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro&immutable=1", uri=True)) as database:
        yield from database.execute(
            "SELECT synonym, definition FROM go_synonym JOIN go_term USING (_id) "
            "WHERE definition IS NOT NULL AND like_go_id = 0 ORDER BY go_id, synonym"
        )


def reaction_tokenizer(words: list[str]) -> Tokenizer:
    """Make a tokenizer of reaction SMILES out of its vocabulary, which holds BERT's special tokens."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers, processors

    vocabulary = {word: number for number, word in enumerate(words) if word}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(SMILES), behavior="isolated")
    ends = [(token, vocabulary[token]) for token in ("[CLS]", "[SEP]")]
    tokenizer.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=ends)
    return tokenizer


def convert_rxnfp(source: Path, folder: Path) -> None:
    """Write a BERT of reactions as a folder that names its kind of model and has a tokenizer; rxnfp's does not."""
    from transformers import BertConfig, BertForMaskedLM, PreTrainedTokenizerFast

    settings = json.loads((source / "config.json").read_text())
    model = BertForMaskedLM.from_pretrained(source, config=BertConfig(**settings))
    model.save_pretrained(folder)
    specials = {f"{name}_token": f"[{name.upper()}]" for name in ("pad", "unk", "cls", "sep", "mask")}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=reaction_tokenizer((source / "vocab.txt").read_text().split("\n")),
        model_max_length=settings["max_position_embeddings"],
        **specials,
    )
    tokenizer.save_pretrained(folder)


def convert_gguf(source: Path, folder: Path) -> None:
    """Write a GGUF file as a bfloat16 folder: transformers would unpack its 4-bit weights anew at every start."""
    import torch
    import transformers
    from transformers import AutoModelForCausalLM, AutoTokenizer

    # Newer versions leave the weights packed unless told otherwise; older ones know no such setting.
    unpack = getattr(transformers, "GgufConfig", None)
    settings = {"quantization_config": unpack(dequantize=True)} if unpack else {}
    model = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.bfloat16, **settings)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name).save_pretrained(folder)
