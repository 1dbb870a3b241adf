"""A model in a file of the user's: the option --model, with examples/palm.py."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import barellm
from barellm import models
from barellm.assembly.programs import build
from barellm.checkpoint import checkpoint
from barellm.cli.main import main
from barellm.errors import UserError
from barellm.models import user_model
from barellm.training import metrics

ROOT = Path(__file__).parents[2]
PALM = ROOT / "examples" / "palm.py"
SIZES = ("--model.layers", 2, "--model.d_model", 16, "--model.heads", 2, "--model.d_ff", 12, "--model.max_seq", 16)
RUN = ("--data.tokenizer", "bytes", "--batch", 2, "--seq", 8, "--steps", 6, "--train.eval_every", 3, "--dtype", "fp32")
WHOLE = """
from dataclasses import dataclass
from barellm.config import ModelConfig
from barellm.config.fields import at_least

@dataclass(frozen=True)
class Config(ModelConfig):
    vocab_size: int = at_least(1, 8, "")
    padded_vocab: int = at_least(0, 0, "")
    max_seq: int = at_least(1, 8, "")
    d_model: int = at_least(1, 8, "")

def declare(p, cfg): ...
def forward(p, cfg, tokens, targets, *, training): ...
"""


pytestmark = pytest.mark.usefixtures("own_cache", "no_own_models")


@pytest.fixture
def train(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("".join(f"{i} squared is {i * i}.\n" for i in range(300)))

    def words(*more: object, out: str = "run") -> list[str]:
        made = ("train", "--model", PALM, "--data", text, "--out", tmp_path / out, *SIZES, *RUN)
        return [str(word) for word in (*made, "--train.eval_tokens", 64, *more)]

    return words


def command(*words: object, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "barellm", *map(str, words)], cwd=cwd, capture_output=True, text=True)


@pytest.mark.extended
def test_as_a_user_does_it(train, tmp_path):
    """Each command in a process of its own, from a folder of the user's, with a module beside the model that it imports."""
    shutil.copy(PALM, tmp_path / "palm.py")
    (tmp_path / "mine.py").write_text(
        "from palm import *\nfrom palm import PRESETS as theirs\nPRESETS = {'mine': theirs['palm-3m']}\n"
    )
    words = [word.replace(str(PALM), "palm.py") for word in train("--train.checkpoint_every", 3, "--train.save_total_limit", 9)]
    done = command(*words, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert f"next     barellm sample {tmp_path}/run --model {tmp_path}/palm.py" in done.stdout
    whole = tmp_path / "run" / "checkpoints"
    shutil.copytree(tmp_path / "run", tmp_path / "cut")
    shutil.rmtree(tmp_path / "cut" / "checkpoints" / "step-000006")
    again = command("train", "--model=palm.py", "--out", "cut", "--resume", cwd=tmp_path)
    assert (again.returncode, again.stderr) == (0, "")
    for name in ("weights.safetensors", "optimizer.safetensors"):
        bits = (tmp_path / "cut" / "checkpoints" / "step-000006" / name).read_bytes()
        assert bits == (whole / "step-000006" / name).read_bytes()
    rows = metrics.read(tmp_path / "cut" / "metrics.jsonl")
    assert [row["step"] for row in rows if row["kind"] == "train"] == [1, 2, 3, 4, 5, 6]
    sampled = command("sample", "cut", "--model", "palm.py", "--max-new-tokens", 9, "--json", cwd=tmp_path)
    assert len(json.loads(sampled.stdout)["tokens"]) == 9
    without = command("sample", "cut", cwd=tmp_path)
    assert without.returncode == 2 and "unknown architecture 'palm'" in without.stderr
    assert "--model FILE.py" in without.stderr


def test_every_command_that_reads_a_model_takes_it(train, tmp_path, capsys):
    assert main(train("--device", "reference")) == 0
    run, small = str(tmp_path / "run"), [str(word) for word in (*SIZES, "--seq", 8)]
    file = ["--model", str(PALM)]
    assert checkpoint.read_json(tmp_path / "run" / "config.json")["architecture"] == "palm"
    capsys.readouterr()
    assert main(["eval", run, *file, "--device", "reference", "--json"]) == 0
    evaluated = json.loads(capsys.readouterr().out)
    assert 0 < evaluated["nats"] < np.log(256) + 0.5
    assert main(["plan", *file, "--json", *small]) == 0  # the file's first preset, as no other is named
    planned = json.loads(capsys.readouterr().out)
    C, F, V = 16, 12, 4096
    assert planned["parameters"] == V * C + C + 2 * (C + (C + 2 * C // 2 + 2 * F) * C + C * C + C * F)
    assert main(["quantize", run, *file, "--weights", "int8", "--out", str(tmp_path / "few")]) == 0
    with pytest.raises(SystemExit):
        main(["train", *file, "--help"])
    said = " ".join(capsys.readouterr().out.split())
    assert "(default: palm-3m)" in said and "--layers INT" in said


def test_text_from_its_cache_is_that_of_whole_passes(train, tmp_path):
    assert main(train("--device", "reference", "--lr", 0.1, "--optim.warmup", 0)) == 0
    with barellm.load(tmp_path / "run", device="reference") as model:
        drawn = model.tokenizer.encode("7 sq" + model.generate("7 sq", max_new_tokens=10, temperature=0))
        logits_TV = model.logits(drawn[None, :-1])[0]
    assert logits_TV.argmax(-1)[3:].tolist() == drawn[4:].tolist()
    assert len({*drawn[4:].tolist()}) > 2


def test_a_resumed_run_is_found_by_the_files_preset(train, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(train("--device", "reference", out="runs/mine")) == 0
    assert main(["train", "--model", str(PALM), "--resume", "--steps", "7", "--device", "reference"]) == 0
    assert checkpoint.find(tmp_path / "runs" / "mine")[0].name == "step-000007"


@pytest.mark.parametrize(
    "name, code, message",
    [
        ("mine.py", "x = (\n", r"mine.py, line 1: '\(' was never closed"),
        ("mine.py", "import math\nmath.sqrt(-1)\n", r"mine.py, line 2: ValueError: "),
        ("mine.py", "import nothing_of_that_name\n", "mine.py, line 1: ModuleNotFoundError: No module named 'nothing"),
        ("mine.py", "Config = 3\n", "has no model: no class Config of barellm.config.ModelConfig"),
        ("mine.py", WHOLE.replace("max_seq", "seq"), "its Config, a frozen dataclass, has no field max_seq, expected"),
        ("mine.py", WHOLE.replace("def forward", "def backward"), r"has no model: no function forward\(p, cfg, tokens"),
        ("mine.py", WHOLE.replace("def declare", "def parameters"), r"has no model: no function declare\(p, cfg\)"),
        ("mine.py", WHOLE + "PRESETS = {'default': Config}", "a preset 'default' is there already: rename it"),
        ("gpt2.py", WHOLE, "a module 'gpt2' is there already: rename it"),
        ("json.py", WHOLE, "a module 'json' is there already: rename it"),
        ("my-model.py", WHOLE, "'my-model' is no name in Python: rename it"),
        ("mine.txt", WHOLE, "is no file of Python, expected one that has a model, such as mine.py"),
    ],
)
def test_mistakes_are_named_and_leave_nothing(tmp_path, refused, name, code, message):
    (tmp_path / name).write_text(code)
    path = [*sys.path]
    with pytest.raises(UserError, match=message):
        user_model.add(tmp_path / name)
    assert "mine" not in sys.modules and not models.ADDED and sys.path[: len(path)] == path
    assert refused("plan", "--model", tmp_path / name).startswith(str(tmp_path))
    assert "there.py does not exist, expected a file of Python" in refused("plan", "--model", tmp_path / "there.py")
    assert "expected one argument" in refused("plan", "--model")
    assert "unknown option --model" in refused("doctor", "--model", tmp_path / name)


def test_a_file_without_presets_is_known_by_its_name(tmp_path):
    (tmp_path / "mine.py").write_text(WHOLE)
    user_model.add(tmp_path / "mine.py")
    user_model.add(tmp_path / "mine.py")  # a second command of the same process
    assert models.module("mine").Config().padded_vocab == 64 and models.usual() == "default"
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "mine.py").write_text(WHOLE)
    with pytest.raises(UserError, match="a module 'mine' is there already"):
        user_model.add(tmp_path / "other" / "mine.py")


MODEL = WHOLE.replace("def declare(p, cfg): ...\ndef forward(p, cfg, tokens, targets, *, training): ...\n", '''
def declare(p, cfg):
    wte = p.parameter("wte", (cfg.padded_vocab, cfg.d_model), std=0.02)
    return wte, p.parameter("w", (cfg.d_model, cfg.d_model), std=0.02)

def forward(p, cfg, tokens, targets, *, training):
    wte, w = declare(p, cfg)
    x = p.linear(p.embedding(tokens, wte), w)
    return p.classifier(x, wte, targets, valid_vocab=cfg.vocab_size)

from barellm.config import Config as Run
PRESETS = {"mine": lambda: Run(preset="mine", model=Config())}
''')  # fmt: skip


@pytest.mark.parametrize(
    "right, wrong, message",
    [
        ('"w", (cfg.d_model, cfg', '"w", (cfg.d_model, 3 + cfg', r"20: ValueError: matmul .*\(weight is the parameter w\)"),
        ("p.linear(", "p.lineer(", "20: AttributeError: 'Program' object has no attribute 'lineer'"),
        ("return wte, p.par", "return p.par", "19: TypeError: cannot unpack"),
        ('parameter("w", (cfg.d_model, cfg', 'parameter("wte", (cfg.d_model, cfg', "16: ValueError: wte is declared twice: "),
        ("return p.classifier", "p.classifier", r"18: forward gives None, expected the loss, a tensor \(1,\)"),
        ("return p.classifier", "return x or p", r"18: forward gives a tensor \(batch<=8, seq<=8, 8\), expected the loss"),
        ("), w)", '), p.parameter("z", (8, 8)))', "18: the parameter z is not in declare: nothing initialises it"),
        ("def declare(p, cfg)", "def declare(p)", r"14: .*, expected declare\(p, cfg\)"),
        ("*, training)", "*, train)", r"18: .*, expected forward\(p, cfg, tokens, targets, \*, training\)"),
        ("Config())}", "Config(d_model=0))}", "24: model.d_model is 0, expected at least 1"),
        ("Run(preset", "Run(prefix", "24: TypeError: .* unexpected keyword argument 'prefix'"),
    ],
)  # fmt: skip
def test_a_mistake_in_the_model_is_one_line_with_the_file_the_line_and_the_parameter(tmp_path, refused, right, wrong, message):
    for folder, text in (("right", MODEL), ("wrong", MODEL.replace(right, wrong))):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "mine.py").write_text(text)
    assert text != MODEL
    assert main(["plan", "--model", str(tmp_path / "right/mine.py"), "--seq", "8", "--batch", "8"]) == 0
    models.ADDED.clear()
    del sys.modules["mine"]
    said = refused("plan", "--model", tmp_path / "wrong/mine.py", "--seq", 8, "--batch", 8)
    assert re.match(re.escape(f"{tmp_path}/wrong/mine.py, line ") + message, said), said


def test_a_module_that_the_program_itself_imports_keeps_its_traceback(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(MODEL.replace("p.linear(", "p.lineer("))
    monkeypatch.syspath_prepend(tmp_path)
    import mine  # pyright: ignore[reportMissingImports]

    try:
        with pytest.raises(AttributeError, match="no attribute 'lineer'"):
            build(mine.Config(), batch=1, seq=8)
    finally:
        del sys.modules["mine"]
