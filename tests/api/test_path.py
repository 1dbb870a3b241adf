"""The path of twelve programs from counting to GPT-2 (examples/path, docs/path.md): what each claims holds."""

from __future__ import annotations

import re
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from importlib import import_module
from itertools import pairwise
from math import log
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

import barellm
from barellm.checkpoint.weights import parameters
from barellm.interop import imported
from barellm.models import preset
from tests.interop.models import random_arrays, weights_of

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples" / "path"
STEPS = sorted(path.stem for path in FOLDER.glob("step_*.py"))
FEW = 8
LOSS = re.compile(r"^\| (\d+) \|.*\| (\d\.\d+) \|$", re.MULTILINE)


@pytest.fixture(scope="module")
def path():
    """The programs as modules, as `python examples/path/step_...py` finds them."""
    before = set(sys.modules)
    sys.path.insert(0, str(FOLDER))
    yield {int(name[5:7]): import_module(name) for name in STEPS}
    sys.path.remove(str(FOLDER))
    for name in {"common", *STEPS} - before:
        del sys.modules[name]


@pytest.fixture(scope="module")
def losses(path):
    """After a few steps, of each program."""
    return {number: module.main(FEW) for number, module in path.items()}


def test_there_are_twelve_and_each_is_short(path):
    assert list(path) == list(range(1, 13))
    for name in STEPS:
        text = (FOLDER / f"{name}.py").read_text()
        assert 25 <= len(text.splitlines()) <= 90 and text.startswith(f'"""{int(name[5:7])}. '), name


def test_each_has_learnt_something_after_a_few_steps(path, losses):
    uniform = log(path[1].dataset().tokenizer.vocab_size)
    assert all(1 < nats < uniform for nats in losses.values()), losses


def test_the_counts_are_those_of_a_dictionary(path, losses):
    train, val = (path[1].ids_of(getattr(path[1].dataset(), part)).tolist() for part in ("train", "val"))
    pairs, firsts, V = Counter(pairwise(train)), Counter(train[:-1]), path[1].dataset().tokenizer.vocab_size
    nats = [log((firsts[a] + V) / (pairs[a, b] + 1)) for a, b in pairwise(val)]
    assert losses[1] == pytest.approx(sum(nats) / len(nats), abs=1e-9)


def test_equal_scores_are_the_masked_matmul(path):
    assert path[3].difference() < 1e-6


@pytest.mark.parametrize("number", [2, 7, 10])
def test_the_same_program_gives_the_same_loss(path, losses, number):
    assert path[number].main(FEW) == losses[number]


def test_shapes(path):
    found = {number: {n: t.shape for n, t in parameters(path[number].Config(layers=2, heads=4)).items()} for number in range(3, 9)}
    assert found[4]["qkv"] == (192, 64) and found[4].keys() - found[3].keys() == {"qkv"}
    assert found[5].keys() - found[4].keys() == {"proj"} and found[5]["proj"] == (64, 64)
    assert found[6].keys() - found[5].keys() == {"ln_1.weight", "ln_1.bias", "ln_f.weight", "ln_f.bias"}
    assert found[7]["h.1.mlp.c_fc.weight"] == (256, 64) and found[7]["h.1.mlp.c_proj.weight"] == (64, 256)
    assert found[8].keys() - found[7].keys() == {"wpe"} and found[7].keys() - found[8].keys() == {"head"}
    theirs = path[12].gpt2.Config(layers=2, heads=4, d_model=64, max_seq=64, vocab_size=256)
    assert found[8] == {n: t.shape for n, t in parameters(theirs).items()}
    assert list(found[8]) == path[12].gpt2_names(2)


def test_two_halves_are_one_batch(path):
    assert 0 <= path[9].difference(3) < 1e-5


def test_the_learning_rate_rises_and_falls(path):
    optim = path[10].recipe(100)
    rates = [path[10].learning_rate(i, total=100, optim=path[10].OptimConfig(**optim)) for i in range(100)]
    peak = rates.index(optim["lr"])
    assert peak == optim["warmup"] == 10
    assert rates[: peak + 1] == sorted(rates[: peak + 1]) and rates[peak:] == sorted(rates[peak:], reverse=True)
    assert rates[-1] == pytest.approx(optim["min_lr"], rel=0.05)


def test_the_groups_of_weight_decay_are_matrices_and_the_rest(path, capsys):
    path[10].main(2)
    names = list(parameters(path[10].Config(**path[10].GPT)).items())
    matrices = sum(len(t.shape) == 2 for _, t in names)
    said = capsys.readouterr().out
    assert f"weight decay 0.1: {matrices} parameters" in said and f"weight decay 0.0: {len(names) - matrices} parameters" in said


def test_a_cache_changes_neither_loss_nor_text(path, losses, capsys):
    assert losses[10] == losses[11] == losses[12]
    path[11].main(FEW)
    said = capsys.readouterr().out
    assert "the texts are equal" in said and "with a cache 51 positions, without one 1320" in said


def test_the_cache_gives_the_text_of_whole_passes(path, tmp_path):
    """With random weights, as a model writes one character again and again after a few steps."""
    model = path[11].Config(layers=2, heads=4)
    config = replace(preset("shakespeare-char"), preset="random", model=model)
    arrays = random_arrays(model)
    arrays["wte"][128:] = -arrays["ln_f.bias"]  # ASCII is likelier, so that different tokens are different texts
    arrays["wte"] *= 0.1
    arrays["wpe"] *= 5  # positions differ more than characters, so the text is not one character again and again
    run = imported.save(weights_of(model, arrays), tmp_path / "run", config=config)
    with barellm.load(run, device="cpu", dtype="fp32") as opened:
        text, _ = path[11].without_cache(opened)
        assert len(set(text)) > 5
        assert opened.generate(path[11].PROMPT, max_new_tokens=path[11].COUNT, temperature=0) == text


def test_ours_is_the_shipped_model_and_its_file(path, capsys):
    path[12].FOLDER = path[12].FOLDER / "again"
    path[12].FOLDER.mkdir()
    path[12].main(FEW)
    said = capsys.readouterr().out
    assert f"losses of the first {FEW} steps, ours and the shipped GPT-2's: equal" in said
    ours, theirs = re.findall(r"\d\.\d{6}", said)
    assert float(ours) == pytest.approx(float(theirs), abs=2e-6)
    tensors = load_file(path[12].FOLDER / "gpt2" / "model.safetensors")  # by its own library
    assert tensors["transformer.h.1.mlp.c_fc.weight"].shape == (64, 256) and len(tensors) == 2 + 2 * 12 + 2
    assert all(np.isfinite(array).all() for array in tensors.values())


def test_a_program_is_a_command():
    done = subprocess.run(
        [sys.executable, str(FOLDER / "step_05_heads.py"), "2"], capture_output=True, text=True, timeout=300, check=True
    )
    assert re.fullmatch(r"validation loss: \d\.\d{3} nats a character\n", done.stdout)


@pytest.mark.extended
@pytest.mark.slow
def test_the_losses_are_those_of_the_page(path, capsys):
    """In their order. The page's are of one version of Python, each of which has a manual of its own."""
    path[12].FOLDER = path[12].FOLDER / "whole"
    path[12].FOLDER.mkdir()
    said = {int(number): float(nats) for number, nats in LOSS.findall((ROOT / "docs" / "path.md").read_text())}
    found = {number: module.main(400) for number, module in path.items()}
    assert found.keys() == said.keys()
    assert all(abs(found[number] - said[number]) < 0.15 for number in said), found
    assert abs(found[2] - found[1]) < 0.1 and found[3] > found[2] + 0.2
    assert all(found[number + 1] < found[number] for number in range(3, 8)), found
    assert found[9] < found[8] and found[10] < found[9] + 0.02, found  # the end of a run at a constant rate is noisy
    assert found[10] == found[11] == found[12], found
