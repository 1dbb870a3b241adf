"""Simulated number formats of matmuls: which operands are rounded, to what, and what that leaves as it was."""

from __future__ import annotations

import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from barellm.assembly.build import build_programs, matmul_formats
from barellm.assembly.programs import build
from barellm.cli.main import main
from barellm.config import Config, TrainConfig
from barellm.config.number_formats import number_formats
from barellm.cpu.step import CpuSession
from barellm.errors import UserError
from barellm.models import llama3, preset, sparse
from barellm.models.training_schedule import on_step
from barellm.optim.adamw import adamw
from barellm.program.builder import Program, Store
from barellm.program.matmul_formats import SLOTS, MatmulFormats
from barellm.program.ops.optim.scales import RoundFloating
from barellm.program.tensor import Dim
from barellm.runtime.ranks import Planned
from barellm.runtime.reference import ReferenceSession
from tests.cpu.test_models import MODEL, OPTIM
from tests.models.test_speedrun import SMALL as SPEEDRUN
from tests.program.graphs import Leaf, Weigh

GRAPH = "barabasi-albert:1:3"
LLAMA = llama3.Config(layers=2, heads=4, kv_heads=2, d_model=48, d_ff=72, vocab_size=101, padded_vocab=104, max_seq=17)
SPARSE = sparse.Config(layers=2, heads=2, d_model=64, vocab_size=101, max_seq=64, layout="local:16", block=16, mlp_layout=GRAPH)
MODELS = {"gpt2": MODEL, "llama3": LLAMA, "speedrun": SPEEDRUN}
EIGHT = MatmulFormats(number_formats("e4m3,e4m3,e5m2"))


def programs_of(model, formats: MatmulFormats | None = None, compute: str = "fp32", **how: Any) -> dict[str, Program]:
    how = {"batch": 3, "seq": 17, "compute": compute, "optimizer": partial(adamw, config=OPTIM)} | how
    return build(model, formats=formats, **how)[1]


def of_8_bits(x: np.ndarray, name: str) -> np.ndarray:
    return x.astype(np.float32).astype(getattr(ml_dtypes, name)).astype(np.float64)


def test_matmuls_read_rounded_operands_forward_and_backward():
    """y = x8 w8^T, dw = g8^T x8 and dx = g8 w8, with the gradient of y rounded once for both."""
    r = np.random.default_rng(3)
    x, w = r.normal(size=(2, 3, 5)), r.normal(size=(7, 5))
    p = Program(Store())
    leaf = p.apply(Leaf, x=p.input("x", (Dim("batch", 2), Dim("seq", 3), 5), "fp32")).y
    h = p.add(leaf, p.linear(leaf, p.parameter("zero", (5, 5))))  # so that x has a gradient
    p.output("y", p.linear(h, p.parameter("w", w.shape)))
    p.output("loss", p.apply(Weigh, x=p.named["y"], seed=1).loss)
    forward = EIGHT.round_forward(p)
    p.backward(p.named["loss"])
    EIGHT.round_gradients(p, forward)
    session = ReferenceSession({"op": p})
    for name, values in (("w", w), ("x", x)):
        session.write(name, values)
    session.run("op")
    g = Weigh({}, {"seed": 1}).weights((2, 3, 7))
    x8, w8, g8 = of_8_bits(x, "float8_e4m3fn"), of_8_bits(w, "float8_e4m3fn"), of_8_bits(g, "float8_e5m2")
    assert (g8 != g).any()
    np.testing.assert_allclose(session.read("y"), x8 @ w8.T, rtol=1e-12)
    np.testing.assert_allclose(session.read("w.grad"), np.einsum("btn,btk->nk", g8, x8), rtol=1e-12)
    dx8 = of_8_bits(g8 @ w8, "float8_e5m2")  # of the matmul before it, whose weight is zero
    np.testing.assert_allclose(session.read("zero.grad"), np.einsum("btn,btk->nk", dx8, x8), rtol=1e-12)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("model", [*MODELS.values(), SPARSE], ids=[*MODELS, "sparse"])
def test_every_operand_of_every_matmul_is_rounded_to_its_kind_s_format(model, recompute):
    how: dict[str, Any] = {"recompute": recompute} | ({"seq": 64} if model is SPARSE else {})
    plain = programs_of(model, **how)["forward_backward"]
    p = programs_of(model, EIGHT, **how)["forward_backward"]
    products = [op for op in p.ops if op.product]
    assert [op.name for op in products] == [op.name for op in plain.ops if op.product]
    rounded = {op.y: op for op in p.ops if isinstance(op, RoundFloating)}
    backward, found = False, set()
    for op in p.ops:
        backward |= op.name.endswith("cross_entropy_backward")
        if op.product:
            kinds = set()
            for slot in SLOTS & op.inputs.keys():
                by = rounded[op.inputs[slot].base]
                kinds.add((slot, by.format == EIGHT.of["gradients"]))
            gradients = {slot for slot, is_gradient in kinds if is_gradient}
            assert bool(gradients) == (backward and not op.recomputed) and gradients <= {"x", "dy", "dout"}, op
            found |= gradients
    assert "dy" in found and "dout" in found
    evaluated = [[op.name for op in programs_of(model, f, **how)["eval"].ops] for f in (None, EIGHT)]
    assert evaluated[0] == evaluated[1]


def gradients_of(model, formats: MatmulFormats | None, compute: str, *, recompute: bool = False, runs: int = 1) -> dict:
    session = CpuSession(programs_of(model, formats, compute, recompute=recompute), threads=2)
    session.run("init", seed=3)
    r = np.random.default_rng(1)
    run = Config(preset="", model=model, train=TrainConfig(micro_batch_size=3, seq=max(17, model.max_seq), steps=6))
    on_step(session, run, 0, 6)
    scalars = {"seed": 5, "inv_targets": 1 / 51, "accumulate": 0, "batch": 3, "seq": 17}
    for step in range(runs):
        for name in ("tokens", "targets"):
            session.write(name, r.integers(4, model.vocab_size, (3, 17)).astype(np.int32))
        session.run("forward_backward", **scalars, step=step + 1, sample=3 * step)
    found = {name: session.read(name) for name, t in session.tensors.items() if t.role in ("gradient", "state")}
    found["loss"] = session.read("loss")
    session.close()
    return found


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_bf16_simulated_in_bf16_has_the_bits_of_bf16(name, recompute):
    """e8m7 has its numbers, so nothing but the rounding ops is there."""
    plain = gradients_of(MODELS[name], None, "bf16", recompute=recompute)
    simulated = gradients_of(MODELS[name], MatmulFormats(number_formats("e8m7")), "bf16", recompute=recompute)
    assert plain.keys() == simulated.keys()
    for tensor, values in plain.items():
        np.testing.assert_array_equal(simulated[tensor], values, err_msg=tensor)


@pytest.mark.parametrize("name", MODELS)
def test_a_wide_format_gives_the_loss_of_fp32_and_a_narrow_one_does_not(name):
    plain = gradients_of(MODELS[name], None, "fp32")
    for form, most in (("e8m10", 1e-3), ("e2m0", np.inf)):
        found = gradients_of(MODELS[name], MatmulFormats(number_formats(form)), "fp32")
        errors = {k: np.linalg.norm(found[k] - v) / np.linalg.norm(v) for k, v in plain.items() if np.linalg.norm(v) > 1e-6}
        assert np.median([*errors.values()]) < most and (0 < errors["loss"] < 1e-5) == (form == "e8m10")
    assert np.median([*errors.values()]) == 1, "gradients below the least number of e2m0 became 0"


@pytest.mark.parametrize("rule", ["floating", "delayed", "learned"])
def test_recomputed_operands_are_rounded_as_the_first_time_and_change_no_state(rule):
    formats = MatmulFormats(number_formats("e4m3,e4m3,e5m2"), rule, ("activations", "weights", "gradients"))
    plain, recomputed = (gradients_of(MODEL, formats, "fp32", recompute=r, runs=3) for r in (False, True))
    states = {name: values for name, values in plain.items() if "exponent_bias" in name}
    assert states
    for mine, other in ((plain, recomputed), (recomputed, plain)):
        forward = {k: v for k, v in mine.items() if ".gradients." not in k}
        for tensor, values in forward.items():
            np.testing.assert_array_equal(other[tensor], values, err_msg=tensor)


def biased(rule: str, sizes: list[float], second: float = -1) -> list[np.ndarray]:
    """What a matmul reads as x in e2m1, of micro-batches whose numbers are (1, `second`) times these: 6 is the largest, 0.5 the
    least."""
    p = Program(Store())
    leaf = p.apply(Leaf, x=p.input("x", (Dim("batch", 1), Dim("seq", 1), 2), "fp32")).y
    y = p.linear(leaf, p.parameter("w", (2, 2)))
    p.output("y", y)
    MatmulFormats(number_formats("e2m1,e8m10,e8m10"), rule).round_forward(p)
    session, found = ReferenceSession({"op": p}), []
    session.write("w", np.eye(2))
    for size in sizes:
        session.write("x", np.array([[[size, second * size]]]))
        session.run("op")
        found.append(session.read("y").reshape(-1))
    return found


@pytest.mark.parametrize(
    "rule, wanted",
    [
        ("static", [1, 1, 0, 6]),  # less than half of the least becomes 0
        ("floating", [1, 1, 0.125, 96]),  # the nearest of 1, 1.5, 2 times powers of two
        # At first the format's; then 1.5 times 1.1 must fit, so the largest is 3 and the least 0.25, until 100 is known.
        ("delayed", [1, 1, 0.25, 3]),
    ],
)
def test_where_the_exponent_biases_of_operands_come_from(rule, wanted):
    found = biased(rule, [1.1, 1.1, 0.13, 100.0])
    np.testing.assert_array_equal(found, [[w, -w] for w in wanted])


def test_a_floating_bias_reaches_the_largest_number_and_no_further():
    """Of 1.1 the largest is 1.5 and the least 0.125, to which 0.07 is rounded; with one exponent more it would be 0."""
    np.testing.assert_array_equal(biased("floating", [1.1], second=-0.07 / 1.1), [[1, -0.125]])


def test_a_learned_bias_is_updated_at_steps_that_double():
    """Two exponents above that of the largest number: of 1.1 it is 0, so the largest is 1.5 * 2^2, and 100 is beyond it."""
    found = biased("learned", [1.1, 100.0, 100.0, 100.0, 100.0, 1.1])
    np.testing.assert_array_equal(np.array(found)[:, 0], [1, 6, 6, 6, 96, 0])


@pytest.mark.parametrize(
    "words, message",
    [
        (["e9m3"], "train.matmul_formats is 'e9m3', expected eXmY with X from 2 to 8 and Y from 0 to 10, or eXmYbZ"),
        (["e4m3,e5m2"], "one for all operands, or three for activations,weights,gradients"),
        (["e8m3b-1"], "numbers below 2^128"),
        (["e4m3", "--train.exponent_bias", "float"], "expected static, floating, delayed or learned"),
        (["e4m3b9", "--train.exponent_bias", "learned"], "expected static, or formats without a bias"),
        (["", "--train.stochastic_rounding", "weights"], "train.matmul_formats empty, expected formats"),
        (["e4m3", "--train.stochastic_rounding", "weight"], "names 'weight', expected any of activations, weights, gradients"),
        (["e5m10", "--dtype", "bf16"], "train.matmul_formats with 10 bits of mantissa expects train.dtype fp32, found bf16"),
        (["e5m7", "--dtype", "fp16"], "with 7 bits of mantissa expects train.dtype fp32 or bf16, found fp16"),
        (["e5m2", "--dtype", "fp16"], "train.matmul_formats with 2 bits of mantissa expects train.dtype fp32 or bf16, found fp16"),
    ],
)
def test_mistakes_are_one_line(tmp_path, capsys, words, message):
    (tmp_path / "text.txt").write_text("abc " * 500)
    given = ["--data", str(tmp_path / "text.txt"), "--out", str(tmp_path / "run"), "--steps", "1"]
    assert main(["train", "shakespeare-char", *given, "--train.matmul_formats", *words]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_what_cannot_be_simulated_is_refused():
    with pytest.raises(UserError, match=r"train\.matmul_formats is given and model\.fp8 too, expected one of them"):
        programs_of(replace(SPEEDRUN, fp8="static"), EIGHT)
    with pytest.raises(UserError, match=r"train\.exponent_bias is delayed with 2 ranks, each of which would have its own"):
        matmul_formats(TrainConfig(matmul_formats="e4m3", exponent_bias="delayed"), Planned(0, 2))
    run = preset("shakespeare-char")
    run = replace(run, train=replace(run.train, dtype="fp32", matmul_formats="e4m3"))
    assert any(isinstance(op, RoundFloating) for op in build_programs(run)["forward_backward"].ops)


@pytest.mark.parametrize("rule", ["delayed", "learned"])
def test_a_resumed_run_ends_with_the_bits_of_one_never_stopped(tmp_path, monkeypatch, capsys, rule):
    monkeypatch.setenv("BARELLM_CACHE", str(tmp_path / "cache"))
    (tmp_path / "text.txt").write_text("".join(f"{i} squared is {i * i}.\n" for i in range(300)))
    words = ["train", "shakespeare-char", "--data", str(tmp_path / "text.txt"), "--out", str(tmp_path / "whole"), "--steps", "6"]
    words += ["--train.checkpoint_every", "2", "--train.save_total_limit", "9", "--model.layers", "1", "--model.d_model", "32"]
    words += ["--train.matmul_formats", "e4m3,e4m3,e5m2", "--train.exponent_bias", rule, "--train.gradient_accumulation_steps", "2"]
    assert main([*words, "--train.stochastic_rounding", "activations,gradients", "--train.sample_every", "0"]) == 0
    shutil.copytree(tmp_path / "whole", tmp_path / "parts")
    for step in (4, 6):
        shutil.rmtree(tmp_path / "parts" / f"checkpoints/step-{step:06d}")
    assert main(["train", "--out", str(tmp_path / "parts"), "--resume"]) == 0
    assert "resumed from" in capsys.readouterr().out
    for name in ("weights.safetensors", "optimizer.safetensors"):
        whole, parts = (tmp_path / run / Path("checkpoints/step-000006") / name for run in ("whole", "parts"))
        assert whole.read_bytes() == parts.read_bytes(), name
    assert b"exponent_bias" in parts.read_bytes()
