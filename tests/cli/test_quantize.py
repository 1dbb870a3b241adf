"""A run's matrices as codes in a checkpoint of their own."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from barellm.assembly.build import build_programs, opened
from barellm.assembly.quantized import products_of
from barellm.checkpoint import checkpoint, quantized, tensorfile
from barellm.checkpoint.weights import of_checkpoint, parameters
from barellm.cli.checkpoints import found
from barellm.cli.main import main
from barellm.data.kinds import tokenizer_files
from barellm.data.loader import Validation
from barellm.data.sources import prepare
from barellm.errors import UserError
from barellm.evaluation.calibration import Calibration
from barellm.program.quantization import dequantize, packed_matrix, quantize, scheme
from tests.cli.test_commands import last_json

REFERENCE = ("--device", "reference")
STEP = Path("checkpoints/step-000004")
EARLIER = Path(__file__).parents[1] / "checkpoint/nf4_v1" / STEP.name


def nats(capsys, folder: Path, *more: str) -> float:
    assert main(["eval", str(folder), "--json", *more]) == 0
    return last_json(capsys)["nats"]


@pytest.mark.parametrize("weights", ["int8", "int4", "nf4/32"])
@pytest.mark.extended
def test_nearest_codes_are_those_that_weights_asks_for(trained, tmp_path, capsys, weights):
    """Without calibration a stored checkpoint gives what rounding while loading gives, to the bit."""
    out = tmp_path / "few"
    assert main(["quantize", str(trained), "--weights", weights, "--tokens", "0", "--out", str(out)]) == 0
    assert f"matrices in {weights}\n  nearest codes\n  before        0.0 MB" in capsys.readouterr().out
    assert nats(capsys, out, *REFERENCE) == nats(capsys, trained, "--weights", weights, *REFERENCE)
    assert nats(capsys, out, "--weights", weights) == nats(capsys, trained, "--weights", weights)
    words = ["--prompt", "12 squared", "--max-new-tokens", "9", "--temperature", "0", "--json"]
    assert main(["sample", str(out), *words]) == main(["sample", str(trained), "--weights", weights, *words]) == 0
    one, other = (json.loads(line)["text"] for line in capsys.readouterr().out.splitlines())
    assert one == other


def changed(trained: Path, out: Path, change: Callable[[dict[str, np.ndarray]], None]) -> Path:
    """A run's checkpoint with other weights."""
    weights = of_checkpoint(trained / STEP)
    assert weights.tokenizer is not None
    arrays = {name: weights.read_rows(name, 0, int(t.shape[0])) for name, t in weights.tensors.items()}
    change(arrays)
    other, meta = replace(weights, arrays=arrays), checkpoint.read_meta(trained / STEP)
    files = tokenizer_files(weights.tokenizer)
    (out / "checkpoints").mkdir(parents=True)
    checkpoint.save(out / "checkpoints", other, step=meta.pop("step"), meta=meta, tokenizer=files, keep=1)
    return out


@pytest.mark.parametrize("weights", ["int8", "int4", "nf4/32"])
@pytest.mark.extended
def test_rows_of_any_magnitude_are_held(trained, tmp_path, capsys, weights):
    """Queries by 2^-60 and keys by 2^60, values by 2^-30 and the matrix behind them by 2^30: what they make together is the same to
    the bit, in texts too, from a stored checkpoint and from codes made while loading."""

    def change(arrays):
        arrays["h.0.attn.c_attn.weight"] *= np.exp2(np.repeat([-60.0, 60.0, -30.0], 8))[:, None].astype(np.float32)
        arrays["h.0.attn.c_proj.weight"] *= np.float32(2.0**30)

    run, out = changed(trained, tmp_path / "run", change), tmp_path / "few"
    assert main(["quantize", str(run), "--weights", weights, "--tokens", "0", "--out", str(out)]) == 0
    stored = tensorfile.mapped(out / STEP / checkpoint.WEIGHTS)
    kinds = {name: stored[name].dtype for name in stored if name.endswith(".scales")}
    assert kinds["h.0.attn.c_attn.weight.scales"] == np.float32 and kinds["h.0.mlp.c_fc.weight.scales"] == np.float16
    for device in ("cpu", "reference"):
        wanted = nats(capsys, trained, "--weights", weights, "--device", device)
        assert nats(capsys, out, "--device", device) == wanted
        assert nats(capsys, run, "--weights", weights, "--device", device) == wanted
    words = ["--prompt", "12 squared", "--max-new-tokens", "9", "--temperature", "0", "--json"]
    for folder in (out, run, trained):
        assert main(["sample", str(folder), *words, *(() if folder == out else ("--weights", weights))]) == 0
    assert len({json.loads(line)["text"] for line in capsys.readouterr().out.splitlines()}) == 1


@pytest.mark.parametrize("value", ["nan", "inf"])
def test_weights_that_are_not_finite_are_refused_with_their_row(trained, tmp_path, capsys, value):
    def change(arrays):
        arrays["h.0.mlp.c_fc.weight"][19, 3] = float(value)

    run, out = str(changed(trained, tmp_path / "run", change)), str(tmp_path / "few")
    for words in (
        ["quantize", run, "--weights", "int4", "--tokens", "0", "--out", out],
        ["sample", run, "--weights", "int8", "--prompt", "1", "--max-new-tokens", "2"],
        ["eval", run, "--weights", "nf4", *REFERENCE],
    ):
        assert main(words) == 2
        line = f"row 19 of h.0.mlp.c_fc.weight has {value}, expected finite numbers to quantize"
        assert capsys.readouterr().err.splitlines()[-1] == f"barellm: error: {line}"
    assert not Path(out, "checkpoints").exists()


def test_a_folder_says_which_numbers_its_codes_stand_for(trained, tmp_path, capsys):
    out = tmp_path / "few"
    assert main(["quantize", str(trained), "--weights", "nf4/32", "--tokens", "0", "--out", str(out)]) == 0
    meta = checkpoint.read_meta(out / STEP)
    assert meta["table"] == list(scheme("nf4").table)
    assert quantized.stored_scheme(out / STEP, meta) == "nf4/32"
    assert quantized.stored_scheme(out / STEP, meta | {"table": list(scheme("nf4-v1").table)}) == "nf4-v1/32"
    assert quantized.stored_scheme(out / STEP, {"weights": "int4/128"}) == "int4/128"
    assert quantized.stored_scheme(out / STEP, {"weights": "nf4"}) == "nf4-v1"
    with pytest.raises(UserError, match=r"step-000004/meta.json has a table for int4 that is not known, expected \(-8.0, "):
        quantized.stored_scheme(out / STEP, {"weights": "int4", "table": meta["table"]})


def test_a_folder_of_an_earlier_version_keeps_its_numbers(capsys):
    """Written by the version whose nf4 had another number for code 6, and no table in meta.json."""
    table = [-1.0, -0.6953125, -0.5234375, -0.39453125, -0.28515625, -0.1845703125, -0.09130859375, 0.0,
             0.07958984375, 0.1611328125, 0.24609375, 0.337890625, 0.44140625, 0.5625, 0.72265625, 1.0]  # fmt: skip
    arrays = tensorfile.mapped(EARLIER / checkpoint.WEIGHTS)
    sixes = 0
    for weights in (None, "nf4/32"):
        with found(str(EARLIER), device="reference", weights=weights).opened(positions=0) as compiled:
            for name, m in compiled.matrices.items():
                if m.stays:
                    continue
                codes, scales = (compiled.session.read(t.name) for t in (m.codes, m.scales))
                made = packed_matrix(codes.astype(np.uint8), scales, m.how, *(int(n) for n in m.parameter.shape))
                both = arrays[f"{name}.codes"].view(np.uint8)
                halves = np.stack([both & 15, both >> 4], -1).reshape(len(both), -1)[:, : made.shape[1]]
                sixes += int((halves == 6).sum())
                each = np.repeat(arrays[f"{name}.scales"].astype(np.float32), 32, 1)[:, : made.shape[1]]
                assert np.array_equal(made, np.array(table, np.float32)[halves] * each), name
    assert sixes
    words = ["--prompt", "12 squared", "--max-new-tokens", "3", "--temperature", "0", "--json"]
    assert main(["sample", str(EARLIER), *words]) == 0 and last_json(capsys)["text"] == "aaa"


def test_calibration_makes_products_on_its_text_more_exact(trained, tmp_path, text, capsys):
    out = tmp_path / "few"
    words = ["--weights", "nf4", "--data", str(text), "--tokens", "2000", "--out", str(out)]
    assert main(["quantize", str(trained), *words, *REFERENCE]) == 0
    said = capsys.readouterr().out
    assert "calibrated on 2," in said and f"tokens of {text}" in said
    meta = checkpoint.read_meta(out / STEP)
    assert meta["weights"] == "nf4" and meta["source"] == str(trained / STEP) and meta["calibration"]["data"] == str(text)
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
    with pytest.raises(UserError, match=r"codes is I8 \(24, 4\), expected I8 \(24, 8\)"):
        quantized.load(few / STEP, SimpleNamespace(), parameters(found(str(few), device="reference").config.model), schemes)  # pyright: ignore
