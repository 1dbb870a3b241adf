"""Steps of many ranks on paper: bytes are those of the programs, seconds those of the formulas."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from barellm import models
from barellm.assembly.build import build_programs, resolved
from barellm.cli.main import main
from barellm.errors import UserError
from barellm.program.ops.base import operand_bytes
from barellm.runtime.ranks import Planned
from barellm.tools.plan import devices, scale
from barellm.tools.plan.scale import Collective, Link, Work

LINK = Link(0.5, 100.0, 0.01, "")


def small(*, batch: int = 6, accumulate: int = 1, **optim):
    preset = models.preset("shakespeare-char")
    model = replace(preset.model, layers=2, d_model=256, heads=2)
    train = replace(preset.train, micro_batch_size=batch, gradient_accumulation_steps=accumulate, dtype="bf16")
    return resolved(replace(preset, model=model, optim=replace(preset.optim, **optim), train=train), "cpu")


def sent(config, rank: int, count: int) -> dict[str, int]:
    """Bytes that a rank's planned transfers send, by op, in the backward pass and behind it."""
    found: dict[str, int] = {}
    programs = build_programs(config, ranks=Planned(rank, count))
    for op in (*programs["forward_backward"].ops, *programs["optimizer_step"].ops):
        if op.name in ("start_all_to_all", "all_to_all", "all_gather"):
            kind = op.name.removeprefix("start_")
            for (name, t), to in zip(op.inputs.items(), op.attrs["to"], strict=True):
                nbytes = operand_bytes(t) if name in op.rounded else t.nbytes
                found[kind] = found.get(kind, 0) + nbytes * len(to)
    return found


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize(
    "optim", [{}, {"overlap": False}, {"powersgd": 4}, {"name": "muon"}], ids=["adamw", "behind", "powersgd", "muon"]
)
def test_bytes_are_those_of_the_planned_transfers(count, optim):
    config = small(**optim)
    store = build_programs(config)["forward_backward"].store
    model = scale.collectives(config, store, count)
    planned = [sent(config, rank, count) for rank in range(count)]
    mean = {op: sum(each[op] for each in planned) / count for op in ("all_to_all", "all_gather")}
    away = (count - 1) / count
    if "powersgd" in optim:
        exchanged = sum(c.nbytes for c in model if c.name.endswith("summed"))
        given = sum(c.nbytes for c in model if c.name.endswith("given"))
    else:
        exchanged = model[0].nbytes
        given = model[1].nbytes + model[2].nbytes
        assert [c.rounds for c in model[1:]] == [1, 1]
    assert mean["all_to_all"] == pytest.approx(exchanged * away, rel=2e-3)
    assert mean["all_gather"] == pytest.approx(given * away, rel=2e-3)


def test_rounds_are_those_of_the_program():
    config = small(batch=2, overlap=False)
    model = replace(config.model, d_model=640, heads=2, layers=3)
    config = replace(config, model=model)
    programs = build_programs(config, ranks=Planned(0, 2))
    rounds = sum(op.name == "all_to_all" for op in programs["optimizer_step"].ops)
    assert rounds > 4
    assert scale.collectives(config, programs["forward_backward"].store, 2)[0].rounds in (rounds - 1, rounds)


@pytest.mark.parametrize(
    "way, ranks, seconds",
    [
        ("direct", 1, 0.0),
        ("direct", 2, 1.5 + 0.01 + 2.0),
        ("direct", 5, 1.5 + 0.04 + 3.2),
        ("ring", 5, 4 * (1.5 + 0.01) + 3.2),
        ("tree", 5, 3 * (1.5 + 0.01) + 3.2),
        ("tree", 4, 2 * (1.5 + 0.01) + 3.0),
    ],
)
def test_a_collective_takes_latency_messages_and_bytes(way, ranks, seconds):
    assert Collective("x", 400).seconds(LINK, ranks, way) == pytest.approx(seconds)
    bytes_s = 4 * (ranks - 1) / ranks
    assert Collective("x", 400, 3).seconds(LINK, ranks, way) == pytest.approx(3 * seconds - 2 * bytes_s)


def test_what_overlaps_is_hidden_until_it_is_late():
    """Two gradients: half of the bytes at 1 s, half at the end of a backward pass of 4 s."""
    done = Work(forward=2.0, backward=4.0, before=0.0, update=1.0, ready=[(1.0, 10), (4.0, 10)])
    over = Link(0.0, 100.0, 0.0, "")

    def hidden(nbytes: float, *, early: bool) -> float:
        return scale.hidden(Collective("x", nbytes, 1, early), done, over, 2, "direct")

    assert hidden(400, early=True) == pytest.approx(1.0)  # 2 s: one while the second half is computed, one behind it
    assert hidden(1600, early=True) == pytest.approx(3.0)  # 8 s, from 1 s to 9 s: 5 s too late
    assert hidden(400, early=False) == 0.0


def test_ranks_share_rows_or_micro_batches():
    config = small(batch=4, accumulate=6)
    found = [(w, scale.rows_of(config, w).train) for w in (1, 2, 4, 5, 8, 1000)]
    assert [(w, t.micro_batch_size, t.gradient_accumulation_steps) for w, t in found] == [
        (1, 4, 6), (2, 2, 6), (4, 1, 6), (5, 4, 2), (8, 4, 1), (1000, 4, 1),
    ]  # fmt: skip


def test_the_work_of_a_rank_is_that_of_its_plan():
    ceiling = devices.published("h100")
    slow = {dtype: rate / 30 for dtype, rate in ceiling.flops.items()}  # so that products of this size are bound by it
    ceiling = replace(ceiling, flops=slow)
    config = small(batch=2, accumulate=3)
    done, store = scale.work(config, 1, ceiling, 0.5)
    half, _ = scale.work(config, 1, ceiling, 0.25)
    assert done.seconds < half.seconds < 2 * done.seconds, "some ops are bound by bytes"
    assert scale.reached(config, ceiling, half.seconds) == pytest.approx(0.25, rel=1e-3)
    assert scale.reached(config, ceiling, 0.0) == 1.0, "less than the bound is the bound"
    assert done.before == pytest.approx(2 * (done.forward + done.backward))
    assert 0.2 < done.forward / (done.forward + done.backward) < 0.5
    assert done.ready[-1][0] <= done.backward * (1 + 1e-9) and done.ready[0][0] >= 0
    assert sum(size for _, size in done.ready) == sum(t.size for t in store.of_role("gradient"))
    built = devices.lower(build_programs(config), "cpu")
    expected = sum(
        times * max(ceiling.operations(op) / 0.5, ceiling.traffic(op) / scale.STREAMED)
        for name, times in (("forward_backward", 3), ("optimizer_step", 1))
        for op in built.lowered[name].ops
    )
    assert done.seconds == pytest.approx(expected)
    dealt, _ = scale.work(config, 4, ceiling, 0.5)
    added = 8 * sum(size for _, size in done.ready) / 4 / ceiling.bandwidth[4, 4, 0]
    assert dealt.update == pytest.approx(done.update / 4 + added)
    whole = [scale.work(small(powersgd=2), w, ceiling, 0.5)[0].update for w in (1, 4)]
    assert whole[0] == whole[1]


def test_a_step_is_arithmetic_and_exchange():
    found = scale.prediction(small(), 3, "10gbit", ceiling=devices.published("h100"), utilisation=0.5)
    store = build_programs(small())["forward_backward"].store
    assert found["sent_bytes"] == pytest.approx(2 / 3 * sum(c.nbytes for c in scale.collectives(small(), store, 3)))
    for row in found["ways"].values():
        exchange = sum(row["collectives_s"].values())
        assert row["step_s"] == pytest.approx(found["compute_s"] + exchange)
        assert found["compute_s"] <= row["overlapped_step_s"] < row["step_s"]
        assert row["efficiency"] == pytest.approx(found["compute_s"] / row["step_s"])
        assert row["overlapped_efficiency"] == pytest.approx(found["compute_s"] / row["overlapped_step_s"])
    alone = scale.prediction(small(), 1, "ib400", ceiling=devices.published("h100"), utilisation=0.5)
    assert alone["sent_bytes"] == 0 and alone["ways"]["ring"]["efficiency"] == 1.0


def test_the_command_predicts(capsys):
    words = ["plan", "shakespeare-char", "--ranks", "1024", "--interconnect", "ib400"]
    assert main([*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["ranks"], found["batch"], found["tokens"]) == (1024, 12, 1024 * 12 * 64)
    assert found["utilisation"] == 0.4 and found["ceiling"].startswith("h100")
    assert main([*words, "--optim.powersgd", "2", "--mfu", "0.8"]) == 0
    out = capsys.readouterr().out
    assert "shakespeare-char on 1,024 ranks, predicted and not run" in out and "as factors of 2 columns" in out
    assert "at 80% of the peak" in out and "factors Q, given" in out


@pytest.mark.parametrize(
    "more, complaint",
    [
        (["--interconnect", "ib40"], "unknown link 'ib40', did you mean 'ib400'?"),
        (["--interconnect", "ib400", "--ranks", "0"], "--ranks is 0, expected at least 1"),
        (["--interconnect", "ib400", "--mfu", "1.5"], "--mfu is 1.5, expected more than 0 and at most 1"),
    ],
)
def test_what_cannot_be_predicted_is_refused(more, complaint, capsys):
    assert main(["plan", "shakespeare-char", "--ranks", "2", *more]) == 2
    assert complaint in capsys.readouterr().err
    assert main(["plan", "shakespeare-char", "--interconnect", "ib400"]) == 2
    assert "expected --ranks too" in capsys.readouterr().err
    with pytest.raises(UserError, match="known: memory, 1gbit"):
        scale.link("x")
