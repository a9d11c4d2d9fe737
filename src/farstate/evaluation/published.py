"""Perplexity of any checkpoint on any text, in the way in which published values are computed.

The documents are joined, each followed by the end-of-text token; the stream is cut into windows of `context` inputs, which do
not overlap and are each read from the zero state; every token but the first of the stream is scored once, the last window
being shorter; the softmax is over all rows of the head, padding included. The publications do not spell this out: joining,
windows, their length and the padding are [assumed].
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np
import numpy.typing as npt
import torch

from farstate.corpus.records import Damage, read_files
from farstate.corpus.tokenizer import load_tokenizer, symbols
from farstate.errors import FarstateError, nearest
from farstate.evaluation.perplexity import EvaluationSettings
from farstate.evaluation.stream import stream_nll
from farstate.models.checkpoints import detect_format, load_model
from farstate.models.config import Config
from farstate.models.contract import Model
from farstate.ops.precision import flushed_denormals
from farstate.params import Source
from farstate.reference import PUBLISHED_CONTEXT, PUBLISHED_FILE, PUBLISHED_TOLERANCE, Published, published

if TYPE_CHECKING:
    from tokenizers import Tokenizer

Integers = npt.NDArray[np.int64]
Progress = Callable[[int, int, float], None]
"""Called with the tokens scored, the documents read and the perplexity so far."""

END_OF_TEXT = "<|endoftext|>"
# Text that is tokenised together: an encoded token takes about 100 bytes until it is reduced to its id.
_BATCH_BYTES = 1 << 18
_FEWEST_WINDOWS = 10


@dataclass(frozen=True)
class Procedure:
    """How a perplexity is taken.

    Attributes:
        context: inputs of a window.
        documents: only the first so many of the text; None: all.
        softmax: over all rows of the head (`padded`) or over the tokenizer's symbols (`real`).
        end_of_text: the token after each document; None: nothing stands between documents.
    """

    context: int = PUBLISHED_CONTEXT
    documents: int | None = None
    softmax: Literal["padded", "real"] = "padded"
    end_of_text: str | None = END_OF_TEXT


@dataclass(frozen=True)
class Measured:
    """A perplexity and what it was taken of.

    Attributes:
        format, config: of the checkpoint.
        rows: of the head in the softmax.
        documents: read; tokens: scored.
        nll: nats per token; error: its standard error, windows taken for independent; NaN where there are fewer than ten.
        seconds: of tokenising and scoring.
        row: the published value that it is to be held against.
    """

    format: str
    config: Config
    procedure: Procedure
    rows: int
    documents: int
    tokens: int
    nll: float
    error: float
    seconds: float
    row: Published | None

    @property
    def perplexity(self) -> float:
        return math.exp(min(self.nll, 700.0))


def perplexity_of_text(
    checkpoint: Path,
    text: Path,
    *,
    text_key: str,
    tokenizer: Path | None,
    procedure: Procedure,
    settings: EvaluationSettings,
    published_model: str | None = None,
    progress: Progress | None = None,
) -> Measured:
    """Measure the model at `checkpoint`, of any format, on the documents of the file `text`.

    The text is read, tokenised and scored as a stream: memory holds one batch of windows and one batch of documents.

    Args:
        text: .txt, .jsonl or .parquet, compressed or not.
        text_key: the field or column that holds a document's text.
        tokenizer: a tokenizer.json; None: that beside the checkpoint.
        published_model: a row of reference/published.csv; see `published_row`.
        progress: called after every batch of windows.

    Raises:
        FarstateError: in one line, what is wrong with checkpoint, text or tokenizer, or that they do not fit each other.
    """
    if procedure.context < 1 or (procedure.documents is not None and procedure.documents < 1):
        raise FarstateError("--context and --documents must be at least 1")
    if text.is_dir():
        raise FarstateError(f"{text}: is a folder; --text takes one .txt, .jsonl or .parquet file, compressed or not")
    if not text.is_file():
        raise FarstateError(f"{text}: no such file; --text takes one .txt, .jsonl or .parquet file, compressed or not")
    encoder = load_tokenizer(tokenizer_of(checkpoint, tokenizer))
    joint = None
    if procedure.end_of_text is not None and (joint := encoder.token_to_id(procedure.end_of_text)) is None:
        raise FarstateError(
            f"{tokenizer or checkpoint}: the tokenizer has no token '{procedure.end_of_text}'; give its end of text with "
            "--end-of-text TOKEN, or --end-of-text none to put nothing between documents"
        )
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    kind = detect_format(checkpoint)
    model = load_model(checkpoint, device=settings.device)
    row = published_row(published_model, text, model.config)
    size = symbols(encoder)
    if size > model.config.padded_vocabulary:
        raise FarstateError(
            f"{checkpoint}: its head has {model.config.padded_vocabulary} rows, the tokenizer {size} symbols; give its own tokenizer"
        )
    started = time.monotonic()
    documents = _Documents(text, text_key, procedure.documents)
    batches = windows(encoded(documents, encoder, joint), procedure.context, settings.rows)
    sums = _Sums()
    with flushed_denormals():
        vocabulary_size = size if procedure.softmax == "real" else None
        for nll, scored in _scored(model, batches, settings, vocabulary_size):
            if not np.isfinite(nll).all():
                raise FarstateError(
                    f"{checkpoint}: the loss is not finite within tokens {sums.tokens + 1:,} … {sums.tokens + nll.size * scored:,}"
                )
            sums.add(nll, scored)
            if progress is not None:
                progress(sums.tokens, documents.count, math.exp(min(sums.mean, 700.0)))
    if not sums.tokens:
        raise FarstateError(f"{text}: holds fewer than two tokens, there is nothing to score")
    return Measured(
        format=kind,
        config=model.config,
        procedure=procedure,
        rows=vocabulary_size or model.config.padded_vocabulary,
        documents=documents.count,
        tokens=sums.tokens,
        nll=sums.mean,
        error=sums.error,
        seconds=time.monotonic() - started,
        row=row,
    )


def encoded(documents: Iterable[str], tokenizer: Tokenizer, joint: int | None) -> Iterator[Integers]:
    """The tokens of the documents, `joint` after each; no other special tokens are added."""
    batch: list[str] = []
    held = 0

    def ids() -> Integers:
        parts: list[int] = []
        for encoding in tokenizer.encode_batch_fast(batch, add_special_tokens=False):
            parts += encoding.ids
            if joint is not None:
                parts.append(joint)
        return np.array(parts, dtype=np.int64)

    for document in documents:
        batch.append(document)
        held += len(document)
        if held >= _BATCH_BYTES:
            yield ids()
            batch, held = [], 0
    if batch:
        yield ids()


def windows(blocks: Iterable[Integers], context: int, rows: int) -> Iterator[Integers]:
    """Cut a stream of tokens into windows of `context` inputs and the token after them, side by side in batches.

    Yields:
        (≤ rows, context + 1); last, where the stream does not end with a window, (1, fewer). The last token of a window is the
        first of the next: each token but the first of the stream is the label of one input.
    """
    size = rows * context
    held: list[Integers] = []
    count = 0
    for block in blocks:
        held.append(block)
        count += block.size
        if count > size:
            tokens = np.concatenate(held)
            while tokens.size > size:
                yield _rows(tokens, context, rows)
                tokens = tokens[size:]
            held, count = [tokens], tokens.size
    tokens = np.concatenate(held) if held else np.empty(0, dtype=np.int64)
    whole = max(tokens.size - 1, 0) // context
    if whole:
        yield _rows(tokens, context, whole)
    if tokens[whole * context :].size > 1:
        yield tokens[None, whole * context :]


def _rows(tokens: Integers, context: int, rows: int) -> Integers:
    return np.stack([tokens[row * context : (row + 1) * context + 1] for row in range(rows)])


def _scored(
    model: Model, batches: Iterable[Integers], settings: EvaluationSettings, vocabulary_size: int | None
) -> Iterator[tuple[npt.NDArray[np.float64], int]]:
    """For each batch: the sum of the losses of each window, and how many each has."""
    for batch in batches:
        length = batch.shape[1] - 1

        def read(start: int, count: int, batch: Integers = batch) -> Integers:
            return np.ascontiguousarray(batch[:, start : start + count])

        sums = np.zeros(batch.shape[0])
        for _, nll in stream_nll(
            model,
            read,
            length,
            segment_tokens=settings.segment_tokens,
            device=torch.device(settings.device),
            vocabulary_size=vocabulary_size,
        ):
            sums += nll.sum(axis=1)
        yield sums, length


class _Sums:
    """Loss and its error over windows, as a ratio of sums: the last window is shorter."""

    def __init__(self) -> None:
        self.tokens = self.windows = 0
        self._nll = self._squares = self._products = self._sizes = 0.0

    def add(self, nll: npt.NDArray[np.float64], tokens: int) -> None:
        self.windows += nll.size
        self.tokens += nll.size * tokens
        self._nll += float(nll.sum())
        self._squares += float((nll**2).sum())
        self._products += float(nll.sum()) * tokens
        self._sizes += float(nll.size * tokens**2)

    @property
    def mean(self) -> float:
        return self._nll / self.tokens

    @property
    def error(self) -> float:
        if self.windows < _FEWEST_WINDOWS:
            return math.nan
        # Σ (nll_w − mean · tokens_w)², by its terms.
        spread = self._squares - 2.0 * self.mean * self._products + self.mean**2 * self._sizes
        return math.sqrt(max(spread, 0.0) * self.windows / (self.windows - 1)) / self.tokens


class _Documents:
    """The texts of a file; `count` says how many have been read."""

    def __init__(self, path: Path, text_key: str, limit: int | None) -> None:
        self._path, self._limit = path, limit
        self._source = Source(name="text", files=str(path), text_key=text_key)
        self.count = 0

    def __iter__(self) -> Iterator[str]:
        for record in islice(read_files([self._path], self._source, Path()), self._limit):
            if isinstance(record, Damage):
                raise FarstateError(record.message)
            self.count += 1
            yield record.utf8.decode()


def tokenizer_of(checkpoint: Path, given: Path | None) -> Path:
    """The tokenizer.json that was given, else the one beside the checkpoint.

    Raises:
        FarstateError: there is none.
    """
    if given is not None:
        if not given.exists():
            raise FarstateError(f"{given}: no such file; --tokenizer takes a tokenizer.json")
        if given.is_dir() and not (given / "tokenizer.json").is_file():
            raise FarstateError(f"{given}: is a folder without a tokenizer.json")
        return given
    beside = (checkpoint if checkpoint.is_dir() else checkpoint.parent) / "tokenizer.json"
    if beside.is_dir():
        raise FarstateError(f"{beside}: is a folder; give --tokenizer FILE")
    if not beside.is_file():
        raise FarstateError(
            f"{beside}: no such file; give --tokenizer FILE (the published Mamba models of the Pile take that of GPT-NeoX-20B)"
        )
    return beside


def published_row(name: str | None, text: Path, config: Config) -> Published | None:
    """The published value that a measurement is to be held against.

    With `name` the user says that the text is the original Pile's validation file; without, the file's name says so, and the
    model's sizes say which row.

    Raises:
        FarstateError: no such row, or one of a model of other sizes.
    """
    rows = published()
    sizes = (config.architecture, config.layers, config.width, config.padded_vocabulary)
    if name is None:
        return next((row for row in rows.values() if row.fits(*sizes)), None) if text.name == PUBLISHED_FILE else None
    if name not in rows:
        raise FarstateError(f"--published: '{name}' is unknown{nearest(name, rows)}; known: {', '.join(rows)}")
    row = rows[name]
    if not row.fits(*sizes):
        raise FarstateError(
            f"--published: {name} is a {row.architecture} of {row.layers} layers and width {row.width} with the vocabulary of "
            f"GPT-NeoX-20B, the checkpoint a {sizes[0]} of {sizes[1]} and {sizes[2]} with {sizes[3]} rows"
        )
    return row


def report(measured: Measured, checkpoint: str, text: Path, device: str) -> list[str]:
    """What `farstate perplexity` prints."""
    procedure, config = measured.procedure, measured.config
    joined = f"documents joined, {procedure.end_of_text} after each" if procedure.end_of_text else "documents joined by nothing"
    padding = "padding included [assumed]" if procedure.softmax == "padded" else "the tokenizer's symbols"
    error = "" if math.isnan(measured.error) else f" ± {measured.error:.4f} (standard error over windows)"
    part = "" if procedure.documents is None else f" (the first {procedure.documents:,} at most)"
    where = f"cpu (threads: {torch.get_num_threads()})" if device == "cpu" else device
    lines = [
        f"checkpoint  {checkpoint}: {config.architecture}, {config.parameter_count():,} parameters, {measured.format} format",
        f"text        {text}: {measured.documents:,} documents{part}, {measured.tokens:,} tokens scored",
        f"protocol    {joined} [assumed]; windows of {procedure.context} tokens from a zero state [assumed]; "
        f"softmax over {measured.rows} rows, {padding}",
        f"nll         {measured.nll:.5f} nats per token{error}",
        f"perplexity  {measured.perplexity:.4f}",
        f"speed       {measured.tokens / max(measured.seconds, 1e-9):,.0f} tokens/s on {where}, tokenising included",
    ]
    return lines if measured.row is None else [*lines, f"published   {verdict(measured, measured.row)}"]


def verdict(measured: Measured, row: Published) -> str:
    """How far a perplexity is from a published one, and what makes the two less than comparable."""
    distance = measured.perplexity - row.perplexity
    within = "within" if abs(distance) <= PUBLISHED_TOLERANCE else "not within"
    procedure = measured.procedure
    deviations = [
        words
        for words, deviates in (
            (f"the first {measured.documents:,} documents only", procedure.documents is not None),
            (f"windows of {procedure.context} instead of {PUBLISHED_CONTEXT}", procedure.context != PUBLISHED_CONTEXT),
            ("softmax without the padded rows", procedure.softmax != "padded"),
            (f"{procedure.end_of_text or 'nothing'} between documents", procedure.end_of_text != END_OF_TEXT),
        )
        if deviates
    ]
    note = f"; measured otherwise: {', '.join(deviations)}" if deviations else ""
    return (
        f"{row.model} {row.perplexity:.2f} on the {row.split} ({row.source}): distance {distance:+.3f}, "
        f"{within} {PUBLISHED_TOLERANCE}{note}"
    )
