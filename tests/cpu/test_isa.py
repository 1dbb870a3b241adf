"""What a processor has, as Linux and macOS tell it on aarch64 and on x86-64; systems that are not here answer from a table."""

import ctypes
import os

import pytest

from barellm.cpu import isa, processor, threads
from barellm.cpu.lang import sync
from barellm.runtime import cgroup

GRAVITON_3 = {"aes": True, "crc": True, "fp-armv8": True, "lse": True, "neon": True, "sve": True}  # by LLVM 22
M2 = {
    "hw.optional.arm.FEAT_BF16": 1,
    "hw.perflevel0.physicalcpu": 4,
    "hw.physicalcpu": 8,
    "hw.perflevel0.l1dcachesize": 131072,
    "hw.l1dcachesize": 65536,
    "hw.perflevel0.l2cachesize": 16 << 20,
    "machdep.cpu.brand_string": "Apple M2",
}
INTEL_MAC = {
    "hw.physicalcpu": 6,
    "hw.l1dcachesize": 32768,
    "hw.l2cachesize": 262144,
    "hw.l3cachesize": 12 << 20,
    "machdep.cpu.brand_string": "Intel(R) Core(TM) i7-9750H CPU @ 2.60GHz",
}


class Library:
    """The C library of a system that has these capabilities, or knows these names."""

    def __init__(self, *, hwcap2=0, known=None):
        def getauxval(kind):
            return {26: hwcap2}[kind]

        def sysctlbyname(name, value, size, new, new_size):
            found = (known or {}).get(name.decode())
            if found is None:
                return -1
            # Some are of 4 bytes and some of 8.
            text = found.encode() + b"\0" if isinstance(found, str) else found.to_bytes(4 if found < 64 else 8, "little")
            ctypes.memmove(value, text, len(text))
            size._obj.value = len(text)
            return 0

        self.getauxval, self.sysctlbyname = getauxval, sysctlbyname


@pytest.fixture
def machine(monkeypatch):
    """Makes this one look like another."""

    def look(architecture, system, features, library):
        monkeypatch.setattr("platform.machine", lambda: architecture)
        monkeypatch.setattr("sys.platform", system)
        monkeypatch.setattr("llvmlite.binding.get_host_cpu_features", lambda: dict(features))
        monkeypatch.setattr("llvmlite.binding.get_host_cpu_name", lambda: "some-cpu")
        monkeypatch.setattr("ctypes.CDLL", lambda name: library)
        monkeypatch.delenv("BARELLM_ISA", raising=False)
        monkeypatch.setattr(processor, "Path", lambda name: cgroup.Path("/nowhere"))
        if system == "darwin":
            monkeypatch.delattr(os, "sched_getaffinity", raising=False)
            monkeypatch.setattr(os, "cpu_count", lambda: 12)
            monkeypatch.setattr(cgroup, "MOUNT", cgroup.Path("/nowhere"))
        for cached in (isa._host, processor.caches, processor.name):
            cached.cache_clear()

    yield look
    monkeypatch.undo()
    for cached in (isa._host, processor.caches, processor.name):
        cached.cache_clear()


BF16 = 1 << 14


@pytest.mark.parametrize("architecture, system, library, best", [
    ("aarch64", "linux", Library(hwcap2=BF16 | 2), "neon_bf16"),
    ("aarch64", "linux", Library(hwcap2=~BF16 & 0xFFFF), "neon"),
    ("arm64", "darwin", Library(known=M2), "neon_bf16"),
    ("arm64", "darwin", Library(known=M2 | {"hw.optional.arm.FEAT_BF16": 0}), "neon"),
    ("arm64", "darwin", Library(), "neon"),
])  # fmt: skip
@pytest.mark.parametrize("features", [GRAVITON_3, {}])
def test_the_system_says_whether_aarch64_has_bf16(machine, architecture, system, library, best, features):
    machine(architecture, system, features, library)
    assert isa.available() == [name for name in isa.ARM if name == best or name != "neon_bf16"]
    host = isa.host()
    assert (host.name, host.cpu) == (best, "some-cpu")
    # Without it LLVM would have no instruction for the intrinsic, and end the process.
    assert ("+" if best == "neon_bf16" else "-") + "bf16" in host.features.split(",")
    assert "+neon" in host.features.split(",") and set(features) <= {f[1:] for f in host.features.split(",")}


def test_x86_is_asked_of_llvm_alone(machine):
    machine("x86_64", "linux", {"avx2": True, "fma": True, "bmi2": True, "avx512f": False}, Library())
    assert isa.available() == ["avx2", "generic"]
    assert isa.host().features == "+avx2,-avx512f,+bmi2,+fma"


@pytest.mark.parametrize("architecture, known, cores, caches, name", [
    ("arm64", M2, 4, {1: 131072, 2: 16 << 20}, "Apple M2, L1 128K L2 16384K"),
    ("x86_64", INTEL_MAC, 6, {1: 32768, 2: 262144, 3: 12 << 20},
     "Intel(R) Core(TM) i7-9750H CPU @ 2.60GHz, L1 32K L2 256K L3 12288K"),
    ("arm64", {}, 12, processor.TYPICAL, "arm, L1 32K L2 1024K L3 16384K"),
])  # fmt: skip
def test_a_mac_tells_its_cores_caches_and_name(machine, monkeypatch, architecture, known, cores, caches, name):
    machine(architecture, "darwin", {}, Library(known=known))
    monkeypatch.delenv("BARELLM_THREADS", raising=False)
    monkeypatch.setattr("builtins.open", lambda *a, **k: (_ for _ in ()).throw(FileNotFoundError()))
    monkeypatch.setattr("platform.processor", lambda: "arm")
    assert threads.thread_count() == len(threads.allowed_cpus()) == cores
    assert processor.caches() == caches
    assert processor.name() == name


@pytest.mark.parametrize("arm", [True, False])
def test_threads_of_a_mac_call_no_number_of_linux(arm):
    assert "@syscall" in sync.ir(arm=arm, futex=True)
    assert "@syscall" not in sync.ir(arm=arm, futex=False)
