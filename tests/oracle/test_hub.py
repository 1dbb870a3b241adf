"""Models of the hub by name, from a server in a thread that speaks its protocol, and that breaks and cuts what it sends."""

from __future__ import annotations

import pytest

import barellm
from barellm.cli.main import main
from barellm.errors import UserError
from barellm.interop import hub
from barellm.interop.sources import open_weights
from tests.oracle.families import case
from tests.oracle.test_named import REPO, REVISION, Hub

pytest.importorskip("huggingface_hub")
pytestmark = pytest.mark.oracle


@pytest.fixture
def served(monkeypatch, tmp_path):
    """A repository with a model, and with what other programs have of it."""
    made = case(tmp_path / "made", "llama")
    files = {path.name: path.read_bytes() for path in (tmp_path / "made").iterdir()}
    found = Hub(files | {"onnx/model.json": b"{}", "consolidated.safetensors": b"x", "pytorch_model.bin": b"x", "README.md": b"x"})
    found.weights = made.weights
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{found.server.server_port}")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("time.sleep", lambda s: None)
    yield found
    found.server.shutdown()
    found.server.server_close()


def test_a_model_comes_by_its_name_once_and_without_what_is_not_read(served, tmp_path):
    found = open_weights(f"hf:{REPO}")
    assert found.model == served.weights.model
    assert set(served.requested) == {"config.json", "generation_config.json", "model.safetensors"}
    before = served.requested.copy()
    assert open_weights(f"hf:{REPO}@{REVISION}").model == found.model and served.requested == before


def test_commands_and_python_take_the_name(served, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("BARELLM_CACHE", str(tmp_path / "own"))
    assert main(["import", f"hf:{REPO}", "--out", str(tmp_path / "run")]) == 0
    assert "llama" in capsys.readouterr().out
    model = barellm.load(f"hf:{REPO}", device="cpu")
    assert model.config.model == served.weights.model
    model.close()


def test_a_connection_that_breaks_is_opened_again(served):
    served.harm = lambda path, count, body: body[: len(body) // 2] if path.endswith("safetensors") and count == 1 else body
    found = open_weights(f"hf:{REPO}")
    assert served.requested["model.safetensors"] == 2
    assert (found.read_rows("wte", 0, 61) == served.weights.read_rows("wte", 0, 61)).all()


def test_a_file_that_never_comes_whole_is_said(served):
    served.harm = lambda path, count, body: body[:1000] if path.endswith("safetensors") else body
    with pytest.raises(UserError, match=f"hf:{REPO} does not come from the hub: "):
        open_weights(f"hf:{REPO}")


def test_a_server_that_is_not_there_is_said(served, monkeypatch, capsys):
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    assert main(["eval", f"hf:{REPO}", "--data", "x.txt"]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"barellm: error: hf:{REPO} does not come from the hub: ") and said.count("\n") == 1


def test_a_repository_without_safetensors_names_its_gguf_files(served):
    served.files.pop("model.safetensors")
    served.files |= {"m-Q8_0.gguf": b"GGUF", "m-Q4_0.gguf": b"GGUF"}
    served.listed |= {"m-Q8_0.gguf": "0" * 64, "m-Q4_0.gguf": "1" * 64}
    with pytest.raises(UserError, match=f"expected one of its GGUF files: hf:{REPO}/m-Q4_0.gguf \\(2 in all\\)"):
        open_weights(f"hf:{REPO}")
    assert hub.fetched(f"hf:{REPO}/m-Q8_0.gguf").read_bytes() == b"GGUF"


@pytest.mark.parametrize("name", ["hf:", "hf:a/b/c", "hf:a b", "hf:a/../b", "hf:/a", "hf:a/b@", "hf:a/b/x.safetensors"])
def test_a_name_that_is_none_is_said(name):
    with pytest.raises(UserError, match="is no name on the hub, expected hf:OWNER/NAME"):
        hub.fetched(name)
