"""Tuning of products and attention on the driver in Python: what is a candidate, that wrong and hanging ones are rejected, what is
kept."""

import json
import re
from dataclasses import replace

import pytest

from barellm.assembly.build import build_programs
from barellm.cli import main
from barellm.cuda import attention_config, gemm_config, tuning
from barellm.cuda.kernel import Target
from barellm.cuda.tuner import candidates as tried
from barellm.cuda.tuner import tuner
from barellm.cuda.tuner.candidates import candidates, problems_of, refined, rivals
from barellm.cuda.tuner.harness import Harness
from barellm.cuda.tuning import AttentionProblem, GemmProblem
from barellm.runtime.tuner import decision
from barellm.runtime.tuner.database import Database
from barellm.runtime.tuner.decision import Verdict
from barellm.runtime.tuner.harness import Wrong
from barellm.runtime.tuner.problem import Candidate
from benchmarks.gpu_check.ship import ship
from tests.profiling.conftest import SMALL, small
from tests.simulators.mock import Gpu

MOCK = Target(80, 3, name="Mock GPU")
HOPPER = Target(90, 3, name="Mock GPU")
CHILD = "tests.cuda.tuner_child"
WORDS = [word for key, value in SMALL.items() for word in (f"--{key}", str(value))]


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("BARELLM_CACHE", str(tmp_path))
    monkeypatch.delenv("BARELLM_TUNING", raising=False)


def test_everything_that_a_model_does_is_there_once_with_all_tiles():
    works = problems_of(build_programs(small(train__dtype="bf16")), MOCK)
    assert {w.operation for w in works} == {"nt", "nn", "tn", "forward", "keys", "queries"} and len(set(works)) == len(works)
    for work in works:
        default, *others = candidates(work, MOCK)
        assert default.config == work.default(80)
        assert {default.config, *(c.config for c in others)} == set(work.configs(80)) and len(others) == len(set(others))
        if isinstance(work, GemmProblem):
            assert {c.config for c in (default, *others)} == set(gemm_config.gemm_configs(work.dtype, 80))
            assert {c.config.group_m for c in (default, *refined(default))} == set(gemm_config.GROUP_SIZES)


@pytest.mark.extended
def test_faulty_candidates_are_rejected_for_their_reason(monkeypatch):
    monkeypatch.setattr(tuner, "HARNESS", CHILD)
    trials = tuner.self_test(MOCK, limit=8.0)
    assert [t.candidate for t in trials] == ["wrong_values", "writes_beyond", "hangs", "another tile"]
    assert all(t.passed for t in trials), trials


@pytest.mark.parametrize("role, dtype", [("nt", "bf16"), ("nn", "bf16"), ("tn", "bf16"), ("nt", "tf32")])
@pytest.mark.extended
def test_bits_decide(role, dtype, monkeypatch):
    """Every tile, in every order, has the default's bits; a result that is off by a bit is not right."""
    Gpu().install(monkeypatch)
    work = GemmProblem(role, dtype, 40, 24, 48)
    harness = Harness(work, calls=1)
    _, *others = candidates(work, MOCK)
    for candidate in (*others, *refined(others[0])):
        harness.check(candidate)
    assert harness.time(others[:1], 3) == [[1.0] * 3] and harness.seconds > 0
    _off_by_a_bit(harness, "out")
    with pytest.raises(Wrong, match=r"other bits than the default's \(1 x 1\): first at byte 0 of "):
        harness.check(others[0])
    harness.close()


def _off_by_a_bit(harness: Harness, name: str) -> None:
    """What is expected of the first run's first result."""
    t = {**harness.default.programs["op"].named, **harness.default.tensors}[name]
    at, memory = harness.default.plan.offsets[t], harness.expected[harness.case.runs[0]]
    byte = memory.read(at, at + 1, harness.default.stream) ^ 1
    memory.write(at, byte, harness.default.stream)


@pytest.mark.parametrize("role", ["forward", "keys", "queries"])
@pytest.mark.parametrize("dropout, heads, kv_heads", [(False, 1, 0), (True, 1, 0), (True, 2, 1)])
@pytest.mark.extended
def test_attention_s_tiles_have_one_result(role, dropout, heads, kv_heads, monkeypatch):
    """The default's bits; those that have others are right too, and are not among them."""
    Gpu().install(monkeypatch)
    work = AttentionProblem(role, "bf16", 1, 67 if kv_heads else 131, heads, 64, dropout, kv_heads)
    harness = Harness(work, calls=1)
    default, *others = candidates(work, MOCK)
    assert others and all(c.config.keys == default.config.keys for c in others if role == "forward")
    for candidate in others if dropout else (*others, *rivals(work, MOCK)):
        harness.check(candidate)
    assert harness.time([candidate], 3) == [[1.0] * 3]
    harness.close()


def test_what_won_is_taken_by_the_next_lowering_and_nonsense_is_not(monkeypatch, capsys):
    work = GemmProblem("nt", "bf16", 64, 96, 64)
    default, other, *_ = candidates(work, MOCK)
    tuner.CudaTuner(MOCK).keep(Verdict(work, default.config, other.config, 0.9, 1e-3, 1))
    assert tuning.select_config(MOCK, work) == other.config
    assert tuning.select_config(Target(80, 4, name="Mock GPU"), work) == default.config  # another card
    assert tuning.select_config(Target(80, 3, name="Mock GPU Ti"), work) == default.config
    monkeypatch.setenv("BARELLM_TUNING", "0")
    assert tuning.select_config(MOCK, work) == default.config
    monkeypatch.delenv("BARELLM_TUNING")
    tuning.database().change({tuning.key(MOCK, work): {"tile": {"rows": 3}}})
    assert tuning.select_config(MOCK, work) == default.config
    assert "tuning ignored" in capsys.readouterr().err
    tuner.CudaTuner(MOCK).keep(Verdict(work, default.config, default.config, 1.0, 1e-3, 1))
    assert not tuning.database().entries


def key_of(at: str) -> tuning.Problem:
    """What a key names."""
    words = at.split(": ")[1]
    name = r"(?:(hopper)(?: (\w+))? )?(nt|nn|tn) (\w+), (\d+) x (\d+) from (\d+)"
    if found := re.fullmatch(name, words):
        kernel, epilogue, role, dtype, *sizes = found.groups()
        return tuning.GemmProblem(role, dtype, *map(int, sizes), kernel=kernel or "triton", epilogue=epilogue or "")
    name = r"attention (\w+) (\w+), (\d+) x (\d+) heads(?: over (\d+))? of (\d+), (\d+) tokens(, dropout)?"
    found = re.fullmatch(name, words)
    assert found, at
    role, dtype, batch, heads, kv_heads, head, seq, dropout = found.groups()
    return tuning.AttentionProblem(role, dtype, int(batch), int(seq), int(heads), int(head), bool(dropout), int(kv_heads or 0))


def test_a_key_names_the_heads_of_keys_only_where_they_are_fewer():
    plain = tuning.AttentionProblem("keys", "bf16", 4, 1024, 12, 64)
    assert plain.name == "attention keys bf16, 4 x 12 heads of 64, 1024 tokens"
    for subject in (plain, replace(plain, kv_heads=4), replace(plain, kv_heads=4, dropout=True)):
        assert key_of(tuning.key(HOPPER, subject)) == subject


def test_what_is_shipped_names_tiles_that_exist():
    entries = json.loads(tuning.SHIPPED.read_text())["entries"]
    for at, entry in entries.items():
        tuning.from_entry(entry, key_of(at), int(at.split("sm_")[1].split(",")[0]))


GELU = GemmProblem("nt", "bf16", 96, 128, 72, "hopper", "gelu")


def test_what_was_measured_on_a_card_is_shipped_for_that_card(tmp_path, monkeypatch):
    default, other, *_ = candidates(GELU, HOPPER)
    tuner.CudaTuner(HOPPER).keep(Verdict(GELU, default.config, other.config, 0.9, 1e-3, 1))
    (at,) = tuning.database().entries
    assert at == "Mock GPU, sm_90, 3 multiprocessors: hopper gelu nt bf16, 96 x 128 from 72"
    assert key_of(at) == GELU
    path = tmp_path / "shipped.json"
    path.write_text('{"entries": {}}')
    assert ship(tuning.database().entries, path) == 1 and ship(tuning.database().entries, path) == 0
    monkeypatch.setattr(tuning, "shipped", lambda: json.loads(path.read_text())["entries"])
    monkeypatch.setenv("BARELLM_CACHE", str(tmp_path / "another user's"))
    Database.opened.cache_clear()
    assert not tuning.database().entries and tuning.select_config(HOPPER, GELU) == other.config
    plain = replace(GELU, epilogue="")
    for target, product in ((MOCK, GELU), (Target(90, 3, name="NVIDIA H200"), GELU), (HOPPER, plain)):
        assert tuning.select_config(target, product) == product.default(target.arch)


def test_a_shipped_form_that_does_not_exist_is_ignored_with_a_line(monkeypatch, capsys):
    at = tuning.key(HOPPER, GELU)
    group = tuning.to_entry(replace(GELU.default(90), group_m=3))
    for entry in ({"form": {"cols": 512, "stages": 1, "slots": 2}}, {"tile": {}}, {"form": 3}, group):
        monkeypatch.setattr(tuning, "shipped", lambda entry=entry: {at: entry})
        tuning.database()._warned.clear()
        assert tuning.select_config(HOPPER, GELU) == GELU.default(90)
        text = capsys.readouterr().err
        assert text.count("\n") == 1 and "tuning ignored" in text and at in text


HOPPERS = [
    ("nt", ""),
    ("nt", "gelu"),
    ("nt", "residual"),
    ("nn", ""),
    ("nn", "gelu_backward"),
    ("nt", "relu2"),
    ("nn", "relu2_backward"),
    ("nt", "relu2_backward"),
    ("tn", ""),
    ("tn", "start"),
]


@pytest.mark.slow
@pytest.mark.parametrize("role, epilogue", HOPPERS)
@pytest.mark.extended
def test_every_form_of_hopper_s_products_is_proved_and_the_fastest_by_the_clock_is_kept(role, epilogue, monkeypatch):
    """On the model of the machine that Gluon kernels have; the clock likes tiles of another width than the default's."""
    monkeypatch.setattr(gemm_config, "WAVE", 1)
    gpu = Gpu(arch=90)
    gpu.install(monkeypatch)
    sizes = {"nt": (67, 72, 136), "nn": (67, 72, 136), "tn": (128, 72, 67)}[role]
    work = GemmProblem(role, "bf16", *sizes, "hopper", epilogue)
    harness = Harness(work, calls=1)
    assert [call.spec.name for call in harness.default.calls["op"]] == ["hopper_gemm"]
    default, *others = candidates(work, HOPPER)
    assert {default.config, *(c.config for c in others)} == set(gemm_config.hopper_configs()) and len(others) == 3
    harness.check(refined(default)[0])
    wanted = next(c for c in others if c.config.tile_n != default.config.tile_n)
    gpu.cost = lambda spec: 0.5 if ("TILE_N", wanted.config.tile_n) in spec.constants else 1.0

    class Here:
        """The child's side, in this process."""

        open, close = lambda self, work: None, lambda self: None

        def check(self, candidate):
            return harness.check(candidate) or ""

        def time(self, contestants, rounds):
            return harness.time(contestants, rounds), harness.seconds

    verdict = decision.decide(Here(), work, others, default)  # pyright: ignore[reportArgumentType]
    harness.close()
    assert not verdict.rejected and verdict.best.tile_n == wanted.config.tile_n and verdict.ratio == pytest.approx(0.5)
    tuner.CudaTuner(HOPPER).keep(verdict)
    with_bits = tuning.select_config(HOPPER, work)
    assert with_bits == verdict.best


def test_a_candidate_is_named_by_all_that_it_is():
    tiles = [t for tile in gemm_config.gemm_configs("bf16", 90) for t in gemm_config.rasterizations(tile)]
    assert len({str(Candidate(t, f)) for t in tiles for f in ("", "hangs")}) == 2 * len(tiles)
    forms = [f for form in gemm_config.hopper_configs() for f in gemm_config.rasterizations(form)]
    blocks = attention_config.attention_configs("keys", 64, "bf16", 90)
    assert len({str(Candidate(t)) for t in (*forms, *blocks)}) == len(forms) + len(blocks)


def test_blocks_with_other_bits_are_never_taken(capsys):
    """Not even where a file says so."""
    work = AttentionProblem("forward", "bf16", 2, 1024, 12, 96)
    default, other, *_ = candidates(work, HOPPER)
    rival = rivals(work, HOPPER)[0]
    tuner.CudaTuner(HOPPER).keep(Verdict(work, default.config, other.config, 0.9, 1e-3, 1))
    assert tuning.select_config(HOPPER, work) == other.config
    at = tuning.key(HOPPER, work)
    assert at == "Mock GPU, sm_90, 3 multiprocessors: attention forward bf16, 2 x 12 heads of 96, 1024 tokens"
    assert key_of(at) == work
    tuning.database().change({at: tuning.to_entry(rival.config)})
    assert tuning.select_config(HOPPER, work) == default.config
    assert "tuning ignored" in capsys.readouterr().err


@pytest.mark.extended
def test_the_command_proves_everything_and_stops_in_time(monkeypatch, capsys):
    """With times that the mock makes up nothing wins."""
    Gpu().install(monkeypatch)
    monkeypatch.setattr(tuner, "HARNESS", CHILD)
    found = tried.problems_of

    def sample_indices(programs, target):
        works = found(programs, target)
        return [next(w for w in works if isinstance(w, kind)) for kind in (GemmProblem, AttentionProblem)]

    monkeypatch.setattr(tried, "problems_of", sample_indices)
    words = ["tune", "shakespeare-char", *WORDS, "--dtype", "bf16", "--device", "cuda", "--json"]
    assert main.main(words) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["machine"] == "Mock GPU, sm_80, 3 multiprocessors" and result["products"] == 2
    product, attention = result["tuned"]
    assert product["tried"] == len(gemm_config.gemm_configs("bf16", 80)) - 1 + len(gemm_config.GROUP_SIZES) - 1
    assert attention["operation"] in ("forward", "keys", "queries") and "rival" not in attention
    for row in (product, attention):
        assert row["best"] == row["default"] and not row["rejected"] and row["gflops"] > 0
    assert result["status"] == "done" and not tuning.database().entries

    assert main.main([*words, "--minutes", "0.0001"]) == 0
    result = json.loads(capsys.readouterr().out)
    (row,) = result["tuned"]
    assert row["tried"] == 0 and row["best"] == row["default"] and result["status"].startswith("stopped after")


def test_a_default_that_fails_does_not_stop_the_others(monkeypatch):
    """Its reason stands where a rejected candidate's does, and the work stays as it is."""
    Gpu().install(monkeypatch)
    monkeypatch.setattr(tuner, "HARNESS", CHILD)
    broken, good = GemmProblem("nt", "fp32", 9, 7, 5, epilogue="unknown"), GemmProblem("nt", "fp32", 9, 7, 5)
    verdicts = tuner.CudaTuner(MOCK).tune([broken, good], seconds=60, each=lambda verdict: None)
    assert [v.problem for v in verdicts] == [broken, good] and not verdicts[1].rejected and verdicts[1].tried > 2
    ((name, why),) = verdicts[0].rejected
    assert name == str(Candidate(broken.default(80))) and "asked for" in why and verdicts[0].to_json()["gflops"] == 0
    assert verdicts[0].best == verdicts[0].default


def test_without_a_gpu_it_is_one_line(monkeypatch, capsys):
    gpu = Gpu()
    gpu.install(monkeypatch)
    gpu.errors["cuInit"] = 100  # no device
    for words in (["tune", "shakespeare-char", "--device", "cuda"], ["tune", "--self-test", "--device", "cuda"]):
        assert main.main(words) == 2
        text = capsys.readouterr().err
        assert text.count("\n") == 1 and "device cuda needs" in text
