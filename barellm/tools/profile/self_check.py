"""The child's side of a GPU's self-check (`cuda/self_check.py`): compares kernels with float64 references."""

from contextlib import closing
from typing import Any

import numpy as np

from barellm.assembly.build import CompiledModel, build_programs
from barellm.config import Config
from barellm.cuda.step import CudaSession
from barellm.cuda.tuner import harness
from barellm.models.training_schedule import on_step
from barellm.runtime.op_check import BOUND, FP32_BOUND, OpCheck
from barellm.runtime.tuner.harness import Wrong
from barellm.tools.profile.step import SEED, StepBench

SMS = 7  # multiprocessors that a persistent kernel fills: each has several tiles


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
        programs = build_programs(config)
        with closing(CudaSession(programs, matmul="triton", tf32=train.tf32, plain_attention=True)) as session:
            compiled = CompiledModel(config, "cuda", session, programs, session.plan)
            on_step(session, config, 0, train.steps)
            session.tells_launches = True  # the last line of one that hangs
            bound = FP32_BOUND if train.dtype == "fp32" and not train.tf32 else BOUND
            self.worst = OpCheck(session, bound=bound, again=False).worst
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
