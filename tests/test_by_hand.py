"""Measurements by hand: the stage's tables from the stage's own function, any text, and errors that name the option."""

from __future__ import annotations

import gzip
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import torch
import typer

from farstate import cli
from farstate.corpus.store import TokenStore, write_store
from farstate.errors import FarstateError
from farstate.evaluation import by_hand, stages
from farstate.files import write_manifest
from farstate.models.checkpoints import load_model, save_model
from farstate.models.language_model import LanguageModel
from farstate.models.mamba2.shape import Mamba2Config
from test_trainer import CONFIG, store_folder  # noqa: F401 (a fixture)

CORPUS = Path(__file__).parent / "data/corpus.jsonl"
SYMBOLS = 300
TABLES = {
    "perplexity": ("perplexity", "positions"),
    "remembrance": ("remembrance",),
    "states": ("positions", "samples", "states"),
    "shift": ("association", "shift", "swaps"),
}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of 300 symbols with its tokenizer beside it, and the first 24 documents as files of several kinds."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    root = tmp_path_factory.mktemp("by_hand")
    documents = [json.loads(line)["text"] for line in CORPUS.read_text().splitlines()][:24]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=SYMBOLS, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(documents, trainer)
    config = Mamba2Config(width=16, layers=2, state_size=8, head_size=8, vocabulary_size=SYMBOLS)
    save_model(LanguageModel(config, torch.Generator().manual_seed(5)), root / "model")
    tokenizer.save(str(root / "model/tokenizer.json"))
    lines = [json.dumps({"text": text}) for text in documents]
    (root / "texts.jsonl").write_text("\n".join(lines))
    with gzip.open(root / "half.jsonl.gz", "wt") as file:
        file.write("\n".join(lines[:12]))
    (root / "folder").mkdir()
    for number, text in enumerate(documents[12:]):
        (root / f"folder/{number}.txt").write_text(text)
    return root


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty current folder: scratch, results and logs go there, and no settings are found."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("FARSTATE_SETTINGS", raising=False)
    return tmp_path


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint as a post-training leaves it: it says its context, its arm and its seed."""
    folder = tmp_path_factory.mktemp("trained")
    save_model(LanguageModel(CONFIG, torch.Generator().manual_seed(5)), folder)
    asked = {
        **{"context": 8, "seed": 3, "steps": 5, "stretch_tokens": None, "arm": {"initial_state": "random_noise", "sigma": 0.5}},
        "recipe": {"batch_tokens": 64, "peak_learning_rate": 1e-2},
    }
    write_manifest(folder, {"rule": "posttrain", "name": "tiny.2.random_noise.s3", "params": asked}, ["config.json"])
    return folder


@pytest.fixture(scope="module")
def held_out(store_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:  # noqa: F811
    """The trainer's documents as a store whose last four are the test split."""
    from farstate.corpus.tokens import INDEX, TOKENS

    shard = tmp_path_factory.mktemp("held_out")
    source = store_folder.parent / "shard"
    index = pl.read_parquet(source / INDEX)
    split = pl.Series(["train"] * (index.height - 4) + ["test"] * 4)
    index.with_columns(split=split).write_parquet(shard / INDEX)
    (shard / TOKENS).write_bytes((source / TOKENS).read_bytes())
    facts = {"dtype": "uint16", "vocabulary_size": CONFIG.vocabulary_size, "tokens": int(index["length"].sum())}
    write_manifest(shard, facts, [TOKENS, INDEX])
    write_store([shard], CONFIG.vocabulary_size, shard / "store")
    return shard / "store"


def called(rule: str, *arguments: Any) -> None:
    cli.app([rule, *map(str, arguments)], standalone_mode=False)


def tables(folder: Path, rule: str) -> dict[str, pl.DataFrame]:
    return {name: pl.read_parquet(folder / f"{name}.parquet") for name in TABLES[rule]}


SMALL: dict[str, dict[str, Any]] = {
    "perplexity": {"length": 64, "bins_per_octave": 1},
    "remembrance": {"length": 64, "starts": [0, 7, 60], "last": 4},
    "states": {"length": 64, "documents": 3},
    "shift": {
        **{"length": 64, "positions": [8, 40], "minimum_states": 8, "reference_states": 40, "heads": 2, "swap_heads": 1},
        **{"resamples": 100, "stretches_per_document": 4},
    },
}


def options(asked: dict[str, Any]) -> list[str]:
    return [
        part
        for name, value in asked.items()
        for part in (f"--{name.replace('_', '-')}", ",".join(map(str, value)) if isinstance(value, list) else str(value))
    ]


@pytest.mark.parametrize("rule", SMALL)
def test_the_tables_are_the_stage_s(rule: str, trained: Path, held_out: Path, here: Path) -> None:
    """The same parameters as a record of the pipeline: the same tables, labels and training length included."""
    given = ["--arm-record", trained / "manifest.json"] if rule == "shift" else []
    called(rule, trained, "--corpus", held_out, *options(SMALL[rule]), *given, "--output", here / "hand")
    said = json.loads((here / "hand/command.json").read_text())
    key = "evaluate" if rule == "perplexity" else rule
    record = {
        **{"rule": rule, "phase": "evaluate", "name": rule, "key": "0", "directory": "results/evaluate/stage-0"},
        "upstream": {"checkpoint": [str(trained)], "store": [str(held_out)]},
        "params": {name: said[name] for name in (key, "context", "labels", *(["training"] if rule == "shift" else []))},
    }
    assert {name: said[key][name] for name in SMALL[rule]} == SMALL[rule]
    assert said["labels"] == {"model": "tiny.2", "arm": "random_noise", "seed": 3}
    assert said["context"] == 8
    (here / "record.json").write_text(json.dumps(record))
    called(rule, "record.json")
    by_stage, by_hand = tables(here / "results/evaluate/stage-0", rule), tables(here / "hand", rule)
    for name, table in by_stage.items():
        assert table.height
        assert table.equals(by_hand[name], null_equal=True)


def test_texts_become_a_store_once(home: Path, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Compressed or not, one file or several: all documents are held out, and the second call finds the store."""
    given = ("--context", 16, "--length", 32, "--bins-per-octave", 1)
    called("states", home / "model", "--corpus", home / "half.jsonl.gz", "--corpus", home / "folder/*.txt", *given)
    (first,) = (here / "results/by_hand").iterdir()
    assert first.name.startswith("states.model-")
    stores = list((here / ".farstate/scratch/by_hand").iterdir())
    store = TokenStore(stores[0] / "store")
    assert len(store.documents("test")) == 24
    assert store.vocabulary_size == SYMBOLS
    assert f"token store {Path('.farstate/scratch/by_hand') / stores[0].name / 'store'}" in capsys.readouterr().out
    made = (stores[0] / "store/manifest.json").stat().st_mtime_ns
    called("perplexity", home / "model", "--corpus", home / "half.jsonl.gz", "--corpus", home / "folder/*.txt", *given)
    assert [path.name for path in (here / ".farstate/scratch/by_hand").iterdir()] == [stores[0].name]
    assert (stores[0] / "store/manifest.json").stat().st_mtime_ns == made
    called("states", home / "model", "--corpus", stores[0] / "store", *given, "--output", "again")
    labels = json.loads(Path("again/command.json").read_text())["labels"]
    assert labels == {"model": "model", "arm": "base", "seed": None}
    assert tables(first, "states")["states"].equals(tables(Path("again"), "states")["states"], null_equal=True)


def test_shift_compares_two_halves_of_the_texts(home: Path, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = options(SMALL["shift"] | {"minimum_states": 10_000})
    called("shift", home / "model", "--corpus", home / "texts.jsonl", "--context", 8, *given, "--output", "out")
    (folder,) = (here / ".farstate/scratch/by_hand").glob("text-*")
    store = TokenStore(folder / "store")
    sides = [set(store.documents(split).ids.tolist()) for split in ("train", "test")]
    assert min(map(len, sides)) > 3
    assert not sides[0] & sides[1]
    assert json.loads(Path("out/command.json").read_text())["training"] is None
    # What has no number says why, in the table and to the person.
    table = tables(Path("out"), "shift")["shift"]
    assert table.filter(pl.col("measure") == "accuracy")["value"].null_count() == (table["measure"] == "accuracy").sum()
    assert "shift.parquet: no number in " in capsys.readouterr().out


def test_the_arm_s_record_is_handed_on(trained: Path, held_out: Path, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    def stop(stage: Any) -> None:
        seen.append(stage.params["training"])
        raise FarstateError("seen")

    monkeypatch.setattr(stages, "shift_stage", stop)
    for given in ([], ["--arm-record", trained / "manifest.json"]):
        with pytest.raises(FarstateError, match="seen"):
            called("shift", trained, "--corpus", held_out, "--length", 64, *given)
    assert seen[0] == seen[1]  # a checkpoint that says itself how it was trained
    assert set(seen[1]) == {"arm", "steps", "seed", "stretch_tokens", "recipe"}
    assert seen[1]["arm"] == {"initial_state": "random_noise", "sigma": 0.5}
    save_model(load_model(trained), here / "bare")
    with pytest.raises(FarstateError, match="seen"):
        called("shift", here / "bare", "--corpus", held_out, "--context", 8, "--length", 64)
    assert seen[2] is None
    # The record of another training, of this model or another.
    record = json.loads((trained / "manifest.json").read_text())
    for name, change in (("name", "other.random_noise.s3"), ("key", "00000000"), ("upstream", {"checkpoint": ["elsewhere"]})):
        (here / "other.json").write_text(json.dumps(record | {name: change}))
        with pytest.raises(
            FarstateError, match=r"--arm-record: .*other.json is the record of .*, the checkpoint .* leave it out"
        ):
            called("shift", trained, "--corpus", held_out, "--arm-record", here / "other.json")
    write_manifest(here / "bare", {**record, "rule": "pretrain"}, ["model.safetensors"])
    with pytest.raises(FarstateError, match=r"--arm-record: .* was trained from zero states"):
        called("shift", here / "bare", "--corpus", held_out, "--arm-record", trained / "manifest.json")
    assert len(seen) == 3


def test_a_snapshot_is_an_arm_of_its_own(here: Path) -> None:
    """Labels as the pipeline's, and a default folder that names the training whole, its seed and key included."""
    folder = here / "tiny.s3-0123abcd"
    folder.mkdir()
    about = {"rule": "pretrain", "name": "tiny.s3", "params": {"seed": 3, "context": 8}}
    snapshot = folder / "snapshot-000000065536.safetensors"
    snapshot.touch()
    (folder / "model.safetensors").touch()
    assert by_hand._labels(about, snapshot) == {"model": "tiny", "arm": "snapshot_65536", "seed": 3}
    assert by_hand._labels(about, folder / "model.safetensors") == {"model": "tiny", "arm": "base", "seed": 3}
    assert by_hand._labels(about, folder) == {"model": "tiny", "arm": "base", "seed": 3}
    assert by_hand._name(about, folder) == "tiny.s3-0123abcd"
    assert by_hand._name(about, snapshot) == "tiny.s3-0123abcd.snapshot-000000065536"
    assert by_hand._name({}, here / "RWKV.pth") == "RWKV"


def test_nothing_beyond_training_is_said(home: Path, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = ("--corpus", home / "half.jsonl.gz", "--bins-per-octave", 1, "--length", 32, "--documents", 2)
    for context, said in ((32, True), (31, False)):
        called("perplexity", home / "model", *given, "--context", context)
        assert ("no position beyond the training length was measured" in capsys.readouterr().out) == said


def test_weights_that_lost_their_header_are_named(home: Path, held_out: Path, here: Path) -> None:
    from safetensors.torch import load_file, save_file

    save_model(load_model(home / "model"), here / "again")
    save_file(load_file(here / "again/model.safetensors"), here / "again/model.safetensors")
    with pytest.raises(FarstateError, match="its header holds no configuration of a model"):
        called("states", here / "again", "--corpus", held_out, "--context", 8, "--length", 32)


@pytest.mark.parametrize("rule", ["perplexity", "states", "remembrance"])
def test_what_breaks_is_told(rule: str, trained: Path, held_out: Path, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = load_model(trained)
    with torch.no_grad():
        model.backbone.layers[0].mixer.dt_bias.fill_(float("nan"))
    save_model(model, here / "spoilt")
    called(rule, here / "spoilt", "--corpus", held_out, "--context", 8, *options(SMALL[rule]), "--output", "out")
    said = capsys.readouterr().out
    if rule == "perplexity":
        assert "not finite: carried, first at position 1 (" in said
    assert re.search(r"not finite: .*first at position \d+ \((\d) of \1 texts\), first in document \w+", said)


@pytest.mark.parametrize("rule", SMALL)
def test_another_result_is_not_overwritten(
    rule: str, home: Path, trained: Path, held_out: Path, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An output folder is new, empty, or this measure's of this checkpoint; what is refused leaves nothing behind."""
    before = {path.name: path.read_bytes() for path in trained.iterdir()}
    given = (rule, trained, "--corpus", held_out, *options(SMALL[rule]))
    (here / "file").write_text("")
    for output, match in (
        (trained, "--output: .* holds something else than `farstate"),
        (here / "file", "--output: .*file is a file; give a folder"),
        (here / "file/below", "--output: .*file is a file; give a folder"),
    ):
        with pytest.raises(FarstateError, match=match):
            called(*given, "--output", output)
    assert {path.name: path.read_bytes() for path in trained.iterdir()} == before
    small = LanguageModel(Mamba2Config(vocabulary_size=20, width=8, layers=1, state_size=4, head_size=8))
    save_model(small, here / "small")
    with pytest.raises(FarstateError, match="knows 20 symbols, the token store"):
        called(rule, here / "small", "--corpus", held_out, "--context", 8, *options(SMALL[rule]), "--output", "never")
    assert not (here / "never").exists()
    if rule != "states":
        return
    called(*given, "--output", "out")
    made = (here / "out/manifest.json").read_bytes()
    with pytest.raises(FarstateError, match="no document has 1000001 tokens"):
        called(*given[:4], "--length", 10**6, "--output", "out")
    assert (here / "out/manifest.json").read_bytes() == made
    with pytest.raises(FarstateError, match="holds something else than `farstate perplexity`"):
        called("perplexity", *given[1:4], "--length", 64, "--output", "out")
    with pytest.raises(FarstateError, match="holds something else than `farstate states`"):
        called(rule, home / "model", "--corpus", held_out, "--context", 8, "--output", "out")
    called(*given, "--output", "out")


def test_an_interrupted_command_says_so_in_its_status(trained: Path, held_out: Path, here: Path) -> None:
    """Ctrl-C while it measures: exit status 130, in the process as a shell sees it."""
    program = (
        "import sys\nfrom farstate import cli\nfrom farstate.evaluation import by_hand\n"
        "def stop(*_, **__): raise KeyboardInterrupt\nby_hand.measure = stop\ncli.main()\n"
    )
    given = ["states", str(trained), "--corpus", str(held_out)]
    done = subprocess.run([sys.executable, "-c", program, *given], capture_output=True, text=True, check=False)
    assert done.returncode == 130
    assert "Traceback" not in done.stderr


def test_bad_input_is_explained_in_a_line(home: Path, trained: Path, held_out: Path, here: Path) -> None:
    model, texts = home / "model", home / "texts.jsonl"
    (here / "empty").mkdir()
    (here / "other.json").write_text('{"rule": "pretrain", "params": {}}')
    (here / "latin.txt").write_bytes("déjà vu".encode("latin-1"))
    (here / "empty.jsonl").write_text("")
    (here / "alone").mkdir()
    (here / "alone/store.json").write_text('{"shards": [{"path": "../tokens.absent"}]}')
    (here / "one.txt").write_text("One document only. " * 40)
    small = LanguageModel(Mamba2Config(vocabulary_size=20, width=8, layers=1, state_size=4, head_size=8))
    save_model(small, here / "small")
    good = ("--corpus", texts, "--context", 8)
    for rule, arguments, match in (
        ("states", (trained,), "not the .json record of a stage; to measure a checkpoint give --corpus WHERE"),
        ("states", ("record.json", "--length", 9), "--length: only with --corpus; what a stage measures"),
        ("states", ("record.json", "--corpus", texts), "a record says itself which text is read"),
        ("states", ("absent", *good), "absent: no such folder or file, and no name on the hub"),
        ("states", (here / "empty", *good), "not a configuration|no such file"),
        ("states", (model, "--corpus", texts), "does not say on how many tokens it was trained; give --context"),
        ("states", (model, "--corpus", texts, "--context", 0), "--context: 0 is not allowed"),
        ("states", (model, "--corpus", here / "empty", "--context", 8), "is no token store .no store.json in it."),
        ("states", (model, "--corpus", held_out, "--corpus", texts, "--context", 8), "give one token store, or files"),
        ("states", (model, "--corpus", "absent.txt", "--context", 8), "'absent.txt': no file matches"),
        ("states", (model, "--corpus", home / "model/config.json", "--context", 8), "not a kind of file that holds documents"),
        ("states", (model, "--corpus", held_out, "--tokenizer", model, "--context", 8), "--tokenizer: .* is a token store"),
        ("states", (trained, "--corpus", texts), "no tokenizer.json beside it; give --tokenizer results/corpus/tokenizer"),
        ("states", (model, *good, "--text-key", "body"), "no text under 'body'"),
        ("states", (model, *good, "--length", 1), "--length: 1 is not allowed"),
        ("states", (model, *good, "--length", 10**6), "no document has 1000001 tokens; .* lower --length, give more text"),
        ("states", (here / "small", "--corpus", held_out, "--context", 8, "--length", 32), "knows 20 symbols, the token store"),
        ("states", (model, *good, "--device", "tpu", "--length", 32), "'tpu' is unknown"),
        ("remembrance", (model, *good, "--length", 64, "--starts", "0,65"), "--starts: 65 is no start point; allowed are 0 … 64"),
        ("remembrance", (model, *good, "--length", 64, "--starts", "0,a"), "--starts: '0,a' is not a list of whole numbers"),
        ("remembrance", (model, *good, "--length", 64, "--starts", "3,3"), "--starts: 3 is given twice"),
        (
            "remembrance",
            (model, *good, "--length", 32),
            "--last: 64 positions do not fit into --length 32; give --last 32 or less",
        ),
        (
            "shift",
            (model, *good, "--length", 64, "--positions", "8,65"),
            "--positions: 65 is not a position that is read; allowed are 1 … 64",
        ),
        ("shift", (model, *good, "--arm-record", here / "other.json"), "not the record of a post-training"),
        ("shift", (model, *good, "--arm-record", "absent.json"), "absent.json: no such file"),
        ("shift", (model, "--corpus", here / "one.txt", "--context", 8), "all documents fell on one side"),
        ("states", (model, "--corpus", here / "latin.txt", "--context", 8), "not utf-8 .*; convert it to UTF-8$"),
        (
            "states",
            (model, "--corpus", here / "empty.jsonl", "--context", 8),
            "--corpus: no document is left .*; give files that hold",
        ),
        ("states", (model, "--corpus", here / "alone", "--context", 8), "needs the token shard .*, which is not there"),
        ("check", (), "params.yaml: no such file; run `farstate check` in the repository's folder"),
        ("perplexity", (model, *good, "--end-of-text", "none"), "--end-of-text: only with --text"),
    ):
        with pytest.raises(FarstateError, match=match) as caught:
            called(rule, *arguments)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("rule", by_hand.MEASURES)
def test_the_help_gives_the_defaults_that_hold(rule: str) -> None:
    """The options' texts repeat the parameters' defaults: they must be the same."""
    command = typer.main.get_command(cli.app).commands[rule]  # type: ignore[attr-defined]
    fields = by_hand.MEASURES[rule].parameters.model_fields
    usual = {name: field.default for name, field in fields.items()} | {"length": by_hand.DEFAULT_LENGTH}
    told = {}
    for option in command.params:
        said = getattr(option, "help", None) or ""
        # A measure's own default stands in brackets behind the common one.
        found = re.search(rf"\({rule}: (\d+)\)", said) or re.search(r"default (\d+)", said)
        if option.name in fields and found:
            told[option.name] = int(found[1])
    assert len(told) >= 3
    assert told == {name: usual[name] for name in told}
