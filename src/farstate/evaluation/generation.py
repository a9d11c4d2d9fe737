"""Generation from a carried state: what a model says after a prompt, and what it would have said inside the right answer.

A prompt is read once, in segments, from the zero state, and never again: each generated token is one step from the cached
state. Prompts of different lengths stand side by side without padding, since padding in front of a prompt would change the
state and padding behind it would overrun its end: a segment ends where the shortest unfinished row ends, and that row's
state is set aside. So every row is what it would be alone, up to rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from farstate.errors import FarstateError
from farstate.evaluation.stream import Precision
from farstate.models.contract import Model
from farstate.models.head import default_chunk_tokens
from farstate.ops.precision import compute_dtype
from farstate.state import State

Tokens = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Progress = Callable[[int, int], None]
"""Called after every segment of the prompts with the prompt tokens read so far and those in all."""

NOT_FINITE = -1
"""In the place of a token: the logits were not finite."""


@dataclass(frozen=True, eq=False)
class Forced:
    """Predictions inside the right answer, each given the prompt and the right answer up to there.

    Attributes:
        predicted: (A,), the most probable token at each place of the answer; `NOT_FINITE` where the logits are not finite. A
            chunked recurrence loses a chunk as a whole, so that a break within the answer may show early.
        nll: (A,), nats, of the answer's token there; NaN where the logits are not finite.
    """

    predicted: Tokens
    nll: Floats


@dataclass(frozen=True, eq=False)
class Answered:
    """Both ways to answer a prompt.

    Attributes:
        generated: what greedy decoding emits; see `greedy`.
        forced: see `teacher_forced`.
    """

    generated: Tokens
    forced: Forced


def batches(lengths: Sequence[int], rows: int) -> list[list[int]]:
    """The prompts that are read side by side: indices, longest first, at most `rows` in a batch.

    Neighbours in length share a batch, so that few segments are short; the longest first, so that what does not fit in memory
    does not fit at once. Equal lengths keep their order.
    """
    order = sorted(range(len(lengths)), key=lambda index: -lengths[index])
    return [order[start : start + rows] for start in range(0, len(order), rows)]


def prefill(
    model: Model,
    prompts: Sequence[Tokens],
    *,
    segment_tokens: int,
    device: torch.device,
    precision: Precision = "float32",
    read: Callable[[int], None] | None = None,
) -> tuple[Tensor, State]:
    """Read prompts side by side, each from the zero state to its own end.

    A batch of n different lengths takes up to n − 1 segments more than one of equal lengths, each at least a model call. The
    head is never applied, and one segment of all rows is alive at a time.

    Args:
        model: the language model, on `device`.
        prompts: R of them, each (T,) with T ≥ 1.
        segment_tokens: longest segment; changes memory and speed, and the numbers only by rounding.
        device: where to compute.
        precision: `bf16-mixed` runs the model under bfloat16 autocast.
        read: called after every segment with the prompt tokens that it read.

    Returns:
        hidden: (R, D), after the last token of each prompt: it predicts the next.
        state: of the R rows there. Both are in the order of the prompts, and are inference tensors.

    Raises:
        FarstateError: no prompt, an empty one, a token that the model does not know, or a segment below one token.
    """
    _check_tokens("prompt", prompts, len(model.head_weight))
    if not prompts:
        raise FarstateError("no prompt to read")
    if segment_tokens < 1:
        raise FarstateError(f"segment_tokens must be at least 1, found {segment_tokens}")
    (order,) = batches([len(prompt) for prompt in prompts], len(prompts))
    endings: list[Tensor] = []
    states: list[State] = []
    state: State | None = None
    active, at = len(order), 0
    with torch.inference_mode():
        while active:
            # The shortest row stands last.
            end = min(at + segment_tokens, len(prompts[order[active - 1]]))
            tokens = np.stack([prompts[row][at:end] for row in order[:active]])
            hidden, state = _step(model, torch.from_numpy(tokens).to(device), state, precision)
            at = end
            going = sum(len(prompts[row]) > at for row in order[:active])
            if going < active:
                endings.append(hidden[going:, -1].clone())
                states.append(state.select(range(going, active)) if going else state)
                state = state.select(range(going)) if going else None
            if read is not None:
                read(tokens.size)
            active = going
            # Freed before the next segment is read, not while it is.
            del hidden
        # The longest rows ended last and stand first.
        ending = torch.cat(endings[::-1])
        joined = states[0] if len(states) == 1 else State.cat(states[::-1])
        if order != sorted(order):
            places = np.argsort(order).tolist()
            ending, joined = ending[places], joined.select(places)
    return ending, joined


def answers(
    model: Model,
    prompts: Sequence[Tokens],
    right: Sequence[Tokens],
    *,
    max_new_tokens: int,
    stop: frozenset[int],
    vocabulary_size: int,
    segment_tokens: int,
    rows: int,
    device: torch.device,
    precision: Precision = "float32",
    progress: Progress | None = None,
) -> list[Answered]:
    """`greedy` and `teacher_forced` from one reading of each prompt, in the order of the prompts; arguments and errors as theirs."""
    _check_generation(max_new_tokens)
    _check_answers(prompts, right, vocabulary_size)
    head = _head(model, vocabulary_size)
    found: dict[int, Answered] = {}
    for batch, hidden, state in _prefilled(model, prompts, segment_tokens, rows, device, precision, progress):
        forced = _force(model, hidden, state, [right[index] for index in batch], head, segment_tokens, precision)
        generated = _generate(model, hidden, state, head, max_new_tokens, stop, precision)
        found |= zip(batch, map(Answered, generated, forced), strict=True)
    return [found[index] for index in range(len(prompts))]


def greedy(
    model: Model,
    prompts: Sequence[Tokens],
    *,
    max_new_tokens: int,
    stop: frozenset[int],
    vocabulary_size: int,
    segment_tokens: int,
    rows: int,
    device: torch.device,
    precision: Precision = "float32",
    progress: Progress | None = None,
) -> list[Tokens]:
    """The most probable next token, again and again, from the state after each prompt.

    One token a step for all rows of a batch; a row that has stopped leaves the batch. Of equally probable tokens the smallest
    is taken. Logits are float32 (float64 in a float64 model), under autocast too.

    Args:
        model: the language model, on `device`.
        prompts: each (T,) with T ≥ 1.
        max_new_tokens: a row ends after so many tokens at the latest.
        stop: a row ends after emitting one of these; it is part of what is returned.
        vocabulary_size: tokens are chosen among the first so many rows of the head, the symbols of the tokenizer.
        segment_tokens, device, precision: as `prefill`.
        rows: prompts read side by side; changes memory and speed, and the numbers only by rounding.
        progress: see `Progress`.

    Returns:
        For every prompt, in order, (1 … max_new_tokens,). Where the logits are not finite the row ends with `NOT_FINITE`.

    Raises:
        FarstateError: as `prefill`; or `max_new_tokens` or `rows` below 1, or a vocabulary larger than the head.
    """
    _check_generation(max_new_tokens)
    head = _head(model, vocabulary_size)
    found: dict[int, Tokens] = {}
    for batch, hidden, state in _prefilled(model, prompts, segment_tokens, rows, device, precision, progress):
        generated = _generate(model, hidden, state, head, max_new_tokens, stop, precision)
        found |= zip(batch, generated, strict=True)
    return [found[index] for index in range(len(prompts))]


def teacher_forced(
    model: Model,
    prompts: Sequence[Tokens],
    right: Sequence[Tokens],
    *,
    vocabulary_size: int,
    segment_tokens: int,
    rows: int,
    device: torch.device,
    precision: Precision = "float32",
    progress: Progress | None = None,
) -> list[Forced]:
    """What the model predicts at each place of the right answer, given the prompt and the right answer up to there.

    Args:
        right: for every prompt its answer, (A,) with A ≥ 1; its last token is predicted, never read.
        vocabulary_size: the softmax and the choice are over the first so many rows of the head.
        model, prompts, segment_tokens, rows, device, precision, progress: as `greedy`.

    Raises:
        FarstateError: as `greedy`; or not one answer a prompt, an empty answer, or one with a token outside the vocabulary.
    """
    _check_answers(prompts, right, vocabulary_size)
    head = _head(model, vocabulary_size)
    found: dict[int, Forced] = {}
    for batch, hidden, state in _prefilled(model, prompts, segment_tokens, rows, device, precision, progress):
        forced = _force(model, hidden, state, [right[index] for index in batch], head, segment_tokens, precision)
        found |= zip(batch, forced, strict=True)
    return [found[index] for index in range(len(prompts))]


def _prefilled(
    model: Model,
    prompts: Sequence[Tokens],
    segment_tokens: int,
    rows: int,
    device: torch.device,
    precision: Precision,
    progress: Progress | None,
) -> Iterator[tuple[list[int], Tensor, State]]:
    """Batch after batch: the indices of its prompts, and what `prefill` returns for them."""
    if rows < 1:
        raise FarstateError(f"rows must be at least 1, found {rows}")
    # All of them before the first is read: nobody waits for hours to learn of the last.
    _check_tokens("prompt", prompts, len(model.head_weight))
    lengths = [len(prompt) for prompt in prompts]
    total, done = sum(lengths), 0

    def read(tokens: int) -> None:
        nonlocal done
        done += tokens
        if progress is not None:
            progress(done, total)

    for batch in batches(lengths, rows):
        chosen = [prompts[index] for index in batch]
        hidden, state = prefill(model, chosen, segment_tokens=segment_tokens, device=device, precision=precision, read=read)
        yield batch, hidden, state


def _generate(
    model: Model,
    hidden: Tensor,
    state: State,
    head: Tensor,
    max_new_tokens: int,
    stop: frozenset[int],
    precision: Precision,
) -> list[Tokens]:
    """Greedy decoding of the rows of `hidden` (R, D), `head` (V, D) being the rows to choose among."""
    generated: list[list[int]] = [[] for _ in range(len(hidden))]
    rows = list(range(len(hidden)))
    with torch.inference_mode():
        while True:
            chosen, _ = _read_out(hidden, head)
            emitted = chosen.tolist()
            for row, token in zip(rows, emitted, strict=True):
                generated[row].append(token)
            going = [place for place, token in enumerate(emitted) if token != NOT_FINITE and token not in stop]
            if not going or len(generated[rows[going[0]]]) == max_new_tokens:
                return [np.array(tokens, dtype=np.int64) for tokens in generated]
            if len(going) < len(rows):
                rows, chosen, state = [rows[place] for place in going], chosen[going], state.select(going)
            following, state = _step(model, chosen[:, None], state, precision)
            hidden = following[:, -1]


def _force(
    model: Model,
    hidden: Tensor,
    state: State,
    right: Sequence[Tokens],
    head: Tensor,
    segment_tokens: int,
    precision: Precision,
) -> list[Forced]:
    """Predictions of the answers `right` after `hidden` (R, D) and `state`, which are left as they are."""
    lengths = [len(answer) for answer in right]
    fed = np.empty((len(right), max(lengths) - 1), dtype=np.int64)
    for row, answer in enumerate(right):
        fed[row, : len(answer) - 1] = answer[:-1]
        # Filled up behind the end, where nothing that is asked for can see it; but not with a token that the row does not read:
        # a chunk would spread what breaks there to its beginning.
        fed[row, len(answer) - 1 :] = answer[max(0, len(answer) - 2)]
    with torch.inference_mode():
        tokens = torch.from_numpy(fed).to(hidden.device)
        parts = [hidden[:, None]]
        for start in range(0, tokens.shape[1], segment_tokens):
            following, state = _step(model, tokens[:, start : start + segment_tokens], state, precision)
            parts.append(following)
        within = torch.cat(parts, dim=1)
        asked = torch.cat([within[row, :length] for row, length in enumerate(lengths)])
        predicted, nll = _read_out(asked, head, torch.from_numpy(np.concatenate(right)).to(hidden.device))
    ends = np.cumsum(lengths)[:-1]
    return list(map(Forced, np.split(predicted.cpu().numpy(), ends), np.split(nll.cpu().numpy(), ends)))


def _step(model: Model, tokens: Tensor, state: State | None, precision: Precision) -> tuple[Tensor, State]:
    with torch.autocast(tokens.device.type, dtype=torch.bfloat16, enabled=precision == "bf16-mixed"):
        return model(tokens, state)


def _read_out(hidden: Tensor, head: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The most probable token of each row of `hidden` (n, D), and the NLL of `targets` (n,), float64 (empty without targets).

    Logits exist for a chunk of rows at a time. Where one of them is not finite: `NOT_FINITE` and NaN.
    """
    dtype = compute_dtype(hidden, head)
    weight = head.to(dtype).t()
    chosen: list[Tensor] = []
    losses = [hidden.new_empty(0, dtype=torch.float64)]
    size = default_chunk_tokens(hidden.device, len(head))
    for start in range(0, len(hidden), size):
        logits = hidden[start : start + size].to(dtype) @ weight
        finite = logits.isfinite().all(1)
        # argmax gives the first of equals.
        chosen.append(torch.where(finite, logits.argmax(1), NOT_FINITE))
        if targets is not None:
            nll = logits.logsumexp(1) - logits.gather(1, targets[start : start + size, None]).squeeze(1)
            losses.append(torch.where(finite, nll.double(), torch.nan))
    return torch.cat(chosen), torch.cat(losses)


def _head(model: Model, vocabulary_size: int) -> Tensor:
    """(V, D), the rows of the head that belong to symbols of the tokenizer."""
    weight = model.head_weight
    if not 1 <= vocabulary_size <= len(weight):
        raise FarstateError(
            f"the tokenizer has {vocabulary_size} symbols, the model's head {len(weight)} rows; take the model's own tokenizer"
        )
    return weight[:vocabulary_size]


def _check_generation(max_new_tokens: int) -> None:
    if max_new_tokens < 1:
        raise FarstateError(f"max_new_tokens must be at least 1, found {max_new_tokens}")


def _check_answers(prompts: Sequence[Tokens], right: Sequence[Tokens], vocabulary_size: int) -> None:
    if len(right) != len(prompts):
        raise FarstateError(f"{len(prompts)} prompts and {len(right)} answers; give one answer for each prompt")
    _check_tokens("answer", right, vocabulary_size)


def _check_tokens(what: str, sequences: Sequence[Tokens], known: int) -> None:
    for number, tokens in enumerate(sequences):
        if tokens.ndim != 1 or not len(tokens):
            raise FarstateError(f"{what} {number} has the shape {tokens.shape}; give at least one token, in one dimension")
        low, high = int(tokens.min()), int(tokens.max())
        if low < 0 or high >= known:
            raise FarstateError(
                f"{what} {number} holds the token {low if low < 0 else high}, known are 0 … {known - 1}; encode it with the model's own tokenizer"
            )
