"""A step of a run once more, from the checkpoint before it: bit for bit as recorded, or the first op and tensor that differ.

What a run records of a step are its rows in metrics.jsonl (loss, gradient norm, learning rates) and, where one was saved behind
it, the weights and the optimizer's state in a checkpoint."""

import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from barellm.assembly.build import open_model
from barellm.checkpoint import checkpoint, tensorfile
from barellm.checkpoint.folder import RunFolder
from barellm.checkpoint.weights import Weights
from barellm.config import Config, overrides
from barellm.errors import UserError
from barellm.runtime.op_check import BOUND, FP32_BOUND, Fault, OpCheck, difference
from barellm.training import metrics
from barellm.training.console import Console
from barellm.training.loop import Loop
from barellm.training.output import Silent
from barellm.training.resume import Start
from barellm.training.run import Run
from barellm.training.stopping import Stopping

NOT_COMPARED = {"kind", "step", "tokens_per_s", "seconds"}  # of a row: what is not a function of the step
OFF = {"exponent_stats": 0, "track": "", "hellaswag": "", "hellaswag_every": 0}  # nothing of a step depends on these
FIRST = 5  # tensors that are told


@dataclass(frozen=True)
class Recorded:
    """What a run's folder says of one of its steps. `start`: the newest checkpoint before it that is complete, None: there is
    none; `after`: that of the step itself. `config`, `total` steps and `machine` are those of the session that did the step."""

    folder: Path
    step: int
    config: Config
    total: int
    machine: dict[str, Any]
    start: Start | None
    after: Path | None
    rows: dict[int, dict[str, Any]]

    @classmethod
    def of(cls, folder: Path, wanted: int | None) -> "Recorded":
        """`wanted` None: the last step. UserError for a step that was not recorded, and for runs that cannot be replayed."""
        checkpoint.must_exist(folder / "config.json", expected="the folder of a run")
        rows = {row["step"]: row for row in metrics.read(folder / "metrics.jsonl") if row["kind"] == "train"}
        step = max(rows, default=0) if wanted is None else wanted
        if step not in rows:
            raise UserError(f"--step is {step}, and {folder} has recorded {f'steps 1 to {max(rows)}' if rows else 'no step'}")
        found: dict[int, Start] = {}
        for path in checkpoint.steps(folder / "checkpoints"):
            if checkpoint.problem(path) is None:
                found[checkpoint.step_of(path)] = Start(path, checkpoint.read_meta(path))
        start = found.get(max((at for at in found if at < step), default=-1))
        later = found.get(min((at for at in found if at >= step), default=-1))
        # `start`: the last checkpoint before the step; `later`: the first from it on.
        # A resumed run may have got other steps and keys: the first that was saved behind the step has those that it had.
        file = folder / "config.json"
        saved = checkpoint.read_json(file)
        config = overrides.from_json(later.meta["config"] if later else saved, later.path if later else file)
        total = (later.meta["total_steps"] if later else 0) or config.train.steps or (start.meta["total_steps"] if start else 0)
        if not total or (start is None and config.train.minutes):
            raise UserError(f"{folder} chose its number of steps by time, expected a checkpoint before step {step}, which has it")
        machine = {"device": saved.get("device", "auto")}
        for meta in (one.meta for one in (start, later) if one):
            machine |= meta["machine"]
        if (ranks := machine.get("ranks", 1)) > 1:
            raise UserError(f"{folder} was trained by {ranks} ranks, whose sums have another order: expected a run of one process")
        config = replace(config, train=replace(config.train, **OFF))
        return cls(folder, step, config, total, machine, start, found[step].path if step in found else None, rows)


class Replay(Run):
    """The steps of a run up to a recorded one. It writes nothing."""

    def __init__(self, recorded: Recorded, config: Config, weights: Weights | None, *, device: str) -> None:
        """`config`, `weights`: as a run from `recorded.start` on has them."""
        self.recorded = recorded
        quiet = Console(stream=open(os.devnull, "w"))  # noqa: SIM115  (to the end of the process)
        how: dict[str, Any] = {"device": device, "console": quiet, "started": time.monotonic()}
        super().__init__(config, start=recorded.start, weights=weights, **how)

    @contextmanager
    def _opened(self) -> Iterator[Loop]:
        """The loop before its first step."""
        self.base, folder = self._named_base(), RunFolder(self.recorded.folder, resume=True)  # not entered: nothing is written
        with ExitStack() as files:
            compiled = files.enter_context(open_model(self.config, device=self.device, documents=self.data.masked))
            self.config, self.stored = compiled.config, compiled.session
            progress = self._begin(folder, compiled)
            progress.total = self.recorded.total
            yield self._loop(folder, compiled, progress, files, output=Silent(self, folder.path, compiled), stop=Stopping())

    def compare(self, *, ops: bool) -> dict[str, Any]:
        """The result: `equal`, what was `compared`, the first `differences`, and with `ops`, or where there are any, the `fault`:
        the first op and tensor that a replay of the step op by op names."""
        with self._opened() as loop:
            found = self._step(loop, by_op=ops)
            machine = loop.meta["machine"]
        if found["differences"] and not ops and machine["device"] != "reference":
            with self._opened() as loop:
                again = self._step(loop, by_op=True, last=found["step"])
                found |= {name: again[name] for name in ("fault", "faults", "ops", "worst")}
        begin = str(self.recorded.start.path) if self.recorded.start else f"the initial weights (seed {self.config.train.seed})"
        return {"kind": "verify", "run": str(self.recorded.folder), "from": begin, "machine": machine, **found}

    def _step(self, loop: Loop, *, by_op: bool, last: int = 0) -> dict[str, Any]:
        """Replay up to the step (or `last`, 0: the step wanted), `by_op` this one op by op, and compare rows of metrics and the
        tensors of the checkpoint behind it. Only those of the first such step are kept. Returns the object of `verify --json`."""
        step, first, check = last or self.recorded.step, loop.progress.step + 1, None
        loop.replay(step - 1)
        if by_op:
            check = OpCheck(loop.session, bound=BOUND, fp32_bound=BOUND if self.config.train.tf32 else FP32_BOUND)
        loop.replay(step)
        differences: list[dict[str, Any]] = []
        for row in loop.metrics.rows:
            known = self.recorded.rows.get(row["step"], {})
            for name in (name for name in row if name in known and name not in NOT_COMPARED):
                if known[name] != row[name] and (not differences or differences[0]["step"] == row["step"]):
                    differences.append({"step": row["step"], "what": name, "recorded": known[name], "replayed": row[name]})
        compared = [f"loss, gradient norm and learning rate of {f'steps {first} to {step}' if first < step else f'step {step}'}"]
        if self.recorded.after and step == self.recorded.step:
            tensors, count = self._tensors(loop, self.recorded.after)
            differences += tensors if not differences or differences[0]["step"] == step else []
            compared.append(f"{count} tensors of {self.recorded.after.name}")
        where = differences[0]["step"] if differences else step
        found: dict[str, Any] = {"step": where, "equal": not differences, "compared": compared, "differences": differences}
        if check:
            worst, of_bound = max(check.worst.items(), key=lambda one: one[1], default=("", 0.0))
            first = vars(check.faults[0]) if check.faults else None
            found |= {"fault": first, "faults": len(check.faults), "ops": check.count, "worst": {"op": worst, "of_bound": of_bound}}
        return found

    @staticmethod
    def _tensors(loop: Loop, path: Path) -> tuple[list[dict[str, Any]], int]:
        """(the tensors that a checkpoint has otherwise, in the order in which they are updated; how many were compared)."""
        session, found, count = loop.session, [], 0
        ops = [op for p in session.programs.values() for op in p.ops]  # pyright: ignore[reportAttributeAccessIssue]
        writers = {t.base.name: op.name for op in ops for t in op.outputs.values()}
        for file, role in ((checkpoint.WEIGHTS, "parameter"), (checkpoint.OPTIMIZER, "state")):
            arrays = tensorfile.mapped(path / file)
            for name, t in checkpoint.of_role(session, role).items():
                count += 1
                now = np.ascontiguousarray(session.read(name), arrays[name].dtype)
                if words := difference(np.ascontiguousarray(arrays[name]), now):
                    found.append({"step": loop.progress.step, "what": name, "how": words, "op": writers.get(t.name, "")})
        order = list(writers)
        return sorted(found, key=lambda one: order.index(one["what"]) if one["what"] in order else -1), count


def lines(found: dict[str, Any]) -> list[str]:
    """The result of `Replay.compare` in lines for the terminal: the first FIRST differences, and what op by op has shown."""
    text = f"step {found['step']} of {found['run']}, replayed from {found['from']}: "
    if found["equal"]:
        out = [f"{text}bit for bit ({', '.join(found['compared'])})"]
    else:
        out = [f"{text}not as recorded"]
        for one in found["differences"][:FIRST]:
            how = one.get("how") or f"{one['recorded']} recorded, {one['replayed']} replayed"
            op = f" (of {one.get('op')})" * bool(one.get("op"))
            out.append(f"  {one['what']}{op}: {how}")
        out += [f"  and {len(found['differences']) - FIRST} tensors more"] * (len(found["differences"]) > FIRST)
    if "fault" not in found:
        return out
    if found["fault"]:
        return [*out, f"first op and tensor that differ: {Fault(**found['fault'])}"]
    worst = f"{found['worst']['op']} comes nearest, at {found['worst']['of_bound']:.2g} of it"
    out.append(f"op by op: {found['ops']} ops have the same bits twice, and are within their bound of float64 ({worst})")
    if not found["equal"]:
        out.append("so the record differs: by other kernels or another machine, or by a fault while the run wrote it")
    return out
