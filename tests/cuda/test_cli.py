"""`--device cuda` as a user meets it, on the mock driver."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from barellm.cli.main import main
from barellm.cuda import backend
from barellm.runtime.rates import Rate
from tests.simulators.mock import Gpu

TINY = (
    *("--model.layers", "1", "--model.heads", "2", "--model.d_model", "8", "--model.max_seq", "8", "--seq", "8"),
    *("--batch", "2", "--dtype", "bf16", "--train.eval_every", "4", "--train.eval_tokens", "32"),
    *("--lr", "0.03", "--schedule", "constant", "--optim.warmup", "0"),
)


@pytest.fixture
def gpu(monkeypatch):
    made = Gpu()
    made.install(monkeypatch)
    monkeypatch.setattr(backend, "measured_peak", lambda dtype: Rate(0.0, 0.0))
    return made


@pytest.fixture
def text(tmp_path, monkeypatch):
    monkeypatch.setenv("BARELLM_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "text.txt"
    path.write_text("".join(f"{i} squared is {i * i}.\n" for i in range(200)))
    return path


@pytest.mark.parametrize("words", [["train", "--data", "no/such/file"], ["sample", "no/such/run"], ["eval", "no/such/run"]])
def test_without_a_gpu_a_command_says_so_before_anything_else(monkeypatch, capsys, words):
    gpu = Gpu()
    gpu.errors["cuInit"] = 100
    gpu.install(monkeypatch)
    assert main([*words, "--device", "cuda"]) == 2
    assert capsys.readouterr().err == (
        "barellm: error: device cuda needs a GPU, and the NVIDIA driver sees none (CUDA_VISIBLE_DEVICES?)\n"
    )


def test_doctor_describes_the_gpu_or_what_is_missing_for_it(gpu, text, capsys):
    assert main(["doctor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["gpu"]
    assert found["device cuda"] == "Mock GPU" and found["compute capability"] == "8.0" and found["driver"] == "CUDA 13.0"
    assert found["cubin cache"].endswith("cubins: 0 kernels")
    gpu.version = 12000
    assert main(["doctor"]) == 0
    assert "no: the NVIDIA driver knows CUDA 12.0" in capsys.readouterr().out


def last(capsys) -> dict:
    return json.loads(capsys.readouterr().out.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.extended
def test_a_run_moves_between_backends(gpu, text, tmp_path, capsys):
    """Started on the CPU, continued on the GPU, finished on the CPU: the losses are those of a run on the CPU alone. Either
    evaluates and samples what the other saved."""
    run, alone = tmp_path / "run", tmp_path / "alone"
    start = ["train", "shakespeare-char", "--data", str(text), *TINY]
    assert main([*start, "--steps", "6", "--out", str(alone)]) == 0
    assert main([*start, "--steps", "2", "--out", str(run)]) == 0
    assert not gpu.launched
    assert main(["train", "--out", str(run), "--resume", "--steps", "4", "--device", "cuda"]) == 0
    told = capsys.readouterr().out
    assert "resuming with sm_80: not bitwise" in told and "machine  cuda, sm_80, bf16, Mock GPU; " in told
    assert gpu.launched and not gpu.allocated
    nats = []
    for device in ("cpu", "cuda"):
        assert main(["eval", str(run), "--tokens", "64", "--device", device, "--json"]) == 0
        nats.append(last(capsys)["nats"])
        assert main(["sample", str(run), "--max-new-tokens", "4", "--temperature", "0", "--device", device, "--json"]) == 0
        assert len(last(capsys)["tokens"]) == 4
    assert "skinny_gemm" in {name for name, _ in gpu.launched}  # a token at a time
    assert nats[0] == pytest.approx(nats[1], rel=1e-3)
    assert main(["train", "--out", str(run), "--resume", "--steps", "6"]) == 0
    found, want = losses(run), losses(alone)
    assert len(found) == 6 and min(abs(a - b) for a, b in pairwise(want)) > 10 * max(abs(np.subtract(found, want)))


def losses(run: Path) -> list[float]:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [row["loss"] for row in rows if row["kind"] == "train"]
