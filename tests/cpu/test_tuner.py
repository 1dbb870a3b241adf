"""Tuning: what is chosen, that bits do not depend on it, and that nothing wrong, hanging or crashing is ever chosen."""

from __future__ import annotations

import json
import time
from contextlib import closing
from dataclasses import replace
from itertools import cycle

import numpy as np
import pytest

from barellm.assembly.build import build_programs
from barellm.assembly.programs import build
from barellm.cli import main
from barellm.config import OptimConfig
from barellm.config.overrides import changed
from barellm.cpu import gemm_config, tuning
from barellm.cpu import isa as isas
from barellm.cpu.gemm_config import GemmConfig, Tile
from barellm.cpu.isa import host
from barellm.cpu.kernel import Lowering
from barellm.cpu.kernels.gemm import amx, gemm
from barellm.cpu.kernels.gemm.skinny_gemm import skinny_configs
from barellm.cpu.step import CpuSession, lower_and_plan
from barellm.cpu.tuner import candidates, faults, tuner
from barellm.cpu.tuner.harness import Harness
from barellm.cpu.tuner.problem import configured, problems_of
from barellm.models import preset
from barellm.models.gpt2 import Config as ModelConfig
from barellm.optim.adamw import adamw
from barellm.program import ops
from barellm.program.builder import Program, Store
from barellm.program.tensor import Dim, View
from barellm.runtime.tuner import decision
from barellm.runtime.tuner.decision import Trial, Verdict
from barellm.runtime.tuner.problem import Candidate
from barellm.runtime.tuner.worker import Lost
from barellm.tools.inspect import kernels
from tests.cpu.check import changed as changed_constants

MODEL = ModelConfig(layers=2, heads=2, d_model=40, vocab_size=131, max_seq=24)
TINY = ("shakespeare-char", "--model.layers", "1", "--model.d_model", "8", "--model.heads", "1", "--batch", "1", "--seq", "8")


WAY = {"tile": [8, 3], "mc": [8, 8], "nc": 48, "order": "rows", "kc": None, "overlap": "prefetch"}


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("BARELLM_CACHE", str(tmp_path))
    monkeypatch.delenv("BARELLM_TUNING", raising=False)


def programs():
    return build(MODEL, batch=2, seq=24, optimizer=lambda p: adamw(p, OptimConfig()))[1]


def works():
    built = lower_and_plan(programs(), threads=2)
    return problems_of(call for name in ("forward_backward", "eval") for call in built.calls[name])


def tune_to(configs: dict) -> None:
    """{work: config} as if they had won."""
    for work, config in configs.items():
        tuner.CpuTuner(host(), 2, 0).keep(Verdict(work, work.default(host()), config, 0.9, 1e-3, 1))


def used() -> list[GemmConfig]:
    """The configs of the GEMMs of `forward_backward`."""
    calls = lower_and_plan(programs(), threads=2).calls["forward_backward"]
    return [dict(c.spec.constants)["config"] for c in calls if "config" in dict(c.spec.constants)]


def trained() -> tuple[str, list[float]]:
    session = CpuSession(programs(), threads=2)
    session.run("init", seed=3)
    tokens = np.random.default_rng(0).integers(0, MODEL.vocab_size, (3, 2, 24)).astype(np.int32)
    losses = []
    for step in range(2):
        session.write("tokens", tokens[step])
        session.write("targets", tokens[step + 1])
        session.run("forward_backward", batch=2, seq=24, inv_targets=1 / 48)
        session.run("optimizer_step", step=step + 1, lr=1e-2)
        losses.append(float(session.read("loss")[0]))
    digest = session.digest()
    session.close()
    return digest, losses


@pytest.mark.extended
def test_a_tuned_run_has_the_bits_of_an_untuned_one():
    before, untuned = used(), trained()
    other = {}
    for work in works():
        possible = [c for c in candidates.possible(work, host()) if c != work.default(host())]
        other[work] = max(possible, key=lambda c: (c.tile != work.default(host()).tile, c.order, -c.mc))
    tune_to(other)
    assert all(a != b for a, b in zip(before, used(), strict=True)), "every product of the step was tuned"
    assert trained() == untuned


def test_the_database_counts_what_holds_here(monkeypatch):
    assert tuning.count(host(), 2) == 0
    work = works()[0]
    tune_to({work: candidates.possible(work, host())[0]})
    assert tuning.count(host(), 2) == 1 and tuning.count(host(), 3) == 0
    before = used()
    monkeypatch.setenv("BARELLM_TUNING", "0")
    assert used() != before
    monkeypatch.delenv("BARELLM_TUNING")
    tune_to({work: work.default(host())})  # tuned again, and the default is as good
    assert tuning.count(host(), 2) == 0


@pytest.mark.parametrize("entry, words", [
    ({"choice": {"tile": [8, 3]}}, "expected tile, mc, nc, order, kc, overlap"),
    ({"choice": None}, "expected tile, mc, nc, order, kc, overlap"),
    ({"choice": WAY | {"tile": [31, 7], "mc": [31, 31], "nc": 7 * 16}}, "no tile of 31 x 7"),
    ({"choice": WAY | {"mc": [9, 9]}}, "multiples of the tile"),
    ({"choice": WAY | {"nc": -48}}, "multiples of the tile"),
    ({"choice": WAY | {"mc": [8.0, 8]}}, "multiples of the tile"),
    ({"choice": WAY | {"order": "spiral"}}, "multiples of the tile"),
])  # fmt: skip
def test_entries_that_make_no_sense_are_ignored(entry, words, capsys):
    before = used()
    tuning.database().change({work.key(host(), 2): entry for work in works()[:1]})
    assert used() == before and used() == before
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "tuning ignored" in error and words in error


def test_a_choice_survives_the_database():
    isa = isas.X86["avx512"]
    choice = GemmConfig(Tile(8, 3), 16, 32, 3 * isa.lanes, "columns", 64, "none")
    entry = json.loads(json.dumps(tuning.to_entry(choice)))
    assert tuning.from_entry(entry, isa, "forward", "fp32", 100) == choice
    assert str(choice) == "8x3v,mc=16/32,nc=48,kc=64,columns,overlap=none"


@pytest.mark.parametrize("kc, overlap, role, isa, words", [
    (64, "prefetch", "forward", "avx512", ""),
    (100, "pack", "input_gradient", "avx512_bf16", ""),  # the whole depth need not be a multiple
    (None, "none", "weight_gradient", "avx512", ""),
    (0, "prefetch", "forward", "avx512", "0 of a depth of 100"),
    (-32, "prefetch", "forward", "avx512", "-32 of a depth of 100"),
    (48, "prefetch", "forward", "avx512", "48 of a depth of 100"),
    (128, "prefetch", "forward", "avx512", "128 of a depth of 100"),
    (64.0, "prefetch", "forward", "avx512", "64.0 of a depth of 100"),
    (64, "prefetch", "weight_gradient", "avx512", "no KC that weight_gradient"),  # its chunks are part of what it is
    (64, "prefetch", "forward", "amx_bf16", "no KC that forward"),  # its tiles have their own
    (None, "pack", "forward", "amx_bf16", "'pack' is no overlap that forward"),
    (None, "all", "forward", "avx512", "'all' is no overlap that forward"),
])  # fmt: skip
def test_parts_and_work_ahead_that_a_product_cannot_have_are_refused(kc, overlap, role, isa, words):
    isa, dtype = isas.X86[isa], "bf16"
    tile = gemm_config.tiles(isa, dtype)[0]
    entry = tuning.to_entry(GemmConfig(tile, 2 * tile.mr, 2 * tile.mr, tile.nr(isa), "rows", kc, overlap))
    if not words:
        assert tuning.from_entry(entry, isa, role, dtype, 100).kc == kc
        return
    with pytest.raises(ValueError, match=words):
        tuning.from_entry(entry, isa, role, dtype, 100)


def test_works_are_what_lowering_asks_for():
    """Else nothing would ever find its entry. A chunk that is not full asks as a full one."""
    found = works()
    assert len({w.key(host(), 2) for w in found}) == len(found)
    assert {w.operation for w in found} >= {"forward_gelu", "forward_residual", "input_gradient_gelu_backward", "weight_gradient"}
    for work in found:
        for spec, operands in zip(work.specs, work.operands, strict=True):
            assert len(spec.operands) == len(operands)
            assert [o.name for o in operands if o and o.written]
        assert all(o is None or min(o.shape) > 0 for row in work.operands for o in row)


@pytest.mark.parametrize(
    "axes, more", [((Dim("batch", 2), Dim("seq", 5), 3), 0), ((41,), 0), ((41,), 5)], ids=["inner axis", "static", "views"]
)
@pytest.mark.parametrize("op_type", [ops.Matmul, ops.MatmulDx, ops.MatmulDw], ids=lambda op: op.name)
def test_products_over_axes_of_any_kind_can_be_tuned(op_type, axes, more):
    """A bed runs them at sizes of its own, all right, and with rows side by side."""
    store = Store()
    p = Program(store)
    bases = {name: p.input(name, (*axes, width + more), "fp32") for name, width in (("x", 7), ("dy", 11))}
    x, dy = (View(bases[name], more // 2, width) for name, width in (("x", 7), ("dy", 11)))
    weight = p.parameter("weight", (11, 7))
    given = {"x": x, "dy": dy, "weight": weight}
    wanted = {ops.Matmul: ("x", "weight"), ops.MatmulDx: ("dy", "weight"), ops.MatmulDw: ("dy", "x")}[op_type]
    op = p.apply(op_type, **{name: given[name] for name in wanted})
    p.output("result", next(iter(op.outputs.values())))
    (work,) = problems_of(lower_and_plan({"op": p}, threads=2).calls["op"])
    assert work.tokens == (30 if len(axes) == 3 else 41)
    harness = Harness(work, 2, 1 << 20)
    try:
        harness.check(Candidate(work.default(host())))
    finally:
        harness.close()


def test_candidates_fit_and_the_default_comes_first():
    for work in works():
        made = candidates.candidates(work, host(), 2)
        assert made[0] == work.default(host()) and len(set(made)) == len(made) <= candidates.MOST + 1
        for c in made[1:]:
            assert tuning.from_entry(tuning.to_entry(c), host(), work.operation, work.dtype, work.depth) == c


def a_work(op_type, rows, cols, depth, isa, dtype="fp32"):
    """One product with a result of (rows, cols) from `depth`, as a training program has it."""
    store = Store()
    p = Program(store, compute=dtype)
    tokens = (Dim("batch", 1), Dim("seq", depth if op_type is ops.MatmulDw else rows))
    if op_type is ops.MatmulDw:
        given = {"dy": p.input("dy", (*tokens, rows), dtype), "x": p.input("x", (*tokens, cols), dtype)}
    elif op_type is ops.MatmulDx:
        given = {"dy": p.input("dy", (*tokens, depth), dtype), "weight": store.get("w", (depth, cols), dtype, "parameter")}
    else:
        given = {"x": p.input("x", (*tokens, depth), dtype), "weight": store.get("w", (cols, depth), dtype, "parameter")}
    p.output("result", next(iter(p.apply(op_type, **given).outputs.values())))  # pyright: ignore[reportArgumentType]
    (work,) = problems_of(lower_and_plan({"op": p}, isa=isa, threads=2).calls["op"])
    return work


def test_the_best_is_refined_in_its_parts_and_in_what_is_done_ahead(monkeypatch):
    monkeypatch.setattr(candidates.processor, "caches", lambda: {2: 1 << 20})
    isa = isas.X86["avx512"]
    work = a_work(ops.Matmul, 256, 768, 768, isa)
    best = GemmConfig(Tile(8, 3), 128, 128, 48, "columns")
    found = candidates.refined(work, best, isa)
    assert len(set(found)) == len(found) == 3 * 3 * 3 - 1 and best not in found
    assert {(c.tile.mr, c.kc, c.overlap) for c in (best, *found)} == {
        (rows, kc, overlap)
        for rows in (8, 12, 6)
        for kc in (None, 192, 768)  # of 1536 bytes, which is the default; of 768; all of it
        for overlap in ("prefetch", "pack", "none")
    }
    # Sums wait for the next part beside each other, and go nowhere where there is one part.
    assert {(c.tile.mr, c.kc, c.nc) for c in found if c.tile.mr != 6} == {
        (8, None, 48), (8, 192, 144), (8, 768, 48), (12, None, 160), (12, 192, 160), (12, 768, 32),
    }  # fmt: skip
    assert {(c.mc, c.long_mc, c.order) for c in found} == {(n, n, "columns") for n in (128, 132)}
    for c in found:
        assert tuning.from_entry(json.loads(json.dumps(tuning.to_entry(c))), isa, work.operation, "fp32", 768) == c
    # From the best in parts, the other way round.
    assert best in candidates.refined(work, found[0], isa)


def test_panels_that_leave_the_second_cache_are_not_tried(monkeypatch):
    isa = isas.X86["avx512"]
    work = a_work(ops.MatmulDx, 256, 768, 3072, isa)

    def whole(level2: int) -> set[int]:
        monkeypatch.setattr(candidates.processor, "caches", lambda: {2: level2})
        return {c.tile.mr for c in candidates.refined(work, work.default(isa), isa) if c.kc == 3072}

    assert whole(2 << 20) == {6, 8, 12} and whole(1 << 20) == {12} and whole(1 << 18) == set()


def test_what_cannot_be_refined_is_not():
    tiles, vectors, narrow = isas.X86["amx_bf16"], isas.X86["avx512_bf16"], isas.X86["avx2"]
    for op_type in (ops.Matmul, ops.MatmulDw):
        work = a_work(op_type, 96, 96, 96, tiles, "bf16")
        assert not candidates.refined(work, work.default(tiles), tiles)
    gradient = a_work(ops.MatmulDw, 96, 96, 96, vectors, "bf16")
    best = replace(gradient.default(vectors), overlap="pack")
    assert candidates.refined(gradient, best, vectors) == [replace(best, overlap=a) for a in ("prefetch", "none")]
    # With 16 registers nothing is packed beside a product's tile, only fetched.
    work = a_work(ops.Matmul, 96, 96, 96, narrow)
    assert {c.overlap for c in candidates.refined(work, work.default(narrow), narrow)} == {"prefetch", "none"}


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.extended
def test_refinements_keep_the_bits_of_every_product(dtype, monkeypatch):
    """The deepest of each role of a model, with what is fused to it. A tile that an activation's slope follows is finished beside
    the next, as only deep ones are."""
    changed_constants(monkeypatch, gemm, DEFER_DEPTH=1)
    monkeypatch.setattr(candidates, "KC_BYTES", (128,))
    isa = host()
    made = build(MODEL, batch=2, seq=24, compute=dtype, optimizer=lambda p: adamw(p, OptimConfig()))[1]
    found = sorted(problems_of(lower_and_plan(made, threads=2).calls["forward_backward"]), key=lambda work: work.depth)
    deepest = {work.operation: work for work in found}
    assert deepest.keys() >= {"forward_gelu", "forward_residual", "input_gradient_gelu_backward", "weight_gradient"}
    for work in deepest.values():
        usual = work.default(isa)
        ways = [c for c in candidates.refined(work, usual, isa) if c.tile == usual.tile]
        assert len(ways) >= 1 or amx.uses_tiles(isa, dtype)
        harness = Harness(work, 2, 1 << 16)
        for way in ways:
            harness.check(Candidate(way))
        harness.close()


@pytest.mark.parametrize("op_type", [ops.Matmul, ops.MatmulDx, ops.MatmulDw], ids=lambda op: op.name)
def test_code_has_what_is_done_ahead_and_no_more(op_type):
    """A fetch of the result, of rows where the depth goes in parts; the packing of a panel once more, beside a tile."""
    isa = isas.X86["avx512"]
    work = a_work(op_type, 64, 96, 768, isa)

    def code(overlap: str) -> tuple[int, int]:
        ir = configured(work.specs[0], replace(work.default(isa), overlap=overlap)).ir(isa)
        return ir.count("call void @llvm.prefetch"), ir.count("br label")

    fetch, pack, nothing = (code(overlap) for overlap in ("prefetch", "pack", "none"))
    assert fetch[0] > pack[0] > nothing[0] and pack[1] > nothing[1]


def test_a_prompt_of_many_rows_is_run_with_as_many():
    """A decoding program has a kernel for few rows, so the one for many does nothing with them."""
    calls = lower_and_plan(build(replace(MODEL, max_seq=128), batch=1, seq=8, decode_batch=1)[1], threads=2).calls["decode"]
    found = problems_of(calls)
    many = [w for w in found if not w.skinny]
    for work in found:  # one row of a few is timed, and all rows of the others
        assert work.flops == 2 * (1 if work.skinny else work.rows) * work.cols * work.depth
    assert many and {dict(s.constants)["least"] for w in many for s in w.specs} == {65}
    harness = Harness(many[0], 2, 1 << 16)
    assert {tokens for _, tokens, _ in harness.runs} == {65, 127, 128}
    harness.check(Candidate(many[0].default(host())))
    harness.close()


def test_products_on_amx_tiles_are_tried_with_other_claims():
    config = changed(preset("gpt2-124m"), {"model.layers": 1, "train.micro_batch_size": 4, "train.seq": 256, "train.dtype": "bf16"})
    isa = isas.cross("amx_bf16", kernels.X86_TRIPLE)
    built = lower_and_plan(build_programs(config), isa=isa, threads=2)
    found = {}
    for work in problems_of(built.calls["forward_backward"]):
        made = candidates.candidates(work, isa, 2)
        assert made[0] == work.default(isa) and len(set(made)) == len(made) <= candidates.MOST + 1
        assert all(tuning.from_entry(tuning.to_entry(c), isa, work.operation, "bf16", work.depth) == c for c in made)
        found[work.operation, work.cols] = {(c.mc, c.nc) for c in made}
    assert found["forward", 2304] == {(rows, columns) for rows in (256, 512, 1024) for columns in (192, 384, 768)}
    assert len(found["weight_gradient", 768]) > 5


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.extended
def test_products_of_few_rows_are_tuned_and_keep_their_bits(dtype):
    """Every way is right in a bed, goes through the database, and writes the text that the default writes."""
    built = build(MODEL, batch=1, seq=8, compute=dtype, decode_batch=1)[1]
    decode = {"decode": built["decode"]}

    def written() -> tuple[list, bytes]:
        session = CpuSession(decode, threads=2)
        for name, t in session.tensors.items():
            if t.role == "parameter":
                session.write_rows(name, 0, np.random.default_rng(len(name)).standard_normal(t.shape).astype(np.float32))
        for pos, count in ((0, 5), (5, 1)):
            session.write("tokens", np.arange(count, dtype=np.int32)[None] + 3)
            session.run("decode", batch=1, seq=count, pos=pos)
        choices = [dict(c.spec.constants)["config"] for c in session.calls["decode"] if c.spec.name == "skinny_gemm"]
        found = session.read("logits").tobytes()
        session.close()
        return choices, found

    found = [w for w in problems_of(lower_and_plan(decode, threads=2).calls["decode"]) if w.skinny]
    assert {w.operation for w in found} == {"few", "few_gelu", "few_residual"} and {w.timed for w in found} == {1}
    before, text = written()
    for work in found:
        ways = candidates.candidates(work, host(), 2)
        assert ways[0] == work.default(host()) and len(set(ways)) == len(ways) > 3
        harness = Harness(work, 2, 1 << 16)
        for way in ways[1:]:
            harness.check(Candidate(way))
        harness.close()
    tune_to({work: candidates.candidates(work, host(), 2)[-1] for work in found})
    after, tuned = written()
    assert all(a != b for a, b in zip(before, after, strict=True)) and tuned == text


def test_an_entry_of_few_rows_that_is_no_way_is_ignored(capsys):
    isa = host()
    key = tuning.key(isa, 2, "few", "fp32", 40, 40, 64)
    tuning.database().change({key: {"choice": {"spans": 3, "together": 99, "prefetch": True}}})
    want = skinny_configs(isa, "fp32", 40, 40)[0]
    assert tuning.select_skinny_config(Lowering(ops.Matmul({}, {}), isa, 2), "few", "fp32", 40, 40) == want
    assert "expected panels, unroll, prefetch" in capsys.readouterr().err


@pytest.mark.alone
def test_faulty_candidates_are_rejected_with_the_reason():
    trials = tuner.self_test(threads=2, limit=3.0)
    assert all(t.passed for t in trials), trials
    assert len(trials) == len(faults.FAULTS) + 1 and sum(bool(t.reason) for t in trials) == len(faults.FAULTS)


def test_a_fault_that_is_not_rejected_fails_the_self_test():
    default, right = (Candidate(config) for config in candidates.candidates(works()[0], host(), 2)[:2])
    faulty = Candidate(default.config, "hangs")
    worker = Scripted({faulty: cycle([1.5]), right: cycle([1.1])})
    trial, honest = decision.self_test(worker, works()[0], default, right, [("hangs", "it hangs")])  # pyright: ignore
    assert not trial.passed and trial.reason == "" and honest.passed


def test_status_of_the_self_test_command(monkeypatch, capsys):
    trials = [Trial("hangs", "", "rejected: it hangs", False)]
    monkeypatch.setattr(tuner, "self_test", lambda threads: trials)
    assert main.main(["tune", "--self-test"]) == 1
    assert "WRONG hangs" in capsys.readouterr().out
    monkeypatch.setattr(tuner, "self_test", lambda threads: [replace(trials[0], reason="it hangs", passed=True)])
    assert main.main(["tune", "--self-test", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["passed"] is True


def default_of(work):
    return Candidate(work.default(host()))


class Scripted:
    """A worker whose times are told in advance."""

    def __init__(self, ratios, lost=()):
        self.ratios, self.lost, self.timed = ratios, lost, []

    def open(self, problem):
        pass

    def close(self):
        pass

    def check(self, candidate):
        return ""

    def time(self, chosen, rounds):
        self.timed.append((chosen, rounds))
        if any(c in self.lost for c in chosen):
            raise Lost("it hangs")
        return [[next(self.ratios[c]) for _ in range(rounds)] for c in chosen], 1e-3


@pytest.mark.parametrize("first, wins", [
    ([0.90], True), ([0.99], False), ([1.1], False),  # clearly faster; within noise; slower
    ([0.7, 0.7, 1.02], False),  # faster in two rounds of three only
    ([0.9] * 14 + [1.0] * 11, False),  # fast until it has to prove it
])  # fmt: skip
def test_only_a_clear_winner_is_chosen(first, wins):
    work = works()[0]
    a, b = (Candidate(c) for c in candidates.candidates(work, host(), 2)[1:3])
    verdict = decision.decide(Scripted({a: cycle(first), b: cycle([1.5])}), work, [a, b], default_of(work))  # pyright: ignore
    assert verdict.best == (a.config if wins else work.default(host()))
    assert verdict.tried == 2 and not verdict.rejected
    assert verdict.timed[-1] == (str(b.config), 1.5) and verdict.timed[0][0] == str(a.config)
    assert verdict.to_json()["timed"][-1] == {"candidate": str(b.config), "ratio": 1.5}


def test_a_candidate_that_hangs_while_it_is_timed_is_rejected():
    work = works()[0]
    a, b = (Candidate(c) for c in candidates.candidates(work, host(), 2)[1:3])
    worker = Scripted({a: cycle([0.5]), b: cycle([0.9])}, lost=(a,))
    verdict = decision.decide(worker, work, [a, b], default_of(work))  # pyright: ignore
    assert verdict.best == b.config and verdict.rejected == [(str(a), "while it was timed: it hangs")]


@pytest.mark.parametrize("rival_s, told", [(0.6, True), (0.7, False), (0.9, False)])
def test_the_best_is_refined_and_what_has_other_bits_is_told_and_not_kept(rival_s, told):
    """It is told where it would clearly beat what won."""
    work = works()[0]
    a, b, c, d = (Candidate(choice) for choice in candidates.candidates(work, host(), 2)[1:5])
    worker = Scripted({a: cycle([0.9]), b: cycle([0.8]), c: cycle([0.7]), d: cycle([rival_s])})
    asked = []

    def refined(best):
        asked.append(best)
        return [c]

    verdict = decision.decide(worker, work, [a, b], default_of(work), refined=refined, rivals=[d])  # pyright: ignore
    assert asked == [b] and verdict.best == c.config and verdict.tried == 4
    assert verdict.rival == ((str(d), 0.6) if told else None)
    worker = Scripted({a: cycle([1.1])})
    decision.decide(worker, work, [a], default_of(work), refined=lambda best: asked.append(best) or [])  # pyright: ignore
    assert asked[1] == default_of(work)


def test_when_the_time_is_up_nothing_more_is_tried():
    work = works()[0]
    a = Candidate(candidates.candidates(work, host(), 2)[1])
    worker = Scripted({a: cycle([0.5])})
    verdict = decision.decide(worker, work, [a], default_of(work), end=time.monotonic())  # pyright: ignore
    assert verdict.tried == 0 and verdict.best == verdict.default and verdict.default_s == 1e-3


@pytest.mark.extended
def test_a_child_times_what_it_checked_and_goes_with_its_parent():
    work = tuner.small_problem(host(), 1)
    with closing(tuner.CpuTuner(host(), 1, 1).worker(30.0)) as worker:
        worker.open(work)
        same = Candidate(work.default(host()))
        ratios, seconds = worker.time([same], 3)  # checks it first
        # A busy machine may hold up either side of a round, by any factor.
        assert len(ratios[0]) == 3 and min(ratios[0]) < 20 and max(ratios[0]) > 0.05 and seconds > 0
        process = worker._process
        assert process is not None
        worker._connection.close()
        assert process.wait(30) == 0


def test_command_keeps_what_was_found_when_interrupted(monkeypatch, capsys):
    real, seen = decision.decide, []

    def decide(worker, work, choices, default, **more):
        if seen:
            raise KeyboardInterrupt
        seen.append(work)
        assert [c.config for c in more["refined"](default)] == candidates.refined(work, default.config, host())
        more["refined"] = lambda best: []
        verdict = real(worker, work, choices[:2], default, **more)
        return replace(verdict, best=choices[0].config, ratio=0.8)

    monkeypatch.setattr(decision, "decide", decide)
    assert main.main(["tune", *TINY, "--json"]) == 130
    found = json.loads(capsys.readouterr().out)
    assert found["status"] == "interrupted" and found["products"] > 5
    (row,) = found["tuned"]
    assert row["ratio"] == 0.8 and 1 <= row["tried"] <= 2 and row["rejected"] == []
    assert main.main(["doctor", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["barellm uses"]["tuned GEMMs"] == 1
    assert main.main(["tune", "--clear"]) == 0
    assert "what 1 version " in capsys.readouterr().out


@pytest.mark.parametrize("argv, words", [
    (["--minutes", "soon"], ["--minutes", "'soon'", "above 0"]),
    (["gpt2-12m"], ["gpt2-12m"]),
    (["--self-tst"], ["--self-tst", "--self-test"]),
])  # fmt: skip
def test_mistakes_are_one_line(argv, words, capsys):
    assert main.main(["tune", *argv]) == 2
    text = capsys.readouterr().err
    assert text.count("\n") == 1 and all(word in text for word in words)
