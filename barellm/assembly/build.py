"""A model's programs on a backend: "cpu", "cuda", or "reference" (NumPy, for tests and small models)."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from barellm import models
from barellm.assembly import advice, quantized, self_check
from barellm.config import Config, TrainConfig
from barellm.config.fields import words
from barellm.config.number_formats import number_formats
from barellm.errors import UserError, check_known, shown
from barellm.models.training_schedule import on_step, runs_per_step
from barellm.program import planner
from barellm.program.builder import Program
from barellm.program.dtypes import PRECISIONS
from barellm.program.matmul_formats import MatmulFormats
from barellm.program.planner import Plan
from barellm.program.ranks import Ranks
from barellm.program.tensor import Tensor
from barellm.runtime import memory, rates
from barellm.runtime.backend import NAMES, automatic, backend
from barellm.runtime.ranks import ALONE, without_peer_access

DEVICES = ("auto", *NAMES, "reference")
ROWS = 4096  # of a matrix that are handed on at a time
SAMPLE_POSITIONS = 512  # of a run's KV cache: its samples have up to 384 tokens and nearly always a short prompt


@dataclass(frozen=True)
class CompiledModel:
    """A session and what is known about it. `config` has the dtype resolved."""

    config: Config
    device: str
    session: Any
    programs: dict[str, Program]
    plan: Plan
    matrices: dict[str, quantized.Matrix] = field(default_factory=dict)  # the quantized ones

    @property
    def loading(self) -> Any:
        """The session as a loader of weights sees it."""
        return quantized.Quantizing(self.session, self.matrices) if self.matrices else self.session

    @property
    def parameters(self) -> int:
        """How many there are, without the padded rows of the vocabulary."""
        codes = sum(m.parameter.trained for m in self.matrices.values() if not m.stays)
        return codes + sum(t.trained for t in self.session.tensors.values() if t.role == "parameter")

    @property
    def flops_per_step(self) -> int:
        """Model FLOPs of one optimizer step, the mean of a cycle's: recompute is not counted."""
        return model_flops(self.programs, self.config) if "forward_backward" in self.programs else 0

    @property
    def written(self) -> dict[str, frozenset[str]]:
        """The tensors that each program changes of those that outlive a run."""
        persistent = self.session.tensors
        return {
            name: frozenset(t.base.name for op in p.ops for t in op.outputs.values() if t.base.name in persistent)
            for name, p in self.programs.items()
        }

    @property
    def shared(self) -> bool:
        """Whether a second thread may read the tensors while a program runs. A GPU's driver calls belong to one thread."""
        return self.device != "cuda"

    def peak(self) -> rates.Rate:
        """FLOP/s that matmuls of this dtype reach here, measured; 0 where nobody measures."""
        if self.device not in NAMES:
            return rates.Rate(0.0, 0.0)
        return backend(self.device).measured_peak(self.config.train.dtype)

    def meta(self) -> dict[str, Any]:
        if self.device not in NAMES:
            return {"device": self.device, "isa": "numpy", "dtype": self.config.train.dtype, "threads": 1}
        return {**backend(self.device).describe(), "dtype": self.config.train.dtype}

    def initialize(self, seed: int) -> None:
        """Initialize the parameters for training. Quantized ones are drawn in a separate session and then quantized."""
        for name in ("init", "init_frozen") if "init_frozen" in self.programs else ("init",) if not self.matrices else ():
            self.session.run(name, seed=seed)
        if not self.matrices:
            return
        from barellm.assembly.programs import build

        loading = self.loading
        with opened({"init": build(self.config.model)[1]["init"]}, self.device) as drawn:
            drawn.run("init", seed=seed)
            for t in drawn.tensors.values():
                if t.role == "parameter":
                    for lo in range(0, int(t.shape[0]), ROWS):
                        loading.write_rows(t.name, lo, drawn.read_rows(t.name, lo, min(lo + ROWS, int(t.shape[0]))))


def check_device(device: str) -> None:
    """Raise a UserError for a device that does not exist, or a GPU that is not there."""
    if not isinstance(device, str):
        raise UserError(f"device is {shown(device)}, expected {', '.join(DEVICES)}")
    if device == "cuda":
        backend(device).describe()
    check_known("device", device, DEVICES)


def chosen_device(device: str, config: Config, *, ranks: int = 1, before: str = "") -> str:
    """Resolve "auto": the GPU if usable and its self-check passes with these options, else the CPU. `before`: device of the run
    that is resumed, kept if it is no GPU; several `ranks` run on CPUs. UserError as in `check_device`."""
    check_device(device)
    if device != "auto":
        return device
    if before not in ("", "cuda") or ranks > 1:
        return before or "cpu"
    return automatic(lambda: proven_options(resolved(config, "cuda"), "cuda"))


def resolved(config: Config, device: str) -> Config:
    """The same with the dtype that "auto" means on `device`. UserError for TF32 that no matmul would be done in."""
    dtype = _dtype(config.train.dtype, device)
    if device == "cuda" and config.train.tf32 and dtype != "fp32":
        raise UserError(f"train.tf32 is about products of fp32, and train.dtype is {dtype}: add --dtype fp32")
    if config.train.branch_scales and (dtype != "fp16" or config.adapter.active):
        found = "an adapter" if config.adapter.active else f"train.dtype {dtype}"
        raise UserError(f"train.branch_scales is true, and the run has {found}, expected fp16 and no adapter")
    return replace(config, train=replace(config.train, dtype=dtype))


def gemm_options(train: TrainConfig, device: str) -> dict[str, Any]:
    """The options of the GPU's backend that say who does matmuls, and how. Other backends have no such options."""
    return {"matmul": train.gemm_backend, "tf32": train.tf32} if device == "cuda" else {}


def proven_options(config: Config, device: str, *, training: bool = True) -> dict[str, Any]:
    """The same, of kernels that the GPU's self-check has found right; without `training` the user's own do not count."""
    options = gemm_options(config.train if training else TrainConfig(), device)
    if device == "cuda":
        small = self_check.small(config)
        options |= backend(device).proven(options["matmul"], small or config, build_programs if small else None)
    return options


def build_programs(
    config: Config, *, training: bool = True, positions: int | None = None, rows: int = 1, scoring: tuple[int, int] | None = None,
    ranks: Ranks = ALONE, documents: bool = False, exact: bool = False,
) -> dict[str, Program]:  # fmt: skip
    """The programs of a training run, or (`training` False) of inference; `config` must have its dtype resolved. `rows` x
    `positions`: KV cache of "decode" (None: what samples need, or without training the model's maximum; 0: no "decode"). `scoring`:
    (batch, seq) of "score", which without training replaces "eval". With several `ranks`, each gets its share of a batch.
    `documents`, `exact`: as in `assembly.programs.build`."""
    from barellm.assembly.programs import build
    from barellm.optim.recipes import start_reduce_scatter, updates

    train, hidden = config.train, models.hidden(config.model)
    precision = replace(PRECISIONS[train.dtype], branch_scales=train.branch_scales)
    if positions is None and training:
        positions = min(SAMPLE_POSITIONS, config.model.max_seq)
    batch = train.micro_batch_size // ranks.count if training or scoring is None else 0
    eval_batch, eval_seq = train.eval_shape(batch) if batch else (0, 0)
    _, programs = build(
        config.model, batch=batch, seq=train.seq, compute=precision,
        optimizer=updates(config.optim, hidden, ranks) if training else None,
        start_reduce_scatter=lambda p: start_reduce_scatter(p, config.optim, hidden, ranks), recompute=train.recompute,
        ranges=train.exponent_stats > 0, eval_batch=eval_batch, eval_seq=eval_seq, decode_batch=0 if positions == 0 else rows,
        decode_seq=positions or 0, score_batch=scoring[0] if scoring else 0, score_seq=scoring[1] if scoring else 0,
        adapter=config.adapter if training else None, documents=documents, exact=exact, formats=matmul_formats(train, ranks),
    )  # fmt: skip
    if training and config.adapter.codes:
        quantized.quantize_frozen(programs, config.adapter.codes)
    return programs


def matmul_formats(train: TrainConfig, ranks: Ranks = ALONE) -> MatmulFormats | None:
    """The formats that `train.matmul_formats` and its like ask for. UserError where each rank would have states of its own."""
    if not train.matmul_formats:
        return None
    if ranks.count > 1 and train.exponent_bias in ("delayed", "learned"):
        raise UserError(
            f"train.exponent_bias is {train.exponent_bias} with {ranks.count} ranks, each of which would have its own: "
            "expected static or floating"
        )
    return MatmulFormats(number_formats(train.matmul_formats), train.exponent_bias, words(train.stochastic_rounding))


def shards_of(config: Config, ranks: Ranks) -> tuple[dict[str, Tensor], dict[str, Sequence[tuple[int, int]]]]:
    """(parameters and optimizer state as one process would have them, {name: elements [first, end) of each rank}). Per-rank state,
    such as error feedback, is concatenated."""
    from barellm.optim.recipes import shards

    store = build_programs(config)["forward_backward"].store
    tensors = {name: t for name, t in store.tensors.items() if t.role in ("parameter", "state")}
    parts = shards(config.optim, models.hidden(config.model), store, ranks)
    for name, of_ranks in parts.items():
        t, size = tensors[name], sum(end - first for first, end in of_ranks)
        if size != t.size:  # each rank has one of its own
            tensors[name] = Tensor(name, (size // t.size * int(t.shape[0]), *t.shape[1:]), t.dtype, t.role)
    return tensors, parts


def model_flops(programs: dict[str, Program], config: Config) -> int:
    """Model FLOPs of one optimizer step of these programs."""
    return round(sum(times * programs[name].flops for name, times in runs_per_step(config).items()))


@contextmanager
def open_model(
    config: Config, *, device: str, training: bool = True, positions: int | None = None, rows: int = 1,
    scoring: tuple[int, int] | None = None, weights: str = "", only: tuple[str, ...] = (), ranks: Ranks = ALONE,
    documents: bool = False, exact: bool = False, bf16: Collection[str] | None = None,
) -> Iterator[CompiledModel]:  # fmt: skip
    """Context manager: programs built, planned, compiled and allocated. `training` False: no optimizer, and `only` selects
    programs. `weights`: a quantization scheme; such a model can only be loaded, not trained or initialized. `bf16`: such parameters
    of weights that are to be loaded, as in `quantized.keep_operands`. Otherwise as `build_programs`."""
    device = chosen_device(device, config, ranks=ranks.count)
    config = resolved(config, device)
    if exact and device != "cpu":
        raise UserError(f"exact is for the CPU, and the device is {device}")
    train, ranks = config.train, without_peer_access(ranks) if device == "cuda" else ranks
    options_of_build: dict[str, Any] = {"positions": positions, "rows": rows, "scoring": scoring, "ranks": ranks}
    options_of_build |= {"documents": documents, "exact": exact}
    programs = build_programs(config, training=training, **options_of_build)
    programs = {name: p for name, p in programs.items() if not only or name in only or (name == "prefill" and "decode" in only)}
    matrices: dict[str, quantized.Matrix] = {}
    if weights:
        programs = {name: programs[name] for name in ("eval", "score", "decode", "prefill") if name in programs}
        matrices = quantized.quantize_programs(programs, weights)
    elif training and config.adapter.codes:
        matrices = next(iter(programs.values())).store.matrices
    if bf16 is not None and device == "cpu":
        quantized.keep_operands(programs, bf16)
    options = proven_options(config, device, training=training)
    if device in NAMES:
        try:
            session = backend(device).open_session(programs, **options)
        except memory.TooLarge as error:
            raise _refused(error, config, device, training, options_of_build) from None
        try:
            on_step(session, config, 0, train.steps)
            yield CompiledModel(config, device, session, programs, session.plan, matrices)
        except KeyboardInterrupt:
            raise  # without waiting for the step that is running: its threads end with the process
        except BaseException:
            session.close()
            raise
        session.close()
    else:
        from barellm.runtime import reference

        plan = _plan(programs, device)
        try:
            memory.check_fits(plan, what=f"a step of {train.micro_batch_size} x {train.seq} tokens")
        except memory.TooLarge as error:
            raise _refused(error, config, device, training, options_of_build) from None
        # fp32 throughout: what a checkpoint holds is then all that there is.
        session = reference.open(programs, dtype="float32")
        on_step(session, config, 0, train.steps)
        yield CompiledModel(config, device, session, programs, plan, matrices)


def _plan(programs: dict[str, Program], device: str, **options: Any) -> Plan:
    if device in NAMES:
        return backend(device).planned(programs, **options)
    return planner.plan({name: p.ops for name, p in programs.items()}, next(iter(programs.values())).store)


def _refused(error: memory.TooLarge, config: Config, device: str, training: bool, how: Mapping[str, Any]) -> UserError:
    """The same with what would fit."""
    if not training:
        return UserError(f"{error}{_caches(config, how)}: choose a smaller context, batch or model")

    def plan(other: Config) -> Plan:
        return _plan(build_programs(other, **how), device, **gemm_options(other.train, device))

    return UserError(f"{error}: {advice.of_training(config, error.limit, plan, ranks=how['ranks'].count)}")


def _caches(config: Config, how: Mapping[str, Any]) -> str:
    """The arithmetic of the KV caches, where there are any."""
    decode = build_programs(config, training=False, **how).get("decode")
    return "" if decode is None else cache_arithmetic(decode)


def cache_arithmetic(p: Program) -> str:
    """How large a program's KV caches are, where it has any."""
    caches = [t for t in p.store.of_role("cache") if t.name.endswith("_cache")]  # the threads' scratch is one too
    if not caches or len(caches[0].shape) != 3:
        return ""
    rows, positions, _ = caches[0].shape
    each = sum(t.nbytes for t in caches) // (rows * positions)
    return f" (KV caches: {rows} texts x {positions} positions x {each} bytes)"


@contextmanager
def opened(programs: dict[str, Program], device: str, **options: Any) -> Iterator[Any]:
    """Context manager: a session of these programs on a device, with a backend's options."""
    if device not in NAMES:
        from barellm.runtime import reference

        yield reference.open(programs, dtype="float32")
        return
    session = backend(device).open_session(programs, **options)
    try:
        yield session
    finally:
        session.close()


def _dtype(requested: str, device: str) -> str:
    if requested != "auto":
        return requested
    if device not in NAMES:
        return "fp32"
    return backend(device).default_dtype()
