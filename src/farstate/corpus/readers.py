"""Readers: batches of token windows for pre-training, for TBTT and for the arms compared with it; held-out stretches.

Notation: B rows, T context length. A window is T + 1 tokens of one document; window k of a document starts at token
k·T (plus a phase), so consecutive windows share one token: the last target of one is the first input of the next,
and every token but the first is predicted once. A batch depends on the step alone: position restore is the step number.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from farstate.corpus.document_table import DocumentTable, Pieces
from farstate.corpus.permutation import mix, permute
from farstate.corpus.store import TokenStore, length_buckets
from farstate.errors import FarstateError

Integers = NDArray[np.int64]

# Keys that keep the pseudo-random draws of one seed apart.
_WINDOWS, _PHASES, _STRETCHES, _SHUFFLE = range(4)
_DRAWN_AT_ONCE = 4096


@dataclass(frozen=True)
class Batch:
    """One step's windows.

    Attributes:
        tokens: (B, T + 1) int64; inputs are `tokens[:, :-1]`, targets `tokens[:, 1:]`.
        document: (B,) int64, index into the split's DocumentTable.
        offset: (B,) int64, position of the first token in its document.
        fresh: (B,) bool, True where the row does not continue its window of the step before.
        weights: (B, T) float32, of the targets in the loss; None: all alike.
    """

    tokens: Tensor
    document: Tensor
    offset: Tensor
    fresh: Tensor
    weights: Tensor | None = None


def rank_rows(rows: int, micro_batches: int, rank: int, world: int) -> Integers:
    """The rows of a batch that process `rank` of `world` reads: (rows / world,) int64, ascending.

    A batch is a function of the step, whatever reads it. Micro-batch m is rows m · rows / micro_batches onwards of the
    whole batch; each process has a contiguous share of every micro-batch, so that micro-batch m of all processes
    together is micro-batch m of a single one, and cutting these rows into `micro_batches` equal parts gives a process's own.

    Raises:
        FarstateError: a micro-batch's rows cannot be shared equally.
    """
    if not 0 <= rank < world:
        raise ValueError(f"rank {rank} of {world}")
    share, rest = divmod(rows, micro_batches * world)
    if rest or not share:
        raise FarstateError(
            f"a batch of {rows} rows (recipe.batch_tokens / context) in {micro_batches} micro-batches (recipe.micro_batches) cannot be "
            f"shared by {world} processes; run with a number of processes that divides {rows // micro_batches}"
        )
    parts = np.arange(micro_batches, dtype=np.int64) * (share * world)
    return (parts[:, None] + rank * share + np.arange(share, dtype=np.int64)).ravel()


def chosen(rows: Integers | None, batch_size: int) -> Integers:
    """The given rows of a batch, or all of it.

    Raises:
        IndexError: the batch has no such row.
    """
    if rows is None:
        return np.arange(batch_size, dtype=np.int64)
    if rows.size and not 0 <= rows.min() <= rows.max() < batch_size:
        raise IndexError(f"rows {rows} of a batch of {batch_size}")
    return rows


class ShuffledWindows:
    """Windows in shuffled order, epoch after epoch, for pre-training.

    Documents are cut into blocks of K tokens, by default of one window: K = T. Each epoch is a permutation of all blocks, and shifts
    those of each document by a phase of its own, drawn from the positions that keep the document's number of blocks; so
    epochs differ in order and in cuts. What of a document is left beside its whole blocks is not read in that epoch; a document
    of fewer than K + 1 tokens never is.

    A block is read as K / T consecutive windows, one after the other through the batches: number n of all windows is the stretch of
    T tokens from n · T on of the blocks laid end to end. So readers with equal K and seed but other T have read the same text in the
    same order after equally many tokens; with as many tokens in a batch, in every single batch.

    Args:
        context: T in tokens.
        batch_size: B in rows.
        block_tokens: K in tokens, a multiple of T; None: T.

    Attributes:
        windows: windows in an epoch.

    Raises:
        FarstateError: no document of the split has K + 1 tokens, or K is not a multiple of T.
    """

    def __init__(
        self, store: TokenStore, split: str, context: int, batch_size: int, seed: int, block_tokens: int | None = None
    ) -> None:
        self._store = store
        self._table = store.documents(split)
        self._context = context
        self._block = context if block_tokens is None else block_tokens
        if self._block % context:
            raise FarstateError(f"pretrain.block_tokens: {self._block} is not a multiple of the context of {context} tokens")
        self._batch_size = batch_size
        self._seed = seed
        self._blocks = Pieces(self._table, lambda lengths: whole_windows(lengths, self._block))
        if not self._blocks.total:
            smaller = "models.*.context" if block_tokens is None else "pretrain.block_tokens"
            raise _too_short(self._table, self._block + 1, f"lower {smaller} or add longer documents")
        self.windows = self._blocks.total * (self._block // context)

    def batch(self, step: int, rows: Integers | None = None) -> Batch:
        """The batch of `step` = 0, 1, …, or the given rows of it; every row is fresh."""
        number = step * self._batch_size + chosen(rows, self._batch_size)
        number, part = np.divmod(number, self._block // self._context)
        epoch, place = np.divmod(number, self._blocks.total)
        block = permute(place, self._blocks.total, self._seed, _WINDOWS, epoch)
        document, of_document, length = self._blocks.locate(block)
        slack = (length - 1) % self._block
        phase = mix(self._seed, _PHASES, epoch, document) % (slack + 1).astype(np.uint64)
        offset = of_document * self._block + phase.astype(np.int64) + part * self._context
        return _batch(self._store, self._table, document, offset, self._context, np.ones(document.size, dtype=np.bool_))


class OrderedStreams:
    """Windows in reading order, for TBTT: a row reads a stretch of a document to its end, then takes another.

    Documents are cut into stretches of as many whole windows as `stretch_tokens` holds. The stretches, in a
    pseudo-random order, go to the row that is free first. A stretch that reaches beyond the last step is cut there, and its
    rest is handed out when the whole stretches are used up; so B × steps windows suffice, however they are spread.

    Rows are balanced by construction: each reads one window in every step, none waits for a long document of another, and no
    window is read twice. Where a document (or a stretch) ends, what follows in the row is another one, and the row is `fresh` there:
    whether its state is zeroed or kept is the arm's (`posttrain.arms.*.at_document_end`), not the order's. The tokens behind a document's
    last whole window, fewer than T, are not read.

    Args:
        context: T in tokens.
        batch_size: B in rows.
        steps: how many steps will be read.
        stretch_tokens: longest stretch in tokens; None for whole documents.

    Raises:
        FarstateError: no document has T + 1 tokens, there are fewer than B × steps windows, or a stretch is shorter than T.
    """

    def __init__(
        self, store: TokenStore, split: str, context: int, batch_size: int, steps: int, seed: int, stretch_tokens: int | None
    ) -> None:
        self._store = store
        self._table = store.documents(split)
        self.context = context
        self.batch_size = batch_size
        self.steps = steps
        if stretch_tokens is not None and stretch_tokens < context:
            raise FarstateError(
                f"posttrain.stretch_tokens: {stretch_tokens} is shorter than one window of {context} tokens (models.*.context)"
            )
        windows = windows_of(self._table, context)
        if not windows:
            raise _too_short(self._table, context + 1, "lower models.*.context or add longer documents")
        if windows < batch_size * steps:
            raise FarstateError(
                f"split '{split}': has {windows} whole windows of {context} tokens, posttrain.steps × rows a step "
                f"(posttrain.recipe.batch_tokens / context) = {steps} × {batch_size} = {batch_size * steps} are to be read; "
                "lower posttrain.steps or posttrain.recipe.batch_tokens, or add text"
            )
        self._schedule(windows if stretch_tokens is None else stretch_tokens // context, seed)

    def batch(self, step: int, rows: Integers | None = None) -> Batch:
        """The batch of `step` in [0, steps), or the given rows of it."""
        if not 0 <= step < self.steps:
            raise IndexError(f"step {step} of {self.steps}")
        rows = chosen(rows, self.batch_size)
        document, offset, first = self.locate(np.full_like(rows, step), rows)
        return _batch(self._store, self._table, document, offset, self.context, first == step)

    def locate(self, step: Integers, row: Integers) -> tuple[Integers, Integers, Integers]:
        """What is read at each (step, row): document, offset in it, and the step at which the row began that stretch; all (n,)."""
        at = np.searchsorted(self._keys, row * self.steps + step, side="right") - 1
        began = self._keys[at] - row * self.steps
        return self._documents[at], (self._windows[at] + step - began) * self.context, began

    def _schedule(self, longest: int, seed: int) -> None:
        pieces = Pieces(self._table, lambda lengths: -(-whole_windows(lengths, self.context) // longest))
        stretches = _drawn(pieces, seed)
        rests: list[tuple[int, int, int]] = []
        free = [(0, row) for row in range(self.batch_size)]
        plan: list[tuple[int, int, int]] = []
        while free:
            step, row = heapq.heappop(free)
            stretch = next(stretches, None)
            if stretch is not None:
                document, number, length = stretch
                window = number * longest
                count = min(longest, (length - 1) // self.context - window)
            else:
                document, window, count = rests.pop()
            plan.append((row * self.steps + step, document, window))
            room = self.steps - step
            if count < room:
                heapq.heappush(free, (step + count, row))
            elif count > room:
                rests.append((document, window + room, count - room))
        plan.sort()
        self._keys, self._documents, self._windows = np.array(plan, dtype=np.int64).T


class ShuffledStreams:
    """The windows that `streams` reads, each exactly once, in shuffled order: what the arms without reading order see.

    Every row is fresh. Arms that share a seed see the same windows in the same order.
    """

    def __init__(self, streams: OrderedStreams, seed: int) -> None:
        self._streams = streams
        self._seed = seed
        self.steps = streams.steps

    def batch(self, step: int, rows: Integers | None = None) -> Batch:
        """The batch of `step` in [0, steps), or the given rows of it."""
        streams = self._streams
        if not 0 <= step < streams.steps:
            raise IndexError(f"step {step} of {streams.steps}")
        size = streams.batch_size
        number = step * size + chosen(rows, size)
        source_step, source_row = np.divmod(permute(number, size * streams.steps, self._seed, _SHUFFLE), size)
        document, offset, _ = streams.locate(source_step, source_row)
        return _batch(streams._store, streams._table, document, offset, streams.context, np.ones(number.size, dtype=np.bool_))


@dataclass(frozen=True)
class Stretch:
    """A held-out stretch, to be read from a zero state: `length` + 1 tokens from `offset` on.

    Attributes:
        document_index: index into the split's DocumentTable.
        id: the document's content hash.
        stretch: number of the stretch in its document, from 0.
        offset: position of its first token in the document.
    """

    document_index: int
    id: str
    stretch: int
    offset: int


def held_out(
    store: TokenStore,
    split: str,
    length: int,
    documents: int | None,
    stretches_per_document: int,
    key: str = "evaluate.length",
) -> list[Stretch]:
    """The stretches an evaluation reads, by document id: of every document with `length` + 1 tokens as many as fit.

    Stretch s starts at token s·`length`, so that no token is predicted twice.

    Args:
        length: positions measured.
        documents: at most this many documents, the first by id; None for all that are long enough.
        stretches_per_document: at most this many stretches of a document.
        key: the parameter that asks for `length`, for the message.

    Raises:
        FarstateError: no document is long enough; the message says how long they are.
    """
    table = store.documents(split)
    enough = np.flatnonzero(table.length > length)[:documents]
    if not enough.size:
        raise _too_short(table, length + 1, f"lower {key}, hold out more documents (corpus.split), or add longer ones")
    ids = table.ids
    return [
        Stretch(int(index), str(ids[index]), stretch, stretch * length)
        for index in enough
        for stretch in range(min(stretches_per_document, int(table.length[index] - 1) // length))
    ]


def whole_windows(lengths: Integers, context: int) -> Integers:
    """How many windows of T = `context` tokens documents of the given lengths have."""
    counts: Integers = np.maximum(lengths - 1, 0) // context
    return counts


def windows_of(table: DocumentTable, context: int) -> int:
    """How many windows of T = `context` tokens all documents of a split have."""
    return sum(int(whole_windows(lengths, context).sum()) for lengths in table.scan())


def _drawn(pieces: Pieces, seed: int) -> Iterator[tuple[int, int, int]]:
    """Every piece once, in pseudo-random order: document, number in it, the document's length. Computed as it is needed, since
    few of a large corpus are."""
    for start in range(0, pieces.total, _DRAWN_AT_ONCE):
        block = np.arange(start, min(start + _DRAWN_AT_ONCE, pieces.total), dtype=np.int64)
        found = pieces.locate(permute(block, pieces.total, seed, _STRETCHES))
        yield from zip(*(values.tolist() for values in found), strict=True)


def _too_short(table: DocumentTable, needed: int, remedy: str) -> FarstateError:
    if not len(table):
        return FarstateError(f"split '{table.split}': has no documents; raise its share (corpus.split) or add documents")
    lengths = table.length
    longest = np.argmax(lengths, keepdims=True)
    buckets = ", ".join(f"{count} from {edge}" for edge, count in length_buckets(lengths).items())
    return FarstateError(
        f"split '{table.split}': no document has {needed} tokens; the longest of {len(table)} is "
        f"'{table.strings('title', longest)[0]}' with {lengths[longest[0]]} (documents by length in tokens: {buckets}); {remedy}"
    )


def _batch(
    store: TokenStore, table: DocumentTable, document: Integers, offset: Integers, context: int, fresh: NDArray[np.bool_]
) -> Batch:
    shard, first = table.places(document)
    tokens = store.windows(shard, first + offset, context + 1)
    return Batch(
        torch.from_numpy(tokens), torch.from_numpy(document.astype(np.int64)), torch.from_numpy(offset), torch.from_numpy(fresh)
    )
