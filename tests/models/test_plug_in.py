"""A new architecture is one file: every command takes it, and nothing of barellm was told."""

from __future__ import annotations

import json
import shutil
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from barellm import models
from barellm.assembly.build import build_programs
from barellm.assembly.programs import build
from barellm.checkpoint import checkpoint
from barellm.cli.main import main
from barellm.config import overrides
from barellm.errors import UserError
from barellm.models import preset
from barellm.tools.plan import plan
from barellm.training import metrics


@pytest.fixture(autouse=True)
def plain(tmp_path_factory, monkeypatch, own_cache):
    """The package's folder of models with one file more."""
    folder = tmp_path_factory.mktemp("models")
    shutil.copy(Path(__file__).with_name("plain.py"), folder / "plain.py")
    monkeypatch.setattr(models, "__path__", [*models.__path__, str(folder)])
    yield models.module("plain")
    sys.modules.pop("barellm.models.plain")
    del models.plain  # pyright: ignore[reportAttributeAccessIssue]


@pytest.fixture
def train(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("".join(f"{i} squared is {i * i}.\n" for i in range(300)))

    def words(*more: object, out: str = "run") -> list[str]:
        return [str(w) for w in ("train", "plain-small", "--data", text, "--out", tmp_path / out, *more)]

    return words


@pytest.mark.slow
@pytest.mark.parametrize("device", ["reference", "cpu"])
@pytest.mark.extended
def test_it_trains_is_saved_resumed_sampled_and_evaluated(train, tmp_path, capsys, device):
    """A run that was stopped and resumed ends with the same bits as one that was not."""
    on = ("--device", device, "--train.dtype", "fp32")
    assert main(train(*on, "--steps", 30)) == 0
    assert main(train(*on, "--steps", 30, "--train.checkpoint_every", 10, "--train.save_total_limit", 9, out="other")) == 0
    for later in (tmp_path / "other" / "checkpoints").glob("step-00002*"):
        shutil.rmtree(later)
    shutil.rmtree(tmp_path / "other" / "checkpoints" / "step-000030")
    assert main(train("--resume", *on, out="other")) == 0
    losses = [row["loss"] for row in metrics.read(tmp_path / "run" / "metrics.jsonl") if row["kind"] == "train"]
    assert losses[-1] < 0.8 * losses[0]
    paths = [checkpoint.find(tmp_path / name)[0] for name in ("run", "other")]
    assert [path.name for path in paths] == ["step-000030"] * 2
    for name in ("weights.safetensors", "optimizer.safetensors"):
        assert (paths[0] / name).read_bytes() == (paths[1] / name).read_bytes()
    capsys.readouterr()
    assert main(["sample", str(tmp_path / "run"), "--device", device, "--max-new-tokens", "40", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["tokens"]) == 40
    assert main(["eval", str(tmp_path / "run"), "--device", device, "--json"]) == 0
    assert 0 < json.loads(capsys.readouterr().out)["nats"] < losses[0]


def test_its_configuration_is_saved_with_its_name_and_comes_back(plain):
    config = overrides.changed(preset("plain-small"), {"model.depth": 3, "model.gate": "none"})
    tree = json.loads(json.dumps(overrides.to_json(config)))
    assert tree["architecture"] == "plain" and tree["model"]["depth"] == 3
    found = overrides.from_json(tree)
    assert found == config and type(found.model) is plain.Config


def test_a_configuration_without_a_name_is_gpt2s():
    tree = overrides.to_json(preset("shakespeare-char"))
    del tree["architecture"], tree["optim"]["name"]  # as older versions saved it, when AdamW was the only optimizer
    assert overrides.from_json(tree) == preset("shakespeare-char")


@pytest.mark.extended
def test_both_backends_train_it_alike(train, tmp_path):
    assert main(train("--device", "reference", "--steps", 10, out="a")) == 0
    assert main(train("--device", "cpu", "--dtype", "fp32", "--steps", 10, out="b")) == 0
    a, b = ([row["loss"] for row in metrics.read(tmp_path / name / "metrics.jsonl") if row["kind"] == "train"] for name in "ab")
    assert a == pytest.approx(b, rel=1e-3)


def test_its_keys_are_options_with_their_help(train, capsys):
    with pytest.raises(SystemExit):
        main(["train", "plain-small", "--help-all"])
    said = " ".join(capsys.readouterr().out.split())
    assert "--model.factor INT the products' inner width over that of the stream (default: 3)" in said
    assert "--model.layers" not in said, "which other architectures have"
    assert "--optim.clip FLOAT gradient clipping: gradients of a larger norm are scaled down to it; 0: none" in said


@pytest.mark.parametrize(
    "words, message",
    [
        (["--model.layers", 3], "plain has no key 'model.layers', which is one of gpt2 and llama3"),
        (["--model.depht", 3], "unknown option --model.depht, did you mean '--model.depth'?"),
        (["--model.depth", 0], "model.depth is 0, expected at least 1"),
        (["--model.gate", "relu"], "model.gate is 'relu', expected gelu or none"),
        (["--model.heads", 3], "model.heads 3 does not divide model.d_model 16"),
        (["--model.factor", "two"], "model.factor is 'two', expected an integer"),
        (["--seq", 33], "train.seq 33 is above model.max_seq 32"),
    ],
)
def test_mistakes_are_named(train, refused, words, message):
    assert refused(*train(*words)).startswith(message)


def test_its_keys_are_no_other_architectures(refused, tmp_path):
    assert "gpt2 has no key 'model.factor', which is one of plain" in refused("train", "default", "--model.factor", 2)
    file = tmp_path / "run.toml"
    file.write_text('preset = "plain-small"\narchitecture = "plain"\n[model]\ndepth = 3\n')
    message = refused("train", "default", "--config", file)
    assert message.endswith("run.toml: architecture is 'plain', the preset 'default' is gpt2")
    file.write_text('preset = "plain-small"\n[model]\nlayers = 3\n')
    assert "run.toml: plain has no key 'model.layers'" in refused("plan", "--config", file)


def test_plan_counts_it(capsys):
    assert main(["plan", "plain-small", "--json", "--dtype", "fp32"]) == 0
    found = json.loads(capsys.readouterr().out)
    store, programs = build(preset("plain-small").model, batch=4, seq=16, optimizer=lambda p: None)
    assert found["parameters"] == sum(t.size for t in store.of_role("parameter"))
    assert found["model_flops"] == programs["forward_backward"].flops > 0


def test_weights_of_one_architecture_begin_a_run_of_the_other_preset(train, tmp_path, capsys, refused):
    """The run has the architecture of its weights; a key of the preset's own is refused."""
    assert main(train("--device", "reference", "--steps", 2)) == 0
    begin = ["train", "default", "--init-from", tmp_path / "run", "--data", tmp_path / "text.txt", "--steps", 2]
    begin += ["--device", "reference", "--out", tmp_path / "next", "--train.eval_tokens", 64]
    begin += ["--optim.name", "adamw"]
    assert main([str(word) for word in begin]) == 0
    config = overrides.from_json(checkpoint.read_json(tmp_path / "next" / "config.json"))
    assert (config.preset, models.name_of(config.model)) == ("default", "plain")
    assert "model.layers is None in" in refused(*begin, "--model.layers", 4)


def test_other_formats_say_that_they_lack_it(train, tmp_path, refused):
    assert main(train("--device", "reference", "--steps", 1)) == 0
    for kind in ("huggingface", "llmc"):
        message = refused("export", tmp_path / "run", "--format", kind, "--out", tmp_path / "there")
        assert message.endswith(f"is plain, which --format {kind} does not have")


def test_a_parameter_that_is_named_as_an_input_is_refused(plain, monkeypatch):
    def declare(p, cfg, declare=plain.declare):
        p.parameter("tokens", (3,), value=0.0)
        return declare(p, cfg)

    monkeypatch.setattr(plain, "declare", declare)
    with pytest.raises(ValueError, match="tokens is an input or output of eval and a parameter: rename one"):
        build(plain.Config(), batch=1, seq=2)


def test_an_unknown_architecture_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "configured", SimpleNamespace(Config={"layers": 3}))  # pyright: ignore[reportArgumentType]
    with pytest.raises(UserError, match="unknown architecture 'configured'"):
        models.module("configured")
    with pytest.raises(UserError, match=r"unknown architecture 'plane', did you mean 'plain'\? \(known: gpt2, "):
        models.module("plane")


@pytest.mark.extended
def test_the_newest_run_of_a_preset_is_found_whatever_its_folder_is_called(train, tmp_path, monkeypatch, capsys):
    """As `train --resume` finds it below runs/."""
    from barellm.training.resume import newest_run

    assert newest_run(tmp_path, "plain-small") is None
    for name in ("runs/mine", "runs/plain-small-1", "runs/other"):
        assert main(train("--device", "reference", "--steps", 1, out=name)) == 0
        time.sleep(0.01)
    (tmp_path / "runs" / "default-1").mkdir()
    assert newest_run(tmp_path / "runs", "plain-small") == tmp_path / "runs" / "other"
    assert newest_run(tmp_path / "runs", "default") is None
    monkeypatch.chdir(tmp_path)
    assert main(["train", "plain-small", "--resume", "--device", "reference", "--steps", "3"]) == 0
    assert checkpoint.find(tmp_path / "runs" / "other")[0].name == "step-000003"


def test_its_module_says_which_matrices_are_hidden(plain, monkeypatch):
    """Muon takes these. Without a word of the module they are named h.*, as this one's are not."""
    config = overrides.changed(preset("plain-small"), {"optim.name": "muon", "train.dtype": "fp32"})
    with pytest.raises(UserError, match=r"optim.name is 'muon', and no matrix of the model has a name like 'h\.\*'"):
        build_programs(config)
    monkeypatch.setattr(plain, "HIDDEN", "[0-9]*.qkv|[0-9]*.up", raising=False)
    _, built = plan.report(config)
    rows = {row["names"]: row["optimizer"] for row in plan.optimizers(built, config)}
    assert {name for name, optimizer in rows.items() if optimizer == "Muon"} == {"*.qkv", "*.up"}
    assert {rows[name] for name in ("embed", "head", "*.out", "*.first_norm")} == {"AdamW"}
    updated = {op.param.name for op in build_programs(config)["optimizer_step"].ops if op.name == "muon_update"}
    assert updated == {f"{i}.{name}" for i in (0, 1) for name in ("qkv", "up")}
