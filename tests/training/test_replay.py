"""barellm verify: a step has the bits that the run recorded, or the first op and tensor that differ are named.

Faults of one bit are planted between the ops of the replay, in the tensors that an op writes or reads: in memory, once; or by a
kernel that is wrong each time. Others are planted while a run trains, so that its record has them."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from barellm.cli.main import main
from barellm.cpu.step import CpuSession
from barellm.program.dtypes import FORMATS, numpy_dtype
from barellm.runtime.op_check import BOUND, FP32_BOUND, difference, excess
from barellm.training import metrics

SIZES = [
    *("--model.layers", "2", "--model.heads", "2", "--model.d_model", "24", "--model.max_seq", "19", "--seq", "19", "--batch", "3"),
    *("--steps", "4", "--train.checkpoint_every", "2", "--train.save_total_limit", "9", "--train.eval_every", "0"),
    *("--train.sample_every", "0", "--optim.warmup", "1", "--device", "cpu"),
]
MUON = ("--optim.name", "muon", "--optim.moments", "16bit-stochastic")
RUNS = {
    "fp32": ("shakespeare-char", "--dtype", "fp32", "--model.dropout", "0.1"),
    "bf16": ("shakespeare-char", "--dtype", "bf16", "--train.gradient_accumulation_steps", "2"),
    "fp16": ("shakespeare-char", "--dtype", "fp16"),
    "llama": ("llama-15m", "--dtype", "bf16", "--model.kv_heads", "1", "--model.d_ff", "40", "--data.tokenizer", "bytes", *MUON),
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> dict[str, Path]:
    """A finished run of four steps of each kind, with checkpoints of the second and the fourth."""
    folder = tmp_path_factory.mktemp("replay")
    text = folder / "text.txt"
    text.write_text("".join(f"{i} squared is {i * i}.\n" for i in range(300)))
    for name, (preset, *how) in RUNS.items():
        assert main(["train", preset, "--data", str(text), "--out", str(folder / name), *SIZES, *how]) == 0
    return {name: folder / name for name in RUNS}


def verified(capsys, run: Path, *options: str) -> tuple[int, dict[str, Any]]:
    capsys.readouterr()
    status = main(["verify", str(run), "--json", *options])
    return status, json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(
    "step, origin", [(1, "the initial weights"), (2, "the initial weights"), (3, "step-000002"), (4, "step-000002")]
)
@pytest.mark.parametrize("kind", RUNS)
def test_every_step_has_the_recorded_bits(runs, capsys, kind, step, origin):
    status, found = verified(capsys, runs[kind], "--step", str(step))
    assert (status, found["equal"], found["differences"]) == (0, True, [])
    assert origin in found["from"] and ("tensors of step-00000" in " ".join(found["compared"])) == (step in (2, 4))


@pytest.mark.parametrize("kind", RUNS)
def test_without_a_fault_each_op_passes(runs, capsys, kind):
    """Whatever fuses, rounds or draws random numbers: nothing is called a fault that is none."""
    status, found = verified(capsys, runs[kind], "--step", "3", "--ops")
    assert (status, found["fault"], found["faults"]) == (0, None, 0)
    assert found["ops"] > 40 and 0 < found["worst"]["of_bound"] < 0.8


@dataclass
class Planted:
    """A bit of the largest element of an operand of the `nth` op called `op`. `when`: "after" its first execution alone; by its
    "kernel", after each; in an input "before" its calls, or "between" its two executions."""

    kind: str
    op: str
    operand: str
    bit: int
    when: str = "after"
    nth: int = 1

    def __str__(self) -> str:
        return f"{self.kind}-{self.op}{self.nth}-{self.operand}-{self.bit}-{self.when}"


FAULTS = [
    Planted("fp32", "embedding", "y", 0),
    Planted("fp32", "layernorm", "y", 7),
    Planted("fp32", "layernorm", "mean", 1),
    Planted("fp32", "matmul", "y", 0),
    Planted("fp32", "attention", "lse", 2, nth=2),
    Planted("fp32", "attention", "out", 30, "kernel"),
    Planted("fp32", "linear_gelu", "y", 22, "kernel"),
    Planted("fp32", "classifier", "dx", 3),
    Planted("fp32", "classifier", "loss", 0),
    Planted("fp32", "matmul_dx", "dx", 31, "kernel"),
    Planted("fp32", "matmul_dw", "dweight", 4, nth=3),
    Planted("fp32", "matmul_dw", "dweight", 20, "kernel", nth=2),
    Planted("fp32", "attention_backward", "dk", 5),
    Planted("fp32", "layernorm_backward", "dx", 9),
    Planted("fp32", "embedding_dwpe", "dweight", 23, "kernel"),
    Planted("fp32", "sum_squares", "partials", 0),
    Planted("fp32", "clip_scale", "clip", 21, "kernel"),
    Planted("fp32", "adamw", "param", 0, nth=4),
    Planted("fp32", "adamw", "m", 6, nth=2),
    Planted("fp32", "adamw", "v", 29, "kernel"),
    Planted("fp32", "adamw", "grad", 1, "before", nth=5),
    Planted("fp32", "matmul_dx", "weight", 0, "before"),
    Planted("bf16", "layernorm", "y", 0),
    Planted("bf16", "matmul", "y", 14, "kernel"),
    Planted("bf16", "linear_gelu", "pre", 0, nth=2),
    Planted("bf16", "attention_backward", "q", 0, "between"),
    Planted("bf16", "attention", "q", 3, "before", nth=2),
    Planted("bf16", "matmul_dx_gelu", "dx", 1),
    Planted("bf16", "classifier", "dweight", 0),
    Planted("bf16", "adamw", "param", 3),
    Planted("llama", "rmsnorm", "y", 0),
    Planted("llama", "attention", "out", 13, "kernel"),
    Planted("llama", "adamw", "m", 0),
    Planted("fp16", "matmul_dw", "dweight", 2),
    Planted("fp16", "attention", "out", 14, "kernel"),
]


def flip(session: CpuSession, t: Any, bit: int) -> None:
    """One bit of the largest element of a tensor, or of a part of one, as it lies in memory."""
    planes = bool(FORMATS[t.dtype].planes)
    kind = np.dtype(np.uint8) if planes else numpy_dtype(t.dtype)
    at = session.plan.offsets[t.base]
    stored = session.arena[at : at + t.base.nbytes].view(kind).reshape(-1)
    whole = np.arange(stored.size) if planes else np.arange(t.base.size).reshape([int(n) for n in t.base.shape])
    own = whole if planes or t.base is t else whole[..., t.first_column : t.first_column + t.shape[-1]]
    own = own.reshape(-1)
    sizes = np.where(np.isfinite(stored[own].astype(np.float64)), np.abs(stored[own].astype(np.float64)), -1)
    codes = stored.view(f"u{kind.itemsize}")
    codes[own[np.argmax(sizes)]] ^= codes.dtype.type(1 << (bit % (8 * kind.itemsize)))


@pytest.mark.parametrize("planted", FAULTS, ids=str)
def test_a_fault_of_one_bit_is_named_by_op_and_tensor(runs, capsys, monkeypatch, planted):
    plain, target = CpuSession.each_op, []

    def each_op(session, program):
        seen = 0
        for op, run in plain(session, program):
            seen += op.name == planted.op
            if op.name != planted.op or seen != planted.nth or (target and target[0][0] is not op):
                yield op, run
                continue
            t = op.inputs.get(planted.operand) or op.outputs[planted.operand]
            if not target:
                target.append((op, t, []))

            def faulty(run=run, t=t):
                times = target[0][2]
                times.append(1)
                if (planted.when, len(times)) in (("before", 1), ("between", 2)):
                    flip(session, t, planted.bit)
                run()
                if planted.when == "kernel" or (planted.when, len(times)) == ("after", 1):
                    flip(session, t, planted.bit)

            yield op, faulty

    monkeypatch.setattr(CpuSession, "each_op", each_op)
    status, found = verified(capsys, runs[planted.kind], "--step", "3", "--ops")
    assert target, f"no op is called {planted.op}"
    t = target[0][1]
    assert status == 1 and found["fault"]["op"] == planted.op
    assert found["fault"]["tensor"] in (t.name, t.base.name)
    expected = {"after": "two executions differ", "kernel": "off from the float64 reference"}
    assert expected.get(planted.when, "changed after") in found["fault"]["what"]


@pytest.mark.parametrize(
    "operand, bit, told",
    [
        ("h.1.mlp.c_fc.weight", 3, {"h.1.mlp.c_fc.weight"}),
        ("h.0.ln_1.weight.m", 0, {"h.0.ln_1.weight.m"}),
        ("wte.v", 12, {"wte.v"}),
        ("h.0.mlp.c_proj.weight.grad", 22, {f"h.0.mlp.c_proj.weight{end}" for end in ("", ".m", ".v")}),
    ],
)
def test_a_fault_of_the_run_itself_shows_in_what_it_recorded(runs, capsys, monkeypatch, tmp_path, operand, bit, told):
    """Of a gradient, which no file has, in the weight and both moments that the update made of it, at one element."""
    run = tmp_path / "run"
    shutil.copytree(runs["fp32"], run)
    for step in ("step-000004",):
        shutil.rmtree(run / "checkpoints" / step)
    plain = CpuSession.run

    def faulty(session, program, /, **scalars):
        plain(session, program, **scalars)
        rows = [row["step"] for row in metrics.read(run / "metrics.jsonl") if row["kind"] == "train"]
        last = rows[-1:] == [3] and program == ("forward_backward" if operand.endswith(".grad") else "optimizer_step")
        if last:
            flip(session, session.tensors[operand], bit)

    with monkeypatch.context() as patch:
        patch.setattr(CpuSession, "run", faulty)
        assert main(["train", "--out", str(run), "--resume", "--device", "cpu"]) == 0
    assert verified(capsys, run, "--step", "3")[0] == 0
    status, found = verified(capsys, run, "--step", "4")
    assert status == 1 and found["fault"] is None and found["faults"] == 0
    tensors = {one["what"]: one for one in found["differences"] if "how" in one}
    assert told <= tensors.keys()
    assert operand.endswith(".grad") or tensors.keys() == told
    for name in told - {"h.0.mlp.c_proj.weight"}:
        assert tensors[name]["op"] == "adamw" and tensors[name]["how"].startswith("1 of ") == (not operand.endswith(".grad"))
    assert main(["verify", str(run), "--step", "4"]) == 1
    said = capsys.readouterr().out
    assert "not as recorded" in said and "so the record differs" in said


def test_how_the_bits_of_two_arrays_differ_in_words():
    one = np.array([1.0, -2.0, 0.0, 5.0], np.float32)
    assert difference(one, one.copy()) == ""
    for codes, said in (
        ({1: 1 << 22}, "1 of 4 elements, the first, number 1, is -2 and -3, bit 22"),
        ({1: 1 << 31, 3: 1}, "2 of 4 elements, the first, number 1, is -2 and 2, bit 31"),
        ({2: 3 << 30}, "1 of 4 elements, the first, number 2, is 0 and -2"),
    ):
        other = one.copy()
        for at, bits in codes.items():
            other.view(np.uint32)[at] ^= np.uint32(bits)
        assert difference(one, other) == said


@pytest.mark.parametrize("dtype, bound, seen", [("float32", FP32_BOUND, range(13, 32)), ("bfloat16", BOUND, range(5, 16))])
def test_bits_that_the_reference_sees(dtype, bound, seen):
    """Of an element as large as the root mean square of its tensor. docs/verify.md has the list."""
    import ml_dtypes

    kind = np.dtype(getattr(ml_dtypes, dtype, dtype))
    right = np.random.default_rng(1).standard_normal(4096)
    right /= np.sqrt(np.mean(right**2))
    right[0] = 1.0
    found = []
    for bit in range(8 * kind.itemsize):
        wrong = right.astype(kind)
        codes = wrong.view(f"u{kind.itemsize}")
        codes[0] ^= codes.dtype.type(1 << bit)
        found += [bit] * (excess(wrong.astype(np.float64), right, "fp32", bound) > 1)
    assert found == list(seen)


@pytest.mark.parametrize(
    "words, error",
    [
        (["--step", "9"], "--step is 9, and"), (["--step", "0"], "has recorded steps 1 to 4"),
        (["--ops", "--device", "reference"], "--ops is for kernels"),
    ],
    ids=str,
)  # fmt: skip
def test_what_cannot_be_replayed_is_one_line(runs, capsys, words, error):
    capsys.readouterr()
    assert main(["verify", str(runs["fp32"]), *words]) == 2
    said = capsys.readouterr().err
    assert error in said and said.count("\n") == 1


def test_a_damaged_checkpoint_is_told_and_the_one_before_is_taken(runs, capsys, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(runs["bf16"], run)
    file = run / "checkpoints/step-000002/weights.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"\1")
    status, found = verified(capsys, run, "--step", "4")
    assert status == 0 and found["from"] == "the initial weights (seed 1337)"


def test_another_instruction_set_rounds_otherwise_and_no_op_is_wrong(runs, capsys, monkeypatch):
    """What a kernel engineer asks: other losses, and each op within its bound."""
    monkeypatch.setenv("BARELLM_ISA", "generic")
    status, found = verified(capsys, runs["fp32"], "--step", "2")
    assert status == 1 and found["differences"] and found["fault"] is None
    assert found["step"] == found["differences"][0]["step"] <= 2
