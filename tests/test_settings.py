"""Where and how: the backend is a setting, the stages run under it, provenance says what it resolved to."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from conftest import REPOSITORY
from farstate import cli
from farstate.errors import FarstateError
from farstate.ops import backends
from farstate.settings import Settings, current_settings, load_settings


def test_the_file_that_comes_with_the_project_holds_the_defaults() -> None:
    assert load_settings(REPOSITORY / "config/settings.yaml") == Settings()


def test_the_backend_is_read_from_the_file_the_command_line_and_the_workflow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "settings.yaml"
    path.write_text("backend: naive\n")
    assert load_settings(path).backend == "naive"
    assert load_settings(path, {"backend": "fla"}).backend == "fla"
    monkeypatch.setenv("FARSTATE_SETTINGS", json.dumps(load_settings(path).model_dump(mode="json")))
    assert current_settings()[0].backend == "naive"


@pytest.mark.parametrize("given", ["", "{", "[]", "5", "null", "[" * 100_000])
def test_what_the_workflow_hands_over_is_checked(given: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FARSTATE_SETTINGS", given)
    with pytest.raises(FarstateError, match=r"FARSTATE_SETTINGS: (not JSON|a JSON object is expected)") as caught:
        current_settings()
    assert "\n" not in str(caught.value)


def test_an_unknown_backend_is_refused_in_one_line(tmp_path: Path) -> None:
    path = tmp_path / "settings.yaml"
    path.write_text("backend: cuda\n")
    with pytest.raises(FarstateError, match=r"backend: 'cuda' is not allowed.*'auto', 'naive', 'chunked', 'triton'") as caught:
        load_settings(path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("backend", ["auto", "naive"])
def test_a_stage_runs_under_the_backend_and_records_what_it_resolved_to(
    backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = SimpleNamespace(
        record={"directory": "results/pretrain/x", "key": "k"},
        output=Path("results/pretrain/x"),
        settings=Settings(backend=backend),
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(cli, "Stage", lambda *_: stage)
    expected = {"auto": "chunked", "naive": "naive"}[backend]

    def work(_: object) -> None:
        stage.output.mkdir(parents=True)
        function = backends.implementation("gla", torch.device("cpu"))
        assert function is backends.load("gla", expected)

    cli._run(Path("record.json"), None, "pretrain", work)
    operations = json.loads(Path("logs/pretrain/x.provenance.json").read_text())["operations"]
    assert operations["gla"]["requested"] == backend
    assert list(operations["gla"]["resolved"]) == [expected]


def test_a_backend_that_cannot_run_stops_the_stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stage = SimpleNamespace(record={}, output=tmp_path, settings=Settings(backend="fla"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(cli, "Stage", lambda *_: stage)
    with pytest.raises(FarstateError, match="fla cannot compute 'ssd' on cpu"):
        cli._run(Path("record.json"), None, "pretrain", lambda _: backends.implementation("ssd", torch.device("cpu")))
    assert not (tmp_path / "logs").exists()
