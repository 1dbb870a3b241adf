"""Which tests are left out, and with --quick."""

from __future__ import annotations

from itertools import combinations, product
from types import SimpleNamespace

import pytest

from barellm.config.overrides import changed
from barellm.cpu import isa as isas
from barellm.cpu.gemm_config import SkinnyGemmConfig
from barellm.cpu.kernels.gemm import linear
from barellm.models import preset
from barellm.tools.inspect import kernels
from tests import selection

SOURCE = pytest.Config.ArgsSource


def item(nodeid: str, *, slow: bool = False, listed: list | None = None, **params):
    """A test as pytest gives it to the selection. `listed`: its marks of parametrize."""
    marks = [SimpleNamespace(args=(), name="slow")] if slow else []
    return SimpleNamespace(
        nodeid=nodeid,
        user_properties=[],
        callspec=SimpleNamespace(params=params),
        iter_markers=lambda name: [m for m in [*marks, *(listed or [])] if m.name == name],
        get_closest_marker=lambda name: next((m for m in marks if m.name == name), None),
    )


def test_fp32_kernels_are_tested_on_one_of_those_with_equal_code():
    def left_out(isa: str, names: set[str], **params) -> bool:
        return selection.same_code(item("x", isa=isa, **params), names)

    every = {"avx512_bf16", "avx512", "avx2"}
    assert left_out("avx512", every, dtype="fp32") and left_out("amx_bf16_emulated_1", every, compute="fp32")
    assert not left_out("amx_bf16", {"amx_bf16", "avx512"}, dtype="fp32")
    assert not left_out("avx512", {"avx512", "avx2"}, dtype="fp32")  # a processor without bf16
    assert not left_out("avx512", every, dtype="bf16") and not left_out("avx512", every)
    assert not left_out("avx2", every, dtype="fp32") and not left_out("avx512_bf16", every, dtype="fp32")


@pytest.mark.parametrize("other", ["avx512", "amx_bf16"])
def test_the_code_of_fp32_kernels_is_equal_there(other, monkeypatch):
    """Name by name, of a model with everything: what `same_code` leaves out would show nothing new. Which way a product of few rows
    takes is a choice, and processors with tiles take another one: tests/cpu/test_tuner.py runs them."""
    monkeypatch.setattr(linear, "select_skinny_config", lambda c, kind, dtype, cols, depth: SkinnyGemmConfig(1, 8, 2))
    config = changed(preset("shakespeare-char"), {"train.dtype": "fp32", "model.dropout": 0.1})
    first, second = (isas.cross(name, kernels.X86_TRIPLE) for name in ("avx512_bf16", other))
    ours, theirs = ({u.spec.key: u.spec.ir(isa) for u in kernels.used_by(config, isa)} for isa in (first, second))
    assert ours == theirs and len(ours) > 20


def test_of_a_product_those_cases_stay_in_which_each_two_values_meet():
    values = {"isa": "abcd", "shape": [(1, 1), (2, 3), (1, 37), (5, 5), (7, 1)], "dtype": ["fp32", "bf16"], "mode": ["s", "a"]}
    cases = [
        item(f"tests/cpu/test_x.py::test_y[{n}]", **dict(zip(values, case, strict=True)))
        for n, case in enumerate(product(*values.values()))
    ]
    kept = [c.callspec.params for c in selection.pairs(cases)]  # pyright: ignore
    assert 20 <= len(kept) <= 24 < len(cases)
    for one, other in combinations(values, 2):
        assert {(c[one], c[other]) for c in kept} == set(product(values[one], values[other]))


def test_values_that_are_listed_together_are_one_parameter():
    """Four shapes by hand, of which any two sizes come together in another one too, stay four; so do tests without parameters."""
    listed = [
        SimpleNamespace(name="parametrize", args=("rows, cols, depth",)),
        SimpleNamespace(name="parametrize", args=(["isa"],)),
    ]
    shapes = [(1, 2, 1), (1, 1, 2), (2, 2, 2), (1, 2, 2)]
    cases = [
        item(f"tests/test_x.py::test_y[{n}]", listed=listed, isa=isa, rows=shape[0], cols=shape[1], depth=shape[2])
        for n, (isa, shape) in enumerate(product("ab", shapes))
    ]
    alone = [
        item("tests/test_x.py::test_a"),
        item("tests/test_x.py::test_b"),
        *(item(f"tests/test_x.py::test_c[{n}]", n=n) for n in range(3)),
    ]
    assert selection.pairs([*cases, *alone]) == [*cases, *alone]  # pyright: ignore
    assert len(selection.pairs([case for case in cases if case.callspec.params["isa"] == "a"])) == 4  # pyright: ignore


def test_an_instruction_set_between_two_others_meets_words_but_no_shapes():
    values = {"isa": ["avx512_bf16", "avx512", "avx2"], "shape": [(1, 1), (2, 3), (1, 37)], "dtype": ["fp16", "bf16"]}

    def kept_of(isas: list[str]) -> list[dict]:
        given = values | {"isa": isas}
        cases = [
            item(f"tests/cpu/test_x.py::test_y[{n}]", **dict(zip(given, case, strict=True)))
            for n, case in enumerate(product(*given.values()))
        ]
        return [c.callspec.params for c in selection.pairs(cases)]  # pyright: ignore

    kept = kept_of(values["isa"])
    assert {c["dtype"] for c in kept if c["isa"] == "avx512"} == {"fp16", "bf16"}
    assert sum(c["isa"] == "avx512" for c in kept) == 2
    for isa in ("avx512_bf16", "avx2"):
        assert {c["shape"] for c in kept if c["isa"] == isa} == set(values["shape"])
    assert {(c["shape"], c["dtype"]) for c in kept} == set(product(values["shape"], values["dtype"]))
    for others in (["avx512", "avx2"], ["avx512_bf16", "avx512"]):  # a processor without bf16; a test of wide registers
        assert {c["shape"] for c in kept_of(others) if c["isa"] == "avx512"} == set(values["shape"])


@pytest.mark.parametrize("expression, read", [
    ("alone", ["alone", "both"]), ("not oracle and alone", ["alone", "both"]), ("alone and oracle", ["both"]),
    ("not oracle and not alone", ["alone", "both", "none"]), ("", ["alone", "both", "none", "whole"]),
    ("alone or oracle", ["alone", "both", "none", "whole"]), ("oracle", ["both", "whole"]),
])  # fmt: skip
def test_files_without_the_mark_that_is_asked_for_are_not_read(tmp_path, expression, read):
    mark = "@pytest.mark."
    texts = {"alone": f"{mark}alone", "both": f"{mark}alone\n{mark}oracle", "none": ""}
    texts["whole"] = "import pytest\n\npytestmark = pytest.mark.oracle\n"
    for name, text in texts.items():
        (tmp_path / f"{name}.py").write_text(text)
    assert [name for name in texts if not selection.lacks_mark(tmp_path / f"{name}.py", expression)] == read
    assert not selection.lacks_mark(tmp_path, expression)


def test_quick_keeps_one_case_of_each_dtype_for_the_best_instruction_set():
    each = product(("best", "other"), ("fp32", "bf16"), (1, 2))
    cases = [
        item(f"tests/cpu/test_x.py::test_y[{n}]", isa=isa, dtype=dtype, shape=shape) for n, (isa, dtype, shape) in enumerate(each)
    ]
    cases += [item("tests/cuda/test_z.py::test_slow", slow=True), item("tests/test_plain.py::test_plain")]
    kept = [c.nodeid for c in selection.quick(cases, "best")]  # pyright: ignore
    assert kept == ["tests/cpu/test_x.py::test_y[0]", "tests/cpu/test_x.py::test_y[2]", "tests/test_plain.py::test_plain"]


@pytest.mark.parametrize("quick", [False, True])
def test_what_is_selected_of_a_run(quick, monkeypatch):
    monkeypatch.setattr("barellm.cpu.isa.available", lambda: ["avx512_bf16", "avx512", "avx2"])
    names = ("avx512_bf16", "avx512", "avx2")
    cases = [item(f"tests/cpu/test_x.py::test_y[{isa}]", isa=isa, dtype="fp32") for isa in names]
    cases.append(item("tests/cuda/test_z.py::test_slow", slow=True))
    gone: list = []
    options = {"--quick": quick, "--part": None}

    def selected(source=SOURCE.TESTPATHS):
        hook = SimpleNamespace(pytest_deselected=lambda items: gone.extend(items))
        items = list(cases)
        selection.select(SimpleNamespace(args_source=source, getoption=options.get, hook=hook), items)  # pyright: ignore
        return items

    items = selected()
    assert items == selected(SOURCE.ARGS) == (cases[:1] if quick else [cases[0], cases[2], cases[3]])
    assert {c.nodeid for c in gone} == {c.nodeid for c in cases} - {c.nodeid for c in items}


def test_parts_share_out_all_tests_and_keep_the_cases_of_one_together():
    cases = [item(f"tests/test_{name}.py::test_y[{n}]") for name in "abcdefghijkl" for n in range(3)]
    parts = [[c.nodeid for c in selection.part(cases, f"{k}/3")] for k in range(3)]  # pyright: ignore
    assert sorted(name for names in parts for name in names) == sorted(c.nodeid for c in cases) and all(parts)
    assert all(len(p) % 3 == 0 for p in parts)
    assert [c.nodeid for c in selection.part(cases, "7/3")] == parts[1]  # pyright: ignore


@pytest.mark.parametrize("source, asked, count", [
    (SOURCE.TESTPATHS, None, 4), (SOURCE.ARGS, None, 8), (SOURCE.TESTPATHS, "all", 8), (SOURCE.ARGS, "pairs", 4),
])  # fmt: skip
def test_all_cases_run_where_tests_are_named_or_all_are_asked_for(source, asked, count):
    items = [
        item(f"tests/test_x.py::test_y[{n}]", one=one, two=two, three=three)
        for n, (one, two, three) in enumerate(product("ab", repeat=3))
    ]
    options = {"--quick": False, "--cases": asked, "--part": None}
    hook = SimpleNamespace(pytest_deselected=lambda items: None)
    config = SimpleNamespace(args_source=source, getoption=options.get, hook=hook, stash={})
    selection.select(config, items)  # pyright: ignore
    assert len(items) == count
