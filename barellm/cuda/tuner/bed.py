"""Where candidates are run: a session for each, inputs that all share, what the result must be. Only ever in the tuner's child."""

from __future__ import annotations

from dataclasses import replace
from statistics import median
from typing import Any

import numpy as np

from barellm.cuda import driver, tuning
from barellm.cuda.bench import replay_seconds
from barellm.cuda.kernel import Launch, Target
from barellm.cuda.kernels.matmul import gemm
from barellm.cuda.step import CudaSession, lower_and_plan
from barellm.cuda.tuner.work import Candidate, Work
from barellm.program import ops
from barellm.program.builder import Program, Store
from barellm.program.ops.elementwise import Gelu, GeluBackward
from barellm.program.tensor import Dim
from barellm.runtime.storage import dtype_of
from barellm.runtime.tuner.child import Wrong

EPS = 2.0**-24
ROUNDING = {"fp32": EPS, "bf16": 2.0**-8}
PERSISTENT = ("weight", "bias")  # of the operands: the others arrive with the run
SAMPLE = 256  # rows and columns that are held against float64; bits are compared everywhere
TURN_SECONDS = 2e-3
MOST_CALLS = 200


class Bed:
    """One product on this machine's GPU. `calls`: of a turn at most."""

    def __init__(self, work: Work, calls: int = MOST_CALLS) -> None:
        self.work, self.device, self.calls = work, driver.device(), calls
        self.target = Target.of(self.device)
        N, K = (work.rows, work.cols) if work.role == "tn" else (work.cols, work.depth)
        N, K = (K, N) if work.role == "nn" else (N, K)
        draw, tokens, kind = np.random.default_rng(1).standard_normal, work.tokens, dtype_of(work.dtype)
        shapes = {"nt": {"x": (tokens, K), "weight": (N, K)}, "nn": {"dy": (tokens, N), "weight": (N, K)}}
        shapes["tn"] = {"dy": (tokens, N), "x": (tokens, K)}
        self.given = {n: draw(shape, np.float32).astype(kind) for n, shape in shapes[work.role].items()}
        if work.epilogue in ("gelu", "residual"):
            self.given["bias"] = draw(N, np.float32)
        if work.epilogue == "residual":
            self.given["residual"] = draw((tokens, N), np.float32)
        if work.epilogue == "gelu_backward":
            self.given["pre"] = draw((tokens, K), np.float32).astype(kind)
        self.before = draw((N, K), np.float32) if work.epilogue in ("add", "start") else None  # what is added to
        self.N, self.K, self.seconds = N, K, 0.0
        self.runs = sorted({tokens, 1, min(37, tokens), max(1, tokens - 1)})
        self.default = self._open(Candidate(tuning.default(self.target, work.product)))
        self.expected = {count: self._result(self.default, count) for count in self.runs}
        self.open = [self.default]

    def _open(self, candidate: Candidate) -> CudaSession:
        role, dtype, dims = self.work.role, self.work.dtype, (Dim("batch", 1), Dim("seq", self.work.tokens))
        store = Store()
        p = Program(store, compute=dtype)
        t: dict[str, Any] = {
            name: store.get(name, a.shape, kind, "parameter")
            if name in PERSISTENT
            else p.input(name, (*dims, a.shape[1]), kind)
            for name, a in self.given.items()
            for kind in ("fp32" if a.dtype == np.float32 else "bf16",)
        }
        if role == "tn":
            into = {"dweight": (store.get("out", (self.N, self.K), "fp32", "gradient"), self.work.epilogue or "store")}
            p.apply(ops.MatmulDw, into=into, **t)
        elif role == "nn":
            out = p.apply(ops.MatmulDx, dy=t["dy"], weight=t["weight"]).dx
            if "pre" in t:
                out = p.apply(ops.GeluBackward, dy=out, x=t["pre"]).dx
            p.output("out", out)
        else:
            out = p.apply(ops.Matmul, x=t["x"], weight=t["weight"]).y
            out = p.apply(ops.Bias, x=out, bias=t["bias"]).y if "bias" in t else out
            if self.work.epilogue == "gelu":
                p.output("pre", out)
                out = p.apply(ops.Gelu, x=out).y
            p.output("out", p.apply(ops.Add, a=t["residual"], b=out).y if "residual" in t else out)
        with tuning.forced(candidate.choice):
            built = lower_and_plan({"op": p}, self.target)
        if function := candidate.function():
            for launch in built.lowered["op"].launches:
                if isinstance(launch, Launch) and launch.spec.function is gemm:
                    launch.spec = replace(launch.spec, function=function)
        return CudaSession({"op": p}, built=built)

    def check(self, candidate: Candidate) -> CudaSession:
        session = self._open(candidate)
        try:
            for count in self.runs:
                result = self._result(session, count)
                for name, want in self.expected[count].items():
                    got = result[name]
                    if not np.array_equal(got.view(np.uint8), want.view(np.uint8)):
                        differ = got.astype(np.float64) != want.astype(np.float64)
                        raise Wrong(
                            f"other bits than the default's ({count} tokens): {int(differ.sum())} of {got.size} elements"
                        )
        except BaseException:
            session.close()
            raise
        self.open.append(session)
        return session

    def _result(self, session: CudaSession, tokens: int) -> dict[str, np.ndarray]:
        """What a run in an arena of NaN gives; Wrong where a value is off or another byte than the result's changed."""
        session._fill(0, session.plan.arena_bytes, 0xFF)
        for name, a in self.given.items():
            session.write(name, a if name in PERSISTENT else a[:tokens])
        if self.before is not None:
            session.write("out", self.before)
        before = session._get(0, session.plan.arena_bytes).copy()
        session.run("op", batch=1, seq=tokens, accumulate=int(self.before is not None))
        after = session._get(0, session.plan.arena_bytes)
        (op,) = session.lowered["op"].ops
        free, got = after != before, {}
        for name, out in op.outputs.items():
            got[name] = session.stored(out, (self.N if self.work.role == "tn" else tokens, self.work.cols)).copy()
        for t in (*op.outputs.values(), *session.lowered["op"].of[op].scratch_tensors):
            at = session.plan.offsets[t]
            used = next((got[name].nbytes for name, out in op.outputs.items() if out is t), t.nbytes)
            free[at : at + used] = False
        for name, t in op.inputs.items():
            if name not in PERSISTENT:  # inputs arrive with the run
                given, at = self.given[name][:tokens], session.plan.offsets[t]
                same = np.array_equal(after[at : at + given.nbytes], given.reshape(-1).view(np.uint8))
                free[at : at + given.nbytes] = not same
        self._hold(got, tokens)
        if free.any():
            raise Wrong(f"it wrote outside its result, first at byte {int(np.flatnonzero(free)[0])} of the arena")
        return got

    def _hold(self, got: dict[str, np.ndarray], tokens: int) -> None:
        """Against float64, a sample that has the first and the last row and column."""
        out = got["y" if self.work.role == "nt" else "dx" if self.work.role == "nn" else "dweight"]
        rows, cols = (np.unique(np.linspace(0, n - 1, min(n, SAMPLE)).astype(int)) for n in out.shape)

        def of(name: str) -> np.ndarray:
            a = self.given[name]
            return a if name in PERSISTENT else a[:tokens]

        if self.work.role == "nt":
            left, right = of("x")[rows], of("weight")[cols].T
        elif self.work.role == "nn":
            left, right = of("dy")[rows], of("weight")[:, cols]
        else:
            left, right = of("dy")[:, rows].T, of("x")[:, cols]
        left, right = left.astype(np.float64), right.astype(np.float64)
        want = left @ right
        bound = 10 * EPS * np.linalg.norm(left, axis=1)[:, None] * np.linalg.norm(right, axis=0) + EPS
        at = np.ix_(rows, cols)
        if "bias" in self.given:
            want = want + of("bias")[cols]
        if self.work.epilogue == "gelu":
            _compare(got["pre"], at, want, bound, tokens)
            want = Gelu.reference(None, want)["y"]  # pyright: ignore[reportArgumentType]
        elif self.work.epilogue == "gelu_backward":
            pre = of("pre")[at].astype(np.float64)
            bound = bound + 1e-5 * np.abs(want)  # where the slope is near 0
            want = GeluBackward.reference(None, want, pre)["dx"]  # pyright: ignore[reportArgumentType]
        elif self.work.epilogue == "residual":
            want = want + of("residual")[at]
        elif self.before is not None:
            want = want + self.before[at]
        _compare(out, at, want, bound, tokens)

    def time(self, candidates: list[CudaSession], rounds: int) -> list[list[float]]:
        everybody = [self.default, *candidates]
        calls = max(1, min(self.calls, round(TURN_SECONDS / max(self._seconds(self.default, 1), 1e-9))))
        samples = np.zeros((rounds, len(everybody)))
        for r in range(rounds):
            order = list(range(len(everybody)))
            for at in order if r % 2 == 0 else reversed(order):
                samples[r, at] = self._seconds(everybody[at], calls)
        self.seconds = float(median(samples[:, 0]))
        return [(samples[:, i + 1] / samples[:, 0]).tolist() for i in range(len(candidates))]

    def _seconds(self, session: CudaSession, calls: int) -> float:
        replay = lambda: session.replay("op", batch=1, seq=self.work.tokens)  # noqa: E731
        return replay_seconds(session.context, replay, calls)

    def close(self) -> None:
        for session in self.open:
            session.close()


def _compare(out: np.ndarray, at: Any, want: np.ndarray, bound: np.ndarray, tokens: int) -> None:
    values = out[at].astype(np.float64)
    bound = bound + 1.1 * ROUNDING["fp32" if out.dtype == np.float32 else "bf16"] * (np.abs(want) + bound)
    bad = ~(np.abs(values - want) <= bound)
    if bad.any():
        r, c = (int(i) for i in np.argwhere(bad)[0])
        where = f"out[{at[0][r, 0]}, {at[1][0, c]}] is {values[r, c]:.6g}, expected {want[r, c]:.6g}"
        raise Wrong(f"wrong values ({tokens} tokens): {where}; {int(bad.sum())} of {bad.size} looked at")
