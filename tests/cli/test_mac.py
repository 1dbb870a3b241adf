"""Commands where only macOS's part of the system is there, in a process of its own: taken away is what Linux adds, and kernels come
in macOS's objects."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from barellm.cli.main import main

# Modules that ask for the system when they are imported come first: it is barellm's use of Linux that is looked at.
MAC = """
import builtins, ctypes, errno, fcntl, importlib, io, mmap, os, platform, sys, time
for name in ("numpy", "llvmlite.binding", "matplotlib.pyplot", "hypothesis", "subprocess", "tokenizers", "xxhash"):
    importlib.import_module(name)
for module, names in ((os, ("sched_getaffinity", "sched_setaffinity", "posix_fallocate", "posix_fadvise")),
                      (mmap, ("MADV_HUGEPAGE", "MAP_POPULATE", "MAP_HUGETLB")), (time, ("CLOCK_BOOTTIME",))):
    for name in names:
        if hasattr(module, name):
            delattr(module, name)
fcntl.F_FULLFSYNC = 51
sys.modules["cuda"] = None

def no_linux(call, at=0):
    def checked(*args, **kwargs):
        if len(args) > at and str(args[at]).startswith(("/proc", "/sys")):
            raise FileNotFoundError(errno.ENOENT, "No such file or directory", str(args[at]))
        return call(*args, **kwargs)
    return checked

builtins.open = io.open = no_linux(open)
os.scandir, os.listdir, os.stat = no_linux(os.scandir), no_linux(os.listdir), no_linux(os.stat)
real_fcntl = fcntl.fcntl
fcntl.fcntl = lambda fd, command, *rest: os.fsync(fd) if command == 51 else real_fcntl(fd, command, *rest)
libc = ctypes.CDLL(None)

class Mac:  # its C library: no number that Linux gives a system call means anything there
    def __init__(self, name, *args, **kwargs):
        assert name is None, name

    def __getattr__(self, name):
        assert name not in ("syscall", "getauxval", "madvise"), name
        own = {"sysctlbyname": self.sysctlbyname, "sigaction": lambda *_: 0}  # of another layout there
        return own.get(name) or getattr(libc, name)

    def sysctlbyname(self, name, value, size, *rest):
        known = {b"hw.physicalcpu": (1).to_bytes(4, "little"), b"machdep.cpu.brand_string": b"A Mac\\0"}
        if name not in known:
            return -1
        value[: len(known[name])] = known[name]
        size._obj.value = len(known[name])
        return 0

# Objects in macOS's format, whose symbols begin with an underscore. One core: a helper that compiles knows nothing of this.
import llvmlite.binding as llvm
architecture = "arm64" if platform.machine() == "aarch64" else platform.machine()
llvm.Target.from_default_triple = lambda: llvm.Target.from_triple(architecture + "-apple-macosx13.0")
from barellm.cpu import jit
for name in (*jit.ALLOWED, "bzero"):
    llvm.add_symbol("_" + name, ctypes.cast(getattr(libc, name), ctypes.c_void_p).value)
ctypes.CDLL = Mac
sys.platform = "darwin"
from barellm.cli.main import main
sys.exit(main(sys.argv[1:]))
"""


pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="makes Linux look like macOS")
SIZES = ["--model.layers=1", "--model.heads=2", "--model.d_model=16", "--train.micro_batch_size=2", "--train.seq=16"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("mac")


@pytest.fixture(scope="module")
def on_a_mac(folder):
    environment = os.environ | {"BARELLM_CACHE": str(folder / "cache"), "BARELLM_THREADS": "2"}

    def run(*words) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", MAC, *map(str, words)]
        return subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)

    return run


@pytest.fixture(scope="module")
def training(folder) -> list[str]:
    text = folder / "text.txt"
    text.write_text("".join(f"line {i} of a text that is easy to learn\n" for i in range(900)))
    return ["train", "shakespeare-char", "--data", str(text), "--steps", "3", *SIZES]


@pytest.fixture(scope="module")
def trained(on_a_mac, training, folder) -> Path:
    """A checkpoint of three steps."""
    done = on_a_mac(*training, "--out", folder / "run")
    assert done.returncode == 0, done.stderr
    objects = list((folder / "cache" / "objects").glob("*.o"))
    mach_o = b"\xcf\xfa\xed\xfe"  # of 64 bits
    assert len(objects) > 10 and all(mach_o in path.read_bytes()[:64] for path in objects)
    return folder / "run"


@pytest.mark.extended
def test_kernels_in_mach_o_objects_compute_the_same(trained, training, tmp_path):
    assert main([*training, "--out", str(tmp_path / "run")]) == 0
    lines = [(run / "metrics.jsonl").read_text().splitlines() for run in (trained, tmp_path / "run")]
    mac, linux = ([m["loss"] for m in map(json.loads, part) if "loss" in m] for part in lines)
    assert mac == linux and len(mac) >= 3


@pytest.mark.extended
def test_sample_and_resume(trained, on_a_mac):
    done = on_a_mac("sample", trained, "--max-new-tokens", "20", "--prompt", "line")
    assert done.returncode == 0 and "line" in done.stdout, done.stderr
    assert on_a_mac("train", "--out", trained, "--resume", "--steps", "5").returncode == 0


SMALL = ["shakespeare-char", "--model.layers=1", "--model.d_model=48", "--batch=2", "--seq=16"]


@pytest.mark.parametrize("words, says", [
    (["doctor"], "A Mac"),
    (["bench", "step", *SMALL, "--steps=2"], "tokens/s"),
    (["inspect", "layernorm"], "layernorm"),
])  # fmt: skip
@pytest.mark.extended
def test_commands(words, says, on_a_mac):
    done = on_a_mac(*words)
    assert done.returncode == 0 and says in done.stdout, done.stderr


@pytest.mark.parametrize("words, says", [
    (["bench", "step", *SMALL, "--peers=torch"], "needs Linux"),
])  # fmt: skip
@pytest.mark.extended
def test_what_needs_linux_says_so(words, says, on_a_mac):
    done = on_a_mac(*words)
    assert done.returncode == 2 and says in done.stderr and done.stderr.count("\n") == 1
