"""What the products of a model read on a text: the second moments that error compensation wants."""

from collections.abc import Callable, Sequence

import numpy as np

from barellm.data.loader import Validation
from barellm.evaluation.validation import Evaluator
from barellm.program import ops
from barellm.program.builder import Program
from barellm.program.ops.base import Op
from barellm.runtime.session import Session


class Calibration:
    """Sums x x' over the inputs x of each of the `products` of the program "eval", with ops for that. Padding rows count too."""

    def __init__(self, p: Program, products: Sequence[Op]) -> None:
        self.moments = {}
        for op in products:
            K = int(op.x.shape[-1])
            self.moments[op.weight.name] = t = p.state(f"{op.weight.name}.moments", (K, K))
            p.apply(ops.MatmulDw, into={"dweight": (t, "add")}, dy=op.x, x=op.x)

    def measure(
        self, session: Session, windows: Validation, *, batch: int, report: Callable[[int], None] = lambda windows: None
    ) -> None:
        """Run the windows."""
        for t in self.moments.values():
            session.write(t.name, np.zeros(t.shape, np.float32))
        Evaluator(windows, batch=batch, byte_lengths=None).run(session, report=report)

    def read(self, session: Session, name: str) -> np.ndarray:
        """The moments (K, K) of the inputs of the parameter's product, float64."""
        return session.read(self.moments[name].name).astype(np.float64)
