"""Tuning of CUDA products on the driver in Python: what is a candidate, that wrong and hanging ones are rejected, what is kept."""

import json
import re
from dataclasses import replace

import numpy as np
import pytest

from barellm.cli import main
from barellm.cuda import choices, tuning
from barellm.cuda.kernel import Target
from barellm.cuda.tuner import tuner
from barellm.cuda.tuner.bed import Bed
from barellm.cuda.tuner.work import Candidate, Work, candidates, works_of
from barellm.runtime.tuner import decision
from barellm.runtime.tuner.child import Wrong
from barellm.runtime.tuner.decision import Verdict
from barellm.training.machine import build_programs
from tests.cuda.mock import Gpu
from tests.profiling.conftest import SMALL, small

MOCK = Target(80, 3, name="Mock GPU")
HOPPER = Target(90, 3, name="Mock GPU")
CHILD = "tests.cuda.tuner_child"
WORDS = [word for key, value in SMALL.items() for word in (f"--{key}", str(value))]


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("BARELLM_CACHE", str(tmp_path))
    monkeypatch.delenv("BARELLM_TUNING", raising=False)


def test_every_product_of_a_model_is_there_once_with_all_tiles():
    works = works_of(build_programs(small(train__dtype="bf16")), MOCK)
    assert {w.role for w in works} == {"nt", "nn", "tn"} and len(set(works)) == len(works)
    assert [w.flops for w in works] == sorted((w.flops for w in works), reverse=True)
    for work in works:
        default, *others = candidates(work, MOCK)
        assert default.choice == tuning.default(MOCK, work.product)
        assert {default.choice, *(c.choice for c in others)} == set(choices.tiles(work.dtype, 80))


def test_faulty_candidates_are_rejected_for_their_reason():
    trials = tuner.self_test(MOCK, child=CHILD, limit=8.0)
    assert [t.candidate for t in trials] == ["wrong_values", "writes_beyond", "hangs", "another tile"]
    assert all(t.passed for t in trials), trials


@pytest.mark.parametrize("role", ["nt", "nn", "tn"])
def test_bits_decide(role, monkeypatch):
    """A tile whose bits are the default's is right in every role; a result that is off by a bit is not."""
    Gpu().install(monkeypatch)
    work = Work(role, "bf16", 40, 24, 48)
    bed = Bed(work, calls=1)
    others = [c for c in candidates(work, MOCK)[1:] if c.choice.depth == bed_depth(work)]
    session = bed.check(others[0])
    assert bed.time([session], 3) == [[1.0] * 3] and bed.seconds > 0
    next(iter(bed.expected[1].values())).view(np.uint8)[0, 0] ^= 1
    with pytest.raises(Wrong, match="other bits than the default's"):
        bed.check(others[0])
    bed.close()


def bed_depth(work):
    return tuning.default(MOCK, work.product).depth


def test_what_won_is_taken_by_the_next_lowering_and_nonsense_is_not(monkeypatch, capsys):
    work = Work("nt", "bf16", 64, 96, 64)
    default, other, *_ = candidates(work, MOCK)
    tuner.keep(Verdict(work, default.choice, other.choice, 0.9, 1e-3, 1), MOCK)
    assert tuning.choose(MOCK, work.product) == other.choice
    assert tuning.choose(Target(80, 4, name="Mock GPU"), work.product) == default.choice  # another card
    assert tuning.choose(Target(80, 3, name="Mock GPU Ti"), work.product) == default.choice
    monkeypatch.setenv("BARELLM_TUNING", "0")
    assert tuning.choose(MOCK, work.product) == default.choice
    monkeypatch.delenv("BARELLM_TUNING")
    tuning.database().change({tuning.key(MOCK, work.product): {"tile": {"rows": 3}}})
    assert tuning.choose(MOCK, work.product) == default.choice
    assert "tuning ignored" in capsys.readouterr().err
    tuner.keep(Verdict(work, default.choice, default.choice, 1.0, 1e-3, 1), MOCK)
    assert not tuning.database().entries


def product_of(at: str) -> tuning.Product:
    """What a key names."""
    name = r"(?:(hopper)(?: (gelu_backward|gelu|residual|add|start))? )?(nt|nn|tn) (\w+), (\d+) x (\d+) from (\d+)"
    found = re.fullmatch(name, at.split(": ")[1])
    assert found, at
    kernel, epilogue, role, dtype, *sizes = found.groups()
    return tuning.Product(role, dtype, *map(int, sizes), kernel or "triton", epilogue or "")


def test_what_is_shipped_names_tiles_that_exist():
    entries = json.loads(tuning.SHIPPED.read_text())["entries"]
    for at, entry in entries.items():
        tuning.from_entry(entry, product_of(at), int(at.split("sm_")[1].split(",")[0]))


GELU = Work("nt", "bf16", 96, 128, 72, "hopper", "gelu")


def test_what_was_measured_on_a_card_is_shipped_for_that_card(tmp_path, monkeypatch):
    default, other, *_ = candidates(GELU, HOPPER)
    tuner.keep(Verdict(GELU, default.choice, other.choice, 0.9, 1e-3, 1), HOPPER)
    (at,) = tuning.database().entries
    assert at == "Mock GPU, sm_90, 3 multiprocessors: hopper gelu nt bf16, 96 x 128 from 72"
    assert product_of(at) == GELU.product
    path = tmp_path / "shipped.json"
    path.write_text('{"entries": {}}')
    assert tuning.ship(tuning.database().entries, path) == 1 and tuning.ship(tuning.database().entries, path) == 0
    monkeypatch.setattr(tuning, "shipped", lambda: json.loads(path.read_text())["entries"])
    monkeypatch.setenv("BARELLM_CACHE", str(tmp_path / "another user's"))
    tuning._opened.cache_clear()
    assert not tuning.database().entries and tuning.choose(HOPPER, GELU.product) == other.choice
    plain = replace(GELU.product, epilogue="")
    for target, product in ((MOCK, GELU.product), (Target(90, 3, name="NVIDIA H200"), GELU.product), (HOPPER, plain)):
        assert tuning.choose(target, product) == tuning.default(target, product)


def test_a_shipped_form_that_does_not_exist_is_ignored_with_a_line(monkeypatch, capsys):
    at = tuning.key(HOPPER, GELU.product)
    for entry in ({"form": {"cols": 512, "stages": 1, "slots": 2}}, {"tile": {}}, {"form": 3}):
        monkeypatch.setattr(tuning, "shipped", lambda entry=entry: {at: entry})
        tuning.database()._told.clear()
        assert tuning.choose(HOPPER, GELU.product) == tuning.default(HOPPER, GELU.product)
        text = capsys.readouterr().err
        assert text.count("\n") == 1 and "tuning ignored" in text and at in text


HOPPERS = [
    ("nt", ""),
    ("nt", "gelu"),
    ("nt", "residual"),
    ("nn", ""),
    ("nn", "gelu_backward"),
    ("tn", ""),
    ("tn", "start"),
]


@pytest.mark.slow
@pytest.mark.parametrize("role, epilogue", HOPPERS)
def test_every_form_of_hopper_s_products_is_proved_and_the_fastest_by_the_clock_is_kept(role, epilogue, monkeypatch):
    """On the model of the machine that Gluon kernels have; the clock likes tiles of another width than the default's."""
    monkeypatch.setattr(choices, "WAVE", 1)
    gpu = Gpu(arch=90)
    gpu.install(monkeypatch)
    sizes = {"nt": (67, 72, 136), "nn": (67, 72, 136), "tn": (128, 72, 67)}[role]
    work = Work(role, "bf16", *sizes, "hopper", epilogue)
    bed = Bed(work, calls=1)
    assert [call.spec.name for call in bed.default.calls["op"]] == ["hopper_gemm"]
    default, *others = candidates(work, HOPPER)
    assert {default.choice, *(c.choice for c in others)} == set(choices.forms()) and len(others) == 3
    wanted = next(c for c in others if c.choice.cols != default.choice.cols)
    gpu.cost = lambda spec: 0.5 if ("COLS", wanted.choice.cols) in spec.constants else 1.0

    class Here:
        """The child's side, in this process."""

        open, close = lambda self, work: None, lambda self: None

        def __init__(self):
            self.sessions = {}

        def check(self, candidate):
            self.sessions[candidate] = bed.check(candidate)
            return ""

        def time(self, contestants, rounds):
            return bed.time([self.sessions[c] for c in contestants], rounds), bed.seconds

    verdict = decision.decide(Here(), work, others, default)  # pyright: ignore[reportArgumentType]
    bed.close()
    assert not verdict.rejected and verdict.best.cols == wanted.choice.cols and verdict.ratio == pytest.approx(0.5)
    tuner.keep(verdict, HOPPER)
    with_bits = tuning.choose(HOPPER, work.product)
    assert with_bits == verdict.best


def test_a_candidate_is_named_by_all_that_it_is():
    tiles = choices.tiles("bf16", 90)
    assert len({str(Candidate(t, f)) for t in tiles for f in ("", "hangs")}) == 2 * len(tiles)


def test_the_command_keeps_a_clear_winner(monkeypatch, capsys):
    """With times that the mock makes up no tile wins; every product is proved."""
    Gpu().install(monkeypatch)
    monkeypatch.setattr(tuner, "CHILD", CHILD)
    words = ["tune", "shakespeare-char", *WORDS, "--dtype", "bf16", "--device", "cuda", "--minutes", "0.0001", "--json"]
    assert main.main(words) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["machine"] == "Mock GPU, sm_80, 3 multiprocessors" and result["products"] > 3
    (row,) = result["tuned"]
    assert row["best"] == row["default"] and row["tried"] == len(choices.tiles("bf16", 80)) - 1
    assert result["status"].startswith("stopped after") and not tuning.database().entries


def test_without_a_gpu_it_is_one_line(monkeypatch, capsys):
    gpu = Gpu()
    gpu.install(monkeypatch)
    gpu.errors["cuInit"] = 100  # no device
    for words in (["tune", "shakespeare-char", "--device", "cuda"], ["tune", "--self-test", "--device", "cuda"]):
        assert main.main(words) == 2
        text = capsys.readouterr().err
        assert text.count("\n") == 1 and "device cuda needs" in text
