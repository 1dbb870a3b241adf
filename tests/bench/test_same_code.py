"""The comparison of two builds' code: names do not matter, anything else does."""

import json

import numpy as np
import pytest

from barellm.cpu import isa as isas
from barellm.cpu.specialisation import Specialisation
from benchmarks import same_code
from tests.check import record_outputs

IR = """declare float @llvm.sqrt.f32(float)
define void @add_0123(ptr %rt, ptr noalias %args) #0 {
entry:
  %x.1 = load float, ptr %args, align 4
  %y = call float @llvm.sqrt.f32(float %x.1)
  br label %done
done:
  ret void
}
"""


def test_names_of_values_labels_and_functions_do_not_matter():
    renamed = IR
    for old, new in (("add_0123", "sum_4567"), ("x.1", "first"), ("%y", "%root.2"), ("done", "end"), ("%rt", "%run")):
        renamed = renamed.replace(old, new)
    assert renamed != IR and same_code.anonymous(renamed) == same_code.anonymous(IR)


@pytest.mark.parametrize(
    "old, new",
    [
        ("align 4", "align 8"),
        ("llvm.sqrt", "llvm.fabs"),
        ("float, ptr %args", "float, ptr %rt"),  # another operand
        ("br label %done", "br label %entry"),
        ("#0", "#1"),
    ],
)
def test_anything_else_does(old, new):
    assert same_code.anonymous(IR.replace(old, new)) != same_code.anonymous(IR)


PTX = """// Generated
.version 8.7
	// .globl	gemm_1   // -- Begin function gemm_1
.extern .shared .align 16 .b8 global_smem[];
.visible .entry gemm_1(  // @gemm_1
	.param .u64 gemm_1_param_0,
	.param .u64 gemm_1_param_1
)
{
	ld.param.b64 	%rd1, [gemm_1_param_0];
	mov.u32 %r1, 4;
	add.s32 %r2, %r1, %r1;
}
"""


@pytest.mark.parametrize("name", ["matmul_2", "add", "mov"])  # two of them instructions
def test_ptx_without_the_kernels_name(name):
    renamed = PTX.replace("gemm_1", name).replace("Generated", "Made anew")
    assert same_code.without_names(renamed) == same_code.without_names(PTX)


@pytest.mark.parametrize("old, new", [("4;", "5;"), ("add.s32", "sub.s32"), ("[gemm_1_param_0]", "[gemm_1_param_1]")])
def test_ptx_with_other_code(old, new):
    assert same_code.without_names(PTX.replace(old, new)) != same_code.without_names(PTX)


def scaled(k, y, x, *, C, by=2.0, twice=False):
    """A kernel; `summed` is the same one with other names."""
    for c in range(C):
        value = x.get(c) * by
        y.put(value + value if twice else value * value, c)


def summed(k, result, operand, *, columns, factor=2.0, doubled=False):
    for column in range(columns):
        scaled = operand.get(column) * factor
        result.put(scaled + scaled if doubled else scaled * scaled, column)


def code_of(kernel, **constants) -> str:
    spec = Specialisation(kernel, ("fp32", "fp32"), tuple(constants.items()))
    return same_code.anonymous(spec.ir(isas.cross("avx2", same_code.X86)))


def test_a_renamed_kernel_has_the_same_code():
    assert code_of(scaled, C=3) == code_of(summed, columns=3)
    assert "scaled" not in code_of(scaled, C=3)


@pytest.mark.parametrize("constants", [{"columns": 4}, {"columns": 3, "factor": 3.0}, {"columns": 3, "doubled": True}])
def test_a_changed_constant_or_operation_is_other_code(constants):
    assert code_of(scaled, C=3) != code_of(summed, **constants)


def test_the_order_of_instructions_matters():
    first, second = "  %a = load float, ptr %x, align 4\n", "  %b = load float, ptr %y, align 4\n"
    code = "define void @f(ptr %x, ptr %y) {{\n{}{}  ret void\n}}\n"
    assert same_code.anonymous(code.format(first, second)) != same_code.anonymous(code.format(second, first))


BEFORE = {
    "code": {"default fp32 avx2": ["a", "b", "c"], "default bf16 avx2": ["d", "e"]},
    "losses": {"default avx2": ["0x1p+3 0x1p+0"]},
    "outputs": {"test_a.py::test[0]": ["f"], "test_a.py::test[1]": ["f", "g"]},
}
RENAMED = {
    "code": {"tiny fp32 avx2": ["a", "b", "c"], "default bf16 avx2": ["d", "e"]},
    "losses": {"tiny avx2": ["0x1p+3 0x1p+0"]},
    "outputs": {"test_b.py::test[two]": ["f", "g"], "test_b.py::test[one]": ["f"]},
}


def written(folder, before, after) -> tuple:
    for name, record in (("before.json", before), ("after.json", after)):
        (folder / name).write_text(json.dumps(record))
    return folder / "before.json", folder / "after.json"


@pytest.mark.parametrize("after", [BEFORE, RENAMED], ids=["equal", "renamed"])
def test_records_of_the_same_code(tmp_path, capsys, after):
    assert same_code.compare(*written(tmp_path, BEFORE, after)) == 0
    assert capsys.readouterr().out.count("no differences") == 3


@pytest.mark.parametrize(
    "part, key, values, line",
    [
        ("code", "default fp32 avx2", ["a", "x", "c"], "3 and 3 entries, different from 1 on, 1 not found again"),
        ("code", "default fp32 avx2", ["a", "c", "b"], "different from 1 on, the same ones in another order"),
        ("code", "default fp32 avx2", ["a", "b"], "3 and 2 entries, different from 2 on, 1 not found again"),
        ("losses", "default avx2", ["0x1p+3 0x1p+1"], "different from 0 on"),
        ("outputs", "test_a.py::test[1]", ["f", "f"], "different from 1 on, 1 not found again"),
        ("outputs", "test_a.py::test[1]", None, "test_a.py::test[1]: only before"),
        ("outputs", "test_a.py::test[2]", ["f"], "test_a.py::test[2]: only after"),
    ],
)
def test_records_that_differ(tmp_path, capsys, part, key, values, line):
    changed = {**BEFORE[part], key: values} if values else {k: v for k, v in BEFORE[part].items() if k != key}
    assert same_code.compare(*written(tmp_path, BEFORE, BEFORE | {part: changed})) == 1
    assert line in capsys.readouterr().out


def test_a_part_that_one_record_lacks_is_named(tmp_path, capsys):
    assert same_code.compare(*written(tmp_path, BEFORE, {"code": BEFORE["code"]})) == 0
    assert "outputs: not in " in capsys.readouterr().out


def test_outputs_are_recorded_under_the_running_test(tmp_path, monkeypatch):
    monkeypatch.setenv("BARELLM_RECORD_OUTPUTS", str(tmp_path / "outputs"))
    for values in ([1.0, 2.0], [1.0, 2.0], [1.0, -2.0]):
        record_outputs([np.array(values)])
    (test, one), (_, same), (_, other) = (line.rsplit(" ", 1) for line in (tmp_path / "outputs").read_text().splitlines())
    assert test.endswith("::test_outputs_are_recorded_under_the_running_test")
    assert one == same != other
