"""The object cache, and code that must not be loaded."""

import os
import time
from pathlib import Path

import pytest

from barellm.cpu import jit
from barellm.cpu.isa import available, host
from barellm.errors import UserError
from barellm.runtime import artefacts

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


def _objects(folder: Path, ages: dict[str, float], nbytes: int = 1000) -> None:
    folder.mkdir(exist_ok=True)
    for name, age in ages.items():
        (folder / name).write_bytes(bytes(nbytes))
        os.utime(folder / name, (time.time() - age, time.time() - age))


def test_the_cache_loses_what_was_not_used_for_longest(tmp_path, monkeypatch):
    monkeypatch.setenv("BARELLM_CACHE", str(tmp_path))
    folder = tmp_path / "objects"
    ages = {f"{i}.o": 1000.0 * i for i in range(10)}
    _objects(folder, ages | {".torn.tmp": 2 * artefacts.PRUNE_EVERY_S, ".new.tmp": 1.0})
    jit.prune(limit=20_000)
    assert {p.name for p in folder.iterdir()} == {*ages, ".new.tmp", ".pruned"}
    _objects(folder, {"late.o": 0.5})
    jit.prune(limit=8000)  # looked at a moment ago
    assert (folder / "9.o").exists()
    os.utime(folder / ".pruned", (time.time() - 2 * artefacts.PRUNE_EVERY_S,) * 2)
    jit.prune(limit=8000)
    assert {p.name for p in folder.iterdir()} == {"late.o", ".new.tmp", ".pruned", *(f"{i}.o" for i in range(4))}


def test_pruning_beside_other_processes_and_without_a_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("BARELLM_CACHE", str(tmp_path))
    jit.prune(limit=1)  # no folder
    _objects(tmp_path / "objects", {f"{i}.o": 1.0 + i for i in range(5)})
    unlink = os.unlink

    def twice(path):  # another process was faster
        unlink(path)
        unlink(path)

    monkeypatch.setattr("os.unlink", twice)
    jit.prune(limit=1)
    assert [p.name for p in (tmp_path / "objects").iterdir()] == [".pruned"]


def test_a_used_object_counts_as_new(tmp_path, monkeypatch):
    monkeypatch.setenv("BARELLM_CACHE", str(tmp_path))
    jit.cached_object("key", host(), lambda: ADD)
    (path,) = (tmp_path / "objects").iterdir()
    long_ago = time.time() - 30 * artefacts.RECENT_S
    os.utime(path, (long_ago, long_ago))
    assert jit.load("key", host())
    assert path.stat().st_mtime > time.time() - 60
