"""The object cache, and code that must not be loaded."""

import ast
import importlib.util
import os
import time
from pathlib import Path

import pytest

from barellm.cpu import jit
from barellm.cpu.isa import available, host
from barellm.cpu.kernel import Spec
from barellm.errors import UserError

ADD = """
define void @f(ptr %x) {
  %v = load i64, ptr %x, align 8
  %w = add i64 %v, 1
  store i64 %w, ptr %x, align 8
  ret void
}
"""
CALLS_NOTHING_THAT_EXISTS = """
declare float @no_such_function(float)
define void @f(ptr %x) {
  %v = load float, ptr %x, align 4
  %w = call float @no_such_function(float %v)
  store float %w, ptr %x, align 4
  ret void
}
"""


def test_the_second_time_nothing_is_compiled(tmp_path, monkeypatch):
    monkeypatch.setenv("BARELLM_CACHE", str(tmp_path))
    first = jit.cached_object("key", host(), lambda: ADD)
    assert jit.cached_object("key", host(), lambda: pytest.fail("compiled again")) == first


@pytest.mark.parametrize("damage", [b"", b"garbage", None])
def test_a_damaged_object_is_compiled_again(tmp_path, monkeypatch, damage):
    monkeypatch.setenv("BARELLM_CACHE", str(tmp_path))
    code = jit.cached_object("key", host(), lambda: ADD)
    (path,) = (tmp_path / "objects").iterdir()
    raw = bytearray(path.read_bytes())
    raw[100] ^= 1
    path.write_bytes(bytes(raw) if damage is None else damage)
    assert jit.cached_object("key", host(), lambda: ADD) == code


def test_a_cache_that_cannot_be_written_only_costs_time(tmp_path, monkeypatch):
    (tmp_path / "objects").write_text("a file where the folder should be")
    monkeypatch.setenv("BARELLM_CACHE", str(tmp_path))
    assert jit.cached_object("key", host(), lambda: ADD)


def test_a_disk_that_fills_up_leaves_nothing_in_the_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("BARELLM_CACHE", str(tmp_path))
    monkeypatch.setattr("os.replace", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    assert jit.cached_object("key", host(), lambda: ADD)
    assert not list((tmp_path / "objects").iterdir())


def test_unknown_symbols_are_refused_before_loading():
    with pytest.raises(RuntimeError, match="no_such_function"):
        jit.compile_object(CALLS_NOTHING_THAT_EXISTS, host())


def test_an_isa_that_the_machine_lacks_is_refused(monkeypatch):
    monkeypatch.setenv("BARELLM_ISA", "avx1024")
    with pytest.raises(UserError, match=f"BARELLM_ISA is 'avx1024', this machine runs: {available()[0]}"):
        host()


def test_every_constant_of_a_kernel_is_part_of_the_key():
    package = Path(jit.__file__).parents[1]
    for path in [*package.glob("cpu/kernels/*.py"), *package.glob("cpu/lang/*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("barellm."):
                source = package.parent / (node.module.replace(".", "/") + ".py")
                assert not source.is_file() or source in jit.sources(), (path, source)


def test_code_that_was_edited_after_its_import_is_not_cached_as_the_edited_one(tmp_path, monkeypatch):
    """A notebook imports barellm, a kernel is edited, a session opens: it compiles the old code. Kept under the digest of the
    new files, that would be what every later process runs."""
    source = tmp_path / "kernel.py"
    monkeypatch.setattr(jit, "sources", lambda: [source])

    def digest(text: str, *, at: float) -> str:
        source.write_text(text)
        os.utime(source, (at, at))
        return jit.sources_digest.__wrapped__()

    before, after, future = jit.IMPORTED - 60, jit.IMPORTED + 1e-3, time.time() + 3600
    assert digest("old", at=before) == digest("old", at=before)
    assert digest("old", at=future) == digest("old", at=before)  # a wrong clock, not an edit
    assert digest("new", at=after) != digest("new", at=before)


def test_a_kernel_outside_the_package_that_was_edited_is_another_kernel(tmp_path):
    def loaded(name: str, factor: float) -> Spec:
        path = tmp_path / f"{name}.py"
        path.write_text(f"def scale(k, y):\n    y.store(y.load() * {factor})\n")
        spec = importlib.util.spec_from_file_location("mine", path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return Spec(module.scale, ("fp32",), ())

    assert loaded("a", 2.0).key == loaded("b", 2.0).key != loaded("c", 3.0).key
