"""Readers of records: archive members, local files, hub data sets, one document or one damage at a time.

A *damage* is one record that cannot be read; the caller decides whether it stops the run. A container that is
damaged as a whole (a truncated file, a broken archive) is always an error: nobody knows what it held.

Every reader can leave out what it gave before: `passed` counts records and damages from the beginning. A compressed stream is
decompressed from its beginning all the same, so that damage in it, and other bytes than before, are noticed; but what was given is
not parsed again.
"""

from __future__ import annotations

import gzip
import io
import json
import lzma
import os
import shutil
import tarfile
import tempfile
import zipfile
import zlib
from collections.abc import Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

from farstate.corpus import compressed
from farstate.corpus.hub import HubFile
from farstate.corpus.sources import matches
from farstate.corpus.trail import Followed, Trail
from farstate.errors import FarstateError
from farstate.params import Source

_PARQUET_BATCH = 64
_BUFFER = 1 << 16


@dataclass(frozen=True, slots=True)
class Record:
    """A document as its source holds it; `title` says where in the source it is."""

    utf8: bytes
    title: str
    pile_set_name: str | None


@dataclass(frozen=True, slots=True)
class Damage:
    """A record that cannot be read: a word for the counts, a sentence that names file, record and problem, and what helps in a corpus."""

    reason: str
    message: str
    remedy: str | None = None


Records = Generator[Record | Damage, None, None]


class _Passed:
    """How many records are still to be left out."""

    def __init__(self, count: int) -> None:
        self.left = count

    def __call__(self, count: int = 1) -> bool:
        """Whether the next `count` records are among them; they are then counted."""
        if self.left < count or not count:
            return False
        self.left -= count
        return True


def read_archive(archive: Path, source: Source, passed: int = 0) -> Records:
    """The plain-text members of a wheel (zip) or an sdist (tar.gz), in the archive's order. Nothing is unpacked or run.

    Raises:
        FarstateError: not an archive, damaged, no member matches, or an exclude glob matches no member.
    """
    past = _Passed(passed)
    unused = set(source.exclude)
    present: list[str] = []
    wanted = 0
    with _explained(archive):
        for name, handle in _members(archive):
            present.append(name)
            if not matches(name, source.members or ""):
                continue
            excluding = {pattern for pattern in source.exclude if matches(name, pattern)}
            unused -= excluding
            if not excluding:
                wanted += 1
                if past():
                    continue
                yield decode_plain(handle.read(), source.encodings, name, f"{source.package}: {name}")
    if not wanted:
        example = next((name for name in present if name.endswith(".txt")), present[0] if present else "nothing")
        raise FarstateError(
            f"corpus source '{source.name}': no member of {source.package} is left by members '{source.members}' "
            f"and exclude; it holds {len(present)} files, such as '{example}'"
        )
    if unused:
        # The archive is pinned by its checksum, so an idle exclude is a slip of the pen.
        raise FarstateError(
            f"corpus source '{source.name}': exclude '{sorted(unused)[0]}' matches no member of {source.package} "
            f"that members '{source.members}' picks"
        )


def _members(archive: Path) -> Iterator[tuple[str, IO[bytes]]]:
    if zipfile.is_zipfile(archive):
        with zipfile.ZipFile(archive) as zipped:
            for info in zipped.infolist():
                if not info.is_dir():
                    with zipped.open(info) as member:
                        yield info.filename, member
    else:
        with tarfile.open(archive, "r:*") as tarred:
            for entry in tarred:
                if entry.isfile() and (content := tarred.extractfile(entry)) is not None:
                    with content:
                        yield entry.name, content
            # A compressed stream proves itself at its end, which lies behind the last member.
            while tarred.fileobj is not None and tarred.fileobj.read(1 << 20):
                pass


@contextmanager
def _explained(archive: Path) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError:
        raise FarstateError(f"{archive}: no such file; run the rule that fetches it") from None
    except PermissionError:
        raise FarstateError(f"{archive}: no permission to read it") from None
    except (zipfile.BadZipFile, tarfile.TarError, EOFError, gzip.BadGzipFile, lzma.LZMAError, zlib.error) as error:
        raise FarstateError(f"{archive}: damaged archive ({error}); delete it and fetch it again") from None


def decode_plain(data: bytes, encodings: Sequence[str], title: str, where: str) -> Record | Damage:
    """Plain text with `\\n` line ends and no byte-order mark, by the first of `encodings` that fits.

    Raises:
        FarstateError: Python knows no encoding of that name.
    """
    problem = ""
    for encoding in encodings:
        try:
            text = data.decode(encoding)
        except UnicodeDecodeError as error:
            problem = problem or f"byte 0x{data[error.start]:02x} at offset {error.start}"
        except LookupError:
            raise FarstateError(
                f"corpus source encodings: '{encoding}' is not an encoding; examples: utf-8, latin-1, cp1252"
            ) from None
        else:
            return _record(text.removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n"), title, None, where)
    return Damage(
        "not_decodable",
        f"{where}: not {' or '.join(encodings)} ({problem})",
        "list the file's encoding in the source's encodings",
    )


def read_files(
    files: Sequence[Path | HubFile], source: Source, scratch: Path, passed: int = 0, trail: Trail | None = None
) -> Records:
    """The documents of files, in the order given; `scratch` is a directory for parquet files that are compressed or come from the hub.

    Args:
        trail: what is read of the files is noted there, and held against what an interrupted reading met; not of a local
            parquet file, and not of a `.txt` whose document is passed.

    Raises:
        FarstateError: an unknown kind of file, or one that is missing, unreadable, truncated or damaged; OtherBytes: see `trail`.
    """
    past = _Passed(passed)
    trail = trail or Trail()
    local = [file.parent for file in files if isinstance(file, Path)]
    folder = os.path.commonpath(local) if local else "."
    for file in files:
        path = file if isinstance(file, Path) else file.name
        title = file.relative_to(folder).as_posix() if isinstance(file, Path) else file.path
        inner = path.with_suffix("") if path.suffix in compressed.SUFFIXES else path
        if inner.suffix == ".txt":
            if not past():
                yield decode_plain(b"".join(_blocks(file, trail)), source.encodings, title, str(path))
        elif inner.suffix == ".jsonl":
            yield from _json_lines(_blocks(file, trail), str(path), title, source.text_key, past)
        elif inner.suffix == ".parquet":
            yield from _parquet(file, str(path), title, source.text_key, scratch, past, trail)
        else:
            raise FarstateError(
                f"{path}: not a kind of file that holds documents; allowed: .txt, .jsonl, .parquet, "
                f"each also with {', '.join(compressed.SUFFIXES)}"
            )


def _blocks(file: Path | HubFile, trail: Trail) -> Iterator[bytes]:
    if isinstance(file, HubFile):
        return compressed.blocks(file.name, file.open(trail))
    trail.begin(str(file))
    return compressed.blocks(file, cast(IO[bytes], io.BufferedReader(Followed(_open(file), trail), _BUFFER)))


def _json_lines(blocks: Iterator[bytes], name: str, title: str, text_key: str, past: _Passed) -> Records:
    for number, line in enumerate(compressed.lines(blocks), start=1):
        if not line.strip() or past():
            continue
        where = f"{name} line {number}"
        try:
            value = json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8"))
        except UnicodeDecodeError as error:
            yield Damage("not_utf8", f"{where}: not UTF-8 (byte 0x{line[error.start]:02x} at offset {error.start} of the line)")
        except (json.JSONDecodeError, RecursionError) as error:
            yield Damage("not_json", f"{where}: not JSON ({error})")
        else:
            yield from_mapping(value, text_key, f"{title}:{number}", where)


def _parquet(source: Path | HubFile, name: str, title: str, text_key: str, scratch: Path, past: _Passed, trail: Trail) -> Records:
    import pyarrow as pa
    import pyarrow.parquet as pq

    handle: IO[bytes]
    with ExitStack() as stack:
        if isinstance(source, Path) and source.suffix == ".parquet":
            handle = stack.enter_context(_open(source))
        else:
            handle = stack.enter_context(tempfile.TemporaryFile(dir=scratch))
            handle.writelines(_blocks(source, trail))
            handle.seek(0)
        try:
            file = pq.ParquetFile(handle)
            columns = file.schema_arrow.names
            if text_key not in columns:
                raise FarstateError(f"{name}: no column '{text_key}' (text_key); it has {', '.join(columns)}")
            number = 0
            wanted = [column for column in (text_key, "meta", "pile_set_name") if column in columns]
            for group in range(file.num_row_groups):
                if past(rows := file.metadata.row_group(group).num_rows):
                    number += rows
                    continue
                for batch in file.iter_batches(batch_size=_PARQUET_BATCH, row_groups=[group], columns=wanted):
                    for row in batch.to_pylist():
                        number += 1
                        if not past():
                            yield from_mapping(row, text_key, f"{title}:{number}", f"{name} row {number}")
        except (pa.ArrowException, UnicodeDecodeError) as error:
            raise FarstateError(f"{name}: damaged parquet file ({' '.join(str(error).split())})") from None
        except OSError as error:
            if error.errno is None:  # pyarrow reports damaged pages so
                raise FarstateError(f"{name}: damaged parquet file ({' '.join(str(error).split())})") from None
            raise


def _open(path: Path) -> io.BufferedReader:
    try:
        return open(path, "rb")
    except FileNotFoundError:
        raise FarstateError(f"{path}: no such file") from None
    except PermissionError:
        raise FarstateError(f"{path}: no permission to read it") from None


def read_hub(source: Source, revision: str | None = None, passed: int = 0) -> Records:
    """The documents of a hub data set at the registered `revision`, streamed as a whole, through the `datasets` library.

    Raises:
        FarstateError: the data set cannot be reached or read; the message says how to give a local copy.
    """
    import datasets

    described = f"hub data set '{source.hub}'" + (f" ({source.subset})" if source.subset else "")
    try:
        stream = datasets.load_dataset(source.hub, source.subset, split=source.hub_split, revision=revision, streaming=True)
        for number, row in enumerate(stream, start=1):
            if number <= passed:
                continue
            yield from_mapping(row, source.text_key, f"{source.hub}:{number}", f"{described} row {number}")
    except FarstateError:
        raise
    except Exception as error:  # the library lets the errors of a dozen packages through
        reason = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
        raise FarstateError(
            f"{described}, split '{source.hub_split}': cannot be read ({type(error).__name__}: {reason}); offline, copy its "
            f".jsonl.zst or .parquet files here and give the source files: '<folder>/*.parquet' in the place of hub"
        ) from None


def from_mapping(value: Any, text_key: str, title: str, where: str) -> Record | Damage:
    """A record of JSON, parquet or hub form; the Pile's `meta.pile_set_name` is kept where there is one."""
    if not isinstance(value, dict):
        return Damage("not_an_object", f"{where}: an object with a key '{text_key}' is expected, found {type(value).__name__}")
    text = value.get(text_key)
    if text is None:
        known = ", ".join(map(str, value)) or "none"
        return Damage("no_text", f"{where}: no text under '{text_key}' (text_key); keys: {known}")
    if not isinstance(text, str):
        return Damage("text_not_a_string", f"{where}: '{text_key}' is {type(text).__name__}, a string is expected")
    meta = value.get("meta")
    name = meta.get("pile_set_name") if isinstance(meta, dict) else value.get("pile_set_name")
    return _record(text, title, name if isinstance(name, str) else None, where)


def _record(text: str, title: str, pile_set_name: str | None, where: str) -> Record | Damage:
    try:
        return Record(text.encode(), title, pile_set_name)
    except UnicodeEncodeError as error:  # JSON can spell what Unicode text cannot hold
        return Damage("not_unicode", f"{where}: half a surrogate pair at character {error.start} of the text")


def copy_member(archive: Path, member: str, target: Path) -> None:
    """Copy one member of an archive to the file `target`.

    Raises:
        FarstateError: the archive is damaged or has no such member.
    """
    found = False
    with _explained(archive):
        for name, handle in _members(archive):
            if name == member:
                found = True
                with open(target, "wb") as out:
                    shutil.copyfileobj(handle, out)
    if not found:
        raise FarstateError(f"{archive}: has no member '{member}'")
