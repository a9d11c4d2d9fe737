"""Compressed files as a stream of bytes that is whole or an error, never silently short."""

from __future__ import annotations

import bz2
import gzip
import lzma
import zlib
from collections.abc import Iterable, Iterator
from pathlib import PurePath
from typing import IO, cast

import zstandard

from farstate.errors import FarstateError

SUFFIXES = (".zst", ".gz", ".xz", ".bz2")
_BLOCK = 1 << 20
_ZSTD_INPUT = 1 << 16
# Archives written with `zstd --long=31`, as some dumps of the Pile are, need this much.
_ZSTD_WINDOW = 1 << 31


def blocks(path: PurePath, stream: IO[bytes] | None = None) -> Iterator[bytes]:
    """The decompressed bytes of `path`, in blocks; the suffix tells the format, no known suffix means plain.

    Args:
        stream: the compressed bytes, closed at the end; by default the file is opened.

    Raises:
        FarstateError: the file is missing, unreadable, damaged or ends before its compressed stream does.
    """
    try:
        with open(path, "rb") if stream is None else stream as raw:
            if path.suffix == ".zst":
                yield from _zstd(path, raw)
            else:
                with _opened(path, raw) as plain:
                    while block := plain.read(_BLOCK):
                        yield block
    except FileNotFoundError:
        raise FarstateError(f"{path}: no such file") from None
    except PermissionError:
        raise FarstateError(f"{path}: no permission to read it") from None
    except EOFError:
        raise _truncated(path) from None
    except (gzip.BadGzipFile, lzma.LZMAError, zlib.error, zstandard.ZstdError) as error:
        raise FarstateError(f"{path}: damaged {path.suffix} data ({error})") from None
    except OSError as error:
        if error.errno is None:  # bz2 reports damage as an OSError without a number
            raise FarstateError(f"{path}: damaged {path.suffix} data ({error})") from None
        raise


def lines(chunks: Iterable[bytes]) -> Iterator[bytes]:
    """Join blocks and cut them at line feeds; the last line needs none."""
    pending: list[bytes] = []
    for chunk in chunks:
        first, *rest = chunk.split(b"\n")
        pending.append(first)
        if rest:
            yield b"".join(pending)
            yield from rest[:-1]
            pending = [rest[-1]]
    if last := b"".join(pending):
        yield last


def _opened(path: PurePath, raw: IO[bytes]) -> IO[bytes]:
    if path.suffix == ".gz":
        return cast(IO[bytes], gzip.open(raw, "rb"))
    if path.suffix == ".xz":
        return lzma.open(raw, "rb")
    if path.suffix == ".bz2":
        return bz2.open(raw, "rb")
    return raw


def _zstd(path: PurePath, raw: IO[bytes]) -> Iterator[bytes]:
    # The library's file reader takes the end of the file for the end of the data, wherever it comes:
    # frames are followed by hand, so that a file that stops inside one is noticed.
    decompressor = zstandard.ZstdDecompressor(max_window_size=_ZSTD_WINDOW)
    frame = None
    seen_any = False
    while block := raw.read(_ZSTD_INPUT):
        seen_any = True
        while block:
            if frame is None:
                frame = decompressor.decompressobj()
            if data := frame.decompress(block):
                yield data
            block = frame.unused_data if frame.eof else b""
            if frame.eof:
                frame = None
    if frame is not None or not seen_any:
        raise _truncated(path)


def _truncated(path: PurePath) -> FarstateError:
    return FarstateError(f"{path}: truncated, its {path.suffix} stream has no end; fetch or copy the file again")
