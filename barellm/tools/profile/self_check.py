"""The child's side of a GPU's self-check (`cuda/self_check.py`): compares kernels with float64 references."""

from contextlib import closing
from functools import partial
from typing import Any

import numpy as np

from barellm.assembly.build import CompiledModel, build_programs
from barellm.config import Config
from barellm.cuda import driver
from barellm.cuda.step import CudaSession
from barellm.cuda.tuner import harness
from barellm.models.training_schedule import on_step
from barellm.program.ops.base import Op
from barellm.program.scalars import SCALARS
from barellm.program.tensor import Dim, Tensor
from barellm.runtime.reference import Arena, ReferenceSession
from barellm.runtime.tuner.harness import Wrong
from barellm.tools.profile.step import SEED, StepBench

SMS = 7  # multiprocessors that a persistent kernel fills: each has several tiles
BOUND, FP32_BOUND = 2.0**-4, 2.0**-12  # of a value and the root mean square of its tensor: what is broken is far above


class Harness:
    """What `runtime.tuner.child` opens: a problem of the tuner's and a configuration of its kernel, or that of a small model, whose
    GEMMs and attention are then Triton's. Wrong where it fails."""

    seconds = 0.0

    def __init__(self, work: Any) -> None:
        self.worst: dict[str, float] = {}  # kernel -> its largest error over the bound
        if isinstance(work, Config):
            self._run_programs(work)
        else:
            problem, config = work
            with closing(harness.Harness(problem, calls=1, sms=SMS, config=config)) as done:
                self.worst[""] = done.case.worst

    def kernels(self) -> dict[str, float]:
        return self.worst

    def close(self) -> None:
        """Nothing is open."""

    def _run_programs(self, config: Config) -> None:
        """Run a training step, an evaluation and two decoding runs, checking each op; Wrong if one exceeds its error bound."""
        train = config.train
        self.bound = FP32_BOUND if train.dtype == "fp32" and not train.tf32 else BOUND
        programs = build_programs(config)
        with closing(CudaSession(programs, matmul="triton", tf32=train.tf32, plain_attention=True)) as session:
            compiled = CompiledModel(config, "cuda", session, programs, session.plan)
            on_step(session, config, 0, train.steps)
            session._starts = {name: partial(self._run_ops, session, name) for name in session._starts}
            compiled.initialize(SEED)
            StepBench(compiled).step()
            ids = np.arange(2 * train.seq, dtype=np.int32).reshape(2, -1) % config.model.vocab_size
            session.write("tokens", ids)
            session.write("targets", ids[:, ::-1])
            session.run("eval", batch=2, seq=train.seq, inv_targets=1 / ids.size)
            for pos, count in ((0, 5), (5, 1)):
                session.write("tokens", ids[:1, :count])
                session.run("decode", batch=1, seq=count, pos=pos)
        if wrong := [f"{name} by {worst:.3g} times the bound" for name, worst in self.worst.items() if not worst <= 1]:
            raise Wrong(f"wrong values: {', '.join(wrong[:3])}{' ...' * (len(wrong) > 3)}")

    def _run_ops(self, session: CudaSession, program: str) -> None:
        """Run a program op by op, comparing each with its float64 reference on the same inputs."""
        session._send_inputs(program)
        run, low, block = session._run(program), session.lowered[program], session._block
        oracle = ReferenceSession({program: session.programs[program]})
        oracle.memory = memory = Arena(session.plan, "float64")
        scalars = {name: (block.ints if row.kind == "i64" else block.floats)[row.index] for name, row in SCALARS.items()}
        read_later = {t.base for op in low.ops for t in op.inputs.values()}

        def read(op: Op, named: dict[str, Tensor]) -> dict[str, np.ndarray]:
            shapes = {}
            for t in {*named.values(), *(t.base for t in named.values())}:
                at = session.plan.offsets[t.base]
                memory.bytes[at : at + t.base.nbytes] = session._get(at, at + t.base.nbytes)
                shapes[t] = tuple(int(scalars[n.name]) if isinstance(n, Dim) else n for n in t.shape)
            return {k: oracle._read(t, shapes, rounded=k in op.rounded) for k, t in named.items()}

        for op in low.ops:
            given = read(op, op.inputs)
            current = read(op, {k: t for k, t in op.outputs.items() if op.adds(k, scalars)})
            for call in low.of[op].launches:
                launch = session._bind(call, run)
                driver.note_launch(launch)
                print(f"{op.name}: {launch}", flush=True)  # the last line of one that hangs
                launch.run(session.stream)
                session.synchronize()
            if not all(np.isfinite(a).all() for a in given.values()):  # an op before it is to blame
                continue
            found, want = read(op, op.outputs), op.run(given, scalars, current)
            for name, t in op.outputs.items():
                if t.role != "activation" or t.base in read_later:  # what nobody reads need not be there
                    self.worst[op.name] = max(self.worst.get(op.name, 0.0), self._error(found[name], want[name], t.dtype))

    def _error(self, found: np.ndarray, want: np.ndarray, dtype: str) -> float:
        """The largest error over its bound; fp16 may overflow where it must, as the first loss scale wants it."""
        with np.errstate(invalid="ignore", over="ignore"):
            want = want.reshape(found.shape).astype(np.float16 if dtype == "fp16" else np.float64).astype(np.float64)
            bound = self.bound * (np.abs(want) + np.sqrt(np.mean(want**2)) + 2.0**-40)
            return float(np.nan_to_num(np.where(found == want, 0.0, np.abs(found - want) / bound), nan=np.inf).max())
