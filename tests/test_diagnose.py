"""One's own model: what is known of a checkpoint, what is read, the rule of a repair, and both commands from end to end."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import torch
import transformers
import yaml
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from conftest import REPOSITORY, run
from farstate.errors import FarstateError
from farstate.files import write_json, write_manifest
from farstate.models.checkpoints import load_model, save_model
from farstate.models.language_model import LanguageModel
from farstate.models.mamba2.shape import Mamba2Config
from farstate.own_model import folder
from farstate.own_model.budgets import BUDGETS, measurements, sizes
from farstate.own_model.checkpoint import know
from farstate.own_model.command import Asked, Repairing, diagnose, repair
from farstate.own_model.repairing import judge_repair
from farstate.params import Passkey, Remembrance, States, as_written

TEXTS = REPOSITORY / "tests/data/corpus.jsonl"
SYMBOLS, CONTEXT = 320, 16


def silent(line: str) -> None:
    """Nobody reads what is said."""


# --- the rule ----------------------------------------------------------------------------------------------

FAILS = {"verdict": "FAIL", "fails_beyond": True, "documents_to_decide": None, "broken_at": None}
GOOD = {
    **{"verdict": "UNDECIDED", "fails_beyond": False, "broken_at": None, "n_documents": 25},
    **{"removed_base": 0.92, "removed_base_low": 0.85, "removed_base_high": 0.97},
    **{"short_context_cost": 0.01, "short_context_cost_low": 0.005, "short_context_cost_high": 0.015},
}
BETTER = {"value": -1.2, "low": -1.3, "high": -1.1, "n_documents": 25}


@pytest.mark.parametrize(
    ("base", "repaired", "difference", "outcome", "reason"),
    [
        ({"documents_to_decide": 3.0}, {"verdict": "PASS"}, {}, "REPAIRED", "92 % (85 % to 97 %) is gone"),
        ({}, {"gap_beyond": 0.1}, {}, "REPAIRED", "By Def. 3.2 alone it is UNDECIDED"),
        ({"verdict": "PASS", "fails_beyond": False}, {}, {}, "NOTHING TO REPAIR", "passes Def. 3.2"),
        ({"fails_beyond": False}, {}, {}, "NOTHING TO REPAIR", "inside its training length only"),
        ({"verdict": "UNDECIDED", "fails_beyond": False}, {}, {}, "UNDECIDED", "Whether the base model fails"),
        ({"fails_beyond": None}, {}, {}, "UNDECIDED", "Whether the base model fails"),
        ({}, {"broken_at": 77}, {}, "NOT A REPAIR", "not a number from position 77"),
        ({}, {"fails_beyond": True, "gap_beyond": 0.3, "worst_beyond": 512}, {}, "NOT A REPAIR", "still fails Def. 3.2"),
        ({}, {"fails_beyond": None}, {}, "UNDECIDED", "cannot be tested"),
        ({}, {"removed_base_low": 0.1, "removed_base_high": 0.4, "removed_base": 0.3}, {}, "NOT A REPAIR", "30 % (10 % to 40 %)"),
        ({}, {"removed_base_low": 0.4, "removed_base": 0.7}, {}, "UNDECIDED", "asked are 50 %"),
        ({}, {"removed_base": None}, {}, "UNDECIDED", "not clearly above zero"),
        ({}, {"short_context_cost_low": 0.03, "short_context_cost_high": 0.05}, {}, "NOT A REPAIR", "allowed are 0.020"),
        ({}, {"short_context_cost_high": 0.02}, {}, "UNDECIDED", "short-context cost"),
        ({}, {"short_context_cost": None}, {}, "UNDECIDED", "not known"),
        ({}, {"short_context_cost_high": None}, {}, "UNDECIDED", "without an interval"),
        ({}, {}, {"value": 0.1, "low": 0.0, "high": 0.2}, "NOT A REPAIR", "which does as well"),
        ({}, {}, {"value": -0.1, "low": -0.3, "high": 0.1}, "UNDECIDED", "from the control's"),
        ({}, {}, None, "UNDECIDED", "without a zero-init control"),
        # What is refuted goes before what is open.
        ({}, {"removed_base": None, "short_context_cost_low": 0.03, "short_context_cost_high": 0.05}, {}, "NOT A REPAIR", "cost"),
    ],
)
def test_the_rule_of_a_repair(
    base: dict[str, Any], repaired: dict[str, Any], difference: dict[str, Any] | None, outcome: str, reason: str
) -> None:
    found = judge_repair(
        {**FAILS, **base},
        {**GOOD, **repaired},
        None if difference is None else GOOD,
        None if difference is None else {**BETTER, **difference},
        least_removed=0.5,
        tolerance=0.02,
    )
    assert found.outcome == outcome
    assert reason.lower() in found.reason.lower()


def test_an_open_repair_says_how_many_documents_would_decide_it() -> None:
    """A half-width of 0.02 around a distance of 0.01 from the limit halves with four times the documents."""
    cost = {"short_context_cost": 0.01, "short_context_cost_low": -0.01, "short_context_cost_high": 0.03}
    found = judge_repair(FAILS, {**GOOD, **cost}, GOOD, BETTER, least_removed=0.5, tolerance=0.02)
    assert (found.outcome, found.documents) == ("UNDECIDED", 100.0)
    unknown = {**cost, "removed_base": None}
    assert judge_repair(FAILS, {**GOOD, **unknown}, GOOD, BETTER, least_removed=0.5, tolerance=0.02).documents is None


# --- what is read ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("budget", ["small", "full"])
@pytest.mark.parametrize("context", [16, 300, 2048])
def test_what_is_read_follows_from_the_training_length(budget: str, context: int) -> None:
    long = [300_000] * 40
    size = sizes(BUDGETS[budget], context, long)
    assert size.notice == ""
    assert 16 * context <= size.length <= 64 * context
    assert sizes(BUDGETS[budget], context, None).length == size.length, "before the texts are known the same is planned"
    found = measurements(BUDGETS[budget], context, size)
    read = size.length * size.documents * found["evaluate"]["stretches_per_document"]
    assert size.documents >= BUDGETS[budget].fewest
    assert budget == "full" or read <= BUDGETS["small"].tokens or size.documents == BUDGETS["small"].fewest
    for section, kind in (("remembrance", Remembrance), ("states", States)):
        kind.model_validate(as_written(found[section]))
    passkey = Passkey.model_validate(as_written(found["tasks"]["passkey"]))
    assert min(passkey.lengths) >= 128


def test_short_texts_shorten_what_is_measured() -> None:
    budget = BUDGETS["small"]
    size = sizes(budget, 100, [900] * 12)
    assert (size.length, size.documents) == (800, 12)
    assert "measured to 800 positions, 8 × T_train" in size.notice
    assert "only 3 held-out document(s)" in sizes(budget, 100, [900] * 3).notice
    assert sizes(budget, 100, [900] * 12, wanted=500).length == 500
    with pytest.raises(FarstateError, match=r"the longest of 2 held-out documents has 150 tokens, more than 200 are needed"):
        sizes(budget, 100, [150, 20])
    with pytest.raises(FarstateError, match=r"evaluate.length: 5,000 positions are asked for, .* allows 899"):
        sizes(budget, 100, [900], wanted=5000)


# --- a checkpoint of one's own -----------------------------------------------------------------------------


def trained_tokenizer(path: Path) -> None:
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=SYMBOLS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|endoftext|>"],
        show_progress=False,
    )
    made.train_from_iterator((json.loads(line)["text"] for line in TEXTS.read_text().splitlines()), trainer)
    made.save(str(path))


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder to work in, with a checkpoint of the transformers library, its tokenizer and its card."""
    home = tmp_path_factory.mktemp("own")
    torch.manual_seed(0)
    config = transformers.Mamba2Config(
        vocab_size=SYMBOLS, hidden_size=16, num_hidden_layers=2, state_size=8, head_dim=8, num_heads=4, n_groups=1, expand=2, conv_kernel=4,
        bos_token_id=0, eos_token_id=0, pad_token_id=0, tie_word_embeddings=True, residual_in_fp32=True, chunk_size=16,
    )  # fmt: skip
    transformers.Mamba2ForCausalLM(config).save_pretrained(home / "mine")
    trained_tokenizer(home / "mine/tokenizer.json")
    (home / "mine/README.md").write_text("---\nlicense: apache-2.0\n---\n# Mine\n")
    return home


@pytest.fixture
def in_home(own: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(own)
    return own


def test_a_result_of_the_pipeline_tells_all_of_itself(tmp_path: Path) -> None:
    """Training length, budget and rate from its manifest; the tokenizer through the records of its corpus, or the only one beside it."""
    result = tmp_path / "results/pretrain/small.s0-00000000"
    save_model(LanguageModel(Mamba2Config(width=16, layers=1, state_size=8, head_size=8, vocabulary_size=SYMBOLS)), result)
    params = {"context": 24, "tokens": 5000, "seed": 0, "recipe": {"peak_learning_rate": 4e-3}}
    store, shard, made = "results/corpus/store-1", "results/corpus/tokens.x-2", "results/corpus/tokenizer.train-3"
    told = {"rule": "pretrain", "name": "small.s0", "params": params, "upstream": {"store": [store]}}
    write_manifest(result, told, ["config.json", "model.safetensors"])
    for name in (made, "results/corpus/tokenizer.file-4"):
        (tmp_path / name).mkdir(parents=True)
        trained_tokenizer(tmp_path / name / "tokenizer.json")
    with pytest.raises(FarstateError, match=r"tokenizer.json: no such file; give --tokenizer"):
        know(str(result), None, None)
    write_json(tmp_path / ".farstate/stages/corpus.store-1.json", {"upstream": {"shards": [shard]}})
    write_json(tmp_path / ".farstate/stages/corpus.tokens.x-2.json", {"upstream": {"tokenizer": [made]}})
    known = know(str(result), None, None)
    assert (known.context, known.pretrained_tokens, known.pretraining_rate) == (24, 5000, 4e-3)
    assert known.tokenizer == tmp_path / made / "tokenizer.json"
    assert (known.name, known.format) == ("small", "farstate")
    assert folder.peak_rate(known) == (pytest.approx(4e-4), "a tenth of the peak rate that its own pre-training's record tells")
    assert know(str(result), 99, None).context == 99


def test_what_is_wrong_is_said_in_one_line(in_home: Path, tmp_path: Path) -> None:
    small = tmp_path / "small"
    save_model(LanguageModel(Mamba2Config(width=16, layers=1, state_size=8, head_size=8, vocabulary_size=100)), small)
    (tmp_path / "empty").mkdir()
    (tmp_path / "full").mkdir()
    (tmp_path / "full/thesis.tex").write_text("x")
    tokenizer = in_home / "mine/tokenizer.json"
    arms = Repairing(["state_passing"])
    wrong: list[tuple[Asked, Repairing | None, str]] = [
        (Asked("nothing-here"), None, r"nothing-here: no such folder or file, and no name on the hub"),
        (Asked(str(tmp_path / "empty"), context=8), None, r"config\.json"),
        (Asked(str(small), context=8), None, r"tokenizer\.json: no such file; give --tokenizer"),
        (Asked(str(small), context=8, tokenizer=tokenizer), None, r"knows 320 symbols, the model .* has 100"),
        (Asked("mine"), None, r"mine: does not say on how many tokens .* give --context T_TRAIN"),
        (Asked("mine", context=0), None, r"--context: 0 is not allowed"),
        (Asked("mine", context=8, budget="smal"), None, r"--budget: 'smal' is unknown.*small"),
        (Asked("mine", ["*.nothing"], context=8), None, r"--corpus: \*\.nothing: no file matches"),
        (Asked("mine", context=8, overrides=["evaluate.length"]), None, r"--set evaluate\.length: KEY=VALUE is expected"),
        (Asked("mine", [str(TEXTS)], context=8, overrides=["evaluate.lenght=9"]), None, r"evaluate\.lenght.*length"),
        (Asked("mine", [str(TEXTS)], context=8, output=tmp_path / "full"), None, r"holds something else than results of mine"),
        (Asked("mine", context=8), Repairing(["state_pasing"]), r"--with: 'state_pasing' is not an intervention.*state_passing"),
        (Asked("mine", context=8), Repairing(["state_passing"], steps=0), r"--steps: 0 is not allowed"),
    ]
    for asked, repairing, message in wrong:
        with pytest.raises(FarstateError, match=message) as caught:
            diagnose(asked, silent) if repairing is None else repair(asked, repairing, silent)
        assert "\n" not in str(caught.value)
    assert arms.control


def test_without_the_repository_it_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(folder, "__file__", str(tmp_path / "a/b/c/d/folder.py"))
    with pytest.raises(FarstateError, match=r"no workflow/Snakefile: .* clone the repository"):
        folder.repository()


def test_values_and_texts_as_they_are_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = folder.overrides_of(["posttrain.recipe.peak_learning_rate=1e-3", "evaluate.length=64", "evaluate.split=validation"])
    assert found == {"posttrain": {"recipe": {"peak_learning_rate": 1e-3}}, "evaluate": {"length": 64, "split": "validation"}}
    monkeypatch.chdir(tmp_path)
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts/a.txt").write_text("a")
    corpus = folder.corpus_of(["texts", "owner/set"], REPOSITORY, trains=True)
    assert [source.get("files", source.get("hub")) for source in corpus.sources] == [str(tmp_path / "texts/**/*"), "owner/set"]
    assert {source["assign"] for source in corpus.sources} == {"hash"}
    assert folder.corpus_of(["texts"], REPOSITORY, trains=False).sources[0]["assign"] == "test"
    assert folder.corpus_of([], REPOSITORY, trains=False).sources[0]["package"]
    assert list(folder.arms_of(["tbtt"], REPOSITORY, control=True)) == ["control", "tbtt"]
    assert list(folder.arms_of(["tbtt", "tbtt"], REPOSITORY, control=False)) == ["tbtt"]


# --- from end to end ---------------------------------------------------------------------------------------

TINY = (
    *(
        "evaluate.length=128",
        "evaluate.stretches_per_document=2",
        "remembrance.length=64",
        "remembrance.last=8",
        "states.length=64",
    ),
    *("tasks.passkey.lengths=[192]", "tasks.passkey.examples=2", "compare.resamples=200"),
)


def farstate(home: Path, *arguments: str) -> str:
    """Run the command with this repository's source, as a user would in `home`; its output."""
    return run(home, "farstate", *arguments, PYTHONPATH=str(REPOSITORY / "src")).stdout


def test_a_model_is_diagnosed(own: Path) -> None:
    options = ["mine", "--corpus", str(TEXTS), "--context", str(CONTEXT), "--output", "found", *(f"--set={one}" for one in TINY)]
    planned = farstate(own, "diagnose", *options, "--dry-run")
    assert "estimate: about" in planned
    assert not (own / "found/results").exists()
    said = farstate(own, "diagnose", *options)
    assert "mine: mamba2," in said
    assert "to run: " in said
    assert re.search(r"To where\. .*\(tolerance 0\.02 nats\)", said, re.S)
    reports = own / "found/reports"
    assert {path.name for path in reports.iterdir()} >= {
        f"diagnosis.{kind}" for kind in ("html", "svg", "png", "json", "parquet", "csv")
    }
    page = (reports / "diagnosis.html").read_text()
    for heading in ("Does it generalise in length?", "What is remembered", "Do states drift", "Is a number found again"):
        assert heading in page
    charts = json.loads(re.search(r'id="farstate-charts">(.*?)</script>', page, re.S).group(1))["groups"][0]["charts"]  # type: ignore[union-attr]
    places = re.findall(r'class="chart" id="([^"]+)"', page)
    assert sorted(chart["id"] for chart in charts) == sorted(set(places)), "a place for every chart, and each once"
    assert len(places) == len(set(places))
    reach = pl.read_parquet(next((own / "found/results/evaluate").glob("compare_reach.diagnosis-*")) / "reach.parquet")
    assert reach["T"].to_list() == [32, 64, 128]
    again = farstate(own, "diagnose", *options)
    assert "nothing to be done" in again
    assert again.partition("To where.")[2].partition("page:")[0] == said.partition("To where.")[2].partition("page:")[0]


def test_a_model_is_repaired_and_comes_back_in_its_own_format(own: Path) -> None:
    only = ("figures.repair.remembrance=false", "figures.repair.states=false", "figures.repair.passkey=false")
    options = [
        *(
            "mine",
            "--with",
            "state_passing",
            "--steps",
            "2",
            "--corpus",
            str(TEXTS),
            "--context",
            str(CONTEXT),
            "--output",
            "mended",
        ),
        *(f"--set={one}" for one in (*TINY, *only)),
    ]
    said = farstate(own, "repair", *options)
    found = re.search(r"state passing: (REPAIRED|UNDECIDED|NOT A REPAIR|NOTHING TO REPAIR)", said)
    assert found, said
    assert "Is it repaired?" in (own / "mended/reports/repair.html").read_text()
    ours = load_model(own / "mended/repaired")
    theirs = transformers.Mamba2ForCausalLM.from_pretrained(own / "mended/repaired", dtype=torch.float32).eval()
    tokens = torch.randint(0, SYMBOLS, (2, 40), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        torch.testing.assert_close(
            (ours(tokens)[0] @ ours.head_weight.t())[..., :SYMBOLS], theirs(tokens).logits, rtol=1e-4, atol=1e-5
        )
    trained = load_model(next((own / "mended/results/posttrain").glob("mine.state_passing.s0-*")))
    for name, tensor in trained.state_dict().items():
        assert torch.equal(tensor, ours.state_dict()[name]), name
    assert (own / "mended/repaired/tokenizer.json").read_bytes() == (own / "mine/tokenizer.json").read_bytes()
    _, front, body = (own / "mended/repaired/README.md").read_text().split("---\n", 2)
    card = yaml.safe_load(front)
    assert (card["base_model"], card["library_name"], card["license"]) == ("mine", "transformers", "apache-2.0")
    assert found.group(1) in body
    assert "2 steps" in body
    written = (own / "mended/repaired/model.safetensors").stat().st_mtime_ns
    assert "nothing to be done" in farstate(own, "repair", *options)
    assert (own / "mended/repaired/model.safetensors").stat().st_mtime_ns == written
