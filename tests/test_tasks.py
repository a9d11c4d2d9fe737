"""Examples of the tasks, their data sets, the rows that training reads, scores, and their comparison."""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import golden
from farstate import params
from farstate.corpus.tokenizer import load_tokenizer
from farstate.errors import FarstateError
from farstate.evaluation.perplexity import EvaluationSettings
from farstate.files import read_manifest, write_json, write_manifest
from farstate.models.checkpoints import save_model
from farstate.models.language_model import LanguageModel
from farstate.models.registry import config_from_json
from farstate.runs import BASE, CONTROL
from farstate.task_plan import ANSWERS, EXAMPLES, SCORES
from farstate.tasks import compare as comparing
from farstate.tasks.babi.world import story
from farstate.tasks.copying import PADDING, Copying, Vocabulary
from farstate.tasks.examples import Cell, Example, Examples, draws, write_examples
from farstate.tasks.labels import TASKS
from farstate.tasks.measure import measure
from farstate.tasks.passkey import FILLER, INSTRUCTION, KEY, QUESTION, Passkey
from farstate.tasks.rows import TaskRows
from farstate.tasks.scores import score


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A byte-level BPE that knows some of the words and no number."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    learned = Tokenizer(models.BPE())
    learned.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    learned.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=330, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False)
    learned.train_from_iterator([FILLER * 3 + QUESTION + INSTRUCTION], trainer)
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    learned.save(str(path))
    return load_tokenizer(path)


def passkey(tokenizer: Any, **changes: Any) -> Passkey:
    given = {"keys": (100, 999), "background": None, "instruction": True, "seed": 0, "split": "test"}
    return Passkey(tokenizer, **{**given, **changes})


# --- passkey ---------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(length=st.integers(150, 700), depth=st.floats(0.0, 1.0), number=st.integers(0, 10**6), instruction=st.booleans())
def test_a_passkey_prompt_has_exactly_its_tokens_and_the_whole_key(
    tokenizer: Any, length: int, depth: float, number: int, instruction: bool
) -> None:
    example = passkey(tokenizer, instruction=instruction).example(Cell("passkey", length, depth), number)
    assert example.prompt.size == length
    text = tokenizer.decode(example.prompt.tolist())
    assert text.count(KEY.format(key=example.label)) == 1
    assert text.endswith(QUESTION)
    assert tokenizer.decode(example.answer.tolist()) == f" {example.label}."
    told = tokenizer.encode(KEY.format(key=example.label), add_special_tokens=False).ids
    (at,) = example.facts
    assert example.prompt[at : at + len(told)].tolist() == told
    if instruction:
        assert text.startswith(INSTRUCTION)


@pytest.mark.parametrize("depth", [0.0, 0.1, 0.5, 0.9, 1.0])
def test_the_key_stands_within_a_sentence_of_its_depth(tokenizer: Any, depth: float) -> None:
    maker = passkey(tokenizer, instruction=False)
    longest = max(len(tokenizer.encode(f" {part}.").ids) for part in FILLER.strip(" .").split(". "))
    for number in range(5):
        example = maker.example(Cell("passkey", 600, depth), number)
        told = len(tokenizer.encode(KEY.format(key=example.label)).ids)
        room = 600 - told - len(tokenizer.encode(QUESTION).ids)
        assert abs(example.facts[0] - depth * room) <= longest
        # Nothing is cut in two: what stands before the key is the end of a sentence, or nothing.
        before = tokenizer.decode(example.prompt[: example.facts[0]].tolist())
        assert before == "" or before.endswith(".")


def test_keys_are_spread_over_their_range_and_differ_between_splits(tokenizer: Any) -> None:
    keys = {
        split: [int(passkey(tokenizer, split=split, context=200).training(n).label) for n in range(400)]
        for split in ("train", "test")
    }
    assert min(keys["test"]) < 150
    assert max(keys["test"]) > 950
    assert all(100 <= key <= 999 for key in keys["test"])
    assert sum(a == b for a, b in zip(*keys.values(), strict=True)) < 10
    assert passkey(tokenizer).chance == 1 / 900
    other = passkey(tokenizer, keys=(1, 50000), context=200)
    sizes = {len(other.training(n).label) for n in range(200)}
    assert sizes >= {4, 5}
    assert all(other.training(n).prompt.size + other.training(n).answer.size == 201 for n in range(50))


def test_an_example_depends_on_its_number_alone(tokenizer: Any) -> None:
    cell = Cell("passkey", 200, 0.5)
    first, second = passkey(tokenizer), passkey(tokenizer)
    backwards = {number: second.example(cell, number) for number in reversed(range(6))}
    for number in range(6):
        one = first.example(cell, number)
        assert one.label == backwards[number].label
        assert np.array_equal(one.prompt, backwards[number].prompt)
    assert first.example(cell, 0).label != first.example(Cell("passkey", 201, 0.5), 0).label
    assert draws(0, "test", "a", 1).random() != draws(0, "train", "a", 1).random()


@pytest.mark.parametrize(
    ("cell", "said"),
    [
        (Cell("passkey", 40, 0.5), "does not hold the key and the question, which take"),
        (Cell("passkey", 200, 1.5), "1.5 is not a depth"),
        (Cell("passkey", 200, -0.1), "-0.1 is not a depth"),
    ],
)
def test_an_impossible_passkey_is_refused(tokenizer: Any, cell: Cell, said: str) -> None:
    with pytest.raises(FarstateError, match=said) as caught:
        passkey(tokenizer).example(cell, 0)
    assert "\n" not in str(caught.value)


def test_a_tokenizer_that_cannot_spell_a_number_is_refused() -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = Tokenizer(models.WordLevel({"[UNK]": 0, ".": 1, "the": 2}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    with pytest.raises(FarstateError, match=r"tasks\.passkey: the tokenizer cannot spell '100'"):
        passkey(words)


# --- copying ---------------------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(length=st.integers(1, 400), number=st.integers(0, 10**6))
def test_a_string_is_framed_and_asked_again(length: int, number: int) -> None:
    maker = Copying("abcdefgh", seed=3, split="test")
    example = maker.example(Cell("copying", length), number)
    assert len(example.label) == length
    assert set(example.label) <= set("abcdefgh")
    assert maker.vocabulary.decode(example.prompt) == f"${example.label}|"
    assert maker.vocabulary.decode(example.answer) == f"{example.label}."
    assert 0 not in example.prompt
    assert example.prompt.max() < len(maker.vocabulary)


def test_training_strings_have_all_lengths_and_all_letters_alike() -> None:
    maker = Copying("abcd", seed=0, split="train", training_lengths=(3, 6))
    texts = [maker.training(number).label for number in range(4000)]
    lengths = np.bincount([len(text) for text in texts], minlength=7)[3:]
    assert lengths.min() > 900
    letters = np.array([sum(text.count(letter) for text in texts) for letter in "abcd"])
    assert abs(letters / letters.sum() - 0.25).max() < 0.01
    assert np.array_equal(Vocabulary("abcd").encode("a$"), [1, 5])


# --- the data set ----------------------------------------------------------------------------------------


def test_a_data_set_gives_back_what_was_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("farstate.tasks.examples._BATCH_EXAMPLES", 7)
    maker = Copying("abcd", seed=0, split="train", training_lengths=(1, 9))
    written = [maker.training(number) for number in range(40)]
    facts = write_examples(iter(written), tmp_path / EXAMPLES)
    assert facts["examples"] == 40
    assert facts["longest_answer"] == max(one.answer.size for one in written)
    assert facts["tokens"] == sum(one.prompt.size + one.answer.size for one in written)
    read = Examples(tmp_path / EXAMPLES)
    assert len(read) == 40
    for one, other in zip(written, read, strict=True):
        assert (one.task, one.number, one.length, one.depth, one.label, one.facts) == (
            other.task, other.number, other.length, other.depth, other.label, other.facts,
        )  # fmt: skip
        assert np.array_equal(one.prompt, other.prompt)
        assert np.array_equal(one.answer, other.answer)
    prompt, answer = read.lengths()
    assert prompt.tolist() == [one.prompt.size for one in written]
    assert answer.tolist() == [one.answer.size for one in written]


def test_a_damaged_data_set_is_named(tmp_path: Path) -> None:
    maker = Copying("abcd", seed=0, split="test")
    path = tmp_path / EXAMPLES
    write_examples([maker.example(Cell("copying", 50), number) for number in range(20)], path)
    path.write_bytes(path.read_bytes()[:400])
    with pytest.raises(FarstateError, match="damaged or truncated"):
        Examples(path)
    with pytest.raises(FarstateError, match="no such file"):
        Examples(tmp_path / "absent")
    with pytest.raises(FarstateError, match="no example"):
        write_examples([], tmp_path / "none")


# --- rows ------------------------------------------------------------------------------------------------


def data_set(folder: Path, count: int = 60, lengths: tuple[int, int] = (1, 5)) -> Examples:
    maker = Copying("abcdef", seed=1, split="train", training_lengths=lengths)
    write_examples((maker.training(number) for number in range(count)), folder / EXAMPLES)
    return Examples(folder / EXAMPLES)


@pytest.mark.parametrize("packing", ["one_per_row", "packed"])
def test_every_example_is_read_once_and_only_its_answer_counts(tmp_path: Path, packing: Any) -> None:
    examples = data_set(tmp_path)
    rows = TaskRows(examples, 30, 2, 5, packing, 0.0)
    vocabulary = Vocabulary("abcdef")
    told = []
    for step in range(rows.steps):
        batch = rows.batch(step)
        assert batch.tokens.shape == (2, 31)
        assert batch.weights is not None
        assert batch.weights.shape == (2, 30)
        assert batch.fresh.all()
        for tokens, weights in zip(batch.tokens.numpy(), batch.weights.numpy(), strict=True):
            text = vocabulary.decode(tokens)
            text = text.replace(PADDING, "")
            told += text.split(".")[:-1]
            # The targets with weight are the answers with their ends, one behind another, and nothing else.
            counted = vocabulary.decode(tokens[1:][weights > 0])
            assert counted == "".join(part.split("|")[1] + "." for part in text.split(".")[:-1])
    wanted = sorted(f"${one.label}|{one.label}" for one in examples)
    left = len(wanted) - len(told)
    assert left == 0 if packing == "one_per_row" else 0 <= left < 2 * 7, "the last broken batch is left out"
    assert Counter(told) <= Counter(wanted)
    if packing == "packed":
        assert rows.steps < TaskRows(examples, 30, 2, 5, "one_per_row", 0.0).steps
        assert any(vocabulary.decode(row).count("$") > 1 for row in rows.batch(0).tokens.numpy())


def test_the_rest_of_an_example_has_its_own_weight(tmp_path: Path) -> None:
    batch = TaskRows(data_set(tmp_path), 30, 4, 0, "packed", 0.25).batch(0)
    assert batch.weights is not None
    vocabulary = Vocabulary("abcdef")
    for tokens, weights in zip(batch.tokens.numpy(), batch.weights.numpy(), strict=True):
        for token, weight in zip(tokens[1:], weights, strict=True):
            if vocabulary.symbols[token] in ("$", PADDING):
                assert weight == 0.0
            elif weight != 1.0:
                assert weight == 0.25


def test_the_seed_decides_the_order(tmp_path: Path) -> None:
    examples = data_set(tmp_path)
    first, again, other = (TaskRows(examples, 30, 4, seed, "one_per_row", 0.0).batch(0).tokens for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_a_process_reads_its_rows_alone(tmp_path: Path) -> None:
    rows = TaskRows(data_set(tmp_path), 30, 4, 1, "packed", 0.25)
    whole, part = rows.batch(1), rows.batch(1, np.array([1, 3]))
    for name in ("tokens", "document", "offset", "fresh", "weights"):
        assert torch.equal(getattr(part, name), getattr(whole, name)[[1, 3]])


def test_rows_that_cannot_be_made_are_refused(tmp_path: Path) -> None:
    examples = data_set(tmp_path, lengths=(9, 9))
    with pytest.raises(FarstateError, match="of 21 tokens does not fit a row of 16"):
        TaskRows(examples, 16, 2, 0, "one_per_row", 0.0)
    with pytest.raises(FarstateError, match="a batch has 64"):
        TaskRows(examples, 30, 64, 0, "one_per_row", 0.0)
    with pytest.raises(IndexError):
        TaskRows(examples, 30, 2, 0, "one_per_row", 0.0).batch(30)


# --- scores ----------------------------------------------------------------------------------------------


def scored(task: str, label: str, generated: str, forced: str | None = None) -> dict[str, float]:
    """Scores where a token is a character."""
    answer = np.array([ord(letter) for letter in label + "."])
    example = Example("qa1" if task == "babilong" else task, 0, 1, None, np.array([1]), answer, label)
    told = np.array([ord(letter) for letter in generated], dtype=np.int64)
    predicted = answer if forced is None else np.array([ord(letter) for letter in forced])
    return score(task, example, told, predicted, lambda tokens: "".join(map(chr, tokens)), ".")


def test_scores_of_an_answer() -> None:
    assert scored("passkey", "471", " 471.") == {"exact": 1.0, "characters": 1.0}
    assert scored("passkey", "471", " 4715") == {"exact": 0.0, "characters": 1.0}, "an answer ends"
    assert scored("passkey", "471", " 481.") == {"exact": 0.0, "characters": pytest.approx(2 / 3)}
    assert scored("passkey", "471", "") == {"exact": 0.0, "characters": 0.0}
    assert scored("copying", "abca", "abba.", "xbca.") == {"exact": 0.0, "characters": 0.75, "characters_forced": 0.75}
    assert scored("copying", "ab", "ab.", "ab.")["exact"] == 1.0
    assert scored("babilong", "garden", " garden.") == {"strict": 1.0, "lenient": 1.0}
    assert scored("babilong", "hall", " no. The hall.") == {"strict": 0.0, "lenient": 1.0}, (
        "lenient reads on after the first sentence"
    )
    assert scored("babilong", "hall", " I do not know. The hall.") == {"strict": 0.0, "lenient": 0.0}, (
        "but no more than 16 tokens"
    )


# --- measuring -------------------------------------------------------------------------------------------


def test_answers_longer_than_allowed_are_refused(tmp_path: Path) -> None:
    maker = Copying("abcd", seed=0, split="test")
    facts = write_examples([maker.example(Cell("copying", 30), 0)], tmp_path / EXAMPLES)
    write_manifest(tmp_path, {**facts, "vocabulary_size": 8, "end": 7, "end_text": ".", "chance": {}, "spelled": {}}, [EXAMPLES])
    config = config_from_json(
        {"architecture": "mamba2", "width": 16, "layers": 1, "state_size": 8, "head_size": 8, "vocabulary_size": 8}
    )
    save_model(LanguageModel(config), tmp_path / "model")
    with pytest.raises(FarstateError, match=r"tasks\.babilong\.max_new_tokens: 16 are fewer than the 31 that the longest"):
        measure(
            checkpoint=tmp_path / "model", data=tmp_path, decode=maker.vocabulary.decode, task="babilong", labels={}, train_length=5,
            max_new_tokens=16, precision="float32", output=tmp_path / "out", settings=EvaluationSettings(),
        )  # fmt: skip
    assert not (tmp_path / "out").exists()


def test_answers_of_a_model(tmp_path: Path) -> None:
    """A model that predicts nothing in particular: the table is complete, and forced scores are those of its own logits."""
    maker = Copying("abcd", seed=0, split="test")
    data = tmp_path / "data"
    facts = write_examples(
        [maker.example(Cell("copying", length), number) for length in (3, 5) for number in range(4)], data / EXAMPLES
    )
    end = maker.vocabulary.encode(".")[0]
    told = {"vocabulary_size": 8, "end": end, "end_text": ".", "chance": {"copying": {"uniform": 0.25}}, "spelled": {}}
    write_manifest(data, {**facts, **told}, [EXAMPLES])
    config = config_from_json(
        {"architecture": "mamba2", "width": 16, "layers": 1, "state_size": 8, "head_size": 8, "vocabulary_size": 8}
    )
    model = LanguageModel(config)
    save_model(model, tmp_path / "model")
    measure(
        checkpoint=tmp_path / "model", data=data, decode=maker.vocabulary.decode, task="copying",
        labels={"model": "m", "arm": "control", "prompting": "trained", "seed": 0}, train_length=5, max_new_tokens=None,
        precision="float32", output=tmp_path / "out", settings=EvaluationSettings(rows=3, segment_tokens=2),
    )  # fmt: skip
    table = pl.read_parquet(tmp_path / "out" / ANSWERS)
    assert table.height == 8
    assert table["finite"].all()
    assert table["tokens"].to_list() == [5] * 4 + [7] * 4
    assert table.select("strict", "lenient").null_count().row(0) == (8, 8)
    assert read_manifest(tmp_path / "out", verify=True)["parameters"] == config.parameter_count()
    examples = Examples(data / EXAMPLES)
    for row, example in zip(table.iter_rows(named=True), examples, strict=True):
        whole = torch.from_numpy(np.concatenate((example.prompt, example.answer)))[None]
        with torch.no_grad():
            logits = model(whole[:, :-1])[0][0, example.prompt.size - 1 :] @ model.head_weight[:8].T
        nll = torch.nn.functional.cross_entropy(logits, whole[0, example.prompt.size :], reduction="sum")
        assert row["nll"] == pytest.approx(float(nll), rel=1e-5)
        right = logits.argmax(1)[:-1] == whole[0, example.prompt.size : -1]
        assert row["characters_forced"] == pytest.approx(float(right.float().mean()))
        assert row["generated_tokens"] <= row["length"] + 2


# --- comparison ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("successes", "count", "low", "high"),
    [(81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611), (1, 29, 0.0061, 0.1718)],
)
def test_wilson_against_published_values(successes: int, count: int, low: float, high: float) -> None:
    """Newcombe 1998 (Statistics in Medicine 17, 857), Table I, method 3; and its mirror image."""
    found = comparing.wilson(successes / count, count, 0.95)
    assert (found.low, found.high) == pytest.approx((low, high), abs=1e-4)
    mirrored = comparing.wilson(1 - successes / count, count, 0.95)
    assert (1 - mirrored.high, 1 - mirrored.low) == pytest.approx((found.low, found.high), abs=1e-12)


def test_the_interval_of_a_difference() -> None:
    """Independent: Newcombe 1998 (Statistics in Medicine 17, 873), 56 of 70 against 48 of 80, method 10. Paired: φ from the table of counts."""
    independent = comparing.paired_difference(comparing.wilson(56 / 70, 70, 0.95), comparing.wilson(48 / 80, 80, 0.95), 0.0)
    assert (independent.value, independent.low, independent.high) == pytest.approx((0.2, 0.0524, 0.3339), abs=1e-4)
    for both, first_alone, second_alone, neither in ((36, 12, 2, 0), (30, 5, 3, 12), (20, 0, 0, 20), (50, 0, 0, 0)):
        n = both + first_alone + second_alone + neither
        first = np.repeat([1.0, 1.0, 0.0, 0.0], [both, first_alone, second_alone, neither])
        second = np.repeat([1.0, 0.0, 1.0, 0.0], [both, first_alone, second_alone, neither])
        product = math.prod((both + first_alone, second_alone + neither, both + second_alone, first_alone + neither))
        apart = both * neither - first_alone * second_alone
        apart = max(apart - n / 2, 0) if apart > 0 else apart
        phi = apart / math.sqrt(product) if product else 0.0
        assert comparing.correlation(first, second) == pytest.approx(phi)
        ends = [comparing.wilson(float(arm.mean()), n, 0.95) for arm in (first, second)]
        paired, alone = (comparing.paired_difference(*ends, known) for known in (phi, 0.0))
        assert paired.value == pytest.approx((first_alone - second_alone) / n)
        assert paired.low < paired.value < paired.high
        assert (paired.high - paired.low < alone.high - alone.low) == (phi > 0)


def test_intervals_cover() -> None:
    generator = np.random.default_rng(0)
    means, differences = 0, 0
    for _ in range(1000):
        parts = [comparing.wilson(generator.binomial(30, p) / 30, 30, 0.95) for p in (0.02, 0.5, 0.97)]
        mean = comparing.mover_mean(parts)
        means += mean.low <= (0.02 + 0.5 + 0.97) / 3 <= mean.high
        # Two arms that err on the same examples: of a common part, each keeps its own share.
        hard = generator.random(50)
        first, second = (((hard < p) ^ (generator.random(50) < 0.05)).astype(float) for p in (0.8, 0.6))
        expected = (0.8 - 0.6) * 0.9
        ends = [comparing.wilson(float(arm.mean()), 50, 0.95) for arm in (first, second)]
        found = comparing.paired_difference(*ends, comparing.correlation(first, second))
        differences += found.low <= expected <= found.high
    assert 930 <= means <= 985, means
    assert 930 <= differences <= 990, differences


def evaluation(
    folder: Path, arm: str, values: np.ndarray, *, seed: int | None = 0, task: str = "passkey", prompting: str = "fine_tuned"
) -> Path:
    """A folder as `measure` writes it: `values` (cells, examples) of the score `exact`, or strict for BABILong's tasks."""
    rows = []
    for cell, line in enumerate(values):
        for example, value in enumerate(line):
            one = {"strict": value, "lenient": value} if task == "babilong" else {"exact": value, "characters": value / 2}
            rows.append(
                {
                    **{"model": "m", "arm": arm, "prompting": prompting, "seed": seed, "train_length": 8},
                    **{"task": f"qa{cell + 1}" if task == "babilong" else task, "length": 16, "depth": None},
                    **{
                        "example": example + (0 if task == "babilong" else 1000 * cell),
                        "tokens": 16,
                        "label": "x",
                        "generated": "x",
                    },
                    **{"generated_tokens": 1, "nll": 1.0, "finite": True, **one},
                }
            )
    from farstate.tasks.measure import ANSWER_SCHEMA

    out = folder / f"{arm}{seed}"
    out.mkdir(parents=True, exist_ok=True)
    pl.DataFrame(rows, schema=ANSWER_SCHEMA).write_parquet(out / ANSWERS)
    told = {
        "labels": {"model": "m", "arm": arm, "prompting": prompting, "seed": seed},
        "chance": {name: {"uniform": 0.25, "majority": None} for name in ({row["task"] for row in rows})},
        **{"spelled": {}, "broken": 0, "parameters": 10, "parameters_without_embeddings": 5},
    }
    write_manifest(out, told, [ANSWERS])
    return out


COMPARE = params.Compare(resamples=200)


def compared(folders: list[Path], shown: list[tuple[str, str, str]], output: Path, task: str = "passkey") -> pl.DataFrame:
    comparing.compare(folders, task=task, figure={"shown": shown, "arms": []}, compare=COMPARE, output=output)
    json.dumps(read_manifest(output, verify=True))
    return pl.read_parquet(output / SCORES)


def test_scores_are_compared_with_base_and_control(tmp_path: Path) -> None:
    generator = np.random.default_rng(1)
    right = {arm: (generator.random((1, 50)) < p).astype(float) for arm, p in ((BASE, 0.1), (CONTROL, 0.3), ("sp", 0.9))}
    folders = [evaluation(tmp_path, BASE, right[BASE], prompting="zero_shot")]
    folders += [evaluation(tmp_path, arm, right[arm]) for arm in (CONTROL, "sp")]
    shown = [("m", BASE, "zero_shot"), ("m", CONTROL, "fine_tuned"), ("m", "sp", "fine_tuned")]
    table = compared(folders, shown, tmp_path / "out")
    exact = table.filter(score="exact", against="")
    for arm in right:
        row = exact.filter(arm=arm).row(0, named=True)
        assert row["value"] == pytest.approx(right[arm].mean())
        assert row["low"] < row["value"] < row["high"]
        assert row["n"] == 50
        assert row["chance"] == 0.25
        assert row["seed"] is None
        assert row["seeds_low"] is None
    pairs = set(table.filter(pl.col("against") != "").select("arm", "against").iter_rows())
    assert pairs == {(CONTROL, BASE), ("sp", BASE), ("sp", CONTROL)}
    apart = table.filter(score="exact", arm="sp", against=CONTROL).row(0, named=True)
    assert apart["value"] == pytest.approx(right["sp"].mean() - right[CONTROL].mean())
    assert apart["low"] > 0
    shares = table.filter(score="characters", arm="sp", against=CONTROL).row(0, named=True)
    assert shares["value"] == pytest.approx(apart["value"] / 2)
    assert shares["low"] < shares["value"] < shares["high"]
    assert "Wilson" in read_manifest(tmp_path / "out")["interval"]


def test_the_order_of_the_evaluations_changes_nothing(tmp_path: Path) -> None:
    generator = np.random.default_rng(2)
    folders = [
        evaluation(tmp_path, arm, (generator.random((2, 20)) < 0.5).astype(float), seed=seed)
        for arm in (BASE, CONTROL)
        for seed in (0, 1, 2)
    ]
    shown = [("m", BASE, "fine_tuned"), ("m", CONTROL, "fine_tuned")]
    first = compared(folders, shown, tmp_path / "a")
    again = compared(folders[::-1], shown, tmp_path / "b")
    key = ["arm", "seed", "score", "against"]
    assert first.sort(key).equals(again.sort(key))
    means = first.filter(score="exact", against="", arm=CONTROL)
    seeds = means.filter(pl.col("seed").is_not_null())["value"]
    mean = means.filter(pl.col("seed").is_null()).row(0, named=True)
    assert len(seeds) == 3
    assert mean["value"] == pytest.approx(seeds.mean())
    assert mean["seeds_low"] < mean["value"] < mean["seeds_high"], "three seeds have an interval of their own"
    apart = first.filter(score="exact", against=BASE, arm=CONTROL).row(0, named=True)
    assert apart["seeds_low"] < apart["value"] < apart["seeds_high"]
    assert mean["n"] == 40
    assert mean["n_seeds"] == 3


def test_the_mean_over_tasks(tmp_path: Path) -> None:
    values = np.array([[1.0] * 10, [0.0] * 10, [1.0] * 5 + [0.0] * 5])
    table = compared(
        [evaluation(tmp_path, BASE, values, task="babilong")], [("m", BASE, "fine_tuned")], tmp_path / "out", "babilong"
    )
    mean = table.filter(task="mean", score="strict").row(0, named=True)
    assert mean["value"] == pytest.approx(0.5)
    assert mean["low"] < 0.5 < mean["high"]
    assert mean["n"] == 30
    assert table.filter(task="qa1", score="strict").row(0, named=True)["low"] < 1.0, "ten right answers are no certainty"


def test_intervals_over_seeds_end_at_what_is_possible(tmp_path: Path) -> None:
    folders = [
        evaluation(tmp_path, arm, np.full((1, 20), value), seed=seed)
        for arm, values in ((BASE, (0.0, 0.0, 0.1)), (CONTROL, (1.0, 1.0, 0.1)))
        for seed, value in enumerate(values)
    ]
    table = compared(folders, [("m", BASE, "fine_tuned"), ("m", CONTROL, "fine_tuned")], tmp_path / "out")
    ends = table.filter(pl.col("seed").is_null(), score="exact").select("arm", "against", "seeds_low", "seeds_high")
    assert ends.filter(arm=BASE).row(0)[2] == 0.0
    assert ends.filter(arm=CONTROL, against="").row(0)[3] == 1.0
    assert ends.filter(arm=CONTROL, against=BASE).row(0)[3] == 1.0


def test_the_mean_over_tasks_has_the_differences_of_its_parts(tmp_path: Path) -> None:
    generator = np.random.default_rng(4)
    folders = [
        evaluation(tmp_path, arm, (generator.random((3, 40)) < p).astype(float), seed=seed, task="babilong")
        for arm, p in ((BASE, 0.3), (CONTROL, 0.6))
        for seed in (0, 1, 2)
    ]
    table = compared(folders, [("m", BASE, "fine_tuned"), ("m", CONTROL, "fine_tuned")], tmp_path / "out", "babilong")
    apart = table.filter(against=BASE, score="strict")
    mean = apart.filter(task="mean").row(0, named=True)
    parts = apart.filter(pl.col("task") != "mean")
    assert mean["value"] == pytest.approx(parts["value"].mean())
    assert mean["high"] - mean["low"] < (parts["high"] - parts["low"]).min()
    assert mean["seeds_low"] < mean["value"] < mean["seeds_high"], "the headline has an interval over seeds too"


def test_the_most_frequent_answer_is_counted_over_all_that_was_asked(tmp_path: Path) -> None:
    """One job a cell: each manifest knows its own cell only."""
    whole = evaluation(tmp_path, BASE, np.ones((1, 10)), task="babilong")
    told = read_manifest(whole)
    table = pl.read_parquet(whole / ANSWERS).with_columns(label=pl.Series(["garden"] * 7 + ["office"] * 3))
    folders = []
    for name, rows in (("a", table[:5]), ("b", table[5:].with_columns(length=pl.lit(32, pl.Int64)))):
        (tmp_path / name).mkdir()
        rows.write_parquet(tmp_path / name / ANSWERS)
        write_manifest(tmp_path / name, told, [ANSWERS])
        folders.append(tmp_path / name)
    for order in (folders, folders[::-1]):
        compared(order, [("m", BASE, "fine_tuned")], tmp_path / "out", "babilong")
        assert read_manifest(tmp_path / "out")["chance"]["qa1"] == {"uniform": 1 / 6, "majority": 0.7}


def test_missing_and_strange_answers_are_refused(tmp_path: Path) -> None:
    base = evaluation(tmp_path, BASE, np.ones((1, 4)))
    other = evaluation(tmp_path, "sp", np.ones((1, 5)))
    with pytest.raises(FarstateError, match="no answers of m / sp / fine_tuned"):
        compared([base], [("m", BASE, "fine_tuned"), ("m", "sp", "fine_tuned")], tmp_path / "out")
    with pytest.raises(FarstateError, match="which the figure does not show"):
        compared([base, other], [("m", BASE, "fine_tuned")], tmp_path / "out")
    with pytest.raises(FarstateError, match="did not answer the same examples"):
        compared([base, other], [("m", BASE, "fine_tuned"), ("m", "sp", "fine_tuned")], tmp_path / "out")
    with pytest.raises(FarstateError, match="are there twice"):
        compared([base, base], [("m", BASE, "fine_tuned")], tmp_path / "out")
    (other / ANSWERS).write_bytes(b"nothing")
    write_json(other / "manifest.json", {**read_manifest(base), "files": {}})
    with pytest.raises(FarstateError, match="damaged"):
        compared([base, other], [("m", BASE, "fine_tuned"), ("m", "sp", "fine_tuned")], tmp_path / "out")


# --- numerics --------------------------------------------------------------------------------------------


def test_golden(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is asked and how it is scored: numpy's draws are part of it, so that a release that moves them is seen."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    bytes_alone = Tokenizer(models.BPE(vocab={symbol: number for number, symbol in enumerate(alphabet)}, merges=[]))
    bytes_alone.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytes_alone.decoder = decoders.ByteLevel()
    strings = Copying("abcdef", seed=1, split="train", training_lengths=(2, 8))
    hidden = passkey(bytes_alone, context=320).training(5)
    stories = [story(task, draws(0, "test", task, number), (2, 8)) for task in TASKS for number in range(3)]
    told = "\n".join(f"{' '.join(one.facts)} {one.question} {one.answer} {one.supporting}" for one in stories)
    write_examples((strings.training(number) for number in range(20)), tmp_path / EXAMPLES)
    batch = TaskRows(Examples(tmp_path / EXAMPLES), 30, 3, 2, "packed", 0.25).batch(0)
    assert batch.weights is not None
    generator = np.random.default_rng(0)
    folders = [
        evaluation(tmp_path, arm, (generator.random((1, 30)) < p).astype(float)) for arm, p in ((BASE, 0.2), (CONTROL, 0.7))
    ]
    scores = compared(folders, [("m", BASE, "fine_tuned"), ("m", CONTROL, "fine_tuned")], tmp_path / "out")
    scores = scores.sort("arm", "score", "against").select("value", "low", "high")
    values = {
        "copying": torch.from_numpy(strings.training(3).prompt).double(),
        "passkey": torch.from_numpy(np.concatenate((hidden.prompt, hidden.answer, hidden.facts))).double(),
        "babi": torch.tensor(list(told.encode()), dtype=torch.float64),
        "rows": batch.tokens.double(),
        "weights": batch.weights.double(),
        "scores": torch.from_numpy(scores.to_numpy()),
    }
    golden.check("tasks", values)
    monkeypatch.delenv("FARSTATE_UPDATE_GOLDEN", raising=False)
    with pytest.raises(AssertionError, match=r"raise NUMERICS\['tasks'\]"):
        golden.check("tasks", values | {"scores": values["scores"] * (1.0 + 1e-6)})
