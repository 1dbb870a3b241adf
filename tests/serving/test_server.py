"""What a command line names becomes models: their names, adapters, and what cannot be served."""

from __future__ import annotations

import sys

import numpy as np
import pytest

from barellm.cli.main import main
from barellm.data.tokenizers import Ids
from barellm.errors import UserError
from barellm.serving import server
from tests.chat.test_models import source
from tests.cli.test_adapters import LORA, SIZES
from tests.interop.models import TINY, checkpoint_of, random_arrays

REFERENCE = {"device": "reference"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BARELLM_CACHE", str(folder / "cache"))
        (folder / "text.txt").write_text("".join(f"{i} squared is {i * i}.\n" for i in range(300)))
        command = ["train", "llama-15m", "--data", str(folder / "text.txt"), "--out", str(folder / "base"), *SIZES, "--steps", "1"]
        assert main(command) == 0
        options = [word for pair in zip(SIZES[::2], SIZES[1::2], strict=True) if "model" not in pair[0] for word in pair]
        tuned = ["train", "llama-15m", "--data", str(folder / "text.txt"), *options, "--init-from", str(folder / "base"), *LORA]
        assert main([*tuned, "--steps", "2", "--out", str(folder / "tuned")]) == 0
        yield folder


def test_models_have_the_names_of_their_runs_or_those_that_they_are_given(folder, monkeypatch):
    source(folder / "hf")
    step = next((folder / "base" / "checkpoints").glob("step-*"))
    found = server.opened([str(folder / "hf"), str(step), f"owner/other={folder / 'base'}"], [], **REFERENCE)
    assert [*found] == ["hf", "base", "owner/other"]
    monkeypatch.chdir(folder / "base")
    assert [*server.opened(["."], [], **REFERENCE)] == ["base"]
    assert server._named("hf:owner/model") == ("owner/model", "hf:owner/model")
    (folder / "a=b").symlink_to(folder / "base")  # a path that is there is one, whatever its name
    assert [path for _, path in [server._named(str(folder / "a=b"))]] == [str(folder / "a=b")]
    with pytest.raises(UserError, match="two models have the name 'base': give one another, as NAME=PATH"):
        server.opened([str(folder / "base"), str(step)], [], **REFERENCE)


def test_an_adapter_is_a_model_of_its_own_beside_its_base(folder):
    found = server.opened([str(folder / "base")], [f"poems={folder / 'tuned'}"], **REFERENCE)
    ids = [[1, 2, 3]]
    assert [*found] == ["base", "poems"]
    assert not np.array_equal(found["base"].logits(ids), found["poems"].logits(ids))
    (alone,) = server.opened([str(folder / "tuned")], [], **REFERENCE).values()
    assert np.array_equal(alone.logits(ids), found["poems"].logits(ids))


def test_what_has_no_text_or_no_model_is_refused(folder):
    checkpoint_of(folder / "ids", TINY, random_arrays(TINY), Ids(TINY.vocab_size))
    with pytest.raises(UserError, match="ids has no tokenizer, so there is no text to serve"):
        server.opened([str(folder / "ids")], [], **REFERENCE)
    with pytest.raises(UserError, match="nothing does not exist, expected a run or checkpoint"):
        server.opened([str(folder / "nothing")], [], **REFERENCE)
    source(folder / "broken", template="{{ raise_exception('no') }}")
    with pytest.raises(UserError, match="the chat template failed"):
        server.opened([str(folder / "broken")], [], **REFERENCE)


def test_without_its_packages_the_command_says_which(refused, monkeypatch):
    for name in [name for name in sys.modules if name.partition(".")[0] in ("starlette", "uvicorn")]:
        monkeypatch.delitem(sys.modules, name)
    for name in [name for name in sys.modules if name.startswith("barellm.serving")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "starlette", None)
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    assert refused("serve", "run") == 'barellm serve needs the packages starlette and uvicorn: pip install "barellm[serve]"'


def test_a_key_is_read_from_a_variable_or_a_file_alone(refused, monkeypatch, tmp_path):
    assert refused("serve", "run", "--host", "0.0.0.0") == (
        "--host 0.0.0.0 lets others ask, expected a key that they need: --api-key-env or --api-key-file"
    )
    monkeypatch.delenv("KEY", raising=False)
    assert refused("serve", "run", "--api-key-env", "KEY") == "KEY has a key of 0 characters, expected 8 or more"
    (tmp_path / "key").write_text("short\n")
    assert refused("serve", "run", "--api-key-file", tmp_path / "key").endswith("has a key of 5 characters, expected 8 or more")
    both = ("--api-key-env", "KEY", "--api-key-file", tmp_path / "key")
    assert refused("serve", "run", *both) == "--api-key-env and --api-key-file are both given, expected one of them"
    for origin in ("foo", "https://a.example/", "chat.example.org"):
        assert f"--allow-origin is '{origin}', expected an origin" in refused("serve", "run", "--allow-origin", origin)
    assert "nothing: No such file" in refused("serve", "run", "--api-key-file", tmp_path / "nothing")
    for words, said in (
        (("--slots", 0), "--slots is 0, expected at least 1"),
        (("--port", -1), "--port is -1, expected at least 0"),
    ):
        assert refused("serve", "run", *words) == said
