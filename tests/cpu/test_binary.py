"""Packed signs and their products on every instruction set: exact integers."""

from __future__ import annotations

import numpy as np
import pytest

from barellm.cpu import isa as isas
from barellm.cpu import jit
from barellm.cpu.kernel import Specialisation
from barellm.cpu.kernels.gemm import binary_matmul
from barellm.program import ops
from barellm.program.ops.pointwise.binary import pack
from tests.binary_cases import NAMES, SIZES, cases
from tests.cpu.check import ISAS, changed, check_op, isa_named, persistent, tokens

each_isa = pytest.mark.parametrize("isa", [isa_named(n) for n in ISAS], ids=ISAS)


@each_isa
@pytest.mark.parametrize("name", NAMES)
def test_signs(isa, name):
    """Each size with another dtype."""
    for (K, N), dtype in zip(SIZES, ("fp32", "bf16", "fp32", "fp16", "bf16"), strict=True):
        op_type, given, more = cases(K, N, dtype)[name]
        check_op(op_type, isa, given, **more)


@each_isa
@pytest.mark.parametrize("mode", ["add", "start"])
def test_products_are_added_to_what_is_there(isa, mode):
    op_type, given, more = cases(33, 100, "fp32")["product"]
    check_op(op_type, isa, given, modes={"y": mode}, scalars={"accumulate": 1}, bounds={"y": 1e-4}, **more)


def product(isa, M: int, N: int, K: int, **opposite: bool) -> None:
    """Random signs, or all of them equal or opposite: then every bit counts."""
    r = np.random.default_rng(0)
    a, b = r.standard_normal((1, M, K)), r.standard_normal((N, K))
    if opposite:
        a, b = np.ones_like(a), -np.ones_like(b)
    given = {"a": tokens(pack(a), "i32"), "b": persistent(pack(b), "i32", "state")}
    check_op(ops.BinaryMatmul, isa, given, columns=K, dtype="fp32", threads=(1, 2))


@each_isa
def test_counts_of_bytes_do_not_overflow(isa):
    """Where all signs differ; a turn of the bytes' counts is 224 columns."""
    for K in (224, 448, 449):
        product(isa, 1, 5, K, opposite=True)


@each_isa
def test_sums_of_16_bits_do_not_overflow(isa, monkeypatch):
    """65,535 columns are counted in 16 bits, one more in 32."""
    for K in ((1 << 16) - 1, 1 << 16):
        product(isa, 1, 1, K, opposite=True)
    changed(monkeypatch, binary_matmul, SHORT=0)
    product(isa, 4, 33, 300)


@each_isa
def test_more_rows_than_a_claim(isa):
    product(isa, binary_matmul.ROWS + 2, 7, 40)


INSTRUCTIONS = {"avx512": "vpshufb", "amx_bf16": "vpopcntd", "neon": "cnt", "avx2": "vpshufb"}


@pytest.mark.parametrize("name", INSTRUCTIONS)
def test_the_inner_loop_is_what_the_machine_counts_ones_by(name):
    """A step for each row and vector of the tile, and no register spilled between the first and the last."""
    isa = isas.cross(name, "aarch64-unknown-linux-gnu" if name == "neon" else "x86_64-unknown-linux-gnu")
    form = binary_matmul.Form.of(isa)
    constants = {"N": 200, "W": 64, "columns": 2048, "dims": ("batch", "seq"), "inner": 1, "mode": "store"}
    kinds = ("fp32", "i32", "bf16")
    spec = Specialisation(binary_matmul.count_signs, kinds, tuple(sorted(constants.items())))
    assert not jit.undefined_symbols(jit.target_machine(isa).emit_object(jit.module(spec.ir(isa), isa))) - jit.ALLOWED
    lines = jit.assembly(spec.ir(isa), isa).splitlines()
    counts = [i for i, line in enumerate(lines) if line.split()[:1] == [INSTRUCTIONS[name]]]
    assert len(counts) == form.steps * form.rows * form.vectors
    inner = lines[counts[0] : counts[-1]]
    assert sum("rsp" in line or "[sp" in line for line in inner) <= (4 if name == "avx2" else 0)
    assert not any("call" in line for line in inner)


def test_a_machine_with_vpopcntdq_counts_words(monkeypatch):
    features = dict.fromkeys(isas.NEEDS["avx512"], True)
    for has, expected in ((False, "nibbles"), (True, "words")):
        monkeypatch.setattr(isas, "host_features", lambda has=has: features | {"avx512vpopcntdq": has})
        monkeypatch.setattr(isas, "arm", lambda: False)
        assert isas._host.__wrapped__("").popcount == expected
