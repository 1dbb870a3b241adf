"""What an edit of a source throws away of the cached objects and the tuned choices: what it may have changed, and no more."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
import time
from pathlib import Path

import pytest

from barellm.config.overrides import changed
from barellm.cpu import isa as isas
from barellm.cpu import sources, tuning
from barellm.cpu.kernels import reductions
from barellm.cpu.kernels.attention import attention_forward
from barellm.cpu.kernels.gemm import gemm, weight_gradient
from barellm.cpu.kernels.pointwise import elementwise
from barellm.cpu.specialisation import Specialisation
from barellm.models import preset
from barellm.runtime import artefacts
from barellm.tools.inspect import kernels

PACKAGE = Path(sources.__file__).parents[1]
KERNELS = (gemm.gemm, weight_gradient.weight_gradient, reductions.sum_squares, elementwise.activation, attention_forward.attention)
EDITS = {
    "program/ops/optim/optimizer.py": {"sum_squares"},
    "program/ops/pointwise/elementwise.py": {"gemm", "weight_gradient", "activation", "attention", "tuning"},  # by lang/vector.py
    "program/ops/base.py": set(),
    "program/planner.py": set(),
    "cpu/kernel.py": set(),
    "cpu/step.py": set(),
    "cpu/tuner/candidates.py": set(),
    "cpu/kernels/gemm/linear.py": set(),
    "cpu/kernels/gemm/packing.py": {"gemm", "weight_gradient", "attention", "tuning"},
    "cpu/kernels/gemm/amx.py": {"gemm", "weight_gradient", "attention", "tuning"},
    "cpu/gemm_config.py": {"gemm", "weight_gradient", "tuning"},
    "cpu/kernels/pointwise/activations.py": {"gemm", "activation", "tuning"},
    "cpu/kernels/pointwise/elementwise.py": {"activation"},
    "cpu/specialisation.py": {"gemm", "weight_gradient", "sum_squares", "activation", "attention", "tuning"},
    "cpu/lang/emit.py": {"gemm", "weight_gradient", "sum_squares", "activation", "attention", "tuning"},
    "program/scalars.py": {"gemm", "weight_gradient", "sum_squares", "activation", "attention", "tuning"},
}


@pytest.fixture(autouse=True)
def read_again():
    yield
    sources.forget()


def keys() -> dict[str, str]:
    sources.forget()
    return {f.__name__: Specialisation(f, (), ()).key for f in KERNELS} | {"tuning": tuning.version()}


def test_an_edit_changes_the_keys_of_what_it_may_have_changed(tmp_path, monkeypatch):
    shutil.copytree(PACKAGE, tmp_path / "barellm", ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(sources, "ROOT", tmp_path)
    before = keys()
    assert before == keys()
    for name, expected in EDITS.items():
        path = tmp_path / "barellm" / name
        text = path.read_text()
        path.write_text(text + "\n# a remark\n")
        os.utime(path, (1e9, 1e9))  # long before this process began
        after = keys()
        path.write_text(text)
        os.utime(path, (1e9, 1e9))
        assert {kernel for kernel in before if before[kernel] != after[kernel]} == expected, name


@pytest.mark.parametrize("isa", ["amx_bf16", "avx512_bf16", "avx2"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.extended
def test_what_runs_while_a_kernel_is_emitted_is_among_its_sources(isa, dtype):
    """A function in a file that runs before code is emitted must not run while it is."""
    machine = isas.cross(isa, kernels.X86_TRIPLE)
    config = changed(preset("shakespeare-char"), {"train.dtype": dtype, "optim.moments": "16bit"})
    for used in kernels.used_by(config, machine):
        ran: set[str] = set()

        def watch(frame, event, argument, ran=ran):
            if event == "call":
                ran.add(frame.f_code.co_filename)

        used.spec.symbol()  # which is made of the key
        sys.setprofile(watch)
        try:
            used.spec.ir(machine)
        finally:
            sys.setprofile(None)
        ours = {Path(name) for name in ran if Path(name).is_relative_to(PACKAGE)}
        known = set(sources.files(sources.EMITTED_WITH, used.spec.emit.__module__))
        assert ours <= known, (used.spec.name, ours - known)


def test_values_from_files_that_run_before_count(monkeypatch):
    """As if the number of claims came from a file that is no source itself."""
    from barellm.cpu import gemm_config

    monkeypatch.setattr(sources, "BEFORE", sources.BEFORE | {"barellm.cpu.gemm_config"})
    sources.forget()
    before = sources.digest("barellm.cpu.kernels.gemm.gemm_mainloop")
    sources.forget()
    monkeypatch.setattr(gemm_config, "ITEMS_PER_THREAD", gemm_config.ITEMS_PER_THREAD + 1)
    assert sources.digest("barellm.cpu.kernels.gemm.gemm_mainloop") != before


def test_every_way_to_import_is_seen():
    text = """
from barellm.cpu.kernels.gemm import amx, gemm  # a remark
from barellm.cpu.lang import Value, random as bits
    from barellm.cpu.kernels.loops import (
        across,
        added as plus,
    )
from elsewhere import barellm
"""
    assert set(sources.imported(text)) == {
        ("barellm.cpu.kernels.gemm.amx", ""), ("barellm.cpu.kernels.gemm.gemm", ""), ("barellm.cpu.lang", "Value"),
        ("barellm.cpu.lang.random", ""), ("barellm.cpu.kernels.loops", "across"), ("barellm.cpu.kernels.loops", "added"),
    }  # fmt: skip
    for path in [path for name in ("cpu/kernels", "cpu/lang", "program/ops") for path in (PACKAGE / name).rglob("*.py")]:
        assert "\nimport barellm" not in path.read_text(), f"{path.name}: sources.py reads `from barellm... import` only"


def test_code_that_was_edited_after_its_import_is_not_cached_as_the_edited_one(tmp_path):
    """A notebook imports barellm, a kernel is edited, a session opens: it compiles the old code. Kept under the digest of the
    new files, that would be what every later process runs."""
    source = tmp_path / "kernel.py"

    def digest(text: str, *, at: float) -> bytes:
        source.write_text(text)
        os.utime(source, (at, at))
        return sources._file_digest.__wrapped__(source)

    before, after, future = artefacts.IMPORTED - 60, artefacts.IMPORTED + 1e-3, time.time() + 3600
    assert digest("old", at=before) == digest("old", at=before)
    assert digest("old", at=future) == digest("old", at=before)  # a wrong clock, not an edit
    assert digest("new", at=after) != digest("new", at=before)


def loaded(path: Path, text: str):
    """The kernel `scale` of a module outside the package."""
    path.write_text(text)
    spec = importlib.util.spec_from_file_location("mine", path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return Specialisation(module.scale, ("fp32",), ())


def test_a_kernel_outside_the_package_that_was_edited_is_another_kernel(tmp_path):
    def scale(name: str, factor: float) -> str:
        text = f"from barellm.cpu.kernels.loops import columns\ndef scale(k, y):\n    y.store(y.load() * {factor})\n"
        return loaded(tmp_path / f"{name}.py", text).key

    assert scale("a", 2.0) == scale("b", 2.0) != scale("c", 3.0)


def test_a_kernel_of_a_cell_that_runs_again_is_another_kernel():
    def of_cell(factor: float) -> str:
        cell: dict = {"__name__": "__main__"}
        exec(f"from barellm.cpu.kernels.loops import columns\ndef scale(k, y):\n    y.store(y.load() * {factor})\n", cell)
        return Specialisation(cell["scale"], ("fp32",), ()).key

    assert of_cell(2.0) == of_cell(2.0) != of_cell(3.0)
