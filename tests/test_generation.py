"""Generation from a carried state against its definition: the prompt and all that was generated, read again from zero at every step."""

from __future__ import annotations

import functools
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import model_checks
from farstate.errors import FarstateError
from farstate.evaluation.generation import NOT_FINITE, Answered, answers, batches, greedy, prefill, teacher_forced
from farstate.models.checkpoints import load_model
from farstate.models.config import Config
from farstate.models.head import token_nll
from farstate.models.language_model import LanguageModel
from farstate.models.mamba2.shape import Mamba2Config
from farstate.models.registry import ARCHITECTURES
from farstate.state import LayerState, State
from test_architectures import SHAPES, every
from test_architectures import config as config_of

Tokens = npt.NDArray[np.int64]

VOCABULARY = 17
"""Symbols of the tokenizer, fewer than the 32 rows of the models' head: the others are padding."""
CPU = torch.device("cpu")
EXACT = {"rtol": 0.0, "atol": 1e-9}
ALIKE = {"vocabulary_size": VOCABULARY, "segment_tokens": 5, "rows": 3, "device": CPU}
LENGTHS = [9, 1, 14, 6, 6, 2, 11]
"""Of prompts: around the window of the hybrid's attention (7) and the taps of the convolutions, in no order."""


pytestmark = pytest.mark.usefixtures("poisoned_memory")


@functools.cache
def model_of(architecture: str) -> LanguageModel:
    return model_checks.random_model(config_of(architecture)).eval()


@functools.cache
def unbounded_hybrid() -> LanguageModel:
    """Attention to all tokens since the state was zero: caches of rows with different lengths differ."""
    sizes = SHAPES["hybrid"] | {"attention_window": None, "width": 16, "layers": 2, "vocabulary_size": 20}
    config: Config = ARCHITECTURES["hybrid"].config(architecture="hybrid", **sizes)
    return model_checks.random_model(config).eval()


def texts(lengths: list[int], seed: int = 0) -> list[Tokens]:
    generator = np.random.default_rng(seed)
    return [generator.integers(VOCABULARY, size=length) for length in lengths]


def reread(model: LanguageModel, ids: Tokens | list[int]) -> Tensor:
    """The definition: hidden states of a text read from the zero state, (T, D)."""
    with torch.no_grad():
        hidden, _ = model(torch.as_tensor(np.asarray(ids))[None])
    return hidden[0]


def logits(model: LanguageModel, hidden: Tensor) -> Tensor:
    return hidden @ model.head_weight[:VOCABULARY].t()


def defined(model: LanguageModel, prompt: Tokens, count: int, stop: frozenset[int] = frozenset()) -> tuple[list[int], Tensor]:
    """Greedy decoding that reads everything again at each step: the tokens, and the logits that each was chosen from."""
    ids, seen = prompt.tolist(), []
    for _ in range(count):
        seen.append(logits(model, reread(model, ids)[-1]))
        ids.append(int(seen[-1].argmax()))
        if ids[-1] in stop:
            break
    return ids[len(prompt) :], torch.stack(seen)


class Recorder:
    """A model that notes what it is fed and what it returns."""

    def __init__(self, model: LanguageModel) -> None:
        self.model = model
        self.fed: list[Tensor] = []
        self.hidden: list[Tensor] = []

    @property
    def head_weight(self) -> Tensor:
        return self.model.head_weight

    def __call__(self, tokens: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        hidden, state = self.model(tokens, state)
        self.fed.append(tokens)
        self.hidden.append(hidden)
        return hidden, state


def same_answers(actual: list[Answered], expected: list[Answered]) -> None:
    for mine, other in zip(actual, expected, strict=True):
        np.testing.assert_array_equal(mine.generated, other.generated)
        np.testing.assert_array_equal(mine.forced.predicted, other.forced.predicted)
        np.testing.assert_allclose(mine.forced.nll, other.forced.nll, **EXACT)


# --- against the definition ------------------------------------------------------------------------------


@pytest.mark.parametrize("architecture", [*ARCHITECTURES, "hybrid without a window"])
def test_answers_are_those_of_reading_again(architecture: str) -> None:
    model = unbounded_hybrid() if architecture == "hybrid without a window" else model_of(architecture)
    prompts, right = texts(LENGTHS), texts([3, 8, 1, 5, 2, 12, 4], seed=1)
    plain = [defined(model, prompt, 6)[0] for prompt in prompts]
    # Some rows stop, at different steps, and others do not.
    stop = frozenset({plain[0][1], plain[3][3]})
    found = answers(model, prompts, right, max_new_tokens=6, stop=stop, **ALIKE)
    unstopped = greedy(model, prompts, max_new_tokens=6, stop=frozenset(), **ALIKE)
    lengths = set()
    for row, (prompt, answer) in enumerate(zip(prompts, right, strict=True)):
        expected, _ = defined(model, prompt, 6, stop)
        lengths.add(len(expected))
        assert torch.equal(torch.from_numpy(found[row].generated), torch.tensor(expected))
        assert unstopped[row].tolist() == plain[row]
        hidden = reread(model, np.concatenate([prompt, answer[:-1]]))[-len(answer) :]
        assert torch.equal(torch.from_numpy(found[row].forced.predicted), logits(model, hidden).argmax(1))
        nll = token_nll(hidden, model.head_weight, torch.from_numpy(answer), VOCABULARY).detach()
        torch.testing.assert_close(torch.from_numpy(found[row].forced.nll), nll, **EXACT)
    assert len(lengths) > 1, "all rows stopped at the same step: the test would not see what stopping does to the others"


@every
def test_logits_of_every_step_are_those_of_reading_again(architecture: str) -> None:
    """What the tokens are chosen from, not the tokens alone."""
    model = model_of(architecture)
    # Longest first, the order in which rows stand.
    prompts = texts(sorted(LENGTHS, reverse=True))
    recorder = Recorder(model)
    generated = greedy(recorder, prompts, max_new_tokens=9, stop=frozenset(), **ALIKE | {"rows": 7})
    steps = recorder.hidden[-8:]
    assert [tuple(tokens.shape) for tokens in recorder.fed[-8:]] == [(7, 1)] * 8
    for row, prompt in enumerate(prompts):
        tokens, expected = defined(model, prompt, 9)
        assert generated[row].tolist() == tokens
        torch.testing.assert_close(logits(model, torch.stack([hidden[row, 0] for hidden in steps])), expected[1:], **EXACT)


@every
def test_prefill_is_each_row_alone(architecture: str) -> None:
    model = model_of(architecture)
    prompts, continuation = texts(LENGTHS), torch.from_numpy(np.stack(texts([4] * 7, seed=2)))
    hidden, state = prefill(model, prompts, segment_tokens=4, device=CPU)
    assert state.batch_size == 7
    with torch.inference_mode():
        together, _ = model(continuation, state)
        for row, prompt in enumerate(prompts):
            alone, final = model(torch.from_numpy(prompt)[None])
            torch.testing.assert_close(hidden[row], alone[0, -1], **EXACT)
            model_checks.same_states(trimmed(state.select([row]), len(prompt)), trimmed(final, len(prompt)))
            torch.testing.assert_close(together[row], model(continuation[row : row + 1], final)[0][0], **EXACT)


def trimmed(state: State, length: int) -> State:
    """Without the empty entries in front of the attention cache of a row that has read `length` tokens."""

    def cut(layer: LayerState) -> LayerState:
        if "valid" not in layer.auxiliary:
            return layer
        return LayerState(layer.recurrent, {name: tensor[:, -length:] for name, tensor in layer.auxiliary.items()})

    return State(tuple(cut(layer) for layer in state.layers))


@pytest.mark.parametrize("precision", ["float32", "bf16-mixed"])
def test_single_precision_and_autocast(precision: Any) -> None:
    """The losses are near those in float64; under autocast hidden states are rounded, the logits made of them are not."""
    exact = model_of("mamba2")
    model = LanguageModel(exact.config)
    model.load_state_dict(exact.state_dict())
    prompts, right = texts(LENGTHS), texts([3, 8, 1, 5, 2, 12, 4], seed=1)
    found = teacher_forced(model, prompts, right, precision=precision, **ALIKE)
    expected = teacher_forced(exact, prompts, right, **ALIKE)
    error = max(np.abs(mine.nll - other.nll).max() for mine, other in zip(found, expected, strict=True))
    print(f"{precision}: losses differ by {error:.1e} nats")
    assert 0.0 < error < (1e-5 if precision == "float32" else 0.2)
    hidden, state = prefill(model, prompts, segment_tokens=5, device=CPU, precision=precision)
    assert all(tensor.dtype == torch.float32 for layer in state.layers for tensor in layer.tensors())
    weight = model.head_weight.detach()
    assert (hidden.float() @ weight[:VOCABULARY].t()).argmax(1).tolist() == [each.predicted[0] for each in found]
    nll = token_nll(hidden.float(), weight, torch.tensor([answer[0] for answer in right]), VOCABULARY)
    np.testing.assert_allclose([each.nll[0] for each in found], nll.numpy(), rtol=0.0, atol=1e-5)


def oracle() -> Any:
    from transformers import Mamba2Config as OracleConfig
    from transformers import Mamba2ForCausalLM

    sizes = {"num_heads": 4, "head_dim": 8, "hidden_size": 16, "state_size": 6, "num_hidden_layers": 2, "n_groups": 1}
    model = Mamba2ForCausalLM(OracleConfig(vocab_size=VOCABULARY, chunk_size=8, tie_word_embeddings=False, **sizes)).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.2 * torch.randn(parameter.shape, generator=generator)
    return model


def test_transformers_generates_the_same(tmp_path: Path) -> None:
    """transformers' `generate` of the same weights, prompt by prompt, until the stop token."""
    reference = oracle()
    reference.save_pretrained(tmp_path)
    model = load_model(tmp_path)
    prompts = texts([*LENGTHS, 23])
    plain = greedy(model, prompts, max_new_tokens=12, stop=frozenset(), **ALIKE)
    stop = int(plain[0][4])
    found = greedy(model, prompts, max_new_tokens=12, stop=frozenset({stop}), **ALIKE)
    with torch.no_grad():
        for prompt, mine in zip(prompts, found, strict=True):
            ids = torch.from_numpy(prompt)[None]
            options = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": stop, "pad_token_id": 0}
            theirs = reference.generate(ids, attention_mask=torch.ones_like(ids), **options)
            assert theirs[0, len(prompt) :].tolist() == mine.tolist()
    assert len({len(mine) for mine in found}) > 1
    assert len({tuple(mine) for mine in plain}) > 1, "the model says the same whatever it reads"


# --- invariants ------------------------------------------------------------------------------------------


@settings(max_examples=12, deadline=None)
@given(
    architecture=st.sampled_from(["mamba2", "rwkv6", "hybrid"]),
    shapes=st.lists(st.tuples(st.integers(1, 20), st.integers(1, 6)), min_size=1, max_size=7),
    rows=st.integers(1, 8),
    segment_tokens=st.integers(1, 24),
    seed=st.integers(0, 1000),
    data=st.data(),
)
def test_neither_batches_nor_segments_nor_order_matter(
    architecture: str, shapes: list[tuple[int, int]], rows: int, segment_tokens: int, seed: int, data: st.DataObject
) -> None:
    model = model_of(architecture)
    prompts, right = texts([length for length, _ in shapes], seed), texts([count for _, count in shapes], seed + 1)
    given_ = {"max_new_tokens": 4, "stop": frozenset({3, 11}), "vocabulary_size": VOCABULARY, "device": CPU}
    alone = [
        answers(model, [prompt], [answer], rows=1, segment_tokens=64, **given_)[0]
        for prompt, answer in zip(prompts, right, strict=True)
    ]
    same_answers(answers(model, prompts, right, rows=rows, segment_tokens=segment_tokens, **given_), alone)
    order = data.draw(st.permutations(range(len(shapes))))
    shuffled = answers(
        model,
        [prompts[row] for row in order],
        [right[row] for row in order],
        rows=rows,
        segment_tokens=segment_tokens,
        **given_,
    )
    same_answers(shuffled, [alone[row] for row in order])


@given(lengths=st.lists(st.integers(1, 9), max_size=12), rows=st.integers(1, 5))
def test_batches_hold_every_prompt_once(lengths: list[int], rows: int) -> None:
    found = batches(lengths, rows)
    flat = [index for batch in found for index in batch]
    assert sorted(flat) == list(range(len(lengths)))
    assert all(len(batch) == rows for batch in found[:-1])
    assert all(1 <= len(batch) <= rows for batch in found)
    keys = [(-lengths[index], index) for index in flat]
    assert keys == sorted(keys)


def test_one_function_gives_what_the_two_give() -> None:
    model, prompts, right = model_of("gla"), texts(LENGTHS), texts([3, 8, 1, 5, 2, 12, 4], seed=1)
    both = answers(model, prompts, right, max_new_tokens=5, stop=frozenset({2}), **ALIKE)
    generated = greedy(model, prompts, max_new_tokens=5, stop=frozenset({2}), **ALIKE)
    forced = teacher_forced(model, prompts, right, **ALIKE)
    same_answers(both, list(map(Answered, generated, forced)))
    assert all(each.generated.dtype == each.forced.predicted.dtype == np.int64 for each in both)


def test_prompts_are_read_once_and_stopped_rows_leave() -> None:
    """Every token that the model is fed, counted: the prompt's once, then one for each row that goes on."""
    prompts, right = texts(LENGTHS), texts([3, 8, 1, 5, 2, 12, 4], seed=1)
    model = model_of("mamba2")
    stop = frozenset({defined(model, prompts[0], 2)[0][1]})
    recorder, calls = Recorder(model), []
    generated = greedy(
        recorder, prompts, max_new_tokens=6, stop=stop, progress=lambda *call: calls.append(call), **ALIKE | {"rows": 4}
    )
    # The last token of a row is emitted, never fed.
    steps = sum(len(tokens) - 1 for tokens in generated)
    assert sum(tokens.numel() for tokens in recorder.fed) == sum(LENGTHS) + steps
    assert max(tokens.shape[1] for tokens in recorder.fed) == 5
    assert steps < 7 * 5, "no row stopped early"
    assert calls[-1] == (sum(LENGTHS), sum(LENGTHS))
    assert [done for done, _ in calls] == sorted({done for done, _ in calls})

    # Answers given together with the generation cost their own tokens, the prompt is still read once.
    recorder = Recorder(model)
    answers(recorder, prompts, right, max_new_tokens=6, stop=stop, **ALIKE | {"rows": 1})
    forced = sum(len(answer) - 1 for answer in right)
    assert sum(tokens.numel() for tokens in recorder.fed) == sum(LENGTHS) + steps + forced
    fed = torch.cat([tokens.flatten() for tokens in recorder.fed[: -(-14 // 5)]])
    assert fed.tolist() == prompts[2].tolist(), "the longest prompt is read first, and to its end"


def test_few_segments_for_few_lengths() -> None:
    """n different lengths cost at most n − 1 calls more than one length."""
    recorder = Recorder(model_of("mamba2"))
    prefill(recorder, texts([20] * 3 + [17] * 2 + [21]), segment_tokens=8, device=CPU)
    assert [tuple(tokens.shape) for tokens in recorder.fed] == [(6, 8), (6, 8), (6, 1), (4, 3), (1, 1)]


def test_a_state_can_be_continued_from_again() -> None:
    """Neither way to answer changes the state that both start from."""
    model = model_of("hybrid")
    prompts = texts([8, 5])
    first = answers(model, prompts, texts([4, 4], seed=3), max_new_tokens=6, stop=frozenset(), **ALIKE)
    other = answers(model, prompts, texts([2, 6], seed=4), max_new_tokens=6, stop=frozenset(), **ALIKE)
    assert all(np.array_equal(one.generated, two.generated) for one, two in zip(first, other, strict=True))


# --- choosing --------------------------------------------------------------------------------------------


class Counting:
    """Hidden state: one-hot of (last token + 1) mod width. The head's integer weights give logits without rounding."""

    def __init__(self, head_weight: Tensor) -> None:
        self.head_weight = head_weight

    def __call__(self, tokens: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        width = self.head_weight.shape[1]
        hidden = torch.nn.functional.one_hot((tokens + 1) % width, width).float()
        return hidden, State((LayerState(torch.zeros(len(tokens), 1, 1)),))


def test_ties_take_the_smallest_and_padding_is_never_emitted() -> None:
    # After token t: symbols 2 and 4 tie above the rest, except after 2, where 0 wins; row 5 is padding and always largest.
    weight = torch.zeros(6, 6)
    weight[[2, 4]] = 3.0
    weight[0, 3] = 7.0
    weight[5] = 100.0
    options = {"segment_tokens": 4, "rows": 2, "device": CPU, "max_new_tokens": 4, "stop": frozenset()}
    prompts = [np.array([1, 1]), np.array([3])]
    found = greedy(Counting(weight), prompts, vocabulary_size=5, **options)
    assert [tokens.tolist() for tokens in found] == [[2, 0, 2, 0]] * 2
    with_padding = greedy(Counting(weight), prompts, vocabulary_size=6, **options)
    assert [tokens.tolist() for tokens in with_padding] == [[5] * 4] * 2


def test_a_stop_token_ends_its_row_and_is_kept() -> None:
    weight = torch.eye(6)
    options = {"vocabulary_size": 6, "segment_tokens": 4, "rows": 3, "device": CPU}
    prompts = [np.array([0]), np.array([2]), np.array([4])]
    found = greedy(Counting(weight), prompts, max_new_tokens=4, stop=frozenset({3, 5}), **options)
    assert [tokens.tolist() for tokens in found] == [[1, 2, 3], [3], [5]]
    found = greedy(Counting(weight), prompts, max_new_tokens=2, stop=frozenset({3, 5}), **options)
    assert [tokens.tolist() for tokens in found] == [[1, 2], [3], [5]]


# --- what breaks -----------------------------------------------------------------------------------------


def breaking_model(architecture: str) -> LanguageModel:
    """Token 5 has no finite embedding; the head is untied and sound."""
    base = config_of(architecture).model_dump() | {"tied_embeddings": False}
    model = model_checks.random_model(ARCHITECTURES[architecture].config(**base)).eval()
    with torch.no_grad():
        model.backbone.embedding.weight[5] = torch.nan
    return model


@every
def test_what_is_not_finite_is_said_of_its_row_alone(architecture: str) -> None:
    model = breaking_model(architecture)
    sound = [np.where(prompt == 5, 6, prompt) for prompt in texts(LENGTHS)]
    right = [np.where(answer == 5, 6, answer) for answer in texts([3, 8, 1, 5, 2, 12, 4], seed=1)]
    options = {"max_new_tokens": 5, "stop": frozenset(), **ALIKE, "rows": 7}
    clean = answers(model, sound, right, **options)
    prompts, given_ = list(sound), list(right)
    prompts[2] = sound[2].copy()
    prompts[2][4] = 5
    # The last token of an answer is never read; one within breaks what comes after it.
    given_[3] = np.append(right[3][:-1], 5)
    given_[5] = right[5].copy()
    given_[5][7] = 5
    found = answers(model, prompts, given_, **options)
    same_answers([found[row] for row in (0, 1, 4, 6)], [clean[row] for row in (0, 1, 4, 6)])
    assert found[2].generated.tolist() == [NOT_FINITE]
    assert found[2].forced.predicted.tolist() == [NOT_FINITE]
    assert np.isnan(found[2].forced.nll).all()
    assert np.isfinite(found[3].forced.nll).all()
    assert found[3].forced.predicted.tolist() == clean[3].forced.predicted.tolist()
    np.testing.assert_array_equal(found[5].generated, clean[5].generated)
    assert np.isnan(found[5].forced.nll[8:]).all()
    assert (found[5].forced.predicted[8:] == NOT_FINITE).all()
    assert np.isfinite(found[5].forced.nll[0])


def test_generation_that_breaks_on_its_way_ends_there() -> None:
    """The first token that has no finite embedding is the last sound one."""
    model = model_of("mamba2")
    prompts = texts(LENGTHS)
    plain = greedy(model, prompts, max_new_tokens=6, stop=frozenset(), **ALIKE)
    broken = int(plain[0][2])
    other = LanguageModel(Mamba2Config(**model.config.model_dump() | {"tied_embeddings": False}), dtype=torch.float64)
    other.load_state_dict(model.state_dict())
    with torch.no_grad():
        other.backbone.embedding.weight[broken] = torch.nan
    for before, prompt, mine in zip(
        plain, prompts, greedy(other, prompts, max_new_tokens=6, stop=frozenset(), **ALIKE), strict=True
    ):
        if broken in prompt:
            assert mine.tolist() == [NOT_FINITE]
            continue
        expected = list(itertools.takewhile(lambda token: token != broken, before.tolist()))
        if len(expected) < 5:
            expected += [broken, NOT_FINITE]
        elif len(expected) == 5:
            expected += [broken]
        assert mine.tolist() == expected


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompts": [np.array([1]), np.array([], dtype=np.int64)]}, "prompt 1 has the shape"),
        ({"prompts": [np.array([1, 32])] * 2}, "prompt 0 holds the token 32, known are 0 … 31"),
        ({"prompts": [np.array([1]), np.array([-1])]}, "prompt 1 holds the token -1"),
        ({"right": [np.array([1])]}, "2 prompts and 1 answers"),
        ({"right": [np.array([1]), np.array([17])]}, "answer 1 holds the token 17, known are 0 … 16"),
        ({"right": [np.array([1]), np.array([], dtype=np.int64)]}, "answer 1 has the shape"),
        ({"vocabulary_size": 33}, "the tokenizer has 33 symbols, the model's head 32 rows"),
        ({"rows": 0}, "rows must be at least 1"),
        ({"segment_tokens": 0}, "segment_tokens must be at least 1"),
        ({"max_new_tokens": 0}, "max_new_tokens must be at least 1"),
    ],
)
def test_bad_input_is_named(changes: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {"prompts": texts([3, 2]), "right": texts([1, 2]), "max_new_tokens": 2, "stop": frozenset()}
    arguments |= ALIKE | changes
    with pytest.raises(FarstateError, match=message) as error:
        answers(model_of("mamba2"), arguments.pop("prompts"), arguments.pop("right"), **arguments)
    assert "\n" not in str(error.value)


def test_no_prompt() -> None:
    assert greedy(model_of("mamba2"), [], max_new_tokens=2, stop=frozenset(), **ALIKE) == []
    with pytest.raises(FarstateError, match="no prompt"):
        prefill(model_of("mamba2"), [], segment_tokens=4, device=CPU)
