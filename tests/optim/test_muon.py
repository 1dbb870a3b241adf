"""Muon's update program, on the references in float64, beside a transcription of what was published."""

from __future__ import annotations

import numpy as np
import pytest

from barellm.optim.muon import TOGETHER, Muon, batches
from barellm.optim.rules import Rule, update
from barellm.program.builder import Program, Store
from barellm.program.ops.optim.muon import JORDAN, POLAR_EXPRESS, jordan_scale, moonshot_scale
from barellm.program.tensor import Tensor
from barellm.runtime.reference import ReferenceSession

SHAPES = [(5, 5), (4, 9), (9, 4), (1, 6), (6, 1), (1, 1)]


def normal(*shape: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape)


def orthogonalised(g: np.ndarray, turns, margin: float, eps: float) -> np.ndarray:
    """As published: a tall matrix is transposed first."""
    x = g.T if g.shape[0] > g.shape[1] else g
    x = x / (np.linalg.norm(x) * margin + eps)
    for a, b, c in turns:
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.T if g.shape[0] > g.shape[1] else x


class Jordan:
    """Keller Jordan's Muon: a heavy ball instead of a mean, which has another length and the same direction."""

    def __init__(self, w: np.ndarray) -> None:
        self.w, self.buffer = w, np.zeros_like(w)

    def step(self, g: np.ndarray, lr: float, momentum: float, weight_decay: float, *, nesterov: bool) -> None:
        self.buffer = momentum * self.buffer + g
        update = g + momentum * self.buffer if nesterov else self.buffer
        x = orthogonalised(update, [(3.4445, -4.7750, 2.0315)] * 5, 1.0, 0.0)
        self.w = self.w * (1 - lr * weight_decay)
        self.w = self.w - lr * max(1.0, self.w.shape[0] / self.w.shape[1]) ** 0.5 * x


class NorMuon:
    """The speedrun's NorMuon with cautious weight decay, in its order of operations."""

    def __init__(self, w: np.ndarray, beta2: float) -> None:
        self.w, self.mean, self.beta2 = w, np.zeros_like(w), beta2
        self.red = 1 if w.shape[0] >= w.shape[1] else 0
        self.second = np.zeros([1 if axis == self.red else n for axis, n in enumerate(w.shape)])

    def step(self, g: np.ndarray, lr: float, momentum: float, weight_decay: float) -> None:
        self.mean += (1 - momentum) * (g - self.mean)
        x = orthogonalised(g + momentum * (self.mean - g), POLAR_EXPRESS, 1.02, 1e-6)
        v = (x**2).mean(self.red, keepdims=True)
        self.second += (1 - self.beta2) * (v - self.second)
        scaled = x / np.sqrt(np.maximum(self.second, 1e-10))
        x = scaled * np.linalg.norm(x) / np.linalg.norm(scaled)
        rate = 0.2 * max(x.shape) ** 0.5
        self.w = self.w - np.where(x * self.w >= 0, lr * weight_decay * self.w, 0) - lr * rate * x


def session_of(optimizer: Muon, shapes=SHAPES, *, compute: str = "fp32") -> ReferenceSession:
    """Program "optimizer_step" of matrices p0, p1, ... with an input "clip"."""
    p = Program(Store(), compute=compute)
    params = [p.parameter(f"p{i}", shape, std=1.0) for i, shape in enumerate(shapes)]
    optimizer.update(p, params, p.input("clip", (2,), "fp32"))
    session = ReferenceSession({"optimizer_step": p})
    for i, t in enumerate(params):
        session.write(t.name, normal(*t.shape, seed=i))
        session.write(f"{t.name}.grad", np.zeros(t.shape))
        session.write(f"{t.name}.m", np.zeros(t.shape))
        if optimizer.beta2:
            session.write(f"{t.name}.v", np.zeros(max(t.shape)))
    session.write("clip", np.array([1.0, 1.0]))
    return session


def run(session: ReferenceSession, momenta=(0.8, 0.85, 0.9), *, clip: float = 1.0, lr: float = 0.1):
    """An update for each momentum with random gradients; yields them, as they are after clipping, before each."""
    session.write("clip", np.array([3.0, clip]))
    for step, momentum in enumerate(momenta):
        grads = [normal(*shape, seed=100 * step + i) for i, shape in enumerate(SHAPES)]
        for i, g in enumerate(grads):
            session.write(f"p{i}.grad", g / clip)
        yield grads, momentum
        session.run("optimizer_step", lr=lr, momentum=momentum)


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("weight_decay", [0.0, 0.3])
def test_it_is_jordans(nesterov, weight_decay):
    session = session_of(Muon(orthogonalization="jordan", nesterov=nesterov, weight_decay=weight_decay, lr_scale=0.5))
    theirs = [Jordan(session.read(f"p{i}")) for i in range(len(SHAPES))]
    # A heavy ball and a mean are proportional where the momentum does not change.
    for grads, momentum in run(session, (0.9, 0.9, 0.9), clip=0.25):
        for t, g in zip(theirs, grads, strict=True):
            t.step(g, 0.05, momentum, weight_decay, nesterov=nesterov)
    for i, t in enumerate(theirs):
        np.testing.assert_allclose(session.read(f"p{i}"), t.w, rtol=1e-6, atol=1e-6, err_msg=str(SHAPES[i]))


def test_it_is_the_speedruns_normuon():
    optimizer = Muon(beta2=0.9, weight_decay=0.3, cautious=True, scale="moonshot")
    session = session_of(optimizer)
    theirs = [NorMuon(session.read(f"p{i}"), 0.9) for i in range(len(SHAPES))]
    for grads, momentum in run(session, clip=0.25):
        for t, g in zip(theirs, grads, strict=True):
            t.step(g, 0.1, momentum, 0.3)
    for i, t in enumerate(theirs):
        np.testing.assert_allclose(session.read(f"p{i}"), t.w, rtol=1e-10, atol=1e-12, err_msg=str(SHAPES[i]))
        np.testing.assert_allclose(session.read(f"p{i}.m"), t.mean, rtol=1e-10, err_msg=str(SHAPES[i]))
        np.testing.assert_allclose(session.read(f"p{i}.v"), t.second.reshape(-1), rtol=1e-10, err_msg=str(SHAPES[i]))


def step_of(grad: np.ndarray, **options) -> np.ndarray:
    """What one update subtracts from a weight of zeros, at rate 1 and momentum 0."""
    session = session_of(Muon(**options), [grad.shape])
    session.write("p0", np.zeros(grad.shape))
    session.write("p0.grad", grad)
    session.run("optimizer_step", lr=1.0, momentum=0.0)
    return -session.read("p0") / jordan_scale(*grad.shape)


@pytest.mark.parametrize("shape", [(24, 24), (16, 40), (40, 16)], ids=str)
@pytest.mark.parametrize("orthogonalization, least, most", [("polar-express", 0.85, 1.15), ("jordan", 0.6, 1.25)])
def test_singular_values_become_one_and_their_vectors_stay(shape, orthogonalization, least, most):
    u, _, vt = np.linalg.svd(normal(*shape, seed=5), full_matrices=False)
    grad = u * np.linspace(0.02, 1.0, min(shape)) @ vt
    found = step_of(grad, orthogonalization=orthogonalization)
    values = np.diag(u.T @ found @ vt.T)
    assert values.min() > least and values.max() < most
    np.testing.assert_allclose(u * values @ vt, found, atol=1e-12)


@pytest.mark.parametrize("orthogonalization", ["polar-express", "jordan"])
@pytest.mark.parametrize("beta2", [0.0, 0.9])
def test_gradients_of_rank_one_zeros_and_one_row(orthogonalization, beta2):
    a, b = normal(6, 1, seed=1), normal(1, 9, seed=2)
    unit = a / np.linalg.norm(a) @ (b / np.linalg.norm(b))
    found = step_of(1e-3 * a @ b, orthogonalization=orthogonalization, beta2=beta2)
    if not beta2:
        size = (found * unit).sum()
        assert 0.6 < size < 1.25
        np.testing.assert_allclose(found, size * unit, atol=1e-12)
    assert np.linalg.norm(found) < 1.25
    row = step_of(b, orthogonalization=orthogonalization, beta2=beta2)
    assert 0.6 < np.linalg.norm(row) < 1.25
    assert np.all(step_of(np.zeros((6, 9)), orthogonalization=orthogonalization, beta2=beta2) == 0)


def test_nothing_changes_where_the_norm_is_not_finite():
    session = session_of(Muon(beta2=0.9, weight_decay=0.1))
    for _ in run(session):
        pass
    before = {name: session.read(name) for name in session.tensors if not name.endswith(".grad")}
    session.write("p1.grad", np.full(SHAPES[1], np.inf))
    session.write("clip", np.array([np.inf, np.nan]))
    session.run("optimizer_step", lr=0.1, momentum=0.9)
    for name, values in before.items():
        assert np.array_equal(session.read(name), values), name


def test_fewer_turns_are_the_first_ones():
    grad = normal(7, 3, seed=3)
    expected = orthogonalised(grad, POLAR_EXPRESS[:2], 1.02, 1e-6)
    np.testing.assert_allclose(step_of(grad, ns_steps=2), expected, rtol=1e-10)
    assert len(JORDAN) == len(POLAR_EXPRESS) == 5


def test_scales_of_steps():
    assert jordan_scale(12, 3) == 2 and jordan_scale(3, 12) == 1
    assert moonshot_scale(3, 16) == moonshot_scale(16, 3) == pytest.approx(0.8)


def test_small_matrices_take_their_turns_together():
    small, large = (Tensor("t", (n, 1024), "fp32", "parameter") for n in (400, 2048))
    assert [len(found) for found in batches([small] * 7 + [large] * 2)] == [3, 3, 2, 1]
    assert 2 * small.size < TOGETHER <= 3 * small.size


def test_its_products_are_not_the_models():
    p = Program(Store())
    for i, shape in enumerate(SHAPES):
        p.parameter(f"p{i}", shape, std=1.0)
    update(p, [Rule("*", optimizer=Muon())], clip=1.0)
    assert p.flops == 0
    products = [op.flops() for op in p.ops if op.name.startswith("gram")]
    turn = 0
    for shape in SHAPES:
        n, depth = sorted(shape)
        triangle = n * (n + 1) // 2  # products and sums of each element of it, over the depth and over n
        turn += 2 * triangle * depth + (2 * triangle * n + 3 * n * n) + (2 * n * n * depth + 2 * n * depth)
    assert sum(products) == 5 * turn
