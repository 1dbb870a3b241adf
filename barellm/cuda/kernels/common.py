"""What kernels of every family share: run-time scalars, and how an output is written."""

from __future__ import annotations

from barellm.cuda.kernel import MODES
from barellm.cuda.lang import constant, device, tl
from barellm.runtime.scalars import SCALARS

_AT = {name: i for i, name in enumerate(SCALARS)}
POS, ACCUMULATE, STEP, SEED, SAMPLE, LR, INV_TARGETS = (
    constant(_AT[name]) for name in ("pos", "accumulate", "step", "seed", "sample", "lr", "inv_targets")
)
STORE, ADD = constant(MODES["store"]), constant(MODES["add"])


@device
def keep(to, mask, value, scalars, MODE: tl.constexpr):
    """Store `value`, or add it to what is there, as the mode and the run's `accumulate` say."""
    if MODE == STORE:
        tl.store(to, value, mask=mask)
    else:
        adding = mask
        if MODE != ADD:
            adding = mask & (tl.load(scalars + ACCUMULATE) != 0)
        before = tl.load(to, mask=adding, other=0.0)
        tl.store(to, before + value, mask=mask)


@device
def double(scalars, AT: tl.constexpr):
    """A run-time scalar that is a float, as fp64."""
    return tl.load(scalars + AT).to(tl.float64, bitcast=True)
