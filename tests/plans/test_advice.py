"""What a run is advised that does not fit into memory: each change is enough by itself, and none that is enough is left out."""

from __future__ import annotations

import re

import pytest

from barellm.assembly import advice
from barellm.assembly.build import build_programs, open_model
from barellm.config import Config, overrides
from barellm.errors import UserError
from barellm.models import preset
from barellm.program import planner
from barellm.program.planner import Plan

CHANGES = {"train.recompute": {"train.recompute": True}, "optim.moments 16bit": {"optim.moments": "16bit"}}


def plan(config: Config) -> Plan:
    programs = build_programs(config)
    return planner.plan({name: p.ops for name, p in programs.items()}, programs["forward_backward"].store)


def bf16(name: str) -> Config:
    return overrides.changed(preset(name), {"train.dtype": "bf16"})


@pytest.mark.parametrize("name", ["shakespeare-char", "gpt2-124m", "llama-15m"])
@pytest.mark.parametrize("share", [0.97, 0.6, 0.3, 0.1])
@pytest.mark.extended
def test_advice_is_what_fits(name, share):
    config = bf16(name)
    limit = int(share * plan(config).arena_bytes)
    text = advice.of_training(config, limit, plan)

    def fits(changes: dict) -> bool:
        return plan(overrides.changed(config, changes)).arena_bytes <= limit

    found = [] if text.startswith("no batch") or " together" in text else text.removeprefix("choose ").split(" or ")
    for words, changes in CHANGES.items():
        assert (words in found) == fits(changes), words
    sizes = {}
    for words in found:
        if size := re.fullmatch(r"(train\.(?:micro_batch_size|seq)) (\d+)", words):
            sizes[size[1]] = int(size[2])
            assert fits({size[1]: int(size[2])})
            assert int(size[2]) * 2 > getattr(config.train, size[1][6:]) / 2 or not fits({size[1]: int(size[2]) * 2})
    assert len(found) == len(sizes) + sum(words in found for words in CHANGES)
    everything = {"train.micro_batch_size": 1, "train.recompute": True, "optim.moments": "16bit"}
    if not found:
        assert text == (
            "choose train.micro_batch_size 1, train.recompute and optim.moments 16bit together"
            if fits(everything)
            else "no batch is small enough: choose a smaller model"
        )


def test_a_batch_stays_a_multiple_of_the_ranks():
    config = bf16("shakespeare-char")
    limit = plan(overrides.changed(config, {"train.micro_batch_size": 5})).arena_bytes
    assert "train.micro_batch_size 3 " in advice.of_training(config, limit, plan, ranks=3)
    assert "train.micro_batch_size 3 " in advice.of_training(config, limit, plan)


@pytest.mark.extended
def test_a_model_that_no_change_makes_fit_is_not_advised_moments(monkeypatch):
    monkeypatch.setenv("BARELLM_MEMORY_LIMIT", "24G")
    with (
        pytest.raises(UserError, match=r"BARELLM_MEMORY_LIMIT is 24576.0 MiB: no batch is small enough: choose a smaller model$"),
        open_model(bf16("llama3-8b"), device="cpu"),
    ):
        pass


def test_changes_that_fit_together_alone_are_advised_together(monkeypatch):
    config = bf16("gpt2-124m")
    together = plan(overrides.changed(config, {"train.micro_batch_size": 1, "train.recompute": True, "optim.moments": "16bit"}))
    wanted = "choose train.micro_batch_size 1, train.recompute and optim.moments 16bit together"
    assert advice.of_training(config, together.arena_bytes, plan) == wanted


@pytest.mark.parametrize("device", ["cpu", "reference"])
@pytest.mark.extended
def test_each_device_plans_what_it_advises(monkeypatch, device):
    config = overrides.changed(preset("shakespeare-char"), {"train.dtype": "fp32"})
    monkeypatch.setenv("BARELLM_MEMORY_LIMIT", "20M")
    with (
        pytest.raises(UserError, match=r"MiB: choose train.micro_batch_size \d+( or |$)") as refused,
        open_model(config, device=device),
    ):
        pass
    batch = re.search(r"train.micro_batch_size (\d+)", str(refused.value))
    assert batch
    with open_model(overrides.changed(config, {"train.micro_batch_size": int(batch[1])}), device=device):
        pass
    with pytest.raises(UserError, match=r"MiB \(KV caches: .*\): choose a smaller context, batch or model$"):
        monkeypatch.setenv("BARELLM_MEMORY_LIMIT", "1M")
        with open_model(config, device=device, training=False):
            pass
