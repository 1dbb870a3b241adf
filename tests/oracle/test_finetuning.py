"""Twenty steps on prompts and answers, of the command line, beside a PyTorch loop from the same weights and rows."""

from __future__ import annotations

import json

import numpy as np
import pytest

from barellm.cli.main import main
from barellm.config import overrides
from barellm.data.examples import ExampleRows
from barellm.data.kinds import load_tokenizer
from barellm.data.sources import prepare
from barellm.training import curve, metrics

torch = pytest.importorskip("torch")
safetensors = pytest.importorskip("safetensors.numpy")

from tests.oracle.torch_gpt2 import TorchGPT2  # noqa: E402

pytestmark = pytest.mark.oracle
STEPS, LIMIT = 20, 1e-4


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """No image is drawn, and PyTorch has one thread: two wait for each other longer than so small a model takes."""
    monkeypatch.setattr(curve, "image", lambda path, *args, **more: path.write_bytes(b""))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def alone(tokens: np.ndarray, targets: np.ndarray, starts: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
    """Each example of packed rows in a row of its own."""
    found = []
    for row in range(len(tokens)) if starts is not None else ():
        for first in np.unique(starts[row]):
            own = starts[row] == first
            tail = (0, int((~own).sum()))
            found.append([np.pad(tokens[row][own], tail), np.pad(targets[row][own], tail, constant_values=-1)])
    return (tokens, targets) if starts is None else tuple(np.array(found).transpose(1, 0, 2))


@pytest.mark.parametrize("mask", ["auto", "off"])
def test_losses_of_answers_equal_pytorchs(mask, tmp_path):
    """Six rows a step in three micro-batches, whose targets are unequal in number: the mean is over those of the whole step. With
    the mask, PyTorch has each example in a row of its own."""
    text, chat = tmp_path / "a.txt", tmp_path / "chat.jsonl"
    text.write_text("What is a plus b? It is c.\n" * 60)
    sums = [{"prompt": f"What is {a} plus {b}?", "answer": f" {a + b}" + ", I think" * (a % 3)} for a in range(8) for b in range(9)]
    chat.write_text("".join(json.dumps(one) + "\n" for one in sums))
    sizes = ["--model.layers", "2", "--model.d_model", "48", "--model.heads", "3", "--seq", "37", "--dtype", "fp32"]
    words = ["--data", str(text), "--data.tokenizer", "bpe", "--data.bpe_vocab", "270", "--batch", "2", "--steps", "1"]
    assert main(["train", "gpt2-124m", *sizes, *words, "--out", str(tmp_path / "base")]) == 0
    words = ["--init-from", str(tmp_path / "base"), "--data", str(chat), "--batch", "2", "--train.gradient_accumulation_steps", "3"]
    words += ["--lr", "1e-3", "--optim.min_lr", "1e-4", "--optim.warmup", "4", "--steps", str(STEPS)]
    words += ["--data.document_mask", mask]
    assert main(["train", "gpt2-124m", *words, "--seq", "37", "--dtype", "fp32", "--out", str(tmp_path / "tuned")]) == 0

    config = overrides.from_json(json.loads((tmp_path / "tuned" / "config.json").read_text()))
    start = next((tmp_path / "base").glob("checkpoints/step-*"))
    tokenizer = load_tokenizer(start)
    examples = prepare(config.data, tokenizer=tokenizer).examples
    assert examples is not None
    masked = config.data.document_mask == "on"
    assert masked == (mask == "auto")
    rows = ExampleRows(examples[0], seq=37, seed=config.train.seed, fill=tokenizer.start, masked=masked)
    theirs = TorchGPT2(config.model, safetensors.load_file(start / "weights.safetensors"))
    optimizer = theirs.adamw(config.optim)
    ours = [row for row in metrics.read(tmp_path / "tuned" / "metrics.jsonl") if row["kind"] == "train"]
    assert len(ours) == STEPS and ours[-1]["loss"] < 0.9 * ours[0]["loss"]
    for step, row in enumerate(ours):
        tokens, targets = rows.batch(6 * step, 6, seq=37, document=0)
        valid = int((targets >= 0).sum())
        assert valid < 0.7 * targets.size
        tokens, targets = alone(tokens, targets, rows.starts(6 * step, 6, tokens))
        loss = theirs.step(optimizer, tokens, targets, 1 / valid, lr=row["lr"], clip=config.optim.clip)
        assert row["loss"] == pytest.approx(loss, rel=LIMIT), step
