"""bench peers: turns interleaved, every sample kept, failures told; the README's tables come from the files."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest

from barellm.cli import main
from barellm.config import preset
from barellm.errors import UserError
from barellm.profiling import peers
from barellm.profiling.roofline import Ceiling
from barellm.training.machine import resolved

ROOT = Path(__file__).parents[2]
FAKE = """
import json, sys
seconds = float(sys.argv[1])
print(json.dumps({"first_step_s": 1.0, "version": "0"}), flush=True)
for line in sys.stdin:
    print(json.dumps({"step_s": [9.0] + [seconds] * (int(line) - 1), "cpu_s": 0, "minor_faults": 0}), flush=True)
print(json.dumps({"peak_rss_bytes": 10**9}), flush=True)
"""


def config():
    return resolved(preset("shakespeare-char"), "cpu")


def fake(name, seconds):
    return peers.Variant(name, [sys.executable, "-c", FAKE, str(seconds)], {}, "a stand-in")


def table():
    spec = importlib.util.spec_from_file_location("table", ROOT / "benchmarks" / "table.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def result(monkeypatch):
    made_up = Ceiling({"fp32": 2e11, "bf16": 4e11}, {"copy": 5e10, "update": 6e10, "read": 4e10})
    monkeypatch.setattr("barellm.profiling.roofline.measured_ceiling", lambda: made_up)
    monkeypatch.setattr(peers, "PAUSE", 0.0)
    monkeypatch.setattr(peers, "variants", lambda c: [fake("barellm", 0.25), fake("slow", 0.5), fake("slower", 0.75)])
    return peers.measure(config(), rounds=3, report=lambda line: None)


def test_every_sample_is_kept_and_warm_up_steps_do_not_count(result):
    assert result["ours_s"] == 0.25 and result["ratios"] == {"slow": 2.0, "slower": 3.0}
    assert (result["best_peer"], result["ratio_to_best"]) == ("slow", 2.0)
    for v in result["variants"]:
        assert [len(turn["step_s"]) for turn in v["turns"]] == [result["steps_per_turn"]] * 3
        assert all(turn["warm_up_s"] == 9.0 for turn in v["turns"])
        assert v["peak_rss_bytes"] == 10**9
    assert {"processor", "cores", "threads", "isa", "system"} <= set(result["machine"])


def test_the_tables_are_made_from_the_files(result, tmp_path, monkeypatch):
    made = table()
    monkeypatch.setattr(made, "RESULTS", tmp_path)
    assert "Nothing is measured yet" in made.tables()
    (tmp_path / "a.json").write_text(json.dumps(result))
    (tmp_path / "other.json").write_text('{"kind": "other"}')
    readme = tmp_path / "README.md"
    readme.write_text(f"before\n{made.BEGIN}\nearlier lines\n{made.END}\nafter\n")
    monkeypatch.setattr(sys, "argv", ["table.py", "--check", str(readme)])
    assert made.main() == 1
    monkeypatch.setattr(sys, "argv", ["table.py", "--write", str(readme)])
    assert made.main() == 0
    text = readme.read_text()
    assert (
        "| **2.00x** | 3.00x | benchmarks/results/a.json |" in text
        and text.endswith("after\n")
        and "earlier" not in text
    )
    monkeypatch.setattr(sys, "argv", ["table.py", "--check", str(readme)])
    assert made.main() == 0


def test_the_readme_has_the_tables_that_the_files_give(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["table.py", "--check", str(ROOT / "README.md")])
    assert table().main() == 0


def test_a_peer_that_dies_is_named_and_the_others_are_stopped(monkeypatch):
    started = [fake("barellm", 0.25), peers.Variant("broken", [sys.executable, "-c", "raise SystemExit(3)"], {}, "")]
    monkeypatch.setattr(peers, "variants", lambda c: started)
    with pytest.raises(RuntimeError, match="broken ended with status 3"):
        peers.measure(config(), rounds=1, report=lambda line: None)
    assert started[0]._process.wait(timeout=10) is not None


def test_both_environments_of_the_peer_are_measured(monkeypatch):
    monkeypatch.setattr(peers.importlib.util, "find_spec", lambda name: object())
    made = {v.name: v for v in peers.variants(config())}
    assert set(made) == {"barellm", *(f"torch {m}, {e}" for m in ("eager", "compile") for e in ("installed", "tuned"))}
    assert made["torch eager, tuned"].environment["GLIBC_TUNABLES"] == "glibc.malloc.hugetlb=1"
    assert "{" not in made["torch eager, tuned"].environment["GOMP_CPU_AFFINITY"]
    assert made["torch eager, installed"].environment == {"OMP_PROC_BIND": "true"}


def test_without_pytorch_or_a_checkout_it_says_so(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(peers.importlib.util, "find_spec", lambda name: None)
    assert main.main(["bench", "peers", "shakespeare-char"]) == 2
    assert "PyTorch is not installed" in capsys.readouterr().err
    monkeypatch.setattr(peers, "FOLDER", tmp_path)
    with pytest.raises(UserError, match="checkout"):
        peers.variants(config())


def test_our_side_serves_turns(tmp_path):
    ours = peers.Variant(
        "ours", [sys.executable, "-m", "barellm", "bench", "step", "shakespeare-char", "--serve"], {}, ""
    )
    ours.start(tmp_path)
    ours.turn(3)
    ours.finish()
    assert len(ours.turns[0]["step_s"]) == 3 and ours.facts["first_step_s"] > 0
    assert ours.facts["peak_rss_bytes"] > ours.facts["arena_bytes"]


@pytest.mark.oracle
def test_pytorch_serves_turns_and_has_most_ops(tmp_path):
    made = {v.name: v for v in peers.variants(config())}["torch eager, tuned"]
    made.start(tmp_path)
    made.turn(2)
    made.finish()
    assert len(made.turns[0]["step_s"]) == 2 and made.facts["peak_rss_bytes"] > 1e8
    names = ["linear", "matmul_dw", "attention_backward", "layernorm_dx", "layernorm_dparams", "adamw", "clip_scale"]
    rows = [{"program": "micro", "op": n, "shape": "128x128", "count": 2, "s": 1e-3, "alone_s": 1e-3} for n in names]
    assert "PyTorch" in peers.torch_ops(config(), rows)["peer"]
    assert [row["op"] for row in rows if row["peer_s"] is None] == ["layernorm_dparams", "clip_scale"]
    assert all(row["times_peer"] > 0 for row in rows if row["peer_s"])
