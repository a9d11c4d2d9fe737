"""Data sets on the hub: registered file by file, one stage a file, read as registered. The hub is a stand-in on this machine."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import random
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
import zstandard

from farstate.corpus import documents as documents_module
from farstate.corpus import hub as hub_module
from farstate.corpus import records as records_module
from farstate.corpus import spool as spool_module
from farstate.errors import FarstateError
from farstate.files import MANIFEST, read_json, read_manifest
from farstate.params import Corpus, Source, as_written, validate
from farstate.plan import Plan
from hub_stand_in import Hub

ROOT = Path(__file__).parents[1]
NAME = "someone/pile"
FIRST, SECOND = "a" * 40, "b" * 40


def shard(*texts: str) -> bytes:
    lines = "".join(json.dumps({"text": text, "meta": {"pile_set_name": "Pile-CC"}}) + "\n" for text in texts)
    return zstandard.ZstdCompressor().compress(lines.encode())


def table(*texts: str) -> bytes:
    buffer = io.BytesIO()
    pq.write_table(pa.table({"text": texts, "meta": [{"pile_set_name": "Books3"}] * len(texts)}), buffer)
    return buffer.getvalue()


FILES = {
    "README.md": b"---\nlicense: other\n---\n",
    "train/00.jsonl.zst": shard("one", "two", "one"),
    "train/01.jsonl.zst": shard("three"),
    "val.jsonl.zst": shard("held out"),
    "more/books.parquet": table("a book", "another"),
    "more/plain.txt": b"plain text",
}


@pytest.fixture
def hub() -> Iterator[Hub]:
    started = Hub(NAME, FIRST, dict(FILES))
    yield started
    started.close()


PROGRAM = """
import json, sys
from pathlib import Path
from farstate.errors import FarstateError
def register(*wheres):
    from farstate import sources
    for where in wheres:
        try:
            print(json.dumps(sources.register(sources.Outside("hub", where))))
        except FarstateError as error:
            print(json.dumps(str(error)))
def read(*records):
    from farstate.corpus.stages import documents_stage
    from farstate.stages import Stage
    for record in records:
        try:
            documents_stage(Stage(Path(record), None, "documents"))
            print(json.dumps(None))
        except FarstateError as error:
            print(json.dumps(str(error)))
def fetch(*paths):
    import huggingface_hub
    for path in paths:
        huggingface_hub.hf_hub_download("someone/pile", path, repo_type="dataset", revision="a" * 40)
globals()[sys.argv[1]](*sys.argv[2:])
"""


def call(folder: Path, url: str, *arguments: str, **environment: str) -> list[Any]:
    """Run one of the functions above where the hub is at `url`; what it prints, a JSON value a line."""
    given = {
        **{"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT / "src"), "HF_ENDPOINT": url, "HF_HOME": str(folder / "hf")},
        **{"HF_HUB_DISABLE_TELEMETRY": "1", "NO_COLOR": "1", "OMP_NUM_THREADS": "1", **environment},
    }
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *arguments], cwd=folder, env=given, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def plan(lock: dict[str, Any], **source: Any) -> Plan:
    data = json.loads(json.dumps(PARAMS))
    data["corpus"]["sources"] = [{"name": "pile", "hub": NAME, **source}]
    return Plan(validate(data, "test"), lock)


def _params() -> dict[str, Any]:
    data: dict[str, Any] = yaml.safe_load((ROOT / "config/test.yaml").read_text())
    return {**data, "figures": {"fig5": data["figures"]["fig5"]}}


PARAMS = _params()


def records(here: Plan, folder: Path) -> list[str]:
    here.write_records(folder)
    return [f".farstate/stages/corpus.{Path(stage.directory).name}.json" for stage in here.documents]


def test_registered_file_by_file_and_read_as_registered(tmp_path: Path, hub: Hub) -> None:
    """The split's files as `datasets` resolves them, the files that a glob names, a file of each kind."""
    wheres = [f"{NAME}@default/train", f"{NAME}:more/*", f"{NAME}@default/dev", f"{NAME}:nothing/*", f"{NAME}:*.md", NAME]
    train, more, no_split, nothing, strange, whole = call(tmp_path, hub.url, "register", *wheres)
    assert train["revision"] == more["revision"] == FIRST
    assert [record["path"] for record in train["files"]] == ["train/00.jsonl.zst", "train/01.jsonl.zst"]
    assert all(record["sha256"] == hub.entry(record["path"])["lfs"]["oid"] for record in train["files"])
    assert [record["bytes"] for record in train["files"]] == [len(FILES[record["path"]]) for record in train["files"]]
    assert [sorted(record) for record in more["files"]] == [["bytes", "path", "sha256"], ["bytes", "git_sha1", "path"]]
    assert "it has no split 'dev'; it has train; or name its files: members" in no_split
    assert "members 'nothing/*' names no file of it; it has 6, such as README.md" in nothing
    assert "names README.md, which is of no kind that holds documents" in strange
    assert whole == {"revision": FIRST}

    lock = {f"hub:{NAME}@default/train": train, f"hub:{NAME}:more/*": more}
    shards = [plan(lock), plan(lock, members="more/*")]
    assert [stage.name for stage in shards[0].documents] == ["documents.pile.0000_00", "documents.pile.0001_01"]
    hub.asked.clear()
    written = [record for here in shards for record in records(here, tmp_path)]
    assert call(tmp_path, hub.url, "read", *written) == [None] * 4
    rows = [
        pq.read_table(tmp_path / stage.directory / "documents.parquet").to_pylist() for here in shards for stage in here.documents
    ]
    assert [[row["text"] for row in part] for part in rows] == [["one", "two"], ["three"], ["a book", "another"], ["plain text"]]
    assert rows[0][1]["title"] == "train/00.jsonl.zst:2"
    assert rows[2][0]["pile_set_name"] == "Books3"
    manifest = read_manifest(tmp_path / shards[0].documents[0].directory)
    assert manifest["inputs"] == [train["files"][0]]
    assert manifest["duplicates"] == 1
    assert not list((tmp_path / "hf").rglob("*.jsonl.zst")), "streamed, nothing is kept"
    assert all(f"/resolve/{FIRST}/" in path for path in hub.asked if "/resolve/" in path)


def test_what_is_not_as_registered_is_refused_and_offline_a_cache_serves(tmp_path: Path, hub: Hub) -> None:
    lock = {f"hub:{NAME}:{pattern}": entry(hub, pattern) for pattern in ("train/*", "more/*")}
    (tmp_path / "config").mkdir()
    (tmp_path / "config/sources.lock").write_text(json.dumps(lock))
    written = [record for members in ("train/*", "more/*") for record in records(plan(lock, members=members), tmp_path)]
    hub.sent = {
        "train/00.jsonl.zst": shard("one", "2wo", "one"),
        "train/01.jsonl.zst": FILES["train/01.jsonl.zst"][:-1],
        "more/books.parquet": table("a book", "not the other"),
        "more/plain.txt": b"plain texT",
    }
    refused = call(tmp_path, hub.url, "read", *written)
    for error, path in zip(refused, hub.sent, strict=False):
        assert str(error).startswith(f"{NAME}/{path}: what the hub sent is not what was registered"), error
    assert not list(tmp_path.glob(f"results/corpus/*/{MANIFEST}"))
    assert not list(tmp_path.glob("results/corpus/*/.*")), "nothing that was read stays"

    hub.sent = {}
    call(tmp_path, hub.url, "fetch", "train/00.jsonl.zst")
    cached, missing = call(tmp_path, hub.url, "read", *written[:2], HF_HUB_OFFLINE="1")
    assert cached is None
    assert missing.startswith(f"{NAME}/train/01.jsonl.zst: not in the hub's cache here and cannot be fetched (")
    assert f"run `hf download {NAME} train/01.jsonl.zst --repo-type dataset --revision {FIRST}`" in missing
    assert "\n" not in missing

    lock[f"hub:{NAME}:train/*"]["files"][1]["sha256"] = "0" * 64
    (tmp_path / "config/sources.lock").write_text(json.dumps(lock))
    (later,) = call(tmp_path, hub.url, "read", written[1])
    assert later == f"hub data set {NAME}:train/*: registered anew since this job was planned; run Snakemake again"


class Broken(io.BytesIO):
    """A stream whose connection is reset before its end."""

    def read(self, size: int | None = -1) -> bytes:
        if not (data := super().read(size)):
            raise ConnectionResetError("connection reset")
        return data


@pytest.mark.parametrize(
    ("suffix", "wrong", "cached"),
    [(".zst", 3, False), (".zst", 3, True), (".gz", 3, False), ("", 3, False), (".zst", None, False)],
)
def test_an_interrupted_reading_is_gone_on_with_only_behind_the_same_bytes(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    suffix: str,
    wrong: int | None,
    cached: bool,
) -> None:
    """The first reading broke off; its document `wrong` was not what was registered. Of a cached copy a later line was damaged too."""
    generator = random.Random(1)
    texts = [generator.randbytes(2000).hex() for _ in range(800)]

    def content(*lines: str) -> bytes:
        data = "\n".join(lines).encode()
        return {"": bytes, ".gz": gzip.compress, ".zst": zstandard.ZstdCompressor().compress}[suffix](data)

    good = content(*(json.dumps({"text": text}) for text in texts))
    lines = [json.dumps({"text": text.upper() if number == wrong else text}) for number, text in enumerate(texts)]
    bad = content(*lines[:600], "{" if cached else lines[600], *lines[601:])
    file = hub_module.HubFile(NAME, FIRST, f"a.jsonl{suffix}", len(good), f"sha256:{hashlib.sha256(good).hexdigest()}")
    source = Source(name="it", hub=NAME, members="*")
    copy = tmp_path / "copy"

    def read(stream: io.BytesIO, output: str) -> str:
        copy.write_bytes(stream.getvalue())
        library = types.SimpleNamespace(
            try_to_load_from_cache=lambda *_, **__: str(copy) if cached else None,
            HfFileSystem=lambda: types.SimpleNamespace(open=lambda *_, **__: type(stream)(stream.getvalue())),
        )
        monkeypatch.setitem(sys.modules, "huggingface_hub", library)
        documents_module.write_documents(source, Corpus(sources=(source,)), tmp_path / output, files=[file])
        return capsys.readouterr().err

    monkeypatch.setattr(documents_module, "_GROUP_BYTES", 100_000)
    monkeypatch.setattr(spool_module, "_COMMIT_SECONDS", 0.0)
    assert read(io.BytesIO(good), "whole") == ""
    with pytest.raises(FarstateError, match="line 601: not JSON" if cached else "connection reset"):
        read(Broken(bad if cached else bad[: len(bad) * 3 // 4]), "out")
    assert read_json(tmp_path / "out/.progress.json")["position"] > 100
    parsed: list[str] = []
    from_mapping = records_module.from_mapping
    monkeypatch.setattr(records_module, "from_mapping", lambda *given: parsed.append(given[2]) or from_mapping(*given))
    said = read(io.BytesIO(good), "out")
    for name in ("documents.parquet", MANIFEST):
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    if wrong is None:
        assert (said, len(parsed) < 700) == ("", True), "what lay on disk was not parsed again"
    else:
        assert said.count("\n") == 1
        assert f"{file.name}: its first " in said
        assert said.endswith(
            " bytes are not those that an interrupted reading met; the rows are discarded, reading begins anew\n"
        )


def entry(hub: Hub, pattern: str) -> dict[str, Any]:
    from farstate.corpus.sources import matches

    found = [hub.entry(path) for path in sorted(hub.files) if matches(path, pattern)]
    files = [
        {"path": each["path"], "bytes": each["size"], "sha256": each["lfs"]["oid"]}
        if "lfs" in each
        else {"path": each["path"], "bytes": each["size"], "git_sha1": each["oid"]}
        for each in found
    ]
    return {"revision": hub.revision, "files": files}


def test_keys_follow_what_files_contain(hub: Hub) -> None:
    """A revision that changes another file changes nothing; an entry of only a revision keeps its key."""
    name = f"hub:{NAME}:train/*"
    before = plan({name: entry(hub, "train/*")}, members="train/*").documents
    hub.revision = SECOND
    hub.files["train/01.jsonl.zst"] = shard("three", "four")
    after = plan({name: entry(hub, "train/*")}, members="train/*").documents
    assert before[0].directory == after[0].directory
    assert before[1].directory != after[1].directory
    left_out = plan({name: entry(hub, "train/*")}, members="train/*", exclude=["00.*"]).documents
    assert [stage.params["file"] for stage in left_out] == ["train/01.jsonl.zst"]
    with pytest.raises(FarstateError, match="'pile': exclude leaves none of the 2 files"):
        plan({name: entry(hub, "train/*")}, members="train/*", exclude=["*.zst"])

    (streamed,) = plan({f"hub:{NAME}@default/train": {"revision": FIRST}}).documents
    assert streamed.directory == "results/corpus/documents.pile-6147a515", "as before data sets were registered file by file"
    assert streamed.params["content"] == {"revision": FIRST}
    assert streamed.params["file"] is None
    (unregistered,) = plan({}).documents
    assert unregistered.params["content"] == "unregistered"


@pytest.mark.parametrize(
    ("where", "parts"),
    [
        ("o/n", ("o/n", None, None)),
        ("o/n@default/train", ("o/n", None, ("default", "train"))),
        ("o/n:a/*@1/b:c", ("o/n", "a/*@1/b:c", None)),
    ],
)
def test_names_in_the_lock(where: str, parts: tuple[Any, ...]) -> None:
    assert hub_module.split_name(where) == parts


def test_the_example_of_the_documentation_is_valid() -> None:
    text = (ROOT / "docs/data.md").read_text()
    example = yaml.safe_load(text.partition("```yaml\n")[2].partition("```")[0])
    corpus = Corpus.model_validate(as_written(example["corpus"]))
    assert [source.name for source in corpus.sources] == ["pile", "pile-validation", "mirror", "set", "gutenberg"]
