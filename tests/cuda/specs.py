"""A kernel and a specialisation for tests of compiling."""

from __future__ import annotations

from barellm.cuda.kernel import Specialisation
from barellm.cuda.lang import device, tl


@device
def scaled(y, x, n, scalars, FACTOR, BLOCK):
    """y (n) = FACTOR x, plus a run-time scalar."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + i, tl.load(x + i, mask=i < n) * FACTOR + tl.load(scalars).to(tl.float32), mask=i < n)


SCALED = Specialisation(
    scaled,
    (("y", "*bf16"), ("x", "*fp32"), ("n", "i32"), ("scalars", "*i64")),
    (("BLOCK", 256), ("FACTOR", 2)),
    (("num_stages", 3), ("num_warps", 4)),
    ("y", "x", "scalars"),
)
