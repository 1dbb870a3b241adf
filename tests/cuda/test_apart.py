"""The group `ops` of gpu-check: kernels by themselves in turns with a peer, and what is made of their times."""

import numpy as np
import pytest

from barellm.program.builder import Program, Store
from barellm.program.tensor import Dim
from benchmarks.gpu_check import apart, craft
from benchmarks.gpu_check.apart import Case
from benchmarks.gpu_check.bars import passed
from benchmarks.gpu_check.stages import STAGES, Scale, rehearsed_on
from tests.simulators.mock import Gpu

PEER = """
import json, sys
cases = json.loads(sys.argv[1])
assert sys.argv[2] == "cuda"
print(json.dumps({}), flush=True)
for line in sys.stdin:
    asked = json.loads(line)
    told = cases[asked["case"]].get(asked["what"])
    print(json.dumps({"s": [told] * asked["calls"]} if told else {"error": "no kernel"}), flush=True)
"""
MS = 0.25e-3  # what the mock's clock gives a launch


def doubled(rows=3, C=8):
    p = Program(Store(), compute="fp32")
    x = p.store.get("x", (Dim("batch", 1), Dim("seq", rows), C), "fp32", "state")
    y = p.input("given", (Dim("batch", 1), Dim("seq", rows), C), "fp32")
    p.output("y", p.dropout(p.add(x, y), 0.5))
    return p


@pytest.fixture
def measured(tmp_path, monkeypatch):
    rehearsed_on(Gpu(), monkeypatch)
    (tmp_path / "peer.py").write_text(PEER)
    monkeypatch.setattr(apart, "baseline_script", lambda name: tmp_path / "peer.py")
    monkeypatch.setattr(apart, "find_spec", lambda name: True)
    monkeypatch.setattr(apart, "TURN_S", 0.0)
    monkeypatch.setattr(apart, "PAUSE_S", 0.0)
    return lambda cases, **scale: apart.measured(Scale(small=True, mock=False, **scale), cases, "ops.json")


def case(name, peer, **more):
    return Case(name, doubled, {"batch": 1, "seq": 3}, peer, **more)


def test_of_a_group_the_fastest_is_held_against_each_way_of_the_peer(measured):
    launches = 2  # an addition and a dropout
    peer = {"run fast": 3 * MS, "run slow": 8 * MS}
    against = {"fast": 1.25, "slow": 4.5, "missing": 1.0}
    found = measured([case("one", peer, against=against), case("two", peer, against=against, group="one")])
    assert [row["bar"] for row in found["bars"]] == [f"one: times as fast as PyTorch's {name}" for name in against]
    assert [row["value"] for row in found["bars"]] == [pytest.approx(1.5), pytest.approx(4.0), None]
    assert [row["met"] for row in found["bars"]] == [True, False, None]
    assert [row["ours_s"] for row in found["cases"]] == [pytest.approx(launches * MS)] * 2
    assert found["cases"][0]["peers_s"] == {"fast": 3 * MS, "slow": 8 * MS}
    assert len(found["cases"][0]["turns_s"]["ours"]) == apart.ROUNDS
    assert found["files"]["ops.json"]["cases"] == found["cases"]


def test_bytes_are_held_against_a_copy_and_what_is_only_told_is_no_bar(measured):
    told = {"nbytes": 10**6, "of_copy": 0.5}
    found = measured([case("moves", {}, **told), case("told", {"run": MS}, against={"peer": 0.0}, nbytes=10**6)])
    (row,) = found["bars"]
    rate = 1e6 / (2 * MS)
    assert row["bar"] == "moves: of copy bandwidth" and row["wanted"] == 0.5
    assert row["value"] == pytest.approx(rate / found["files"]["ops.json"]["copy_bytes_s"])
    assert [r["gb_per_s"] for r in found["cases"]] == [pytest.approx(rate / 1e9)] * 2
    assert found["cases"][0]["ratios"] == {} and found["cases"][1]["ratios"] == {"peer": pytest.approx(0.5)}


def test_what_the_time_does_not_reach_is_told(measured):
    found = measured([case("late", {"run": MS}, against={"peer": 1.0}, nbytes=8, of_copy=0.5)], limit_s=1.0)
    assert found["cases"] == [{"case": "late", "left out": "no time"}]
    assert [row["value"] for row in found["bars"]] == [None, None]


def test_operands_hold_numbers_and_tables_stay(monkeypatch):
    """Random numbers everywhere but in what the program itself wrote, also where a tensor has more than are drawn."""
    rehearsed_on(Gpu(), monkeypatch)
    monkeypatch.setattr(apart, "NOISE", 64)
    seen = {}

    def look(session, program, calls, **sizes):
        for t, start in session.plan.offsets.items():
            seen[t.name, t.role] = session._get(start, start + t.nbytes).copy()
        return [1.0] * calls

    monkeypatch.setattr(apart.devices, "replay_seconds", look)
    (first, *_) = craft.block_products(Scale(small=True, mock=True))
    apart.measured(Scale(small=True, mock=True), [first], "ops.json")
    numbers = {name: found.view(np.float32) for (name, *_), found in seen.items() if name in ("x", "weight")}
    assert set(numbers) == {"x", "weight"}
    for found in numbers.values():
        assert found.size > 64 and np.isfinite(found).all() and found.all() and 0.5 < found.std() < 2
    tables = [a.view(np.int32) for (_, role), a in seen.items() if role == "constant"]
    assert tables and all(a.min() >= -1 and a.max() < 1 << 16 for a in tables)


@pytest.mark.parametrize("name", craft.CASES)
def test_a_stage_has_bars_and_no_more_than_it_can_do(name, monkeypatch):
    """Rehearsed without work; every case has a peer or a rate, and each peer is asked for what it is compared with."""
    rehearsed_on(Gpu(arch=90, sms=132, execute=lambda *_: None), monkeypatch)
    found = getattr(craft, name)(Scale(small=True, mock=True))
    assert found["bars"] and passed({name: {"status": "done", **found}})
    for scale in (Scale(small=True, mock=True), Scale(small=False, mock=False)):
        cases = craft.CASES[name](scale)
        assert all(case.against and case.baseline["op"] for case in cases)
        assert len({case.name for case in cases}) == len(cases)
    assert {s.name for s in STAGES if s.module == "craft"} == set(craft.CASES)


@pytest.mark.oracle
@pytest.mark.parametrize("name", craft.CASES)
def test_pytorch_has_what_it_is_asked_for(name, monkeypatch):
    """Each call of each case, on a CPU; flex_attention would be compiled there for a minute."""
    pytest.importorskip("torch")
    monkeypatch.syspath_prepend(apart.baseline_script("torch_kernels.py").parent)
    calls = __import__("torch_kernels").calls
    for one in craft.CASES[name](Scale(small=True, mock=False)):
        made = calls(device="cpu", **one.baseline)
        for way in one.against:
            call = made["run" if way == "peer" else f"run {way}"]
            assert way == "flex" or call() is not None


def test_bytes_of_weights_of_few_bits():
    """A code and its share of a scale for each number: 8, 4.5 and 4.25 bits, and an exponent for each row."""
    nbytes = {one.name.partition(",")[0]: one.nbytes for one in craft.few_rows(Scale(small=False, mock=False))}
    numbers, rows = 50304 * 4096, 2 * 50304
    assert nbytes["bf16"] == 2 * numbers and nbytes["int8"] == numbers + rows + rows
    assert nbytes["int4"] == numbers * 4.5 / 8 + rows and nbytes["nf4"] == numbers * 4.25 / 8 + rows


@pytest.mark.parametrize("name", ["few", "rows", "bits"])
def test_bytes_are_those_that_the_op_must_move(name):
    """But for what is small beside them: statistics, a norm's weight, the few rows themselves."""
    for one in craft.CASES[name](Scale(small=False, mock=False)):
        (op,) = one.program().ops
        assert one.nbytes <= op.bytes() < 1.02 * one.nbytes, one.name


def test_what_is_measured_and_asked_for():
    """Of sparse kernels a time of their density and a little; of rows the longest."""
    cases = craft.block_products(Scale(small=False, mock=False))
    assert {one.against["dense"] for one in cases} == {round(1 / (density + 0.08), 2) for density in (1 / 16, 1 / 4)}
    windows = [one.baseline["window"] for one in craft.attentions(Scale(small=False, mock=False))]
    flexed = ["flex" in one.against for one in craft.attentions(Scale(small=False, mock=False))]
    assert windows == [256, 256, 0, 0, 0, 0] and flexed == [window > 0 for window in windows]
    rows = [(one.baseline["backward"], one.baseline["columns"]) for one in craft.long_rows(Scale(small=False, mock=False))]
    assert rows == [(False, 32768)] * 2 + [(True, 16384)] * 2  # as many as each has in registers
