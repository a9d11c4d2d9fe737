"""Throughput of `write_tokens` against the `tokenizers` library's own `encode_batch` on the same cores.

The stage reads parquet, encodes, writes tokens and an index, and makes every row group durable; the library's call gets
the texts in memory and leaves its result there. Both run in this process, in turns; the ratio of the medians should be
at least 0.9. Prints one JSON object.

    python benchmarks/tokenisation.py --documents results/documents/<name> --tokenizer results/tokenizer/<name>
    python benchmarks/tokenisation.py            # the Pile sample in ../shared/data, a 2,048-symbol BPE of it
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path

import pyarrow.parquet as pq

from farstate.corpus import stage
from farstate.corpus.documents import write_documents
from farstate.corpus.tokenizer import load_tokenizer, make_tokenizer, symbols
from farstate.corpus.tokens import write_tokens
from farstate.params import Corpus, Source, Store, Tokenizer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", type=Path, help="a result of the documents stage")
    parser.add_argument("--tokenizer", type=Path, help="a result of the tokenizer stage, or a tokenizer.json")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    stage.use_threads(arguments.threads)
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        documents, tokenizer = arguments.documents, arguments.tokenizer
        if documents is None:
            shared = Path(os.environ.get("FARSTATE_SHARED", Path(__file__).parents[2] / "shared"))
            documents = scratch / "documents"
            sample = Source(name="pile-sample", files=str(shared / "data" / "pile_test_sample_small.jsonl.zst"))
            write_documents(sample, Corpus(sources=(sample,)), documents)
        if tokenizer is None:
            tokenizer = scratch / "tokenizer"
            make_tokenizer(Tokenizer(kind="train", vocabulary_size=2048), [documents], tokenizer)
        print(json.dumps(measure(documents, tokenizer, scratch, arguments.threads, arguments.repeats), indent=2))


def measure(documents: Path, tokenizer: Path, scratch: Path, threads: int, repeats: int) -> dict[str, float | int]:
    """Median seconds of both, and their ratio; each time with a tokenizer whose cache of words is cold."""
    table = pq.read_table(stage.part(documents, stage.DOCUMENTS), columns=["text", "bytes"])
    texts = table["text"].to_pylist()
    vocabulary = symbols(load_tokenizer(tokenizer))
    library: list[float] = []
    ours: list[float] = []
    for repeat in range(repeats):
        encoder = load_tokenizer(tokenizer)
        start = time.perf_counter()
        with stage.parallelism(True):
            encoder.encode_batch(texts, add_special_tokens=False)
        library.append(time.perf_counter() - start)
        start = time.perf_counter()
        write_tokens(documents, tokenizer, Store(), vocabulary, scratch / f"tokens-{repeat}", threads=threads)
        ours.append(time.perf_counter() - start)
    return {
        "documents": len(texts),
        "bytes": sum(table["bytes"].to_pylist()),
        "threads": threads,
        "repeats": repeats,
        "library_seconds": round(statistics.median(library), 3),
        "write_tokens_seconds": round(statistics.median(ours), 3),
        "throughput_ratio": round(statistics.median(library) / statistics.median(ours), 3),
    }


if __name__ == "__main__":
    main()
