"""BABILong: background text, stories hidden in it at exact lengths, and the published sets."""

from __future__ import annotations

import json
import re
import sys
import types
from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Library
from tokenizers import decoders, models, pre_tokenizers, trainers

from farstate.corpus.store import TokenStore, write_store
from farstate.corpus.tokenizer import load_tokenizer, make_tokenizer
from farstate.corpus.tokens import write_tokens
from farstate.errors import FarstateError
from farstate.params import PublishedBabilong, Store, Tokenizer
from farstate.tasks.babi.solver import solve
from farstate.tasks.babilong import Babilong
from farstate.tasks.background import Background
from farstate.tasks.examples import Cell, Example
from farstate.tasks.labels import TASKS, labels
from farstate.tasks.published import published
from test_tokenizer import written

NOUNS = ["river", "mill", "harbour", "stranger", "lantern", "bishop", "orchard", "widow", "market", "letter"]
VERBS = ["was seen", "had waited", "could not be found", "was forgotten", "burned", "stood alone"]
FORMS = [
    'The {a} {v} by the {b}.',
    '"And what of the {a}?" asked Mr. Hale, who {v} near the {b}.',
    'Nobody knew why the {a} {v}!',
    '"The {a} {v}," she said. "It was the {b}."',
    "In those days, e.g. when the {b} {v}, no {a} was dear (so they said.)",
    "Dr. B. Lowe {v}; the {a}, however, stayed.",
]  # fmt: skip
SENTENCE_END = r"""[.!?]["')]*$"""
STORY = re.compile(
    r"(?:[A-Z]\w+ (?:(?:went|went back|moved|travelled|journeyed) to|got|took|grabbed|picked up|dropped|left|discarded|put down"
    r"|gave|handed|passed|is (?:not |no longer |either )?in) the |The \w+ is (?:north|south|east|west) of the )\w+"
    r"(?: to [A-Z]\w+| there| or the \w+)?\."
)


def prose(number: int) -> str:
    """A made-up document of a few hundred words; it has no sentence of bAbI's."""
    drawn = np.random.default_rng(number)
    paragraphs = []
    for _ in range(int(drawn.integers(3, 9))):
        sentences = [
            FORMS[int(drawn.integers(len(FORMS)))].format(a=drawn.choice(NOUNS), b=drawn.choice(NOUNS), v=drawn.choice(VERBS))
            for _ in range(int(drawn.integers(2, 6)))
        ]
        paragraphs.append(" ".join(sentences))
    return "\n\n".join(paragraphs) + "\n"


@dataclass
class World:
    """A tokenizer and a store of made-up documents."""

    tokenizer: Library
    store: TokenStore

    @cached_property
    def background(self) -> Background:
        return Background(self.store, "test", self.tokenizer)

    @cached_property
    def text(self) -> str:
        """The documents of the test split one behind the other, twice, as a piece that wraps around reads them."""
        return "".join(self.documents) * 2

    @cached_property
    def documents(self) -> list[str]:
        table = self.store.documents("test")
        places = zip(table.shard, table.offset, table.length, strict=True)
        return [self.tokenizer.decode(self.store.read(*map(int, place)).tolist()) for place in places]

    def babilong(self, **given: Any) -> Babilong:
        options = {"facts": (2, 6), "shots": 0, "seed": 3, "split": "test"} | given
        return Babilong(self.tokenizer, self.background, **options)

    def decode(self, tokens: np.ndarray) -> str:
        return str(self.tokenizer.decode(tokens.tolist(), skip_special_tokens=False))

    def encode(self, text: str) -> np.ndarray:
        return np.array(self.tokenizer.encode(text, add_special_tokens=False).ids, dtype=np.int64)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return made_world(tmp_path_factory.mktemp("small"), 400)


@pytest.fixture(scope="module")
def whole_labels(tmp_path_factory: pytest.TempPathFactory) -> World:
    """The same with a vocabulary that holds every label, since the documents it is learned from are full of them."""
    names = sorted({label for task in TASKS for label in labels(task)})
    return made_world(tmp_path_factory.mktemp("large"), 480, " ".join(f"I say {label} here." for label in names) * 3)


def made_world(folder: Path, vocabulary_size: int, extra: str = "") -> World:
    documents = written(folder, [prose(number) + extra for number in range(60)], validation=0.1, test=0.4)
    make_tokenizer(Tokenizer(kind="train", vocabulary_size=vocabulary_size), [documents], folder / "tokenizer")
    write_tokens(documents, folder / "tokenizer", Store(), vocabulary_size, folder / "shard")
    write_store([folder / "shard"], vocabulary_size, folder / "store")
    return World(load_tokenizer(folder / "tokenizer"), TokenStore(folder / "store"))


# background


@settings(max_examples=60, deadline=None)
@given(length=st.integers(0, 1500), seed=st.integers(0, 2**32))
def test_a_piece_is_exact_and_begins_and_parts_between_sentences(world: World, length: int, seed: int) -> None:
    piece = world.background.piece(length, np.random.default_rng(seed))
    again = world.background.piece(length, np.random.default_rng(seed))
    assert piece.tokens.shape == (length,)
    assert piece.tokens.tolist() == again.tokens.tolist()
    assert piece.places.tolist() == again.places.tolist() == sorted(set(piece.places.tolist()))
    assert piece.places[0] == 0
    text = world.decode(piece.tokens)
    assert text in world.text
    # A short piece may stand in several places.
    befores = (world.text[: found.start()].rstrip() for found in re.finditer(f"(?={re.escape(text)})", world.text))
    assert any(not before or re.search(SENTENCE_END, before) for before in befores)
    for place in piece.places[1:].tolist():
        assert place < length
        assert re.search(SENTENCE_END, world.decode(piece.tokens[:place]).rstrip())
        assert not re.search(r"\b(?:Mr|Dr|B)\.$", world.decode(piece.tokens[:place]))
        assert re.match(r"""\s*["(]*(?:[A-Z]|$)""", world.decode(piece.tokens[place:]))


@pytest.mark.parametrize(
    "marked",
    [
        'He came.¦ She left!¦  "Who?" said Ann.',
        'He said "no."¦\n\nThen it rained (a lot.)¦ Dr. Lowe slept.¦ At 5 p.m. he woke.',
        "one. two. 3.¦ Four",
        'A. B. Lowe, of St. Ives, e.g. here.¦ "Yes."¦\nEnd.¦ Mr. X.',
    ],
)
def test_places_are_all_ends_of_sentences(world: World, marked: str) -> None:
    pieces = [world.encode(part) for part in marked.split("¦")]
    tokens = np.concatenate(pieces)
    found = world.background._sentences.starts(tokens)
    assert "¦".join(world.decode(part) for part in np.split(tokens, found)) == marked


def test_a_tokenizer_that_writes_the_space_as_a_letter(world: World) -> None:
    """Sentencepiece's way: a text's first space is lost in decoding, and white space is found nevertheless."""
    tokenizer = Library(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.train_from_iterator(
        [world.text], trainers.BpeTrainer(vocab_size=300, special_tokens=["<unk>"], show_progress=False)
    )
    background = Background(world.store, "test", tokenizer)
    tokens = np.array(tokenizer.encode('The mill burned. "The river?" said Mr. Hale. The widow stood alone!').ids)
    starts = background._sentences.starts(tokens)
    assert [tokenizer.decode(part.tolist()) for part in np.split(tokens, starts)] == [
        "The mill burned.",
        '"The river?" said Mr. Hale.',
        "The widow stood alone!",
    ]


def test_the_whole_split_and_no_more(world: World) -> None:
    total = world.background.tokens
    assert total == int(world.store.documents("test").length.sum())
    assert world.background.piece(total, np.random.default_rng(0)).tokens.size == total
    with pytest.raises(
        FarstateError, match=rf"split 'test': {total + 1} tokens of background text are needed, .* have {total}; take"
    ):
        world.background.piece(total + 1, np.random.default_rng(0))
    with pytest.raises(FarstateError, match="split 'tset': unknown"):
        Background(world.store, "tset", world.tokenizer)


def test_only_what_is_needed_is_read(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []

    def counted(shard: int, offset: int, length: int) -> np.ndarray:
        read.append(length)
        return TokenStore.read(world.store, shard, offset, length)

    monkeypatch.setattr(world.store, "read", counted)
    for seed in range(20):
        read.clear()
        world.background.piece(100, np.random.default_rng(seed))
        assert sum(read) <= 100 + 516
        assert len(read) <= 4


def test_a_text_without_sentences_is_read_from_its_beginning(world: World, tmp_path: Path) -> None:
    documents = written(tmp_path, [f"{number} no end of it " * 30 for number in range(20)], validation=0.1, test=0.5)
    make_tokenizer(Tokenizer(kind="train", vocabulary_size=270), [documents], tmp_path / "tokenizer")
    write_tokens(documents, tmp_path / "tokenizer", Store(), 270, tmp_path / "shard")
    write_store([tmp_path / "shard"], 270, tmp_path / "store")
    background = Background(TokenStore(tmp_path / "store"), "test", load_tokenizer(tmp_path / "tokenizer"))
    piece = background.piece(500, np.random.default_rng(0))
    assert (piece.tokens.size, piece.places.tolist()) == (500, [0])


def test_starts_are_spread(world: World) -> None:
    firsts = {world.decode(world.background.piece(12, np.random.default_rng(seed)).tokens) for seed in range(200)}
    assert len(firsts) > 60


# stories hidden in text


def told_in(text: str) -> tuple[list[str], str]:
    """Facts and question of a decoded prompt."""
    body, question = re.fullmatch(r"(?s)(.*) ((?:Where|What|Who|How many|Is) [^.?\"]*\?) Answer:", text).groups()
    return [found[0] for found in STORY.finditer(body)], question


@settings(max_examples=150, deadline=None)
@given(
    task=st.sampled_from(TASKS), length=st.one_of(st.just(0), st.integers(170, 1500)), number=st.integers(0, 10_000),
    most=st.integers(2, 6),
)  # fmt: skip
def test_a_hidden_story(world: World, task: str, length: int, number: int, most: int) -> None:
    example = world.babilong(facts=(2, most)).example(Cell(task, length), number)
    assert (example.task, example.number, example.length, example.depth) == (task, number, length, None)
    assert length in (0, example.prompt.size)
    text = world.decode(example.prompt)
    facts, question = told_in(text)
    # The question is last, and the facts alone answer it.
    solution = solve(task, facts, question)
    assert (solution.answer, len(facts) <= max(most, 3)) == (example.label, True)
    # Every fact stands between sentences: taken out, the text is one of the split's again.
    rest = text[: text.rindex(f" {question}")]
    for fact in facts:
        before, _, behind = rest.partition(f" {fact}")
        assert not before or re.search(SENTENCE_END, before.rstrip())
        assert not behind or re.match(r"\s+\S|[A-Z\"]", behind)
        rest = before + behind
    assert (rest in world.text) if length else not rest
    # `facts` are the places of the facts that decide.
    assert len(example.facts) == len(solution.supporting)
    for place, fact in zip(example.facts, sorted(solution.supporting), strict=True):
        tokens = world.encode(f" {facts[fact]}")
        assert example.prompt[place : place + tokens.size].tolist() == tokens.tolist()
    assert world.decode(example.answer) == f" {example.label}."
    assert example.answer[-1] == world.encode(".")[0]


@settings(max_examples=100, deadline=None)
@given(task=st.sampled_from(TASKS), length=st.integers(200, 800), number=st.integers(0, 1000))
def test_tokens_are_those_of_the_joined_text(world: World, task: str, length: int, number: int) -> None:
    """But for the last word of the background, which is cut, the prompt is how the tokenizer writes its own text."""
    example = world.babilong().example(Cell(task, length), number)
    text = world.decode(example.prompt)
    facts, question = told_in(text)
    background = text[: text.rindex(f" {question}")]
    for fact in facts:
        background = background.replace(f" {fact}", "", 1)
    assume(any(background in document for document in world.documents))
    again = world.encode(world.decode(np.concatenate((example.prompt, example.answer))))
    prompt = example.prompt.tolist() + example.answer.tolist()
    end = world.encode(f" {question} Answer:").size + example.answer.size
    assert again[-end:].tolist() == prompt[-end:]
    cut = length + example.answer.size - end
    same = next((at for at, (one, other) in enumerate(zip(again.tolist(), prompt, strict=False)) if one != other), cut)
    assert world.decode(np.array(prompt[same:cut], dtype=np.int64)).strip().count(" ") == 0
    alone = world.babilong().example(Cell(task, 0), number)
    assert world.encode(world.decode(alone.prompt)).tolist() == alone.prompt.tolist()


def test_facts_stand_anywhere(world: World) -> None:
    """The middle of the supporting fact's places is the middle of the text, and all tenths of it are met."""
    maker = world.babilong()
    places = np.array([maker.example(Cell("qa1", 1000), number).facts[0] / 1000 for number in range(300)])
    assert set((10 * places).astype(int)) == set(range(10))
    # The last of 2 – 6 uniform places of a person lies behind the middle.
    assert 0.45 < np.median(places) < 0.75


def test_draws_depend_on_seed_split_cell_and_number_alone(world: World) -> None:
    one, other = world.babilong(), world.babilong()
    cells = [(Cell("qa2", 300), 5), (Cell("qa1", 300), 5), (Cell("qa2", 400), 5), (Cell("qa2", 300), 6)]
    first = [one.example(*cell) for cell in cells]
    second = [other.example(*cell) for cell in reversed(cells)][::-1]
    assert [each.prompt.tolist() for each in first] == [each.prompt.tolist() for each in second]
    assert len({tuple(each.prompt.tolist()[:50]) for each in first}) == len(cells)
    # The same story at another length, in other text.
    assert told_in(world.decode(first[0].prompt)) == told_in(world.decode(first[2].prompt))
    for changed in ({"seed": 4}, {"split": "train"}):
        assert world.babilong(**changed).example(*cells[0]).prompt.tolist() != first[0].prompt.tolist()


@pytest.mark.parametrize("length", [0, 700])
def test_solved_stories_come_first(world: World, length: int) -> None:
    example = world.babilong(shots=2).example(Cell("qa6", length), 1)
    assert length in (0, example.prompt.size)
    *solved, asked = re.findall(r"(?s)(.*? Answer:)(?: (\w+)\.|$)", world.decode(example.prompt))
    assert len(solved) == 2
    for story, label in solved:
        facts, question = told_in(story)
        assert solve("qa6", facts, question).answer == label
        assert story == " " + " ".join([*facts, question, "Answer:"])
        assert 2 <= len(facts) <= 4
    facts, question = told_in(asked[0])
    assert solve("qa6", facts, question).answer == example.label
    assert example.facts[0] > world.encode("".join(f"{story} {label}." for story, label in solved)).size - 1


@pytest.mark.parametrize("lengths", ["full", "uniform"])
def test_training_examples_fit_a_row(world: World, lengths: str) -> None:
    maker = world.babilong(context=200, training_lengths=lengths, mixture={"qa1": 3.0, "qa5": 1.0}, split="train")
    made = [maker.training(number) for number in range(200)]
    sizes = np.array([each.prompt.size + each.answer.size for each in made])
    assert (sizes == 201).all() if lengths == "full" else sizes.max() <= 201 and sizes.min() < 120 and np.unique(sizes).size > 50
    assert all(each.length == each.prompt.size for each in made)
    assert 120 < Counter(each.task for each in made)["qa1"] < 180
    for each in made:
        facts, question = told_in(world.decode(each.prompt))
        assert solve(each.task, facts, question).answer == each.label
    assert made[7].prompt.tolist() == maker.training(7).prompt.tolist()


def test_a_length_that_fits_some_stories_takes_those(world: World) -> None:
    """Where the drawn story does not fit, another one does, and never has more tokens than there are."""
    maker = world.babilong(facts=(2, 12))
    sizes = [maker.example(Cell("qa1", 0), number).prompt.size for number in range(20)]
    assert max(sizes) > 90 > min(sizes)
    for number in range(20):
        assert maker.example(Cell("qa1", 90), number).prompt.size == 90


def test_lengths_that_are_too_short_are_told(world: World) -> None:
    told = r"^tasks\.babilong\.lengths: 20 tokens are too few for qa3; .* shortest of 100 stories takes (\d+) with its question{}; take .*$"
    with pytest.raises(FarstateError, match=told.format("")) as caught:
        world.babilong().example(Cell("qa3", 20), 0)
    need = int(re.search(r"takes (\d+)", str(caught.value))[1])
    assert world.babilong().example(Cell("qa3", need), 0).prompt.size == need
    with pytest.raises(FarstateError, match=told.format(" and 2 solved stories before it")):
        world.babilong(shots=2).example(Cell("qa3", 20), 0)
    with pytest.raises(
        FarstateError, match=r"training row of 20 tokens \(T_train\) is too short for qa1; .*; take a longer context"
    ):
        world.babilong(context=20, tasks=["qa1"]).training(0)
    with pytest.raises(FarstateError, match="training examples need a context and tasks"):
        world.babilong().training(0)
    with pytest.raises(FarstateError, match=r"task 'qa12': unknown \(did you mean"):
        world.babilong().example(Cell("qa12", 500), 0)


def test_labels_of_several_tokens(world: World, whole_labels: World) -> None:
    told = r"^tasks\.babilong\.split_labels: the tokenizer writes 'bathroom' of qa1 as \d tokens \(' .*'\); take one with more symbols"
    with pytest.raises(FarstateError, match=told):
        world.babilong(split_labels="refuse", tasks=["qa1"])
    with pytest.raises(FarstateError, match=told):
        world.babilong(split_labels="refuse").example(Cell("qa1", 500), 0)
    maker = whole_labels.babilong(split_labels="refuse", tasks=TASKS)
    for task in TASKS:
        assert maker.example(Cell(task, 300), 0).answer.size == (2 if task != "qa8" else pytest.approx(3, abs=3))


def test_a_vocabulary_that_cannot_spell(world: World) -> None:
    tokenizer = Library(models.WordLevel({"<unk>": 0, ".": 1, "a": 2, "bathroom": 3}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    background = Background(world.store, "test", tokenizer)
    with pytest.raises(
        FarstateError, match=r"^tasks\.babilong: the tokenizer cannot spell 'bedroom', it reads back '.*'; choose one"
    ):
        Babilong(tokenizer, background, facts=(2, 3), shots=0, seed=0, split="test", tasks=["qa1"])


# the published sets

ROWS = [
    {"input": "It rained. Mary went to the park. Mary moved to the garden. It rained again.", "question": "Where is Mary? ", "target": "garden"},
    {"input": "John went to the office.", "question": "Where is John?", "target": "office"},
]  # fmt: skip


def lines(rows: list[dict[str, Any]]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def local(folder: Path, name: str, content: bytes) -> PublishedBabilong:
    (folder / name).parent.mkdir(parents=True)
    (folder / name).write_bytes(content)
    return PublishedBabilong(files=str(folder), lengths=("4k",))


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("data/qa1/4k.json", json.dumps(ROWS, indent=1).encode()),
        ("data/qa1/4k.json", lines(ROWS)),
        ("qa1/4k.jsonl", lines(ROWS)),
        ("qa1/4k.jsonl.zst", zstandard.ZstdCompressor().compress(lines(ROWS))),
        ("data/qa1/4k.parquet", None),
        ("4k/qa1-00000-of-00001.parquet", None),
    ],
)
def test_local_copies(world: World, tmp_path: Path, name: str, content: bytes | None) -> None:
    if content is None:
        pq.write_table(pa.Table.from_pylist(ROWS), tmp_path / "rows")
        content = (tmp_path / "rows").read_bytes()
    source = local(tmp_path / "copy", name, content)
    first, second = world.babilong(shots=1).published(source, "qa1", "4k")
    assert (first.task, first.number, first.length, first.label, second.label) == ("qa1", 0, 4096, "garden", "office")
    solved, _, asked = world.decode(first.prompt).partition("Answer:")
    assert re.fullmatch(r" \w+\. It rained\. Mary .* again\. Where is Mary\? Answer:", asked)
    assert told_in(f"{solved}Answer:")
    assert world.decode(second.answer) == " office."
    assert [each.number for each in world.babilong().published(source, "qa1", "4k", examples=1)] == [0]


def test_hub_sets(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def load_dataset(path: str, name: str, *, split: str, revision: str | None, streaming: bool) -> Any:
        asked.append((path, name, split, revision, streaming))
        if split == "qa2":
            raise ConnectionError("Couldn't reach the hub\nmore of it")
        return iter(ROWS)

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    source = PublishedBabilong(hub="RMT-team/babilong", lengths=("0k",))
    made: list[Example] = list(world.babilong().published(source, "qa1", "0k", revision="abc"))
    assert [each.label for each in made] == ["garden", "office"]
    assert made[0].length == 0 < made[0].prompt.size
    with pytest.raises(FarstateError) as caught:
        list(published(source, "qa2", "0k"))
    assert str(caught.value) == (
        "hub data set 'RMT-team/babilong' (0k), split 'qa2': cannot be read (ConnectionError: Couldn't reach the hub); offline, copy its "
        "files here and give tasks.babilong.published.files: '<folder>', with <folder>/data/qa2/0k.json, in the place of hub"
    )
    assert asked[0] == ("RMT-team/babilong", "0k", "qa1", "abc", True)


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (
            lines([ROWS[0], {"input": "x", "target": "office"}]),
            r"4k\.json line 2: no text under 'question'; it has input, target$",
        ),
        (json.dumps([*ROWS, 3]).encode(), r"4k\.json record 3: an object with input, question, target is expected, found int$"),
        (
            lines([{**ROWS[0], "target": "park"}]),
            r"4k\.json line 1: target 'park' is none of the task's labels, bathroom, .*office$",
        ),
        (lines([{**ROWS[0], "target": 7}]), r"4k\.json line 1: no text under 'target'"),
        (b'{"input": "x"\n', r"4k\.json line 1: damaged, not JSON \(.*\); copy the file again$"),
    ],
)
def test_damaged_records_are_told(tmp_path: Path, content: bytes, told: str) -> None:
    with pytest.raises(FarstateError, match=told):
        list(published(local(tmp_path / "copy", "data/qa1/4k.json", content), "qa1", "4k"))


def test_missing_sets_are_told(tmp_path: Path) -> None:
    source = local(tmp_path / "copy", "data/qa1/4k.json", lines(ROWS))
    for task, length in (("qa2", "4k"), ("qa1", "8k")):
        with pytest.raises(
            FarstateError, match=rf"files '.*copy': has no set {length} of {task}; expected .*/data/{task}/{length}\.json"
        ):
            list(published(source, task, length))
    (tmp_path / "copy/data/qa1/1k.parquet").write_bytes(b"no parquet")
    with pytest.raises(FarstateError, match=r"1k\.parquet: damaged parquet file \(.*\); copy it again"):
        list(published(source, "qa1", "1k"))
    assert [PublishedBabilong.tokens_of(name) for name in ("0k", "4k", "256k", "10M")] == [0, 4096, 262_144, 10 << 20]


def test_lists_are_spelled_alike(tmp_path: Path) -> None:
    row = {"input": "x", "question": "What is Mary carrying?", "target": "apple, milk"}
    source = local(tmp_path / "copy", "data/qa8/4k.json", lines([row]))
    assert [each.target for each in published(source, "qa8", "4k")] == ["apple,milk"]
