"""Presets for tests of plans: recipes that train the same model on the same micro-batch have the same plan."""

from __future__ import annotations

from barellm.models import preset, presets


def planned() -> list[str]:
    """The first preset of each model, batch, length and optimizer."""
    found: dict[object, str] = {}
    for name in presets():
        config = preset(name)
        train, optim = config.train, config.optim
        found.setdefault((config.model, train.micro_batch_size, train.seq, optim.name, optim.moments, optim.skips), name)
    return list(found.values())
