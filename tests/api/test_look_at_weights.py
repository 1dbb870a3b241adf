"""examples/look_at_weights.py prints what NumPy finds in the weights, and draws its pictures."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

import barellm
from barellm.data.tokenizers import Ids
from barellm.models.gpt2 import Config as GPT2
from barellm.models.llama3 import Config as Llama
from tests.interop.models import TINY, checkpoint_of, random_arrays

SCRIPT = Path(__file__).parents[2] / "examples" / "look_at_weights.py"


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("look_at_weights", SCRIPT)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def as_text(byte: int) -> str:
    return repr(chr(byte)) if byte < 128 else repr(bytes([byte]))


def test_the_numbers_are_those_of_numpy(script, tmp_path, capsys):
    assert isinstance(TINY, GPT2)
    arrays = random_arrays(TINY)
    run = checkpoint_of(tmp_path / "run", TINY, arrays)
    script.look(run, tmp_path / "pictures", ["a", "("])
    said = capsys.readouterr().out
    wte, wpe, matrix = (arrays[name].astype(np.float64) for name in ("wte", "wpe", "h.1.mlp.c_fc.weight"))

    sizes = np.sqrt((wpe**2).sum(1))
    assert f"positions: 20 of 12 numbers, norms {sizes.min():.3f} to {sizes.max():.3f}" in said
    cosines = [a @ b / np.sqrt(a @ a * (b @ b)) for a, b in pairwise(wpe)]
    assert f"neighbours have a cosine of {np.mean(cosines):.3f}" in said

    norms = np.sqrt((wte**2).sum(1))
    smallest, largest = norms.argmin(), norms.argmax()
    assert f"smallest: {as_text(smallest)} {norms[smallest]:.3f}" in said
    assert f"largest: {as_text(largest)} {norms[largest]:.3f}" in said
    scores = wte @ wte[ord("a")] / (norms * norms[ord("a")])
    best = max((i for i in range(256) if i != ord("a")), key=lambda i: scores[i])
    assert f"nearest to 'a': {as_text(best)} {scores[best]:.3f}" in said

    values = np.sqrt(np.linalg.eigvalsh(matrix.T @ matrix)[::-1])  # by another way than the script's
    rms, rank = np.sqrt((matrix**2).mean()), (values**2).sum() / values[0] ** 2
    assert f"h.1.mlp.c_fc.weight: {rms:.4f}, {values[0]:.3f}, {rank:.1f} of 12" in said
    for name in ("positions", "tokens", "layers"):
        assert "</svg>" in (tmp_path / "pictures" / f"{name}.svg").read_text()


def test_a_sine_is_one_frequency(script):
    t = np.arange(64)
    columns = np.stack([np.sin(2 * np.pi * 3 * t / 64), np.sin(2 * np.pi * 3 * t / 64) + np.cos(2 * np.pi * 5 * t / 64) + 4], 1)
    assert script.sine_share(columns) == pytest.approx([1.0, 0.5])
    assert script.stable_rank(script.spectrum(np.diag([3.0, 3.0, 0.0]))) == pytest.approx(2)


def test_a_model_with_rope_has_no_positions(script, tmp_path, capsys):
    model = Llama(layers=1, heads=2, kv_heads=1, d_model=16, d_ff=32, vocab_size=256, max_seq=16)
    script.look(checkpoint_of(tmp_path / "run", model, random_arrays(model)), tmp_path / "out")
    assert "positions: the model has no position embeddings" in capsys.readouterr().out
    assert not (tmp_path / "out" / "positions.svg").exists() and (tmp_path / "out" / "layers.svg").exists()


def test_a_model_without_a_tokenizer_shows_ids(script, tmp_path, capsys):
    arrays = random_arrays(TINY)
    script.look(checkpoint_of(tmp_path / "run", TINY, arrays, Ids(TINY.vocab_size)), tmp_path / "out")
    largest = np.linalg.norm(arrays["wte"], axis=1).argmax()
    assert f"largest: {largest} " in capsys.readouterr().out


def test_a_text_of_two_tokens_is_refused(tmp_path):
    run = checkpoint_of(tmp_path / "run", TINY, random_arrays(TINY))
    with barellm.load(run) as model:
        assert len(model.tokenizer.encode("ab")) == 2
    words = [sys.executable, str(SCRIPT), str(run), "--out", str(tmp_path / "out"), "--tokens", "ab"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2 and re.search(r"--tokens: 'ab' is 2 tokens, expected a text that is one token\n$", done.stderr)
    assert not (tmp_path / "out").exists()
