"""The comparison of two builds' code: names do not matter, anything else does."""

import json

import pytest

from benchmarks import same_code

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


def test_ptx_without_the_kernels_name():
    ptx = "//\n.version 8.7\n.visible .entry gemm_1(\n\t.param .u64 gemm_1_param_0\n)\n{\n\tmov.u32 %r1, 4;\n}\n"
    other = same_code.without_names(ptx.replace("gemm_1", "matmul_2").replace("//\n", "// a comment\n"))
    assert other == same_code.without_names(ptx)
    assert same_code.without_names(ptx.replace("4;", "5;")) != same_code.without_names(ptx)


@pytest.mark.parametrize("change, status", [(None, 0), ("code", 1), ("losses", 1), ("missing", 1)])
def test_records_are_compared(tmp_path, capsys, change, status):
    record = {"code": {"default fp32 avx2": ["a", "b"]}, "losses": {"default avx2": ["0x1p+3 0x1p+0"]}}
    (tmp_path / "before.json").write_text(json.dumps(record))
    if change == "missing":
        record["code"]["more fp32 avx2"] = record["code"].pop("default fp32 avx2")
    elif change:
        (found,) = record[change].values()
        found[-1] = "c"
    (tmp_path / "after.json").write_text(json.dumps(record))
    assert same_code.compare(tmp_path / "before.json", tmp_path / "after.json") == status
    assert ("no differences" in capsys.readouterr().out) == (status == 0)
