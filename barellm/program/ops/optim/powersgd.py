"""PowerSGD: ranks exchange two thin factors of a matrix gradient instead of the gradient (Vogels et al. 2019).

With M (rows, cols), the gradient that a rank has found plus the error that it kept:

    P = M Q, summed over the ranks;  P^ = an orthonormal basis of P;  Q' = M^T P^, summed too;
    the gradient of the run becomes P^ Q'^T, and each rank keeps E = M - P^ Q'^T with its own Q', not the sum.

So M = P^ Q'^T + E on every rank, whatever rounding did to the factors on their way: what one step leaves out, the next ones get.
A tall M is taken transposed: P, the factor that is made orthonormal, belongs to the shorter side.

Shapes: grad, error (rows, cols); a factor is (rank, n), one of its columns after the other, with n the length of its side."""

from typing import ClassVar

import numpy as np

from barellm.program.ops.base import Op, Spec, Tensor, describe


class OfMatrix(Op):
    """The part that both ops that read a matrix share."""

    def expect(self, grad: Tensor, error: Tensor, **factors: tuple[Tensor, int]) -> None:
        """Raise a ValueError unless grad and error are equal matrices, and each factor, given as (tensor, length of its side), has
        `rank` columns of that length."""
        wrong = [f for f, n in factors.values() if f.size != self.attrs["rank"] * n]
        if len(grad.shape) != 2 or tuple(grad.shape) != tuple(error.shape) or wrong:
            shapes = describe(grad=grad, error=error, **{name: f for name, (f, _) in factors.items()})
            raise ValueError(f"{self.name} of rank {self.attrs['rank']} expects equal matrices and their factors: {shapes}")


class Factor(OfMatrix):
    """y_j = M f_j for each of the `rank` columns f_j of a factor, with M = grad + error; `transposed`: y_j = M^T f_j. y has the
    dtype `dtype`, that in which it travels."""

    name = "factor"
    product: ClassVar[bool] = False  # a matmul of fp32 numbers at the speed of memory, and not the model's

    def infer(self, grad: Tensor, error: Tensor, f: Tensor) -> dict[str, Spec]:
        if len(grad.shape) != 2:
            raise ValueError(f"factor expects a matrix: {describe(grad=grad)}")
        y_length, f_length = (int(n) for n in grad.shape)
        if self.attrs["transposed"]:
            y_length, f_length = f_length, y_length
        self.expect(grad, error, f=(f, f_length))
        return {"y": ((self.attrs["rank"], y_length), self.attrs["dtype"])}

    def reference(self, grad, error, f):
        m = grad + error
        f = f.reshape(self.attrs["rank"], -1)
        return {"y": f @ m if self.attrs["transposed"] else f @ m.T}

    def flops(self) -> int:
        return (2 * self.attrs["rank"] + 1) * self.grad.size


class Householder(Op):
    """y = an orthonormal basis of the columns of x: the first `rank` columns of the product of the Householder reflections that
    make x upper triangular. Columns that depend on others, or are zero, get a direction of their own: no division, and no
    difference of nearly equal numbers, goes wrong, as it does in Gram's and Schmidt's way."""

    name = "householder"

    def infer(self, x: Tensor) -> dict[str, Spec]:
        rank = self.attrs["rank"]
        if x.size % rank or x.size // rank < rank:
            raise ValueError(f"householder expects {rank} columns of at least {rank} numbers: {describe(x=x)}")
        return {"y": ((rank, x.size // rank), "fp32")}

    def reference(self, x):
        """QR by Householder reflections; rows of `a` are the columns of x, so everything is transposed."""
        rank = self.attrs["rank"]
        a = np.array(x, dtype=np.float64).reshape(rank, -1)
        reflections = []
        for j in range(rank):
            v, tau = reflection(a[j], j)
            a -= tau * np.outer(a @ v, v)
            reflections.append((v, tau))
        y = np.eye(*a.shape)  # the basis: the reflections applied, last first, to the first `rank` unit vectors
        for v, tau in reversed(reflections):
            y -= tau * np.outer(y @ v, v)
        return {"y": y}

    def flops(self) -> int:
        return 4 * self.attrs["rank"] * self.x.size


def reflection(column: np.ndarray, first: int) -> tuple[np.ndarray, float]:
    """(v, tau) of the Householder reflection 1 - tau v v^T that makes the elements of a column behind `first` zero, and keeps those
    before it; v[first] = 1 (Golub and Van Loan, 5.1)."""
    v = np.zeros_like(column)
    v[first] = 1.0
    alpha, rest = column[first], column[first + 1 :]
    tail = np.sqrt((rest**2).sum())
    if tail == 0:
        return v, 0.0
    beta = np.hypot(alpha, tail) * (1 if alpha < 0 else -1)  # of the other sign: alpha - beta does not cancel
    v[first + 1 :] = rest / (alpha - beta)
    return v, float((beta - alpha) / beta)


class Feedback(OfMatrix):
    """What the factors have left out stays with the rank, and the gradient becomes what all ranks have sent:

    error = M - P^ own^T with M = grad + error;  grad = P^ total^T;  q = total.

    `own` is this rank's Q' as it was sent, `total` the sum over all ranks. With `tall` P^ belongs to the columns of M and Q' to
    its rows. Nothing changes where clip[1] is NaN: the step is left out, and the error of the steps before it is still there."""

    name = "feedback"
    inplace: ClassVar[dict[str, str]] = {"grad": "grad", "error": "error", "q": "q"}

    def infer(self, grad: Tensor, error: Tensor, p: Tensor, own: Tensor, total: Tensor, q: Tensor, clip: Tensor) -> dict[str, Spec]:
        if len(grad.shape) != 2 or clip.shape != (2,):
            raise ValueError(f"feedback expects a matrix and clip (2): {describe(grad=grad, clip=clip)}")
        q_length, p_length = (int(n) for n in grad.shape)
        if not self.attrs["tall"]:
            q_length, p_length = p_length, q_length
        self.expect(grad, error, p=(p, p_length), own=(own, q_length), total=(total, q_length), q=(q, q_length))
        return {name: (t.shape, t.dtype) for name, t in (("grad", grad), ("error", error), ("q", q))}

    def reference(self, grad, error, p, own, total, q, clip):
        if np.isnan(clip[1]):
            return {"grad": grad, "error": error, "q": q}
        p, own, total = (f.reshape(self.attrs["rank"], -1) for f in (p, own, total))

        def product(factor: np.ndarray) -> np.ndarray:
            return factor.T @ p if self.attrs["tall"] else p.T @ factor

        return {"grad": product(total), "error": grad + error - product(own), "q": total.reshape(q.shape)}

    def flops(self) -> int:
        return (4 * self.attrs["rank"] + 1) * self.grad.size
