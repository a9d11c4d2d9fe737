"""Background text to hide facts in: pieces of a split's documents, of an exact number of tokens, and the places between sentences.

Where a sentence ends is read off the tokens, without decoding the text: for every token of the vocabulary it is worked out once
what its text begins and ends with.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from farstate.corpus.document_table import Pieces
from farstate.corpus.store import TokenStore
from farstate.corpus.tokenizer import symbols
from farstate.errors import FarstateError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

Tokens = NDArray[np.int64]
Marks = NDArray[np.bool_]

# The next sentence start is looked for in windows of so many tokens, and in so many windows at most; a text that has none within them
# (tables, source code) is read from its beginning.
_WINDOW, _WINDOWS = 512, 64

_CLOSES = re.compile(r"""[.!?]["'”’)\]]*\s*\Z""")
_QUOTES = re.compile(r"""["'”’)\]]+\s*""")
# What may stand before the capital of a sentence; \ufffd is part of a character of several bytes, most often such a mark.
_BEFORE_CAPITAL = "\"'“‘([_*\ufffd"
# Behind these, and behind a single capital, a full stop ends no sentence.
_ABBREVIATED = {
    "Capt",
    "Col",
    "Dr",
    "Esq",
    "Gen",
    "Hon",
    "Jr",
    "Lieut",
    "Messrs",
    "Mr",
    "Mrs",
    "Ms",
    "No",
    "Prof",
    "Rev",
    "Sr",
    "St",
}
_ABBREVIATED |= {"Vol", "cf", "ch", "ed", "etc", "viz", "vol"}
_LONGEST = 2 + max(map(len, _ABBREVIATED))


class Piece(NamedTuple):
    """Background text.

    Attributes:
        tokens: (length,) int64.
        places: offsets into `tokens` before which something can be inserted without cutting a sentence, ascending. The first is 0,
            where the piece begins; its end is none, since the piece is cut there.
    """

    tokens: Tokens
    places: Tokens


class Background:
    """Pieces of the documents of a split, each from a place drawn uniformly from all tokens, at the next start of a sentence.

    A piece that is longer than the rest of its document goes on with the next one of the store's table, from its beginning, and
    after the last with the first: the longest piece is the whole split.

    Args:
        tokenizer: the one the store was made with.

    Raises:
        FarstateError: there is no such split.
    """

    def __init__(self, store: TokenStore, split: str, tokenizer: Tokenizer) -> None:
        self._store = store
        self._split = split
        self._table = store.documents(split)
        self._tokens = Pieces(self._table, lambda lengths: lengths)
        self._sentences = _Sentences(tokenizer, store.vocabulary_size)

    @property
    def tokens(self) -> int:
        """Tokens of the split, the length of the longest piece."""
        return self._tokens.total

    def piece(self, length: int, generator: np.random.Generator) -> Piece:
        """A piece of exactly `length` tokens, 0 included. Only its own tokens are read, and what is looked through for its start.

        Raises:
            FarstateError: all documents together have fewer tokens.
        """
        if length > self.tokens:
            raise FarstateError(
                f"split '{self._split}': {length} tokens of background text are needed, all its documents together have {self.tokens}; "
                "take shorter prompts (tasks.*.lengths), hold out more documents (corpus.split), or add text"
            )
        if length <= 0:
            return Piece(np.empty(0, dtype=np.int64), np.zeros(1, dtype=np.int64))
        document, offset, _ = self._tokens.locate(np.array([generator.integers(self.tokens)]))
        number, start = self._sentence_start(int(document[0]), int(offset[0]))
        parts, taken = [], 0
        while taken < length:
            parts.append(self._read(number, start, min(self._length(number) - start, length - taken)))
            taken += parts[-1].size
            number, start = self._next(number), 0
        tokens = np.concatenate(parts)
        return Piece(tokens, np.concatenate(([0], self._sentences.starts(tokens))))

    def _sentence_start(self, document: int, offset: int) -> tuple[int, int]:
        """The first start of a sentence from there on that has white space before it, in this document or the next ones."""
        for _ in range(_WINDOWS):
            length = self._length(document)
            # Two tokens before the window tell whether a sentence ends where it begins, two behind it whether one ends at its last.
            first = max(0, offset - 2)
            starts = self._sentences.starts(self._read(document, first, min(length, offset + _WINDOW + 2) - first)) + first
            starts = starts[starts >= offset]
            if starts.size:
                return document, int(starts[0])
            offset += _WINDOW
            if offset >= length:
                document, offset = self._next(document), 0
        return document, 0

    def _next(self, document: int) -> int:
        """The next document that has tokens."""
        while True:
            document = (document + 1) % len(self._table)
            if self._length(document):
                return document

    def _length(self, document: int) -> int:
        return int(self._table.lengths(np.array([document]))[0])

    def _read(self, document: int, start: int, count: int) -> Tokens:
        shard, offset = self._table.places(np.array([document]))
        return self._store.read(int(shard[0]), int(offset[0]) + start, count)


class _Sentences:
    """What every token of a vocabulary tells of sentences: (V,) bool each.

    Attributes:
        closes: its text ends with the end of a sentence, quotation marks and brackets behind it included.
        quotes: it is quotation marks or brackets, which belong to the sentence before.
        opens: its first letter is a capital, or it is an opening quotation mark.
        blank: it is white space.
        spaced_before, spaced_after: it begins, ends with white space.
        stop: it ends with a full stop.
    """

    def __init__(self, tokenizer: Tokenizer, vocabulary_size: int) -> None:
        texts = self._texts = _texts(tokenizer, max(vocabulary_size, symbols(tokenizer)))
        self.closes = _marks(_CLOSES.search(text) is not None for text in texts)
        self.quotes = _marks(_QUOTES.fullmatch(text) is not None for text in texts)
        self.opens = _marks(_opens(text.strip()) for text in texts)
        self.blank = _marks(text.isspace() for text in texts)
        self.spaced_before = _marks(text[:1].isspace() for text in texts)
        self.spaced_after = _marks(text[-1:].isspace() for text in texts)
        self.stop = _marks(text.rstrip().endswith(".") for text in texts)

    def starts(self, tokens: Tokens) -> Tokens:
        """The offsets, from 1 on, where a sentence begins and one has ended before it, white space between them; ascending."""
        count = tokens.size
        if count < 2:
            return np.empty(0, dtype=np.int64)
        closed = self.closes[tokens]
        closed[1:] |= self.quotes[tokens[1:]] & closed[:-1]
        spaced = self.spaced_after[tokens[:-1]] | self.spaced_before[tokens[1:]]
        # The next token that is not white space, or `count` where there is none.
        word = np.where(self.blank[tokens], count, np.arange(count))
        word = np.minimum.accumulate(word[::-1])[::-1]
        opens = np.append(self.opens[tokens], False)[word]
        ends = np.flatnonzero(closed[:-1] & spaced & opens[1:])
        stops = np.flatnonzero(self.stop[tokens[ends]])
        wrong = [place for place in stops.tolist() if self._abbreviated(tokens, int(ends[place]))]
        return np.delete(ends, wrong) + 1

    def _abbreviated(self, tokens: Tokens, stop: int) -> bool:
        """Whether the word that ends with this full stop, which may be several tokens, is an abbreviation."""
        word = ""
        for token in tokens[max(0, stop - _LONGEST) : stop + 1][::-1].tolist():
            word = self._texts[token] + word
            if len(word.rstrip()) > _LONGEST or word[:1].isspace():
                break
        word = word.strip().lstrip(_BEFORE_CAPITAL).removesuffix(".")
        return word in _ABBREVIATED or (len(word) == 1 and word.isupper())


def _marks(values: Iterable[bool]) -> Marks:
    return np.fromiter(values, dtype=np.bool_)


def _opens(word: str) -> bool:
    rest = word.lstrip(_BEFORE_CAPITAL)
    return rest[:1].isupper() or (word != "" and not rest)


def _texts(tokenizer: Tokenizer, size: int) -> list[str]:
    """The text of every token, the white space it begins with included; "" for those that the tokenizer has not.

    Decoded behind another token, since some decoders take away the space a text begins with.
    """
    anchor = tokenizer.encode("a", add_special_tokens=False).ids[-1:]
    before = len(tokenizer.decode(anchor, skip_special_tokens=False))
    known = min(size, symbols(tokenizer))
    pairs = [[*anchor, token] for token in range(known)]
    texts = [text[before:] for text in tokenizer.decode_batch(pairs, skip_special_tokens=False)]
    return texts + [""] * (size - known)
