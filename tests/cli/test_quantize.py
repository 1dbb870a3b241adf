"""A run's matrices as codes in a checkpoint of their own."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from barellm.assembly.machine import build_programs, opened
from barellm.assembly.quantized import products_of
from barellm.checkpoint import checkpoint, quantized, tensorfile
from barellm.checkpoint.weights import of_checkpoint, parameters
from barellm.cli.checkpoints import found
from barellm.cli.main import main
from barellm.data.loader import Validation
from barellm.data.sources import prepare
from barellm.errors import UserError
from barellm.evaluation.calibration import Calibration
from barellm.program.quantization import dequantize, quantize, scheme
from tests.cli.test_commands import last_json

REFERENCE = ("--device", "reference")
STEP = Path("checkpoints/step-000004")


def nats(capsys, folder: Path, *more: str) -> float:
    assert main(["eval", str(folder), "--json", *more]) == 0
    return last_json(capsys)["nats"]


@pytest.mark.parametrize("weights", ["int8", "int4", "nf4/32"])
def test_nearest_codes_are_those_that_weights_asks_for(trained, tmp_path, capsys, weights):
    """Without calibration a stored checkpoint gives what rounding while loading gives, to the bit."""
    out = tmp_path / "few"
    assert main(["quantize", str(trained), "--weights", weights, "--tokens", "0", "--out", str(out)]) == 0
    assert f"matrices in {weights}, 0.0 MB (nearest codes)" in capsys.readouterr().out
    assert nats(capsys, out, *REFERENCE) == nats(capsys, trained, "--weights", weights, *REFERENCE)
    assert nats(capsys, out, "--weights", weights) == nats(capsys, trained, "--weights", weights)
    words = ["--prompt", "12 squared", "--tokens", "9", "--temperature", "0", "--json"]
    assert main(["sample", str(out), *words]) == main(["sample", str(trained), "--weights", weights, *words]) == 0
    one, other = (json.loads(line)["text"] for line in capsys.readouterr().out.splitlines())
    assert one == other


def test_calibration_makes_products_on_its_text_more_exact(trained, tmp_path, text, capsys):
    out = tmp_path / "few"
    words = ["--weights", "nf4", "--data", str(text), "--tokens", "2000", "--out", str(out)]
    assert main(["quantize", str(trained), *words, *REFERENCE]) == 0
    said = capsys.readouterr().out
    assert "calibrated on 2," in said and f"tokens of {text}" in said
    meta = checkpoint.read_meta(out / STEP)
    assert (
        meta["weights"] == "nf4" and meta["source"] == str(trained / STEP) and meta["calibration"]["data"] == str(text)
    )
    arrays, numbers = tensorfile.mapped(out / STEP / checkpoint.WEIGHTS), of_checkpoint(trained / STEP)
    names = [name.removesuffix(".codes") for name in arrays if name.endswith(".codes")]
    assert len(names) == 4  # of the one block; the classifier is the embedding, which keeps its numbers
    changed = 0
    for name in names:
        w = numbers.arrays[name]
        codes, scales = quantize(w, scheme("nf4"))
        both = arrays[f"{name}.codes"].view(np.uint8)
        halves = np.stack([both & 15, both >> 4], -1).reshape(len(w), -1)[:, : w.shape[1]]
        changed += int((halves != codes).sum())
        error = np.linalg.norm(dequantize(halves, np.array(arrays[f"{name}.scales"]), scheme("nf4")) - w)
        assert error < 3 * np.linalg.norm(dequantize(codes, scales, scheme("nf4")) - w)
    assert changed and nats(capsys, out, *REFERENCE) != nats(capsys, trained, "--weights", "nf4", *REFERENCE)


def test_moments_are_those_of_what_products_read(trained):
    """By hand from the model's first LayerNorm, whose result the first product reads."""
    run = found(str(trained), device="cpu", dtype="fp32", batch=3)
    p = build_programs(run.config, training=False, positions=0)["eval"]
    product = products_of(p)[0]
    calibration = Calibration(p, [product])
    p.output("read", product.x)
    data = prepare(run.config.data, tokenizer=run.tokenizer)
    windows = Validation(data.val, seq=5, max_tokens=60)
    seen = []
    with opened({"eval": p}, "cpu") as session:
        of_checkpoint(run.path).load(session)
        calibration.measure(session, windows, batch=3, report=lambda done: seen.append(session.read("read").copy()))
        found_moments = calibration.read(session, product.weight.name)
    x = np.concatenate([rows.reshape(-1, rows.shape[-1]) for rows in seen])
    assert len(seen) > 1 and np.allclose(found_moments, x.T.astype(np.float64) @ x, rtol=1e-4)


@pytest.fixture
def few(trained, tmp_path) -> Path:
    out = tmp_path / "few"
    assert main(["quantize", str(trained), "--weights", "int4", "--tokens", "0", "--out", str(out)]) == 0
    return out


def test_what_a_checkpoint_of_few_bits_cannot_do_is_said(few, trained, tmp_path, capsys):
    def refused(*words) -> str:
        assert main([str(word) for word in words]) == 2
        return capsys.readouterr().err

    only = "step-000004 has weights of few bits (int4), which only sample and eval read: use"
    only = f"{only} {trained / STEP}, of which it was made"
    assert only in refused("export", few, "--format", "huggingface", "--out", tmp_path / "hf")
    assert only in refused("quantize", few, "--weights", "nf4", "--out", tmp_path / "again")
    assert only in refused("train", "shakespeare-char", "--init-from", few, "--out", tmp_path / "more", *REFERENCE)
    assert "has weights int4, the command line says nf4: use" in refused("eval", few, "--weights", "nf4")
    message = refused("quantize", trained, "--weights", "int4", "--out", few)
    found = f"--out {few} is not empty (it has checkpoints/step-000004)"
    assert message == f"barellm: error: {found}: name another folder\n"  # this command has no --resume
    assert "--data is a text to calibrate with" in refused(
        "quantize", trained, "--weights", "int4", "--tokens", 0, "--data", "x", "--out", tmp_path / "x"
    )
    assert "--tokens is -1, expected at least 0" in refused(
        "quantize", trained, "--weights", "int4", "--tokens", -1, "--out", tmp_path / "x"
    )
    assert "unknown weights 'int5'" in refused("quantize", trained, "--weights", "int5", "--out", tmp_path / "x")
    assert not (tmp_path / "x").exists() and not (tmp_path / "again").exists()


def test_a_file_of_other_codes_is_refused(few):
    """Bytes of 8-bit codes in the place of two codes in a byte."""
    names = tensorfile.mapped(few / STEP / checkpoint.WEIGHTS)
    schemes = {name.removesuffix(".codes"): scheme("int8") for name in names if name.endswith(".codes")}
    with pytest.raises(UserError, match=r"codes is int8 \(24, 4\), expected int8 \(24, 8\)"):
        quantized.load(
            few / STEP, SimpleNamespace(), parameters(found(str(few), device="reference").config.model), schemes
        )  # pyright: ignore
