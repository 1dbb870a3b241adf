"""Every command where only macOS's part of the system is there: taken away is what Linux adds, in a process of its own."""

import subprocess
import sys
from pathlib import Path

import pytest

# Modules that ask for the system when they are imported come first: it is barellm's use of Linux that is looked at.
MAC = """
import builtins, ctypes, errno, fcntl, importlib, io, mmap, os, sys, time
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
        return self.sysctlbyname if name == "sysctlbyname" else getattr(libc, name)

    def sysctlbyname(self, name, value, size, *rest):
        known = {b"hw.physicalcpu": (2).to_bytes(4, "little"), b"machdep.cpu.brand_string": b"A Mac\\0"}
        if name not in known:
            return -1
        value[: len(known[name])] = known[name]
        size._obj.value = len(known[name])
        return 0

ctypes.CDLL = Mac
sys.platform = "darwin"
from barellm.cli.main import main
sys.exit(main(sys.argv[1:]))
"""


def on_a_mac(*words) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", MAC, *map(str, words)], capture_output=True, text=True, timeout=120)


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """A checkpoint of three steps."""
    folder = tmp_path_factory.mktemp("mac")
    text = folder / "text.txt"
    text.write_text("".join(f"line {i} of a text that is easy to learn\n" for i in range(900)))
    sizes = ["--model.layers=1", "--model.heads=2", "--model.channels=16", "--train.batch=2", "--train.seq=16"]
    done = on_a_mac("train", "shakespeare-char", "--data", text, "--out", folder / "run", "--steps", "3", *sizes)
    assert done.returncode == 0, done.stderr
    return folder / "run"


def test_train_sample_and_resume(trained):
    done = on_a_mac("sample", trained, "--tokens", "20", "--prompt", "line")
    assert done.returncode == 0 and "line" in done.stdout, done.stderr
    assert on_a_mac("train", "--out", trained, "--resume", "--steps", "5").returncode == 0


SMALL = ["shakespeare-char", "--model.layers=1", "--model.channels=48", "--batch=2", "--seq=16"]


@pytest.mark.parametrize("words, says", [
    (["doctor"], "A Mac"),
    (["bench", "step", *SMALL, "--steps=2"], "tokens/s"),
    (["inspect", "layernorm"], "layernorm"),
])  # fmt: skip
def test_commands(words, says):
    done = on_a_mac(*words)
    assert done.returncode == 0 and says in done.stdout, done.stderr


@pytest.mark.parametrize("words, says", [
    (["bench", "step", *SMALL, "--peers=torch"], "needs Linux"),
    (["bench", "scaling", *SMALL], "bound to processors"),
])  # fmt: skip
def test_what_needs_linux_says_so(words, says):
    done = on_a_mac(*words)
    assert done.returncode == 2 and says in done.stderr and done.stderr.count("\n") == 1
