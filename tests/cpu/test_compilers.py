"""Compiling in several processes: the same objects, whatever happens to the others."""

import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path

import pytest

from barellm.cpu import compilers, jit
from barellm.cpu.isa import host
from barellm.runtime import compilers as processes

HANGS = "import time; time.sleep(600)"
DIES_AFTER_ONE = """
import json, sys
path, _, isa = json.loads(sys.argv[1])
sys.path[:] = path
from barellm.cpu import jit
from barellm.cpu.isa import ISA
from barellm.runtime import compilers
ir = compilers.read(sys.stdin.buffer).decode()
compilers.write(sys.stdout.buffer, jit.compile_object(ir, ISA(**isa)))
compilers.read(sys.stdin.buffer)
"""


def ir(n: int) -> str:
    """A function of about `n` instructions."""
    steps = "\n".join(f"  %v{i + 1} = mul i64 %v{i}, {2 * i + 3}" for i in range(n))
    return f"define i64 @f{n}(i64 %v0) {{\n{steps}\n  ret i64 %v{n}\n}}\n"


SIZES = range(100, 2100, 100)
EMITTERS = {f"mul {n}": lambda n=n: ir(n) for n in SIZES}


@pytest.fixture
def alone() -> list[bytes]:
    return [jit.compile_object(ir(n), host()) for n in SIZES]


@pytest.fixture
def started(tmp_path, monkeypatch) -> list[subprocess.Popen]:
    """An empty cache, and the helpers that were started."""
    monkeypatch.setenv("BARELLM_CACHE", str(tmp_path))
    found = []
    start = processes.start

    def noted(service):
        found.append(start(service))
        return found[-1]

    monkeypatch.setattr(processes, "start", noted)
    return found


def ended(process: subprocess.Popen) -> bool:
    return process.returncode is not None and process.stdin.closed and process.stdout.closed


def test_objects_are_the_same_from_any_number_of_processes(started, alone):
    assert compilers.cached_objects(EMITTERS, host(), processes=3) == alone
    assert len(started) == 2 and all(ended(p) for p in started)
    refuse = dict.fromkeys(EMITTERS, lambda: pytest.fail("compiled again"))
    assert compilers.cached_objects(refuse, host(), processes=3) == alone


def test_a_helper_compiles(started):
    queue = processes.Queue()
    helper = processes.Helper(processes.Service("barellm.cpu.compilers", asdict(host())), queue)
    queue.add("a", ir(100))
    end = time.monotonic() + 20
    while not queue._compiled and time.monotonic() < end:
        time.sleep(0.01)
    queue.close()
    helper.close()
    assert queue._compiled == {"a": jit.compile_object(ir(100), host())}


@pytest.mark.parametrize("code", [HANGS, DIES_AFTER_ONE, "raise SystemExit(1)", "import no_such_module"])
def test_a_helper_that_hangs_or_dies_only_costs_time(started, alone, monkeypatch, code):
    monkeypatch.setattr(processes, "START", code)
    monkeypatch.setattr(processes, "LATE_S", 0.05)
    assert compilers.cached_objects(EMITTERS, host(), processes=3) == alone
    assert all(ended(p) for p in started)


def test_where_no_process_or_thread_can_be_started_this_one_compiles(tmp_path, alone, monkeypatch):
    def refuse(*_, **__):
        raise BlockingIOError(11, "Resource temporarily unavailable")

    def no_thread(_):
        raise RuntimeError("can't start new thread")

    cases = [(processes.subprocess, "Popen", refuse), (sys, "executable", ""), (processes.threading.Thread, "start", no_thread)]
    for i, (owner, name, value) in enumerate(cases):
        monkeypatch.setenv("BARELLM_CACHE", str(tmp_path / str(i)))
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, value)
            assert compilers.cached_objects(EMITTERS, host(), processes=3) == alone, name


def test_a_few_objects_are_not_worth_a_process(started):
    few = dict(list(EMITTERS.items())[: 2 * compilers.SHARE - 1])
    compilers.cached_objects(few, host(), processes=8)
    assert len(started) == 1
    compilers.cached_objects(EMITTERS, host(), processes=1)
    assert len(started) == 1


def test_an_error_or_ctrl_c_while_compiling_ends_the_helpers(started):
    def interrupted() -> str:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        compilers.cached_objects(EMITTERS | {"last": interrupted}, host(), processes=3)
    broken = EMITTERS | {"broken": lambda: "define void @f() {\n  call void @nothing()\n  ret void\n}\ndeclare void @nothing()\n"}
    with pytest.raises(RuntimeError, match="calls nothing"):
        compilers.cached_objects(broken, host(), processes=3)
    assert len(started) == 4 and all(ended(p) for p in started)


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_helpers_of_a_killed_process_end(tmp_path):
    program = """
from dataclasses import asdict
from barellm.cpu.isa import host
from barellm.runtime import compilers
queue = compilers.Queue()
helper = compilers.Helper(compilers.Service("barellm.cpu.compilers", asdict(host())), queue)
print(helper._process.pid, flush=True)
queue.take()
"""
    env = os.environ | {"BARELLM_CACHE": str(tmp_path), "PYTHONPATH": str(Path(__file__).parents[2])}
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, env=env) as parent:
        pid = int(parent.stdout.readline())
        os.kill(pid, 0)
        parent.send_signal(signal.SIGKILL)
    end = time.monotonic() + 20
    stat = Path(f"/proc/{pid}/stat")
    while time.monotonic() < end:
        try:
            if stat.read_text().rpartition(")")[2].split()[0] == "Z":  # ended; nobody asks for its status
                return
        except OSError:
            return
        time.sleep(0.05)
    pytest.fail("the helper is still there")


@pytest.mark.slow
@pytest.mark.extended
def test_a_session_opens_from_a_script_on_standard_input(tmp_path):
    """The helper has no script to import again."""
    script = """
from dataclasses import replace
from barellm.models import preset
from barellm.runtime import compilers
from barellm.assembly.build import build_programs, resolved
from barellm.cpu.step import CpuSession
helpers = []
start = compilers.start
compilers.start = lambda service: helpers.append(start(service)) or helpers[-1]
session = CpuSession(build_programs(resolved(preset("shakespeare-char"), "cpu")))
session.run("init", seed=1)
session.close()
print(len(helpers), helpers[0].returncode is not None)
"""
    root = str(Path(__file__).parents[2])
    env = os.environ | {"BARELLM_CACHE": str(tmp_path), "BARELLM_THREADS": "2", "PYTHONPATH": root}
    done = subprocess.run([sys.executable, "-"], input=script, capture_output=True, text=True, env=env, check=False)
    assert (done.stdout, done.stderr) == ("1 True\n", "")
