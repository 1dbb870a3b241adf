"""The GPU's whole way without a GPU: barellm's processes, NVIDIA's bindings, the driver library in C (simulators/libcuda.c), and
the PTX of each launch on the PTX machine (simulators/ptx), for sm_80 and for sm_90a with Hopper's own kernels. `make emulate`
runs all of it."""

from __future__ import annotations

import json
from collections import defaultdict
from typing import Any

import pytest

from barellm.training import metrics

pytestmark = pytest.mark.extended

LONG_S = 1500
OWN = {"LIBCUDA_PYTHON": "tests.simulators.emulator", "LIBCUDA_SMS": "3", "BARELLM_SELF_CHECK": "0"}
ARCHS = (80, 90)
each_arch = pytest.mark.parametrize("arch", ARCHS)
HOPPER = {"hopper_gemm", "hopper_attention", "hopper_attention_backward"}
# Relative distances to the CPU's, which rounds to bf16 elsewhere: of a loss, of gradients, of weights against how far they moved.
# AdamW's first steps go by the sign of a gradient, so numbers that are all noise move as far as others.
# Muon's steps give every direction of a gradient the same length, those of noise too.
LIMITS = {"bf16": (1e-3, 0.06, 0.25), "fp32": (1e-5, 1e-3, 0.02), "muon": (1e-4, 0.12, 0.45)}


@pytest.fixture
def emulate(start, tmp_path):
    """Runs a case of emulated.py; what it found."""

    def run(*words: str, arch: int, **environment: str) -> dict[str, Any]:
        process = start("-m", "tests.cuda.emulated", *words, **OWN, LIBCUDA_ARCH=str(arch), **environment)
        out, err = process.communicate(timeout=LONG_S)
        assert process.returncode == 0 and "libcuda:" not in err and "emulator:" not in err, out + err
        return json.loads(out.splitlines()[-1])

    return run


def check(found: dict[str, Any], kind: str = "bf16") -> None:
    """Losses, gradients and weights are the CPU's within LIMITS."""
    loss, gradient, weight = LIMITS[kind]
    got, want = found["losses"]
    assert len(got) == 2 and got == pytest.approx(want, rel=loss)
    assert found["gradients"] and max(found["gradients"].values()) <= gradient, found["gradients"]
    moved = {name: far for name, far in found["weights"].items() if not name.endswith("c_attn.bias")}  # a key's: only noise
    assert moved and max(moved.values()) <= weight, moved


@each_arch
def test_two_steps_of_a_gpt2_are_the_cpus(emulate, arch):
    """And their bits are the same whether asynchronous copies arrive early or late."""
    found = emulate("gpt2", arch=arch)
    check(found)
    assert (set(found["launched"]) >= HOPPER) == (arch == 90) and ("gemm" in found["launched"]) == (arch == 80)
    assert emulate("gpt2", arch=arch, EMULATOR_COPIES="early")["digest"] == found["digest"]


@each_arch
def test_two_steps_of_a_llama_are_the_cpus(emulate, arch):
    found = emulate("llama", arch=arch)
    check(found)
    assert (set(found["launched"]) >= HOPPER) == (arch == 90) and "rope" in found["launched"]


@each_arch
def test_two_steps_of_a_speedrun_are_the_cpus(emulate, arch):
    """Muon's update, then Muon's and Adam's."""
    found = emulate("speedrun", arch=arch)
    check(found, "muon")
    assert ("hopper_gemm" in found["launched"]) == (arch == 90)


def test_two_steps_of_odd_sizes_are_the_cpus(emulate):
    """In fp32, with dropout, and no size a multiple of anything."""
    check(emulate("odd", arch=80), "fp32")


TINY = (
    *("shakespeare-char", "--model.layers", "1", "--model.heads", "2", "--model.d_model", "8", "--model.max_seq", "8"),
    *("--seq", "8", "--batch", "2", "--dtype", "fp32", "--train.eval_every", "2", "--train.eval_tokens", "16", "--steps", "2"),
)


@each_arch
def test_a_run_on_the_command_line(start, tmp_path, arch):
    """Trained, evaluated and sampled, each by a process: losses and tokens are those of the same commands on the CPU."""
    text, results = tmp_path / "text.txt", {}
    text.write_text("".join(f"{i} squared is {i * i}.\n" for i in range(200)))
    for device in ("cuda", "cpu"):
        run = str(tmp_path / device)

        def barellm(*words: str, device: str = device) -> str:
            process = start("-m", "barellm", *words, "--device", device, **OWN, LIBCUDA_ARCH=str(arch))
            out, err = process.communicate(timeout=LONG_S)
            assert process.returncode == 0 and "libcuda:" not in err and "emulator:" not in err, out + err
            return out

        barellm("train", *TINY, "--data", str(text), "--out", run)
        losses = [row["loss"] for row in metrics.read(tmp_path / device / "metrics.jsonl") if row["kind"] == "train"]
        nats = json.loads(barellm("eval", run, "--tokens", "16", "--json"))["nats"]
        tokens = json.loads(barellm("sample", run, "--max-new-tokens", "3", "--temperature", "0", "--json"))["tokens"]
        results[device] = [*losses, nats], tokens
    (got, tokens), (want, wanted) = results["cuda"], results["cpu"]
    assert len(got) == 3 and got == pytest.approx(want, rel=1e-5) and tokens == wanted and len(tokens) == 3


RUNG = """
import json, sys
from benchmarks.gpu_check import first
from benchmarks.gpu_check.stages import Scale
print(json.dumps(getattr(first, sys.argv[1])(Scale(small=True, mock=False, limit_s=1e4))))
"""


@pytest.mark.parametrize("rung", ["plain", "tile"])
def test_a_first_rung_of_gpu_check_holds(start, rung):
    """A product of Triton's, a tile of Hopper's: right, as the stage itself judges. Only its time does not count here."""
    out, err = start("-c", RUNG, rung, **OWN).communicate(timeout=LONG_S)
    found = json.loads(out.splitlines()[-1])
    assert found["cases"] and found["bars"] and all(bar["met"] for bar in found["bars"]), (found, err)


# Sectors of global memory, against those that the bytes would fill, and passes over the banks of shared memory, against those that
# would do. Most kernels need no more; docs/cuda.md says what is behind the others.
SECTORS = defaultdict(lambda: 1.1, layernorm=1.65, layernorm_backward=1.55, sort_blocks=2.7, total_loss=3.0)
PASSES = defaultdict(lambda: 1.01, layernorm_backward=5.3, bias_grad_partials=8.4, combine_partials=2.7)


def test_memory_is_asked_for_little_more_than_is_needed(emulate):
    """Of each kernel of a step whose sizes are multiples of a tile, over all its launches."""
    counts = emulate("aligned", "--first", arch=80)["counts"]
    assert {"gemm", "attention_dkv", "adamw", "layernorm_backward"} <= set(counts)
    for name, (_, sectors, asked, passes, needed) in counts.items():
        assert sectors <= SECTORS[name] * asked and passes <= PASSES[name] * needed, (name, sectors, asked, passes, needed)


# How many of the fences and waits of a kernel are noticed when they are taken away, one at a time. No fence may be missed. The rest
# of the waits are those of loops that do not come round in a model so small (simulators/ptx/test_hopper_products.py has larger
# ones), and barriers that Triton has more than the code needs.
NOTICED = {
    80: {
        "gemm": {"bar.sync": 4, "cp.async.wait_group": 2},
        "attention_forward": {"bar.sync": 5, "cp.async.wait_group": 2},
        "attention_dkv": {"bar.sync": 5, "cp.async.wait_group": 2},
    },
    90: {
        "hopper_gemm": {
            "fence.proxy.async": 5, "mbarrier wait": 2, "wgmma.wait_group": 2, "cp.async.bulk.wait_group": 4, "bar.sync": 19
        },
        "hopper_attention": {"fence.proxy.async": 1, "mbarrier wait": 6, "wgmma.wait_group": 4, "bar.sync": 15},
        "hopper_attention_backward": {"fence.proxy.async": 1, "mbarrier wait": 4, "wgmma.wait_group": 6, "bar.sync": 19},
    },
}  # fmt: skip


@each_arch
def test_fences_and_waits_taken_away_are_noticed(emulate, arch):
    """In the first GEMM and in attention of a GPT-2's step: by the machine itself, or in the results."""
    found = emulate("gpt2", "--planted", *NOTICED[arch], arch=arch)["planted"]
    noticed = {(kernel, kind): count for kernel, kind, count in found["noticed"]}
    for kernel, wanted in NOTICED[arch].items():
        for kind, count in wanted.items():
            assert noticed.get((kernel, kind), 0) >= count, (kernel, kind, found)
    assert not [fault for fault in found["survivors"] if fault[1] == "fence.proxy.async"], found["survivors"]
