"""Steps of a model whose runs have stages are measured as its course has them: the programs, their scalars, their order."""

import json
from dataclasses import replace
from statistics import median

import pytest

from barellm.assembly.build import build_programs, resolved
from barellm.config.overrides import changed
from barellm.errors import UserError
from barellm.models import preset
from barellm.models.training_schedule import only_stage, runs_per_step
from barellm.tools.profile import profile
from barellm.tools.profile.step import measure, opened
from barellm.training.training_schedule import training_schedule
from benchmarks.roofline import step_bound
from tests.profiling.conftest import CEILING, made_up, small

STAGES = "share=1/2 seq=16 windows=1,2 mtp=1,0.5; share=1/2 seq=32 windows=1,3 lr=2; seq=32 windows=1,4"
SIZES = {"heads": 2, "d_model": 32, "d_ff": 48, "block": 4, "vocab_size": 65, "max_seq": 32, "stages": STAGES, "untie": 1}
SHARES = {"forward_backward": 1.0, "optimizer_step": 0.5, "optimizer_step_tied": 0.5}


def speedrun(number=None):
    keys = {f"model.{key}": value for key, value in SIZES.items()}
    chosen = changed(preset("speedrun-small"), keys | {"train.seq": 32, "train.dtype": "fp32"})
    return resolved(only_stage(chosen, number), "cpu")


def test_one_stage_is_chosen():
    assert [speedrun(n).train.seq for n in (None, 1, 2, 3)] == [16, 16, 32, 32]
    assert speedrun(2).model.stages == "share=1 seq=32 windows=1,3 lr=2 mtp=1; seq=32 windows=1,3 lr=2 mtp=1"
    first, steps = training_schedule(speedrun(1)), speedrun(1).train.steps
    assert {update for at in range(2, 500) for update, _ in first.step(at, steps).updates} == {
        "optimizer_step", "optimizer_step_tied"
    }  # fmt: skip
    assert only_stage(speedrun(2), None) == speedrun(2)  # what a process of ours makes of it
    assert runs_per_step(speedrun(1)) == SHARES
    assert runs_per_step(speedrun(2)) == {
        "forward_backward": 1.0,
        "optimizer_step": 0.5,
        "optimizer_step_untied": 0.5,
    }  # "untie" ran once, in its first cycle
    for number in (0, 4):
        with pytest.raises(UserError, match=f"--stage is {number}, expected 1 to 3"):
            speedrun(number)
    assert only_stage(small(), None) == small()
    assert runs_per_step(small()) == {"forward_backward": 1.0, "optimizer_step": 1.0}


@pytest.mark.parametrize("number", [1, 2, 3])
@pytest.mark.extended
def test_the_shares_name_the_programs_that_all_but_the_first_cycle_run(number):
    with opened(speedrun(number)) as (bench, _):
        bench.step()
        ran = set()
        bench.step(run=lambda program, **values: (ran.add(program), bench.compiled.session.run(program, **values))[1])
    assert ran == set(bench.shares)


def test_a_model_without_stages_has_none_to_choose(refused):
    assert "shakespeare-char' is gpt2, whose runs have no stages" in refused("bench", "step", "shakespeare-char", "--stage", "1")


@pytest.mark.extended
def test_a_cycle_is_two_steps_with_the_course_s_scalars():
    with opened(speedrun(1)) as (bench, _):
        ran, session = [], bench.compiled.session

        def run(program, **values):
            ran.append((program, values))
            session.run(program, **values)

        assert bench.steps == 2 and bench.step(run=run).loss == pytest.approx(7, abs=1)
        assert bench.steps == 4 and session.default_scalars["window_long"] == 8
    assert [program for program, _ in ran] == ["forward_backward", "optimizer_step", "forward_backward", "optimizer_step_tied"]
    first, update, second, adam = (values for _, values in ran)
    assert [first["accumulate"], second["accumulate"], first["inv_targets"], first["seq"]] == [0, 1, 1.0, 16]
    assert [update["step"], adam["step"]] == [1, 2] and update["lr"] > 0


def test_the_step_of_a_plain_run_has_the_mean_of_one_micro_batch():
    config = small()
    config = replace(config, train=replace(config.train, gradient_accumulation_steps=4))
    with opened(config) as (bench, facts):
        assert facts["first_step"]["loss"] == pytest.approx(4.2, abs=0.2) and bench.steps == 1


@pytest.mark.extended
def test_a_profile_is_of_an_average_step(tmp_path, monkeypatch):
    monkeypatch.setattr(profile, "measured_ceiling", made_up)
    config = speedrun(1)
    found = profile.measure(config, steps=3, folder=tmp_path)
    assert {row["program"] for row in found["ops"]} == set(SHARES)
    assert sum(row["s"] for row in found["ops"]) == pytest.approx(found["work_s"] + found["barrier_s"])
    assert found["work_s"] + found["barrier_s"] + found["idle_s"] == pytest.approx(found["step_s"], rel=0.1)
    costs = [100 * (a / b - 1) for a, b in zip(found["traced_s"], found["untraced_s"], strict=True)]
    assert found["tracing_percent"] == pytest.approx(median(costs))
    with opened(config) as (bench, _):
        programs = bench.compiled.session.lowered
    for name, share in SHARES.items():
        rows = [row for row in found["ops"] if row["program"] == name]
        assert sum(row["flops"] for row in rows) == share * sum(op.flops() for op in programs[name].ops)
    slices = [e for e in json.loads((tmp_path / "timeline.json").read_text())["traceEvents"] if e.get("cat") == "python"]
    assert [e["name"] for e in slices] == ["step", "forward_backward", "optimizer_step", "forward_backward", "optimizer_step_tied"]


@pytest.mark.extended
def test_a_measured_step_is_an_average_one():
    programs = build_programs(speedrun(1))
    found = measure(speedrun(1), steps=2)
    assert found["flops"] == sum(share * programs[name].flops for name, share in SHARES.items())
    assert found["percent_of_peak"] == pytest.approx(100 * found["flops"] / found["median_s"] / found["peak_flops"])
    assert found["besides_step_s"] == found["first_step_s"] - found["median_s"]
    assert found["tokens_per_s"] == 16 / found["median_s"]


def test_the_bound_has_each_update_as_often_as_it_runs():
    programs = build_programs(speedrun(1))
    alone = {name: step_bound(programs, "fp32", CEILING, {name: 1.0}) for name in ("optimizer_step", "optimizer_step_tied")}
    products = programs["forward_backward"].flops / CEILING.flops["fp32"]
    found = step_bound(programs, "fp32", CEILING, SHARES)
    assert alone["optimizer_step_tied"] > alone["optimizer_step"] > products
    assert found == pytest.approx(sum(alone.values()) / 2)
