"""The side of llm.c: its files, what it prints, and turns of a program that steps whether asked or not."""

import importlib.util
import json
import subprocess
import sys
import time
from argparse import Namespace
from pathlib import Path

import numpy as np
import pytest

from benchmarks import interleaved
from benchmarks.interleaved import Variant

pytestmark = pytest.mark.alone

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "peers" / "llmc.py"
SMALL = ["--layers", "2", "--heads", "2", "--d_model", "64", "--vocab", "512"]

# What llm.c's train_gpt2 does, by its source: reads the files, prints the number of activations of its constants B and T
# (1018624 is what the real one printed for this model), steps, and after step 19 generates for minutes.
PROGRAM = """#!{python}
import time
import numpy as np

head = np.fromfile("gpt2_124M.bin", "<i4", 256)
assert head[:2].tolist() == [20240326, 3]
longest, vocab, layers, heads, channels, padded = head[2:8].tolist()
C, L = channels, layers
sizes = [padded * C, longest * C, L * C, L * C, L * 3 * C * C, L * 3 * C, L * C * C, L * C, L * C, L * C, L * 4 * C * C,
         L * 4 * C, L * C * 4 * C, L * C, C, C]
weights = np.fromfile("gpt2_124M.bin", "<f4", offset=1024)
assert weights.size == sum(sizes)
parts = np.split(weights, np.cumsum(sizes)[:-1])
assert [p.mean() for p in (parts[2], parts[8], parts[14])] == [1, 1, 1]  # LayerNorm's weights
assert all(abs(p.std() / 0.02 - 1) < 0.05 for p in (parts[0], parts[1], parts[4], parts[10]))
for name in ("train", "val"):
    file = f"dev/data/tinyshakespeare/tiny_shakespeare_{{name}}.bin"
    head, tokens = np.fromfile(file, "<i4", 256), np.fromfile(file, "<u2", offset=1024)
    assert head[:3].tolist() == [20240520, 1, tokens.size] and tokens.size > 4 * 64 and tokens.max() < vocab
print("[GPT-2]")
print("num_activations: 1018624")
for step in range(41):
    if step % 10 == 0:
        print("val loss 6.2")
    if step > 0 and step % 20 == 0:
        print("generating:")
        time.sleep(600)
    start = time.monotonic()
    time.sleep({seconds})
    print(f"step {{step}}: train loss {{6 - step / 10:f}} (took {{1e3 * (time.monotonic() - start):f}} ms)")
"""


@pytest.fixture
def program(tmp_path):
    def made(seconds=0.02):
        path = tmp_path / "train_gpt2"
        path.write_text(PROGRAM.format(python=sys.executable, seconds=seconds))
        path.chmod(0o755)
        return path

    return made


def run(program, interleaved, *more):
    command = [sys.executable, str(SCRIPT), "--program", str(program), *SMALL, *more]
    return subprocess.run(command, input=interleaved, capture_output=True, text=True, timeout=60)


def test_it_reads_our_files_and_we_read_its_steps(program):
    done = run(program(), "3\n2\n")
    first, one, two = map(json.loads, done.stdout.splitlines())
    assert first["loss"] == 6.0 and first["step_s"] > 0.02 and first["first_step_s"] > first["step_s"]
    assert one["losses"] == [5.8, 5.7, 5.6] and len(two["step_s"]) == 2  # step 1 is the one in which the turn began
    assert two["losses"][0] <= 5.4 and all(0.02 < s < 0.5 for s in one["step_s"] + two["step_s"])
    assert one["peak_rss_bytes"] > 10**6 and one["cpu_s"] >= 0 and one["minor_faults"] >= 0


def test_it_is_started_anew_before_it_generates_text(program):
    done = run(program(), "12\n30\n")
    _, one, two = map(json.loads, done.stdout.splitlines())
    assert len(one["losses"]) == 12 and len(two["losses"]) == 30
    assert two["losses"].count(4.1) == 2 and two["losses"].count(6.0) == 0  # the last step, twice; a first one never
    assert two["cpu_s"] >= 0 and two["minor_faults"] >= 0


def test_a_program_built_for_another_shape_is_refused(program):
    done = run(program(), "1\n", "--seq", "128")
    assert done.returncode == 2 and "is not built for batch 4 x 128: it has 1018624" in done.stderr and not done.stdout


def test_a_program_that_is_not_llm_c(tmp_path):
    done = run("/bin/echo", "1\n")
    assert done.returncode == 2 and "ended without a step" in done.stderr and "Traceback" not in done.stderr


def test_activations_are_those_that_llm_c_printed():
    spec = importlib.util.spec_from_file_location("llmc", SCRIPT)
    llmc = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(llmc)
    shape = {"batch": 4, "seq": 64}
    assert llmc.activations(Namespace(layers=2, heads=2, d_model=64, vocab=512, **shape)) == 1_018_624
    assert llmc.activations(Namespace(layers=4, heads=4, d_model=128, vocab=65, **shape)) == 2_987_264


def test_while_it_is_stopped_it_does_not_step_and_at_the_end_it_is_gone(program, tmp_path, monkeypatch):
    monkeypatch.setattr(interleaved, "SETTLE_SECONDS", 0.5)  # 10 of its steps
    command = [sys.executable, str(SCRIPT), "--program", str(program(seconds=0.05)), *SMALL]
    v = Variant("llm.c", command, {}, "")
    monkeypatch.setattr(interleaved, "ROUND_SECONDS", 0.1)
    interleaved.interleave([v], rounds=2, report=lambda line: None)
    assert all(0.05 <= s < 0.2 for s in v.samples)  # no step that was stopped
    steps = np.round((6 - np.array([loss for t in v.turns for loss in t["losses"]])) * 10)
    assert np.diff(steps).max() <= 3
    end = time.monotonic() + 10  # killed, it may take a moment to go
    while running := [p for p in Path("/proc").glob("[0-9]*/cmdline") if str(tmp_path).encode() in read(p)]:
        assert time.monotonic() < end, running
        time.sleep(0.01)


def read(path):
    try:
        return path.read_bytes()
    except OSError:
        return b""
