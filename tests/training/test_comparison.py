"""barellm compare: rounding is called noise, and a small error a fault where the seeds can show it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from barellm.cli.main import main
from barellm.cpu.kernel import Lowering
from barellm.cpu.step import CpuSession
from barellm.training import comparison

SIZES = [
    *("--model.layers", "2", "--model.heads", "2", "--model.d_model", "32", "--model.max_seq", "32", "--seq", "32", "--batch", "4"),
    *("--steps", "60", "--train.eval_every", "0", "--train.sample_every", "0", "--optim.warmup", "5", "--device", "cpu"),
]
SEEDS = 5


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """The runs of five seeds as they are, and with three other roundings."""
    path = tmp_path_factory.mktemp("compare")
    (path / "text.txt").write_text("".join(f"{i} squared is {i * i}, and cubed {i**3}.\n" for i in range(2000)))
    return path


def roundings(folder: Path, *options: str) -> list[str]:
    data = ["--data", str(folder / "text.txt"), *SIZES]
    return ["compare", "shakespeare-char", *data, "--roundings", "isa,unfused,order", "--out", str(folder / "runs"), *options]


@pytest.fixture(scope="module")
def known(folder) -> Path:
    assert main(roundings(folder)) == 0
    return folder / "runs"


def result(capsys, *words: Any) -> tuple[int, dict[str, Any]]:
    capsys.readouterr()
    status = main(["compare", *map(str, words), "--json"])
    return status, json.loads(capsys.readouterr().out.splitlines()[-1])


def test_other_roundings_are_noise_and_are_trained_once(folder, known, capsys, monkeypatch):
    """The second call trains nothing, and the losses are not simply equal."""
    monkeypatch.setattr("barellm.runs.train", None)
    capsys.readouterr()
    assert main(roundings(folder, "--json")) == 0
    found = json.loads(capsys.readouterr().out)
    assert list(found["against"]) == ["isa", "unfused", "order"] and found["seeds"] == list(range(1337, 1337 + SEEDS))
    for tests in found["against"].values():
        assert [test["quantity"] for test in tests] == ["val", "loss", "norm"]
        assert all(test["paired"] and test["seeds"] == SEEDS and not test["fault"] for test in tests)
        assert all(0 < abs(test["difference"]) < test["detectable"] < test["spread"] for test in tests)


def trained(folder: Path, name: str, *options: str) -> list[Path]:
    """Runs of the same seeds with something else."""
    paths = [folder / f"{name}-{seed}" for seed in range(1337, 1337 + SEEDS)]
    for path in paths:
        seed = ["--seed", path.name.rpartition("-")[2], "--out", str(path)]
        assert main(["train", "shakespeare-char", "--data", str(folder / "text.txt"), *SIZES, *seed, *options]) == 0
    return paths


def as_it_is(known: Path) -> list[Path]:
    return sorted(known.glob("as-it-is-seed-*"))


def test_a_learning_rate_three_percent_higher_is_a_fault(folder, known, capsys):
    """Grouped by configuration; a single run of each group finds the other seeds beside it."""
    trained(folder, "rate", "--lr", str(1e-3 * 1.03))
    status, found = result(capsys, as_it_is(known)[0], folder / "rate-1337")
    (tests,) = found["against"].values()
    assert status == 1 and len(found["seeds"]) == SEEDS and list(found["against"]) == [str(folder / "rate-1337")]
    assert any(test["fault"] and abs(test["difference"]) > test["detectable"] for test in tests)


def test_gradients_times_1_05_are_a_fault(folder, known, capsys, monkeypatch):
    """AdamW hardly sees them, so the losses do not tell; the norm does."""
    plain = CpuSession.run

    def run(session, program, /, **scalars):
        plain(session, program, **scalars)
        for name, t in session.tensors.items() if program == "forward_backward" else ():
            if t.role == "gradient":
                session.write(name, session.read(name) * np.float32(1.05))

    monkeypatch.setattr(CpuSession, "run", run)
    paths = trained(folder, "scaled")
    status, found = result(capsys, *as_it_is(known), "--against", *paths)
    (tests,) = found["against"].values()
    assert status == 1 and {test["quantity"] for test in tests if test["fault"]} >= {"norm"}
    assert tests[-1]["difference"] == pytest.approx(np.log(1.05), rel=0.2)


def test_a_wrong_epsilon_is_a_fault(folder, known, capsys, monkeypatch):
    """LayerNorm's is ten times too large in its kernel; verify names the op of a step trained so."""
    plain, changed = Lowering.call, []

    def call(c, emit, operands, constants=None, **more):
        if c.op.name == "layernorm" and constants:
            changed.append(constants["eps"])
            constants = constants | {"eps": 10 * constants["eps"]}
        plain(c, emit, operands, constants, **more)

    monkeypatch.setattr(Lowering, "call", call)
    paths = trained(folder, "epsilon")
    assert set(changed) == {1e-5}
    status, found = result(capsys, *as_it_is(known), "--against", *paths)
    (tests,) = found["against"].values()
    assert status == 1 and any(test["fault"] for test in tests)
    capsys.readouterr()
    assert main(["verify", str(paths[0]), "--step", "2", "--ops", "--json"]) == 1
    fault = json.loads(capsys.readouterr().out)["fault"]
    assert fault["op"] == "layernorm" and "float64 reference" in fault["what"]


@pytest.mark.parametrize(
    "df, t, p", [(1, 12.706205, 0.05), (2, 4.302653, 0.05), (4, 4.604095, 0.01), (8, 2.306004, 0.05), (7, 0, 1)]
)
def test_the_distribution_is_students(df, t, p):
    """Quantiles of printed tables."""
    assert comparison.p_value(t, df) == pytest.approx(p, rel=1e-6)
    assert p == 1 or comparison.critical(p, df) == pytest.approx(t, rel=1e-6)


@pytest.mark.parametrize(
    "other, paired, p",
    [
        ({7: 3.11, 8: 3.02, 9: 3.2, 10: 3.07, 11: 3.13}, False, 0.07344176128178881),
        ({1: 3.03, 2: 3.06, 3: 3.01}, True, 0.07417990022744561),
    ],
    ids=["groups of 3 and 5", "pairs"],
)
def test_p_values_are_those_of_scipy(other, paired, p):
    """scipy 1.17's ttest_ind and ttest_rel."""
    test = comparison.tested({1: 3.01, 2: 3.05, 3: 2.98}, other, "loss", comparison.ALPHA)
    assert (test.paired, test.seeds) == (paired, 3) and test.p == pytest.approx(p, rel=1e-9)


@pytest.mark.parametrize("seeds", [(range(5), range(5)), (range(5), range(9, 14)), (range(6), range(9, 10))], ids=str)
def test_noise_is_called_a_fault_as_rarely_as_promised(seeds):
    """And a difference of the least detectable size about half of the time."""
    random, found = np.random.default_rng(1), {0.0: 0, 1.0: 0}
    for shift in found:
        for _ in range(1000):
            base = random.normal(3, 0.02, 20)
            a, b = ({seed: float(base[seed] + random.normal(0, 0.01)) for seed in group} for group in seeds)
            least = comparison.tested(a, b, "loss", comparison.ALPHA).detectable
            b = {seed: value + shift * least for seed, value in b.items()}
            found[shift] += comparison.tested(a, b, "loss", comparison.ALPHA).fault
    assert found[0.0] < 25 and 350 < found[1.0] < 650


def test_a_certain_difference_that_is_tiny_beside_the_seeds_is_noise():
    """Rounding may have a direction of its own."""
    a = {seed: 3 + 0.02 * seed for seed in range(5)}
    for size, fault in ((1e-4, False), (1e-2, True)):
        b = {seed: value + size * (1 + 0.01 * seed) for seed, value in a.items()}
        test = comparison.tested(a, b, "loss", comparison.ALPHA)
        assert test.p < 1e-6 and test.fault == fault


@pytest.mark.parametrize(
    "words, error",
    [
        (["RUN"], "1 runs are named, expected two or more"),
        (["RUN", "RUN"], "the 2 runs have one configuration: name those with other kernels behind --against"),
        (["RUN", "--against", "RUN"], "is named before and behind --against"),
        (["RUN", "--against", "OTHER"], "have no spread over seeds"),
        (["RUN", "RUN", "--seeds", "2"], "--seeds is 2, expected at least 3"),
        (["default", "--roundings", "isa,sums"], "--roundings has 'sums', expected isa, unfused, order"),
        (["RUN", "--roundings", "isa", "--against", "RUN"], "--roundings trains the runs of one preset"),
        (["nowhere", "RUN"], "nowhere/config.json"),
        (["default", "--roundings", "isa"], "train.minutes is 1.75, and runs of one length are compared: pass --steps"),
        (["RUN", "OTHER", "--against", "SHORT"], "the runs have 3 and 60 steps, expected as many of each"),
    ],
    ids=lambda words: " ".join(words) if isinstance(words, list) else "",
)
def test_what_cannot_be_compared_is_one_line(folder, known, capsys, words, error):
    short = str(folder / "short")
    if "SHORT" in words:
        assert main(["train", "shakespeare-char", "--data", str(folder / "text.txt"), *SIZES, "--steps", "3", "--out", short]) == 0
        capsys.readouterr()
    named = dict(zip(("SHORT", "RUN", "OTHER"), (short, *map(str, as_it_is(known))), strict=False))
    assert main(["compare", *(str(named.get(word, word)) for word in words)]) == 2
    said = capsys.readouterr().err
    assert error in said and said.count("\n") == 1
