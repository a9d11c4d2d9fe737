"""Documents: every kind of source, what is kept of it, and what is said about what cannot be read."""

from __future__ import annotations

import bz2
import gzip
import hashlib
import io
import json
import lzma
import os
import random
import shutil
import signal
import subprocess
import sys
import tarfile
import textwrap
import types
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from conftest import SHARED
from farstate.corpus import documents as documents_module
from farstate.corpus import records as records_module
from farstate.corpus.documents import SCHEMA, split_of, write_documents
from farstate.corpus.trail import OtherBytes, Trail
from farstate.errors import FarstateError
from farstate.files import MANIFEST, read_manifest
from farstate.params import Corpus, Source, Split

COMPRESS: dict[str, Callable[[bytes], bytes]] = {
    "": lambda data: data,
    ".gz": gzip.compress,
    ".xz": lzma.compress,
    ".bz2": bz2.compress,
    ".zst": lambda data: zstandard.ZstdCompressor().compress(data),
}


def run(
    tmp_path: Path, source: dict[str, Any], files: list[Path] | None = None, **corpus: Any
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Write the documents of one source; return rows and manifest."""
    made = Source(name="it", **source)
    output = tmp_path / "out"
    archive = source.pop("archive_path", None)
    write_documents(made, Corpus(sources=(made,), **corpus), output, archive=archive, files=files)
    manifest = read_manifest(output, verify=True)
    table = pq.read_table(output / "documents.parquet")
    assert table.schema.equals(SCHEMA)
    assert not [path for path in output.iterdir() if path.name.startswith(".")]
    return table.to_pylist(), manifest


def refuse(tmp_path: Path, match: str, source: dict[str, Any], files: list[Path] | None = None, **corpus: Any) -> None:
    with pytest.raises(FarstateError, match=match) as caught:
        run(tmp_path, source, files, **corpus)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out" / MANIFEST).exists()
    assert not (tmp_path / "out" / "documents.parquet").exists()


def lines_file(tmp_path: Path, *lines: str | bytes, name: str = "a.jsonl") -> Path:
    path = tmp_path / name
    path.write_bytes(b"\n".join(line if isinstance(line, bytes) else line.encode() for line in lines) + b"\n")
    return path


def text_line(text: str, **meta: str) -> str:
    return json.dumps({"text": text, "meta": meta} if meta else {"text": text})


@pytest.mark.parametrize("suffix", COMPRESS)
@pytest.mark.parametrize("kind", ["txt", "jsonl", "parquet"])
def test_kinds_and_compressions(tmp_path: Path, kind: str, suffix: str) -> None:
    texts = ["First, ä document.\r\nTwo lines.", "Second €"]
    if kind == "txt":
        data, expected = texts[0].encode(), [texts[0].replace("\r\n", "\n")]
    elif kind == "jsonl":
        data, expected = "\n".join(text_line(text, pile_set_name="Books3") for text in texts).encode(), texts
    else:
        buffer = io.BytesIO()
        pq.write_table(pa.table({"text": texts, "meta": [{"pile_set_name": "Books3"}] * 2}), buffer)
        data, expected = buffer.getvalue(), texts
    path = tmp_path / f"a.{kind}{suffix}"
    path.write_bytes(COMPRESS[suffix](data))
    rows, manifest = run(tmp_path, {"files": str(path)})
    assert [row["text"] for row in rows] == expected
    assert [row["id"] for row in rows] == [hashlib.sha256(text.encode()).hexdigest()[:32] for text in expected]
    assert [row["bytes"] for row in rows] == [len(text.encode()) for text in expected]
    assert {row["source"] for row in rows} == {"it"}
    assert [row["title"] for row in rows] == ([path.name] if kind == "txt" else [f"{path.name}:1", f"{path.name}:2"])
    if kind != "txt":
        assert {row["pile_set_name"] for row in rows} == {"Books3"}
        assert manifest["pile_set_names"] == {"Books3": {"documents": 2, "bytes": sum(len(text.encode()) for text in texts)}}
    assert manifest["documents"] == len(expected)
    assert sum(counts["documents"] for counts in manifest["splits"].values()) == len(expected)


def test_several_frames_and_files(tmp_path: Path) -> None:
    compress = zstandard.ZstdCompressor().compress
    (tmp_path / "a.jsonl.zst").write_bytes(compress(text_line("one").encode() + b"\n" + b'{"text": "tw') + compress(b'o"}\n'))
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "b.txt").write_text("three", encoding="utf-8")
    rows, _ = run(tmp_path, {"files": f"{tmp_path}/**/*.*"})
    assert [(row["text"], row["title"]) for row in rows] == [
        ("one", "a.jsonl.zst:1"),
        ("two", "a.jsonl.zst:2"),
        ("three", "sub/b.txt"),
    ]


@pytest.mark.parametrize("suffix", [".zst", ".gz", ".xz", ".bz2"])
@pytest.mark.parametrize("damaged_records", ["stop", "skip"])
def test_truncated_file_is_always_an_error(tmp_path: Path, suffix: str, damaged_records: str) -> None:
    whole = COMPRESS[suffix]("\n".join(text_line(f"document {number} {hash(str(number))}") for number in range(5000)).encode())
    path = tmp_path / f"a.jsonl{suffix}"
    for cut in (len(whole) // 2, len(whole) - 1, 0):
        path.write_bytes(whole[:cut])
        refuse(
            tmp_path,
            rf"a\.jsonl{suffix}: (truncated|damaged)|no document is left",
            {"files": str(path)},
            damaged_records=damaged_records,
        )


def test_truncated_between_decodable_frames(tmp_path: Path) -> None:
    compress = zstandard.ZstdCompressor().compress
    first, second = (compress((text_line(f"text {n}") + "\n").encode()) for n in range(2))
    path = tmp_path / "a.jsonl.zst"
    path.write_bytes(first + second[:-2])
    refuse(tmp_path, r"a\.jsonl\.zst: truncated", {"files": str(path)})


@pytest.mark.parametrize("suffix", [".zst", ".gz", ".xz", ".bz2", ".parquet"])
def test_damaged_file(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / ("a.parquet" if suffix == ".parquet" else f"a.jsonl{suffix}")
    path.write_bytes(b"this is not what the name says, whatever it is" * 5)
    refuse(tmp_path, rf"{path.name}: damaged", {"files": str(path)})


def test_damaged_inside_a_parquet_page(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": [f"{n} {hash(str(n))}" for n in range(3000)]}), path, compression="zstd")
    data = bytearray(path.read_bytes())
    data[200:400] = bytes(200)
    path.write_bytes(data)
    refuse(tmp_path, r"a\.parquet: damaged parquet file", {"files": str(path)})


BAD_LINES = {
    "not_utf8": (b'{"text": "caf\xe9"}', r"a\.jsonl line 2: not UTF-8 \(byte 0xe9 at offset 13 of the line\)"),
    "not_json": ('{"text": "unfinished', r"a\.jsonl line 2: not JSON"),
    "not_an_object": ('["text"]', r"a\.jsonl line 2: an object with a key 'text' is expected, found list"),
    "no_text": ('{"txt": "x"}', r"a\.jsonl line 2: no text under 'text' \(text_key\); keys: txt"),
    "text_not_a_string": ('{"text": 7}', r"a\.jsonl line 2: 'text' is int, a string is expected"),
    "not_unicode": (r'{"text": "\ud800"}', r"a\.jsonl line 2: half a surrogate pair at character 0"),
}


@pytest.mark.parametrize("reason", BAD_LINES)
def test_damaged_records_stop_or_are_counted(tmp_path: Path, reason: str) -> None:
    line, message = BAD_LINES[reason]
    path = lines_file(tmp_path, text_line("good"), line, "", text_line("better"))
    refuse(tmp_path, message, {"files": str(path)})
    rows, manifest = run(tmp_path, {"files": str(path)}, damaged_records="skip")
    assert [(row["text"], row["title"]) for row in rows] == [("good", "a.jsonl:1"), ("better", "a.jsonl:4")]
    assert manifest["skipped"] == {reason: 1}


def test_text_in_the_wrong_encoding(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes("café".encode("latin-1"))
    refuse(tmp_path, r"a\.txt: not utf-8 \(byte 0xe9 at offset 3\)", {"files": str(path)})
    refuse(tmp_path, "no document is left \\(1 not_decodable\\)", {"files": str(path)}, damaged_records="skip")
    refuse(tmp_path, "'utf-nine' is not an encoding", {"files": str(path), "encodings": ("utf-nine",)})
    rows, _ = run(tmp_path, {"files": str(path), "encodings": ("utf-8", "latin-1")})
    assert rows[0]["text"] == "café"


def test_byte_order_mark_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfmarked")
    (tmp_path / "b.jsonl").write_bytes(b"\xef\xbb\xbf" + text_line("also marked").encode())
    rows, _ = run(tmp_path, {"files": f"{tmp_path}/*.*"})
    assert [row["text"] for row in rows] == ["marked", "also marked"]


def test_parquet_columns_and_nulls(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"content": ["one", None], "pile_set_name": ["Github", "Github"]}), path)
    refuse(tmp_path, r"a\.parquet: no column 'text' \(text_key\); it has content, pile_set_name", {"files": str(path)})
    refuse(tmp_path, r"a\.parquet row 2: no text under 'content'", {"files": str(path), "text_key": "content"})
    rows, _ = run(tmp_path, {"files": str(path), "text_key": "content"}, damaged_records="skip")
    assert [(row["text"], row["pile_set_name"]) for row in rows] == [("one", "Github")]


def test_missing_unknown_and_empty(tmp_path: Path) -> None:
    refuse(tmp_path, r"gone\.jsonl: no such file", {"files": "unused"}, [tmp_path / "gone.jsonl"])
    refuse(tmp_path, r"gone\.parquet: no such file", {"files": "unused"}, [tmp_path / "gone.parquet"])
    odd = lines_file(tmp_path, "x", name="a.pdf")
    refuse(tmp_path, r"a\.pdf: not a kind of file that holds documents; allowed: \.txt, \.jsonl, \.parquet", {"files": str(odd)})
    empty = tmp_path / "empty.jsonl"
    empty.touch()
    refuse(tmp_path, "no document is left \\(it held no record\\)", {"files": str(empty)})
    refuse(
        tmp_path, "no document is left \\(1 too_short\\)", {"files": str(lines_file(tmp_path, text_line("abc")))}, minimum_bytes=4
    )


def test_duplicates_short_ones_and_limits(tmp_path: Path) -> None:
    path = lines_file(tmp_path, *(text_line(text) for text in ("same", "other", "same", "", "four", "last")))
    rows, manifest = run(tmp_path, {"files": str(path)})
    assert [row["text"] for row in rows] == ["same", "other", "four", "last"]
    assert manifest["duplicates"] == 1
    assert manifest["skipped"] == {"too_short": 1}
    rows, _ = run(tmp_path, {"files": str(path), "limit_documents": 2})
    assert [row["text"] for row in rows] == ["same", "other"]


def test_split_depends_on_content_and_salt_alone(tmp_path: Path) -> None:
    texts = [f"document number {number}" for number in range(400)]
    split = Split(validation=0.2, test=0.3, salt="a")

    def splits(these: list[str], chosen: Split) -> dict[str, str]:
        rows, _ = run(tmp_path, {"files": str(lines_file(tmp_path, *map(text_line, these)))}, split=chosen)
        return {row["text"]: row["split"] for row in rows}

    first = splits(texts, split)
    assert splits(texts[::-1], split) == first
    assert {text: first[text] for text in texts[:100]} == splits(texts[:100], split)
    assert splits(texts, Split(validation=0.2, test=0.3, salt="b")) != first
    counts = {name: sum(value == name for value in first.values()) for name in ("train", "validation", "test")}
    assert abs(counts["test"] - 120) < 30
    assert abs(counts["validation"] - 80) < 25
    wider = splits(texts, Split(validation=0.4, test=0.3, salt="a"))
    assert {text for text, name in wider.items() if name == "test"} == {text for text, name in first.items() if name == "test"}
    digest = hashlib.sha256(b"frozen").digest()
    frozen = [split_of(digest, Split(validation=0.3, test=0.3, salt=salt)) for salt in ("a", "b", "c", "farstate", "demo", "e")]
    assert frozen == ["validation", "train", "test", "train", "train", "test"]


def package(tmp_path: Path, kind: str, members: dict[str, bytes]) -> Path:
    path = tmp_path / "fetched" / "archive"
    path.parent.mkdir(exist_ok=True)
    if kind == "wheel":
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as zipped:
            for name, data in members.items():
                zipped.writestr(name, data)
    else:
        with tarfile.open(path, "w:gz") as tarred:
            for name, data in members.items():
                entry = tarfile.TarInfo(name)
                entry.size = len(data)
                tarred.addfile(entry, io.BytesIO(data))
            link = tarfile.TarInfo("p-1/texts/link_gut.txt")
            link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
            tarred.addfile(link)
    return path.parent


PACKAGE = {"package": "p==1", "sha256": "0" * 64, "members": "*/*data/texts/*_gut.txt"}
MEMBERS = {
    "p-1/setup.py": b"raise SystemExit('run')",
    "p-1/adata/texts/one_gut.txt": b"one\r\n",
    "p-1/bdata/texts/two_gut.txt": "zwölf".encode("latin-1"),
    "p-1/bdata/texts/three_(no_notes)_gut.txt": b"three",
    "p-1/bdata/texts/one_moby.txt": b"other",
}


@pytest.mark.parametrize("kind", ["wheel", "sdist"])
def test_package_archive(tmp_path: Path, kind: str) -> None:
    archive = package(tmp_path, kind, MEMBERS)
    source = Source(name="it", encodings=("utf-8", "latin-1"), exclude=("three_*_gut.txt",), **PACKAGE)
    write_documents(source, Corpus(sources=(source,)), tmp_path / "out", archive=archive)
    rows = pq.read_table(tmp_path / "out" / "documents.parquet").to_pylist()
    assert [(row["text"], row["title"]) for row in rows] == [
        ("one\n", "p-1/adata/texts/one_gut.txt"),
        ("zwölf", "p-1/bdata/texts/two_gut.txt"),
    ]


@pytest.mark.parametrize("kind", ["wheel", "sdist"])
@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"members": "nothing/*.txt"}, "no member of p==1 is left by members 'nothing/.*such as 'p-1/"),
        ({"exclude": ("tow_gut.txt",), "encodings": ("latin-1",)}, "exclude 'tow_gut.txt' matches no member of p==1"),
        ({}, r"p==1: p-1/bdata/texts/two_gut\.txt: not utf-8 \(byte 0xf6"),
    ],
)
def test_package_that_does_not_fit(tmp_path: Path, kind: str, changes: dict[str, Any], match: str) -> None:
    archive = package(tmp_path, kind, MEMBERS)
    source = Source(name="it", **{**PACKAGE, **changes})
    with pytest.raises(FarstateError, match=match):
        write_documents(source, Corpus(sources=(source,)), tmp_path / "out", archive=archive)
    assert not (tmp_path / "out" / MANIFEST).exists()


@pytest.mark.parametrize("kind", ["wheel", "sdist"])
def test_damaged_archive(tmp_path: Path, kind: str) -> None:
    archive = package(tmp_path, kind, {"p-1/adata/texts/long_gut.txt": random.Random(0).randbytes(200_000).hex().encode()})
    file = archive / "archive"
    data = bytearray(file.read_bytes())
    source = Source(name="it", **PACKAGE)
    for damaged in (data[: len(data) // 2], data[:5000] + bytes(500) + data[5500:]):
        file.write_bytes(damaged)
        with pytest.raises(FarstateError, match="archive: damaged archive"):
            write_documents(source, Corpus(sources=(source,)), tmp_path / "out", archive=archive)
    with pytest.raises(FarstateError, match="no such file"):
        write_documents(source, Corpus(sources=(source,)), tmp_path / "out", archive=tmp_path / "gone")
    with pytest.raises(FarstateError, match="has not been fetched"):
        write_documents(source, Corpus(sources=(source,)), tmp_path / "out")


def test_hub_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}

    def load_dataset(
        path: str, name: str | None, *, split: str, revision: str | None, streaming: bool
    ) -> Iterator[dict[str, Any]]:
        asked.update(path=path, name=name, split=split, streaming=streaming, revision=revision)
        return iter([{"text": "one", "meta": {"pile_set_name": "Pile-CC"}}, {"text": "two"}])

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    rows, _ = run(tmp_path, {"hub": "someone/set", "subset": "part", "hub_split": "validation"})
    assert asked == {"path": "someone/set", "name": "part", "split": "validation", "streaming": True, "revision": None}
    assert [(row["text"], row["title"], row["pile_set_name"]) for row in rows] == [
        ("one", "someone/set:1", "Pile-CC"),
        ("two", "someone/set:2", None),
    ]
    source = Source(name="it", hub="someone/set")
    write_documents(source, Corpus(sources=(source,)), tmp_path / "pinned", revision="0123abc")
    assert asked["revision"] == "0123abc", "what is registered is what is read"


def test_hub_offline_in_a_process_of_its_own(tmp_path: Path) -> None:
    code = f"""
    from pathlib import Path
    from farstate.corpus.documents import write_documents
    from farstate.errors import FarstateError
    from farstate.params import Corpus, Source
    source = Source(name="it", hub="nobody/no-such-set")
    try:
        write_documents(source, Corpus(sources=(source,)), Path({str(tmp_path / "out")!r}))
    except FarstateError as error:
        print(error)
    """
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "hf")}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, env=environment, check=True
    )
    assert done.stdout.startswith("hub data set 'nobody/no-such-set', split 'train': cannot be read")
    assert "give the source files:" in done.stdout
    assert not (tmp_path / "out" / MANIFEST).exists()


def test_row_groups_are_bounded_and_reruns_are_identical(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents_module, "_GROUP_BYTES", 2000)
    path = lines_file(tmp_path, *(text_line(f"{number} " * 50) for number in range(100)))
    run(tmp_path, {"files": str(path)})
    file = pq.ParquetFile(tmp_path / "out" / "documents.parquet")
    assert file.num_row_groups > 5
    before = (tmp_path / "out" / "documents.parquet").read_bytes()
    (tmp_path / "out" / MANIFEST).unlink()
    (tmp_path / "out" / ".documents.parquet.99999.part").write_bytes(b"left by a killed run")
    run(tmp_path, {"files": str(path)})
    assert (tmp_path / "out" / "documents.parquet").read_bytes() == before


def test_memory_does_not_grow_with_the_input(tmp_path: Path) -> None:
    block = "".join(text_line(f"{number} " + "word " * 2000) + "\n" for number in range(1000)).encode()
    path = tmp_path / "a.jsonl.zst"
    with open(path, "wb") as handle, zstandard.ZstdCompressor().stream_writer(handle) as writer:
        for part in range(12):
            writer.write(block.replace(b'"text": "', f'"text": "{part} '.encode()))
    code = f"""
    import resource
    from pathlib import Path
    from farstate.corpus.documents import write_documents
    from farstate.params import Corpus, Source
    def peak(limit):
        source = Source(name="it", files={str(path)!r}, limit_documents=limit)
        write_documents(source, Corpus(sources=(source,)), Path({str(tmp_path / "out")!r}))
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    few = peak(2000)
    print(peak(None) - few)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=True)
    assert float(done.stdout) < 50, "MiB more for 100 MB more text"


KILLED = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
from pathlib import Path
from deadly import kill_at
from farstate.corpus import documents, spool
from farstate.params import Corpus, Source
output, path, step, left, limit = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], int(sys.argv[4]), int(sys.argv[5])
documents._GROUP_BYTES = 600
spool._COMMIT_SECONDS = 0.0
where = documents if step == "write_manifest" else spool.Spool
kill_at(where, step, left)
source = Source(name="it", files=str(path), limit_documents=limit or None)
documents.write_documents(source, Corpus(sources=(source,), damaged_records="skip", minimum_bytes=20), output, files=[path])
"""


def messy(tmp_path: Path, suffix: str) -> Path:
    """Documents, with damaged and short ones, duplicates near and far, and blank lines between them."""
    texts = [f"document number {number % 90}, {number % 90} times counted" for number in range(120)]
    if suffix == ".parquet":
        path = tmp_path / "a.parquet"
        rows: list[str | None] = [
            None if number % 17 == 5 else "short" if number % 13 == 3 else t for number, t in enumerate(texts)
        ]
        pq.write_table(pa.table({"text": rows}), path, row_group_size=25)
        return path
    lines = [
        "{" if number % 17 == 5 else "" if number % 19 == 7 else text_line("short" if number % 13 == 3 else text)
        for number, text in enumerate(texts)
    ]
    path = tmp_path / f"a.jsonl{suffix}"
    path.write_bytes(COMPRESS[suffix]("\n".join(lines).encode()))
    return path


@pytest.mark.parametrize(
    ("suffix", "step", "after", "limit"),
    [
        (".zst", "append", 0, 0),
        (".zst", "append", 2, 0),
        (".zst", "append", 2, 60),
        (".parquet", "commit", 1, 0),
        (".gz", "write_parquet", 0, 0),
        (".zst", "write_manifest", 0, 0),
    ],
)
def test_killed_run_goes_on_where_it_was(
    tmp_path: Path, suffix: str, step: str, after: int, limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(documents_module, "_GROUP_BYTES", 600)
    path = messy(tmp_path, suffix)
    source = Source(name="it", files=str(path), limit_documents=limit or None)
    corpus = Corpus(sources=(source,), damaged_records="skip", minimum_bytes=20)
    write_documents(source, corpus, tmp_path / "whole", files=[path])
    manifest = read_manifest(tmp_path / "whole")
    assert min(manifest["duplicates"], sum(manifest["skipped"].values())) >= (0 if limit else 5)

    killed = tmp_path / "killed"
    done = subprocess.run([sys.executable, "-c", KILLED, killed, path, step, str(after), str(limit)], check=False)
    assert done.returncode == -signal.SIGKILL
    assert not (killed / MANIFEST).exists()
    read: list[str] = []
    original = records_module.from_mapping
    monkeypatch.setattr(records_module, "from_mapping", lambda *given: read.append(given[2]) or original(*given))
    write_documents(source, corpus, killed, files=[path])
    assert {item.name: item.read_bytes() for item in killed.iterdir()} == {
        item.name: item.read_bytes() for item in (tmp_path / "whole").iterdir()
    }
    if step.startswith("write"):
        assert read == [], "all had been read"
    elif after:
        titles = pq.read_table(killed / "documents.parquet")["title"].to_pylist()
        assert titles[0] not in read, "what was on disk was not parsed again"
        assert titles[-1] in read


def test_rows_of_another_input_are_not_gone_on_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents_module, "_GROUP_BYTES", 600)
    path = messy(tmp_path, ".zst")
    source = Source(name="it", files=str(path))
    corpus = Corpus(sources=(source,), damaged_records="skip", minimum_bytes=20)
    write_documents(source, corpus, tmp_path / "whole", files=[path])
    killed = tmp_path / "killed"
    subprocess.run([sys.executable, "-c", KILLED, killed, path, "write_parquet", "0", "0"], check=False)
    rows = (killed / ".rows.part").read_bytes()
    for number, changes in enumerate(
        [
            {".progress.json": b"{ torn"},
            {".progress.json": b"[]"},
            {".rows.part": rows[:-50]},
            {".rows.part": rows + b"half a row"},
        ]
    ):
        output = tmp_path / f"damaged-{number}"
        shutil.copytree(killed, output)
        for name, data in changes.items():
            (output / name).write_bytes(data)
        write_documents(source, corpus, output, files=[path])
        assert (output / MANIFEST).read_bytes() == (tmp_path / "whole" / MANIFEST).read_bytes(), changes
    os.utime(path, ns=(1, 1))
    path.write_bytes(COMPRESS[".zst"]("\n".join(text_line(f"another text, number {n}") for n in range(50)).encode()))
    write_documents(source, corpus, killed, files=[path])
    assert read_manifest(killed)["documents"] == 50


def test_a_file_that_changed_unseen_is_read_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its size and its date are those of the killed run."""
    monkeypatch.setattr(documents_module, "_GROUP_BYTES", 600)
    path = messy(tmp_path, "")
    source = Source(name="it", files=str(path))
    corpus = Corpus(sources=(source,), damaged_records="skip", minimum_bytes=20)
    killed = tmp_path / "killed"
    subprocess.run([sys.executable, "-c", KILLED, killed, path, "append", "2", "0"], check=False)
    status = path.stat()
    path.write_bytes(path.read_bytes().replace(b"number 0, 0 times", b"number 0, O times", 1))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    write_documents(source, corpus, killed, files=[path])
    assert capsys.readouterr().err.startswith(f"farstate: {path}: its first ")
    write_documents(source, corpus, tmp_path / "whole", files=[path])
    assert (killed / MANIFEST).read_bytes() == (tmp_path / "whole" / MANIFEST).read_bytes()
    assert "O times" in pq.read_table(killed / "documents.parquet")["text"][0].as_py()


def test_marks_of_an_interrupted_reading() -> None:
    """One that a second reading, interrupted in its turn, has not come to holds for the third."""
    first = Trail()
    first.begin("a")
    first.add(b"12345")
    second = Trail(first.marks)
    second.begin("a")
    assert second.room(100) == 5
    second.add(b"1x")
    third = Trail(second.marks)
    assert third.marks == [], "nothing is read yet"
    third.begin("b")
    assert third.room(100) == 100, "of another file nothing is known"
    third.begin("a")
    assert third.room(100) == 2
    with pytest.raises(OtherBytes, match="a: its first 2 bytes are not those"):
        third.add(b"12")
    with pytest.raises(OtherBytes, match="a: its first 5 bytes are not those"):
        second.add(b"345")
    short = Trail(first.marks)
    short.begin("a")
    short.add(b"123")
    with pytest.raises(OtherBytes, match="a: its first 5 bytes are not those"):
        short.add(b"")


AS_NOBODY = """
import os, sys
from pathlib import Path
from farstate.corpus.documents import write_documents
from farstate.errors import FarstateError
from farstate.params import Corpus, Source
source = Source(name="it", files=sys.argv[1])
if os.geteuid() == 0:
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)
try:
    write_documents(source, Corpus(sources=(source,)), Path(sys.argv[2]), files=[Path(sys.argv[1])])
except FarstateError as error:
    print("FarstateError", error)
except PermissionError as error:
    print("PermissionError", error.filename)
"""


@pytest.fixture
def open_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that an unprivileged user reaches: pytest's own are closed to others."""
    folder = tmp_path_factory.mktemp("open")
    for parent in (folder, *folder.parents):
        if parent.owner() == folder.owner() and parent != Path("/tmp") and len(parent.parts) > 2:
            parent.chmod(0o755)
    return folder


def test_without_permission(open_folder: Path) -> None:
    path = lines_file(open_folder, text_line("abc"))
    closed = open_folder / "closed"
    closed.mkdir(mode=0o555)
    done = subprocess.run([sys.executable, "-c", AS_NOBODY, path, closed / "out"], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == f"PermissionError {closed / 'out'}"
    writable = open_folder / "writable"
    writable.mkdir()
    writable.chmod(0o777)
    path.chmod(0o000)
    done = subprocess.run([sys.executable, "-c", AS_NOBODY, path, writable / "out"], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == f"FarstateError {path}: no permission to read it"
    assert not (writable / "out" / MANIFEST).exists()


@pytest.mark.skipif(not (SHARED / "data").is_dir(), reason=f"no Pile sample: {SHARED / 'data'} is absent")
def test_real_pile_sample(tmp_path: Path) -> None:
    rows, manifest = run(tmp_path, {"files": str(SHARED / "data" / "pile_test_sample_small.jsonl.zst")})
    assert len(rows) == 1280
    assert len(manifest["pile_set_names"]) == 7
    assert manifest["bytes"] == 4_385_599
    assert manifest["skipped"] == {}
    assert rows[0]["title"] == "pile_test_sample_small.jsonl.zst:1"


@pytest.mark.parametrize("assign", ["train", "validation", "test"])
def test_a_source_can_name_its_split(tmp_path: Path, assign: str) -> None:
    """The original Pile's shards are split already: all documents of a source then go where it says."""
    given = tmp_path / "val.jsonl"
    given.write_text("".join(json.dumps({"text": f"document {number}"}) + "\n" for number in range(20)))
    source = Source(name="pile", files=str(given), assign=assign)
    write_documents(source, Corpus(sources=(source,), split=Split(validation=0.3, test=0.3)), tmp_path / "out", files=[given])
    assert set(pq.read_table(tmp_path / "out/documents.parquet")["split"].to_pylist()) == {assign}
