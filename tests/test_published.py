"""`farstate perplexity` on checkpoints: against a direct computation, transformers' own loss, and the published table."""

from __future__ import annotations

import json
import math
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import zstandard

import farstate.evaluation.published as published
from farstate import cli
from farstate.errors import FarstateError
from farstate.evaluation.perplexity import EvaluationSettings
from farstate.evaluation.published import Measured, Procedure, encoded, perplexity_of_text, published_row, report, windows
from farstate.models.checkpoints import export, load_model, save_model
from farstate.models.language_model import LanguageModel
from farstate.models.mamba2.shape import Mamba2Config
from farstate.reference import PUBLISHED_TOLERANCE
from farstate.reference import published as published_values
from test_formats import load_transformers, save_transformers, transformers_model

CORPUS = Path(__file__).parent / "data/corpus.jsonl"
SYMBOLS = 300
ROWS = 304
END = "<|endoftext|>"


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer of 300 symbols with an end of text; one set of weights in two formats; eight documents."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    root = tmp_path_factory.mktemp("published")
    documents = [json.loads(line)["text"] for line in CORPUS.read_text().splitlines()]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=SYMBOLS, initial_alphabet=alphabet, special_tokens=[END], show_progress=False)
    tokenizer.train_from_iterator(documents, trainer)
    assert tokenizer.get_vocab_size() == SYMBOLS
    # The embedding of transformers holds padding, of which its configuration knows nothing.
    save_transformers(
        transformers_model("mamba2", vocab_size=ROWS, tie_word_embeddings=True), root / "transformers", "safetensors"
    )
    tokenizer.save(str(root / "transformers/tokenizer.json"))
    export(root / "transformers", root / "mamba-ssm", "mamba-ssm")
    config = root / "mamba-ssm/config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"vocab_size": 301, "pad_vocab_size_multiple": 16}))
    with open(root / "text.jsonl", "w") as file:
        for number, document in enumerate(documents[:8]):
            file.write(json.dumps({"text": document[: 300 + 7 * number], "meta": {"pile_set_name": "Made"}}) + "\n")
    (root / "val.jsonl.zst").write_bytes(zstandard.compress((root / "text.jsonl").read_bytes()))
    return root


def stream(home: Path, documents: int | None = None, end: str | None = END) -> list[int]:
    """The tokens, one document after the other, in the plainest words."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(home / "transformers/tokenizer.json"))
    ids: list[int] = []
    for line in (home / "text.jsonl").read_text().splitlines()[:documents]:
        ids += tokenizer.encode(json.loads(line)["text"], add_special_tokens=False).ids
        ids += [tokenizer.token_to_id(end)] if end else []
    return ids


def measured(home: Path, name: str = "transformers", **options: Any) -> Measured:
    settings = EvaluationSettings("cpu", 1, options.pop("rows", 3), options.pop("segment_tokens", 16))
    end = options.pop("end_of_text", END)
    procedure = Procedure(options.pop("context", 20), options.pop("documents", 3), options.pop("softmax", "padded"), end)
    given = {"text": home / "text.jsonl", "text_key": "text", "tokenizer": None} | options
    return perplexity_of_text(home / name, given.pop("text"), procedure=procedure, settings=settings, **given)


# --- the stream ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [0, 1, 2, 6, 7, 12, 13, 14, 50])
@pytest.mark.parametrize(("context", "rows"), [(1, 1), (3, 2), (6, 1), (6, 3)])
def test_every_token_but_the_first_is_a_label_once(length: int, context: int, rows: int) -> None:
    tokens = np.arange(length)
    for cuts in ([], [1, 2, 3], [7], [10, 11]):
        blocks = [tokens[a:b] for a, b in pairwise([0, *[cut for cut in cuts if cut < length], length])]
        labels: list[int] = []
        for batch in windows(iter(blocks), context, rows):
            assert batch.shape[0] <= rows
            assert batch.shape[1] <= context + 1
            for window in batch:
                assert window[0] == (labels[-1] if labels else 0)
                assert window[0] % context == 0
                labels += window[1:].tolist()
        assert labels == list(range(1, length))


def test_documents_are_joined_by_the_end_of_text(home: Path) -> None:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(home / "transformers/tokenizer.json"))
    texts = [json.loads(line)["text"] for line in (home / "text.jsonl").read_text().splitlines()]
    for batch_bytes in (1, 900, 1 << 20):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(published, "_BATCH_BYTES", batch_bytes)
            blocks = list(encoded(texts, tokenizer, tokenizer.token_to_id(END)))
        assert np.concatenate(blocks).tolist() == stream(home)
        assert len(blocks) == {1: 8, 900: 3, 1 << 20: 1}[batch_bytes]
    assert np.concatenate(list(encoded(texts, tokenizer, None))).tolist() == stream(home, end=None)


# --- the number ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("softmax", ["padded", "real"])
def test_against_a_direct_computation(softmax: str, home: Path) -> None:
    ids = stream(home, 3)
    model = load_model(home / "transformers").double()
    losses = []
    with torch.no_grad():
        for start in range(0, len(ids) - 1, 20):
            window = torch.tensor([ids[start : start + 21]])
            hidden, _ = model(window[:, :-1])
            logits = hidden[0] @ model.head_weight[: SYMBOLS if softmax == "real" else ROWS].T
            losses.append(F.cross_entropy(logits, window[0, 1:], reduction="none"))
    found = measured(home, softmax=softmax)
    assert (found.tokens, found.documents, found.rows) == (len(ids) - 1, 3, SYMBOLS if softmax == "real" else ROWS)
    assert found.nll == pytest.approx(torch.cat(losses).mean().item(), rel=1e-6)
    assert found.perplexity == pytest.approx(math.exp(found.nll))
    sums = np.array([loss.sum().item() for loss in losses])
    sizes = np.array([loss.numel() for loss in losses])
    residuals = sums - found.nll * sizes
    expected = math.sqrt(residuals.var(ddof=0) * len(sums) * len(sums) / (len(sums) - 1)) / sizes.sum()
    assert found.error == pytest.approx(expected, rel=1e-4)
    assert math.isnan(measured(home, softmax=softmax, context=200).error), "of three windows nothing can be said"
    # Batches and segments change nothing.
    assert measured(home, softmax=softmax, rows=1, segment_tokens=64).nll == pytest.approx(found.nll, rel=1e-6)


def test_against_the_loss_of_transformers(home: Path) -> None:
    reference = load_transformers(home / "transformers")
    ids = stream(home, 2)
    total = 0.0
    with torch.no_grad():
        for start in range(0, len(ids) - 1, 64):
            window = torch.tensor([ids[start : start + 65]])
            total += reference(window, labels=window).loss.item() * (window.shape[1] - 1)
    found = measured(home, documents=2, context=64)
    print(f"{found.nll:.6f} beside transformers' {total / (len(ids) - 1):.6f}")
    assert found.nll == pytest.approx(total / (len(ids) - 1), rel=1e-5)


def test_two_formats_of_the_same_weights_agree(home: Path) -> None:
    """mamba-ssm's vocabulary is padded, transformers' holds the padding: over the tokenizer's symbols they are the same."""
    configs = [load_model(home / name).config for name in ("mamba-ssm", "transformers")]
    assert [config.vocabulary_size for config in configs] == [301, ROWS]
    assert [config.padded_vocabulary for config in configs] == [ROWS, ROWS]
    real = [
        measured(home, name, softmax="real", tokenizer=home / "transformers/tokenizer.json").nll
        for name in ("mamba-ssm", "transformers")
    ]
    padded = [measured(home, name, tokenizer=home / "transformers/tokenizer.json").nll for name in ("mamba-ssm", "transformers")]
    assert real[0] == real[1]
    assert padded[0] == padded[1] > real[0]


def test_nothing_but_a_batch_is_held(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Documents are read when the model asks for more, not before."""
    monkeypatch.setattr(published, "_BATCH_BYTES", 1)
    read: list[int] = []
    whole = published._Documents.__iter__

    def counted(self: Any) -> Any:
        for number, document in enumerate(whole(self), start=1):
            read.append(number)
            yield document

    monkeypatch.setattr(published._Documents, "__iter__", counted)
    seen = []
    found = measured(
        home, documents=None, rows=1, context=40, progress=lambda tokens, documents, _: seen.append((tokens, documents))
    )
    assert seen[-1] == (found.tokens, 8)
    assert found.tokens == len(stream(home)) - 1
    assert seen[0] == (40, 1)
    assert read == list(range(1, 9))
    assert [documents for _, documents in seen] == sorted(documents for _, documents in seen)


# --- the published values --------------------------------------------------------------------------------


def test_rows_are_found_by_sizes_and_name() -> None:
    rows = published_values()
    assert len(rows) == 8
    assert rows["mamba2-780m"].perplexity == 7.26
    config = Mamba2Config(vocabulary_size=50277, width=768, layers=24)
    assert config.padded_vocabulary == 50288
    val, other = Path("pile/val.jsonl.zst"), Path("pile/test.jsonl.zst")
    assert published_row(None, val, config) is not None
    assert published_row(None, val, config) == published_row("mamba2-130m", other, config) == rows["mamba2-130m"]
    assert published_row(None, other, config) is None
    assert published_row(None, val, config.model_copy(update={"vocabulary_size": 300})) is None
    assert published_row(None, val, config.model_copy(update={"layers": 25})) is None
    with pytest.raises(FarstateError, match=r"'mamba-130' is unknown \(did you mean 'mamba-130m'\?\); known: mamba2-130m, "):
        published_row("mamba-130", val, config)
    with pytest.raises(
        FarstateError, match=r"mamba2-370m is a mamba2 of 48 layers and width 1024 .*, the checkpoint a mamba2 of 24 and 768"
    ):
        published_row("mamba2-370m", val, config)


def test_sizes_are_those_of_the_models_names() -> None:
    """Each row's sizes give the parameters that its name promises."""
    from farstate.models.registry import ARCHITECTURES

    for name, row in published_values().items():
        config = ARCHITECTURES[row.architecture].config(vocabulary_size=50277, width=row.width, layers=row.layers)
        number, unit = re.fullmatch(r"\w+-([\d.]+)([mb])", name).groups()  # type: ignore[union-attr]
        promised = float(number) * {"m": 1e6, "b": 1e9}[unit]
        assert config.parameter_count() == pytest.approx(promised, rel=0.05), name


@pytest.mark.parametrize(
    ("perplexity", "options", "words"),
    [
        (10.5249, {}, "distance +0.045, within 0.05"),
        (10.4249, {}, "distance -0.055, not within 0.05"),
        (10.48, {"documents": 9}, "within 0.05; measured otherwise: the first 7 documents only"),
        (
            10.48,
            {"context": 1024, "softmax": "real"},
            "otherwise: windows of 1024 instead of 2048, softmax without the padded rows",
        ),
        (10.48, {"end_of_text": None}, "otherwise: nothing between documents"),
    ],
)
def test_the_verdict(perplexity: float, options: dict[str, Any], words: str) -> None:
    config = Mamba2Config(vocabulary_size=50277, width=768, layers=24)
    procedure = Procedure(**options)
    row = published_values()["mamba2-130m"]
    found = Measured("mamba-ssm", config, procedure, 50288, 7, 1000, math.log(perplexity), 0.01, 2.0, row)
    *_, line = report(found, "state-spaces/mamba2-130m", Path("val.jsonl.zst"), "cpu")
    assert line.startswith("published   mamba2-130m 10.48 on the original Pile validation (Mamba-2 paper Table 10): distance ")
    assert words in line
    assert PUBLISHED_TOLERANCE == 0.05


# --- the command -----------------------------------------------------------------------------------------


def called(*arguments: str) -> None:
    cli.app(["perplexity", *map(str, arguments)], standalone_mode=False)


def test_the_command_prints_it(home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    # So that the model has the sizes of a row: the sizes of a published one are too large for a test.
    row = published.published()["mamba2-130m"]
    monkeypatch.setattr(published, "published", lambda: {row.model: row})
    monkeypatch.setattr(type(row), "fits", lambda self, *sizes: sizes == ("mamba2", 2, 16, ROWS))
    called(home / "transformers", "--text", home / "val.jsonl.zst", "--device", "cpu", "--context", "64")
    printed, shown = capsys.readouterr()
    found = measured(home, documents=None, context=64)
    assert f"\nnll         {found.nll:.5f} nats per token ± {found.error:.4f}" in printed
    assert f"\nperplexity  {found.perplexity:.4f}\n" in printed
    assert f"documents, {found.tokens:,} tokens scored" in printed
    assert f"softmax over {ROWS} rows, padding included [assumed]" in printed
    assert re.search(r"\nspeed +[\d,]+ tokens/s on cpu", printed)
    assert f"distance {found.perplexity - 10.48:+.3f}, not within 0.05; measured otherwise: windows of 64" in printed
    assert shown == "" or "tokens/s" in shown

    called(home / "transformers", "--text", home / "text.jsonl", "--documents", "2", "--softmax", "real", "--end-of-text", "none")
    printed = capsys.readouterr().out
    assert "\npublished" not in printed
    assert "documents joined by nothing [assumed]" in printed
    assert "2 documents (the first 2 at most)" in printed


def test_progress_without_a_known_end(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    from farstate.evaluation.progress import StreamProgress

    clock = iter(range(0, 1000, 12))
    monkeypatch.setattr("farstate.training.progress.time.monotonic", lambda: float(next(clock)))
    with StreamProgress("mamba2-130m") as progress:
        progress(2400, 3, 12.3456)
        progress(4800, 7, 11.0)
    assert capsys.readouterr().err == (
        "farstate: mamba2-130m: 3 documents, 2,400 tokens, perplexity 12.346, 200 tokens/s\n"
        "farstate: mamba2-130m: 7 documents, 4,800 tokens, perplexity 11.000, 200 tokens/s\n"
    )


def test_bad_input_is_explained_in_a_line(home: Path, tmp_path: Path) -> None:
    text = str(home / "text.jsonl")
    (tmp_path / "broken.jsonl").write_text('{"text": "a b"}\n{"tex')
    (tmp_path / "short.txt").write_text("")
    (tmp_path / "cut.jsonl.zst").write_bytes((home / "val.jsonl.zst").read_bytes()[:-20])
    (tmp_path / "no_tokenizer.json").write_text("{}")
    (tmp_path / "latin.txt").write_bytes("caf\xe9".encode("latin-1"))
    (tmp_path / "folder/tokenizer.json").mkdir(parents=True)
    export(home / "transformers", tmp_path / "bare", "mamba-ssm")
    (tmp_path / "bare/tokenizer.json").unlink()
    (tmp_path / "bare/tokenizer.json").mkdir()
    small = LanguageModel(Mamba2Config(vocabulary_size=200, width=8, layers=1, state_size=4, head_size=8))
    save_model(small, tmp_path / "small")
    with torch.no_grad():
        model = load_model(home / "transformers")
        model.backbone.norm_f.weight[0] = float("nan")
    save_model(model, tmp_path / "spoilt")
    tokenizer = ("--tokenizer", str(home / "transformers/tokenizer.json"))
    good = str(home / "transformers")
    for arguments, match in (
        ((good,), "not the .json record of a stage; to measure a checkpoint give --corpus WHERE with it .* or --text FILE"),
        (("record.json", "--documents", "3"), "--documents: only with --corpus or --text"),
        (("record.json", "--text", text), "give one of the two"),
        ((good, "--text", text, "--output", "out"), "give one of the two"),
        ((good, "--text", text, "--corpus", text), "--corpus: not with --text"),
        ((good, "--text", text, "--length", "64"), "--length: not with --text"),
        (("record.json", "--corpus", text), "a record says itself which text is read"),
        (("record.json", "--published", "mamba2-130m"), "--published: only with --text"),
        (("absent", "--text", text), "absent: no such folder or file, and no name on the hub"),
        ((good, "--text", "absent.jsonl"), "absent.jsonl: no such file; --text takes"),
        ((good, "--text", str(tmp_path)), "is a folder; --text takes one"),
        ((good, "--text", str(tmp_path / "latin.txt")), r"latin\.txt: not utf-8 .byte 0xe9 at offset 3.$"),
        ((good, "--text", text, "--tokenizer", str(tmp_path / "folder")), "folder: is a folder without a tokenizer.json"),
        ((good, "--text", text, "--tokenizer", str(tmp_path / "folder/tokenizer.json")), "is a folder without a tokenizer.json"),
        ((str(tmp_path / "bare"), "--text", text), "bare/tokenizer.json: is a folder; give --tokenizer FILE"),
        ((good, "--text", text, "--text-key", "body"), "text.jsonl line 1: no text under 'body'"),
        ((good, "--text", str(tmp_path / "broken.jsonl")), "broken.jsonl line 2: not JSON"),
        ((good, "--text", str(tmp_path / "cut.jsonl.zst")), "cut.jsonl.zst: truncated"),
        ((good, "--text", str(tmp_path / "short.txt"), "--end-of-text", "none"), "short.txt: holds fewer than two tokens"),
        ((good, "--text", str(home / "transformers/config.json")), "not a kind of file that holds documents"),
        ((good, "--text", text, "--context", "0"), "--context and --documents must be at least 1"),
        ((good, "--text", text, "--end-of-text", "<eot>"), "has no token '<eot>'; give its end of text"),
        ((good, "--text", text, "--tokenizer", "absent.json"), "absent.json: no such file; --tokenizer takes"),
        ((good, "--text", text, "--tokenizer", str(tmp_path / "no_tokenizer.json")), "not a tokenizer.json"),
        ((good, "--text", text, "--published", "mamba2-130m"), "mamba2-130m is a mamba2 of 24 layers"),
        ((good, "--text", text, "--device", "tpu"), "--device: 'tpu' is unknown"),
        ((str(tmp_path / "small"), "--text", text), "tokenizer.json: no such file; give --tokenizer FILE"),
        ((str(tmp_path / "small"), "--text", text, *tokenizer), "its head has 208 rows, the tokenizer 300 symbols"),
        ((str(tmp_path / "spoilt"), "--text", text, *tokenizer), "the loss is not finite within tokens 1 … "),
    ):
        with pytest.raises(FarstateError, match=match) as caught:
            called(*arguments)
        assert "\n" not in str(caught.value)


def test_a_stage_still_takes_its_record(tmp_path: Path) -> None:
    (tmp_path / "record.json").write_text(json.dumps({"rule": "compare"}))
    with pytest.raises(FarstateError, match="the record of a 'compare' stage was given to 'perplexity'"):
        called(tmp_path / "record.json")
