"""A program of a session op by op, each op held against a second execution, its float64 reference, and what other ops left.

A kernel that is run twice from the same inputs has the same bits here. So an op whose two executions differ, or a tensor that
changes where no op writes it, shows a fault of the memory or the processor, in any bit. A kernel that computes wrongly does so
twice, and shows where it is further from the reference than rounding explains."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from barellm.program import dtypes
from barellm.program.ops.base import Op
from barellm.program.scalars import SCALARS
from barellm.program.tensor import PERSISTENT, Dim, Tensor
from barellm.runtime.reference import Arena, ReferenceSession

# Of a value and the root mean square of its tensor: what is broken is far above, and every order of sums below.
BOUND, FP32_BOUND = 2.0**-4, 2.0**-12


@dataclass(frozen=True)
class Fault:
    """The first sign of a fault: the op that has just run, and the tensor that it should not have left, or found, as it is."""

    program: str
    number: int  # of the op among those of the program, from 1
    op: str
    tensor: str
    what: str

    def __str__(self) -> str:
        return f"{self.program}, op {self.number}, {self.op}, tensor {self.tensor}: {self.what}"


class OpCheck:
    """From here on every run of the session goes op by op. `worst`: of each op the largest error over its bound, relative to the
    reference. `again`: each op is executed twice, and what it reads must be as it was left. `faults`: all that was found."""

    def __init__(self, session: Any, *, bound: float, fp32_bound: float | None = None, again: bool = True) -> None:
        """`session`: an ArenaSession whose `each_op(program)` gives, in a run that has begun, each op and a function that runs its
        calls alone. `fp32_bound`: of outputs of fp32 whose op reads nothing of 16 bits (None: as others)."""
        self.session = session
        self.bound, self.fp32_bound, self.again = bound, fp32_bound or bound, again
        self.worst: dict[str, float] = {}
        self.faults: list[Fault] = []
        self.count = 0  # ops that have run
        self._left: dict[Tensor, tuple[str, str]] = {}  # tensor -> digest of its bytes, and who left them so
        self._memory = Arena(session.plan, "float64")
        session._starts = {name: partial(self._run, name) for name in session._starts}

    def _run(self, program: str) -> None:
        """Run a program op by op, in place of the session's own start: each op is compared with the float64 reference, computed
        from the bytes that the op read. With `again` an op runs twice, and no tensor may change between its writer and its
        readers (`_left`: digest and writer of each). Appends to `faults`; a program goes on behind a fault."""
        block = self.session._block
        oracle = ReferenceSession({program: self.session.programs[program]})
        oracle.memory = self._memory
        scalars = {name: (block.ints if row.kind == "i64" else block.floats)[row.index] for name, row in SCALARS.items()}
        ops = list(self.session.each_op(program))
        read_later = {t.base for op, _ in ops for t in op.inputs.values()}

        def read(op: Op, named: dict[str, Tensor]) -> dict[str, np.ndarray]:
            return self._read(oracle, op, named, scalars)

        self._left = {t: left for t, left in self._left.items() if t.role in PERSISTENT}
        for number, (op, run) in enumerate(ops, 1):
            found: list[tuple[Tensor, str]] = []
            # Before the op: its operands are as they were left.
            read_bases = {t.base for t in op.inputs.values()}
            written_bases = {t.base for t in op.outputs.values()}
            if self.again:
                found += self._changed(t.base for t in op.inputs.values())
            given = read(op, op.inputs)
            current = read(op, {k: t for k, t in op.outputs.items() if op.adds(k, scalars)})
            # The op, and what it only reads is still so.
            twice = self._twice(op, run)
            if self.again:
                found += self._changed(read_bases - written_bases)
            found += twice
            # Its results.
            if all(np.isfinite(a).all() for a in given.values()):  # else an op before it is to blame
                results = read(op, {k: t for k, t in op.outputs.items() if t.role != "activation" or t.base in read_later})
                found += self._wrong(op, results, wanted=op.run(given, scalars, current))
            self.count += 1
            self.faults += [Fault(program, number, op.name, t.name, what) for t, what in found]
            if self.again:
                self._left |= {t: (digest(self._bytes(t)), f"op {number}, {op.name}, wrote it") for t in written_bases}
        if self.again:
            last = len(ops), ops[-1][0].name if ops else ""
            changed = [(t, what) for t, what in self._changed(list(self._left)) if t.role in PERSISTENT]
            self.faults += [Fault(program, *last, t.name, what) for t, what in changed]

    def _read(self, oracle: ReferenceSession, op: Op, named: dict[str, Tensor], scalars: dict[str, Any]) -> dict[str, np.ndarray]:
        """The values of an op's operands `named`, copied out of the session's memory at this moment."""
        shapes = {}
        for t in {*named.values(), *(t.base for t in named.values())}:
            at = self.session.plan.offsets[t.base]
            self._memory.bytes[at : at + t.base.nbytes] = self._bytes(t.base)
            shapes[t] = tuple(int(scalars[n.name]) if isinstance(n, Dim) else n for n in t.shape)
        return {k: oracle._read(t, shapes, rounded=k in op.rounded) for k, t in named.items()}

    def _wrong(self, op: Op, results: dict[str, np.ndarray], wanted: dict[str, np.ndarray]) -> list[tuple[Tensor, str]]:
        """The outputs of `results` that are further from the reference's than the bound. Notes the largest error in `worst`."""
        found = []
        for name, result in results.items():
            t = op.outputs[name]
            full = all(x.dtype in ("fp32", "i32") for x in (t, *op.inputs.values()))
            error = excess(result, wanted[name], t.dtype, self.fp32_bound if full else self.bound)
            self.worst[op.name] = max(self.worst.get(op.name, 0.0), error)
            if not error <= 1:
                found.append((t, f"off from the float64 reference by {error:.3g} times what rounding explains"))
        return found

    def _bytes(self, t: Tensor) -> np.ndarray:
        at = self.session.plan.offsets[t]
        return self.session._get(at, at + t.nbytes)

    def _changed(self, tensors: Iterable[Tensor]) -> list[tuple[Tensor, str]]:
        """Those of the tensors that are not as they were left. One that nobody has written yet counts from here on."""
        found = []
        for t in dict.fromkeys(tensors):
            now = digest(self._bytes(t))
            before, who = self._left.setdefault(t, (now, "it was read"))
            if before != now:
                found.append((t, f"changed after {who}, and no op has written it since"))
                self._left[t] = now, "that was found"
        return found

    def _twice(self, op: Op, run: Callable[[], None]) -> list[tuple[Tensor, str]]:
        """Run an op, and with `again` once more from the same bytes: the outputs whose bits differ."""
        bases = dict.fromkeys(t.base for t in op.outputs.values()) if self.again else {}
        before = {t: self._bytes(t).copy() for t in bases}
        run()
        first = {t: self._bytes(t).copy() for t in bases}
        for t, data in before.items():
            self.session._set(self.session.plan.offsets[t], data)
        if bases:
            run()
        found = []
        for t in bases:
            # Formats of several planes (`program.dtypes`) are compared byte by byte.
            kind = np.dtype(np.uint8) if dtypes.FORMATS[t.dtype].planes else dtypes.numpy_dtype(t.dtype)
            if words := difference(first[t].view(kind), self._bytes(t).view(kind)):
                found.append((t, f"two executions differ: {words}"))
        return found


def digest(data: np.ndarray) -> str:
    import xxhash

    return xxhash.xxh3_64(np.ascontiguousarray(data).data).hexdigest()


def excess(found: np.ndarray, want: np.ndarray, dtype: str, bound: float) -> float:
    """The largest error over its bound; fp16 may overflow where it must, as the first loss scale wants it."""
    with np.errstate(invalid="ignore", over="ignore"):
        want = want.reshape(found.shape).astype(np.float16 if dtype == "fp16" else np.float64).astype(np.float64)
        allowed = bound * (np.abs(want) + np.sqrt(np.mean(want**2)) + 2.0**-40)
        return float(np.nan_to_num(np.where(found == want, 0.0, np.abs(found - want) / allowed), nan=np.inf).max())


def difference(one: np.ndarray, other: np.ndarray) -> str:
    """How the bits of two arrays of a dtype differ, in words: how many elements, the first with both values, and its bit if it is
    one; "" if they are equal."""
    dtype = one.dtype
    codes = [np.ascontiguousarray(data).reshape(-1).view(f"u{dtype.itemsize}") for data in (one, other)]
    at = np.flatnonzero(codes[0] != codes[1])
    if not at.size:
        return ""
    a, b = (code[at[0] : at[0] + 1] for code in codes)
    bits = int(a[0] ^ b[0])
    bit = f", bit {bits.bit_length() - 1}" if bits & (bits - 1) == 0 else ""
    values = " and ".join(f"{float(v.view(dtype)[0]):.9g}" for v in (a, b))
    return f"{at.size:,} of {codes[0].size:,} elements, the first, number {at[0]:,}, is {values}{bit}"
