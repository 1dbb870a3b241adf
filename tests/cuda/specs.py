"""A specialisation for tests of compiling."""

from __future__ import annotations

from barellm.cuda.kernel import Spec
from barellm.cuda.kernels.elementwise import cast

CAST = Spec(
    cast,
    (("y", "*bf16"), ("x", "*fp32"), ("n", "i32"), ("scalars", "*i64")),
    (("BLOCK", 256), ("MODE", 0)),
    (("num_stages", 3), ("num_warps", 4)),
    ("y", "x", "scalars"),
)
