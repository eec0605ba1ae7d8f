"""Documents with a fact hidden in them, and the questions that are asked of them: all made from a seed.

Source: the needle task of Touchent, de la Clergerie (2026), arXiv:2605.12438: "is this fact in the document?",
templated facts, lengths of 512 to 8,192 tokens, three positions. Templates, words and filler are ours.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, product
from typing import TYPE_CHECKING, Literal, get_args

from lit_encoders.data.sources import as_source
from lit_encoders.data.tokens import encode, num_ids

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Position = Literal["start", "middle", "end"]
POSITIONS: tuple[Position, ...] = get_args(Position)

# What a fact can say: a template with the values that it takes. A near miss differs in the value alone.
FACTS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("The access code of {name} is {value}.", ("lantern", "velvet", "copper", "thunder", "pepper", "marble")),
    ("{name} was born in {value}.", ("Lisbon", "Cairo", "Oslo", "Madrid", "Toronto", "Dublin")),
    ("{name} works as a {value}.", ("dentist", "lawyer", "farmer", "pilot", "nurse", "painter")),
    ("The pet of {name} is a {value}.", ("horse", "parrot", "rabbit", "snake", "goat", "turtle")),
)


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


_FIRST = _words(
    "Adam Alice Anna Arthur Barbara Ben Brian Carl Carol Charles Clara Daniel David Diana Edward Ellen Emma Eric Eva "
    "Frank Fred George Grace Hannah Harry Helen Henry Ian Irene Jack James Jane Jason Jean Joan John Julia Karen Kate "
    "Kevin Laura Leo Linda Louis Lucy Marie Mark Martha Martin Mary Michael Nancy Oliver Oscar Paul Peter Rachel "
    "Robert Rose Ruth Sarah Simon Thomas William"
)
_LAST = _words(
    "Adams Allen Anderson Bailey Baker Barnes Bell Bennett Brooks Brown Campbell Carter Clark Collins Cook Cooper "
    "Davis Edwards Evans Fisher Foster Garcia Gibson Graham Grant Gray Green Hall Hamilton Harris Hill Howard Hughes "
    "Hunter Jackson Johnson Jones Kelly King Lee Lewis Marshall Martinez Mason Miller Mitchell Moore Morgan Morris "
    "Murphy Nelson Parker Phillips Reed Roberts Robinson Scott Stewart Taylor Turner Walker Watson Wilson Young"
)
NUM_PEOPLE = len(_FIRST) * len(_LAST)

# What the positive control asks: two sentences that have every word of weight apart, and no person in them.
_CONTROL = (
    "The signal at the harbour is green and steady and low.",
    "The signal at the harbour is red, blinking, high.",
)

# Filler: everyday sentences that speak of nobody by name.
_FILLER = (
    "The {adjective} {noun} stood near the {noun} for most of the {time}.",
    "In the {time} the {noun} was as {adjective} as before.",
    "Nobody knew why the {noun} looked so {adjective} that {time}.",
    "They moved the {noun} to the {noun} and left it there.",
    "A {adjective} {noun} can be of use when the {noun} is {adjective}.",
    "By the end of the {time} there was another {noun} behind the {noun}.",
    "It was a {adjective} {time}, and the {noun} did not change.",
)
_WORDS = {
    "adjective": _words("small large heavy bright quiet empty broken narrow clean simple wide dry"),
    "noun": _words(
        "table river bridge window garden market road letter station wall kitchen field engine boat shelf door"
    ),
    "time": _words("morning evening week summer winter month night year"),
}
_NUM_SENTENCES = 5_000
# Tokens of a text that documents are filled with: more would only take longer to read.
_NUM_FILLER = 200_000


@dataclass(frozen=True)
class Needle:
    """A fact, and what a document of its own is made from.

    Attributes:
        fact: the sentence that the document has.
        near_miss: the same of the same person with another value, which it does not have.
        position: where in the document the fact stands.
        key: of the document's filler.
    """

    fact: str
    near_miss: str
    position: Position
    key: str


@dataclass(frozen=True)
class Filler:
    """Text to hide facts in.

    Attributes:
        ids: of all of it, one piece after the other.
        starts: where its pieces (sentences, or documents of a text) begin.
    """

    ids: list[int]
    starts: list[int]

    def take(self, key: str, count: int) -> list[int]:
        """So many ids from the beginning of a piece that the key chooses; after the last piece comes the first.

        >>> Filler([1, 2, 3], [0]).take("any", 5)
        [1, 2, 3, 1, 2]
        """
        start = random.Random(f"filler {key}").choice(self.starts)
        turns = (start + count) // len(self.ids) + 1
        return (self.ids * turns)[start : start + count] if turns > 1 else self.ids[start : start + count]


def make_needles(counts: Sequence[int], positions: Sequence[Position], seed: int = 0) -> list[list[Needle]]:
    """Make facts for several sets, each of another person, so that no fact is in two of them.

    Args:
        counts: facts of each set for each position.
        positions: where they stand.
        seed: everything follows from it.

    Returns:
        For each set its needles, positions in turn.

    Raises:
        ValueError: there are fewer people than facts.

    >>> fit, test = make_needles([1, 2], ["start", "end"])
    >>> len(fit), [needle.position for needle in test]
    (2, ['start', 'end', 'start', 'end'])
    """
    wanted = sum(counts) * len(positions)
    if wanted > NUM_PEOPLE:
        raise ValueError(f"fit and pairs must be at most {NUM_PEOPLE} facts together over all positions, got {wanted}")
    draw = random.Random(f"needles {seed}")
    people = draw.sample([" ".join(names) for names in product(_FIRST, _LAST)], wanted)
    sets = []
    for count in counts:
        needles = []
        for place in range(count * len(positions)):
            name = people.pop()
            template, values = draw.choice(FACTS)
            fact, near_miss = (template.format(name=name, value=value) for value in draw.sample(values, 2))
            needles.append(Needle(fact, near_miss, positions[place % len(positions)], f"{seed} {name}"))
        sets.append(needles)
    return sets


def control_needles(counts: Sequence[int], positions: Sequence[Position], seed: int = 0) -> list[list[Needle]]:
    """The same for the positive control: one of two sentences, which the words of a document alone tell apart.

    Args:
        counts, positions, seed: see `make_needles`; sets share their two facts and differ in filler.
    """
    draw = random.Random(f"control {seed}")
    sets = []
    for number, count in enumerate(counts):
        needles = []
        for place in range(count * len(positions)):
            fact, near_miss = draw.sample(_CONTROL, 2)
            key = f"{seed} control {number} {place}"
            needles.append(Needle(fact, near_miss, positions[place % len(positions)], key))
        sets.append(needles)
    return sets


def sentences(seed: int = 0) -> Iterator[str]:
    """Everyday sentences without end, the same for the same seed.

    >>> next(sentences(0)) == next(sentences(0)) != next(sentences(1))
    True
    """
    draw = random.Random(f"sentences {seed}")
    while True:
        sentence = draw.choice(_FILLER)
        while "{" in sentence:
            kind = sentence[sentence.index("{") + 1 : sentence.index("}")]
            sentence = sentence.replace(f"{{{kind}}}", draw.choice(_WORDS[kind]), 1)
        yield sentence


def make_filler(tokenizer: PreTrainedTokenizerBase, text: str | None = None, seed: int = 0) -> Filler:
    """Tokenise sentences of templates, or the first of a text.

    Args:
        tokenizer: of the model.
        text: as data.train takes it; None makes sentences.
        seed: of the sentences.

    Raises:
        ValueError: the text cannot be read, or has no token.
    """
    size = num_ids(tokenizer)
    if text is None:
        # With the space that stands between sentences, which some tokenizers write into the first token.
        made = [f" {sentence}" for sentence in islice(sentences(seed), _NUM_SENTENCES)]
        pieces = encode(made, tokenizer, size)
    else:
        pieces, found = [], 0
        documents = as_source(text, "text", "line", "text").documents()
        while found < _NUM_FILLER and (batch := list(islice(documents, 100))):
            encoded = [ids for ids in encode(batch, tokenizer, size) if ids]
            pieces += encoded
            found += sum(map(len, encoded))
        if not pieces:
            raise ValueError(f"text must hold at least one token to fill documents with, got none in {text!r}")
    starts = [0]
    for piece in pieces[:-1]:
        starts.append(starts[-1] + len(piece))
    return Filler([token for piece in pieces for token in piece], starts)


def hide(fact: Sequence[int], filler: Sequence[int], position: Position) -> list[int]:
    """Put a fact into filler.

    Args:
        fact: ids.
        filler: ids, as many as the document has beside the fact.
        position: at the very start or end, or with as much filler before as after it (one less where it is odd).

    >>> hide([7, 8], [1, 2, 3], "middle")
    [1, 7, 8, 2, 3]
    """
    before = {"start": 0, "middle": len(filler) // 2, "end": len(filler)}[position]
    return [*filler[:before], *fact, *filler[before:]]


def make_documents(
    needles: Sequence[Needle], filler: Filler, content: int, tokenizer: PreTrainedTokenizerBase
) -> list[list[int]]:
    """Write the document of each needle: filler is cut on tokens, so that all have exactly one length.

    Args:
        needles: with their facts and positions.
        filler: to hide them in; it begins where a sentence does and may end within one.
        content: tokens of a document without special ones, at least those of its fact.
        tokenizer: of the model.

    Returns:
        Ids of each document's content, ``content`` of them.
    """
    facts = [needle.fact if needle.position == "start" else f" {needle.fact}" for needle in needles]
    encoded = encode(facts, tokenizer, num_ids(tokenizer))
    return [
        hide(fact, filler.take(needle.key, content - len(fact)), needle.position)
        for needle, fact in zip(needles, encoded, strict=True)
    ]
