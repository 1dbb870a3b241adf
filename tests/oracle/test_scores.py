"""Losses of single tokens and HellaSwag's shares against transformers' models of the same random weights."""

from __future__ import annotations

import json

import numpy as np
import pytest

from barellm.cli.main import main

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from tests.oracle import llama  # noqa: E402
from tests.oracle.test_interop import theirs  # noqa: E402

pytestmark = pytest.mark.oracle
WORDS = ("the", "cat", "sat on", "a", "mat,", "then", "it ran", "up", "tree.", "She puts", "oil into", "an old", "pan", "and")


def examples(count: int, seed: int = 3) -> list[dict]:
    """As the public file has them; contexts and endings of odd lengths, whose bytes are tokens."""
    r = np.random.default_rng(seed)

    def some(least: int, most: int) -> str:
        return " ".join(r.choice(WORDS, r.integers(least, most)))

    return [
        {"ind": 3 * i, "ctx": some(1, 4), "endings": [some(1, 4) for _ in range(4)], "label": int(r.integers(4))}
        for i in range(count)
    ]


def their_losses(model, context: str, ending: str, positions: int) -> np.ndarray:
    """One text at a time, no padding."""
    ids = list(f"{context} {ending}".encode())[-(positions + 1) :]
    with torch.no_grad():
        logits = model(torch.tensor([ids[:-1]])).logits[0].double()
    losses = torch.nn.functional.cross_entropy(logits, torch.tensor(ids[1:]), reduction="none").numpy()
    return losses[-(len(ending) + 1) :]


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_hellaswag_is_what_transformers_says(tmp_path, monkeypatch, capsys, kind):
    monkeypatch.setenv("BARELLM_CACHE", str(tmp_path / "cache"))
    if kind == "gpt2":
        model, positions = theirs(tmp_path / "hf"), 40
    else:
        model, positions = llama.made(vocab_size=256, max_position_embeddings=64), 64
        model.save_pretrained(tmp_path / "hf")
    assert main(["import", str(tmp_path / "hf"), "--out", str(tmp_path / "run"), "--tokenizer", "bytes"]) == 0
    rows, path, out = examples(23), tmp_path / "val.jsonl", tmp_path / "found.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    capsys.readouterr()
    command = ["eval", str(tmp_path / "run"), "--hellaswag", str(path), "--json", "--per-document", str(out)]
    assert main([*command, "--dtype", "fp32", "--batch", "1"]) == 0
    summary = json.loads(capsys.readouterr().out)
    found = [json.loads(line) for line in out.read_text().splitlines()]
    right = {"acc": 0, "acc_norm": 0}
    for row, ours in zip(rows, found, strict=True):
        each = [their_losses(model, row["ctx"], ending, positions) for ending in row["endings"]]
        np.testing.assert_allclose(ours["losses"], [losses.sum() for losses in each], rtol=2e-5)
        assert ours["tokens"] == [len(losses) for losses in each]
        right["acc"] += int(np.argmin([losses.sum() for losses in each])) == row["label"]
        right["acc_norm"] += int(np.argmin([losses.mean() for losses in each])) == row["label"]
    assert {name: summary[name] for name in right} == {name: count / 23 for name, count in right.items()}
    assert summary["total"] == 23
