"""Messages that travel while the ranks compute, and where a backward pass sends them."""

from __future__ import annotations

import threading
import time
from collections import Counter
from dataclasses import replace

import pytest

from barellm import models
from barellm.assembly.build import build_programs, resolved
from barellm.distributed.transfers import Transfers
from barellm.program.ops.collectives import StartAllToAll, WaitAllToAll
from barellm.runtime.ranks import Planned
from barellm.tools.plan.devices import lower


class Requests:
    """Requests that are done when their list has been tested so often."""

    def __init__(self) -> None:
        self.left: dict[str, int] = {}
        self.inside = threading.Lock()

    def test(self, requests) -> bool:
        assert self.inside.acquire(blocking=False), "two threads test at once"
        (name,) = requests
        self.left[name] -= 1
        self.inside.release()
        return self.left[name] <= 0


def wait(what) -> None:
    end = time.monotonic() + 20
    while not what():
        assert time.monotonic() < end
        time.sleep(0.001)


def test_messages_travel_while_nobody_waits():
    requests = Requests()
    transfers = Transfers(requests.test)
    for turn in range(2):  # the numbers come again in every step
        requests.left = {"a": 5, "b": 9}
        transfers.begin(0, ["a"])
        transfers.begin(1, ["b"])
        wait(lambda: max(requests.left.values()) <= 0)
        assert transfers.over(0) and transfers.over(1), turn


def test_a_rank_that_waits_asks_too():
    requests = Requests()
    requests.left = {"a": 10**9, "b": 10**9}
    transfers = Transfers(requests.test)
    transfers.begin(3, ["a"])
    transfers.begin(7, ["b"])
    assert not transfers.over(3)
    requests.left["a"] = 1
    wait(lambda: transfers.over(3))
    assert not transfers.over(7)
    with pytest.raises(AssertionError, match="transfer 7 has not ended yet"):
        transfers.begin(7, ["b"])
    requests.left["b"] = 1
    wait(lambda: transfers.over(7))


def config_of(**optim):
    preset = models.preset("shakespeare-char")
    model = replace(preset.model, layers=4, d_model=256, heads=2)
    return resolved(
        replace(preset, model=model, optim=replace(preset.optim, **optim), train=replace(preset.train, micro_batch_size=6)), "cpu"
    )


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("optim", [{}, {"name": "muon"}], ids=["adamw", "muon"])
@pytest.mark.extended
def test_gradients_leave_as_soon_as_they_are_whole(optim, count):
    """Behind the op that writes them last, in one order on all ranks, which is that of the update's waits; and no op is fused
    another way."""
    orders = []
    for rank in range(count):
        found = {
            early: lower(build_programs(config_of(**optim, overlap=early), ranks=Planned(rank, count)), "cpu")
            for early in (True, False)
        }
        ops = found[True].lowered["forward_backward"].ops
        plain = found[False].lowered["forward_backward"].ops
        assert Counter(op.name for op in ops if op.name != "start_all_to_all") == Counter(op.name for op in plain)
        last, first = {}, None
        for i, op in enumerate(ops):
            if not isinstance(op, StartAllToAll):
                written = [t.base for t in op.outputs.values() if t.base.role == "gradient"]
                last |= dict.fromkeys(written, i)
                first = i if written and first is None else first
        begun = [(i, op) for i, op in enumerate(ops) if isinstance(op, StartAllToAll)]
        for i, op in begun:
            whole = max(last[t.base] for t in op.inputs.values())
            assert i > whole
            assert all(isinstance(between, StartAllToAll) for between in ops[whole + 1 : i]), "at once"
        half = (first + len(ops)) / 2
        assert sum(i < half for i, _ in begun) >= len(begun) // 4, "they leave all along the way"
        sent = {t.base for _, op in begun for t in op.inputs.values()}
        assert sent == {t for t in last}, "all gradients"
        assert sum(t.size for _, op in begun for t in op.inputs.values()) == sum(t.size for t in sent), "each once"
        orders.append([op.number for _, op in begun])
        assert {op.segment for _, op in begun} >= {"h.0", "h.1", "h.2", "h.3"}
        ends = [op.number for op in found[True].lowered["optimizer_step"].ops if isinstance(op, WaitAllToAll)]
        assert sorted(orders[-1]) == ends == list(range(len(ends))) and len(ends) > 8
        assert not any(isinstance(op, WaitAllToAll) for op in found[False].lowered["optimizer_step"].ops)
    assert all(order == orders[0] for order in orders)


def test_what_arrives_has_room_until_it_is_added():
    """As much as this rank's share of the gradient, from each other rank."""
    plans = {}
    for early in (True, False):
        config = config_of(overlap=early)
        plans[early] = lower(build_programs(config, ranks=Planned(0, 3)), "cpu").plan.persistent_bytes
    parameters = build_programs(config_of())["forward_backward"].store.of_role("parameter")
    share = 4 * sum(t.size for t in parameters) / 3
    assert plans[True] - plans[False] == pytest.approx(2 * share, rel=0.1)


def test_ranks_that_read_sum_the_gradient_of_each_part_of_the_model_by_itself():
    """In the order of the forward pass, under the name of what is largest in it, meeting once before all and once after."""
    ranks = Planned(1, 2)
    ranks.direct = True
    programs = build_programs(config_of(), ranks=ranks)
    ops = [op for op in programs["optimizer_step"].ops if op.name == "reduce_scatter"]
    assert [op.segment for op in ops] == ["wte", "h.0", "h.1", "h.2", "h.3"]
    assert [op.meets for op in ops] == [(True, False), *[(False, False)] * 3, (False, True)]
    shares = [t for op in ops for t in op.shares]
    assert {t.base for t in shares} <= set(programs["optimizer_step"].store.of_role("gradient"))
    assert len({(t.base, getattr(t, "first", 0)) for t in shares}) == len(shares), "each once"
