"""The tuning database as the CUDA backend uses it: configurations of Triton's GEMM, of Hopper's and of attention's kernels. An
entry's key contains the card's name."""

import hashlib
import json
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

from barellm.cuda import attention_config, gemm_config
from barellm.cuda.attention_config import AttentionConfig
from barellm.cuda.gemm_config import GemmConfig, HopperGemmConfig
from barellm.cuda.kernel import Target
from barellm.program.ops.pointwise.elementwise import SLOPES
from barellm.runtime import artefacts
from barellm.runtime.tuner.database import Database, Entry, requested
from barellm.runtime.tuner.problem import Gemm, given_config

SHIPPED = Path(__file__).with_name("tuned.json")  # what was measured on cards that people have: nothing yet
KERNELS = (
    "matmul", "hopper", "hopper_warp_specialized", "epilogue", "activations", "split_k", "attention", "attention_backward",
    "attention_mask", "attention_tiles", "hopper_attention", "hopper_attention_backward", "hopper_pipeline", "random", "common",
)  # fmt: skip
FILES = ("gemm_config.py", "attention_config.py", "tuning.py", *(f"{name}.py" for name in KERNELS))  # below this folder

Config = GemmConfig | HopperGemmConfig | AttentionConfig
NAMES: dict[type, str] = {GemmConfig: "tile", HopperGemmConfig: "form", AttentionConfig: "blocks"}  # in an entry
OLD_FIELDS = {  # names of fields in entries that were written before they had the field's names
    "rows": "tile_m", "cols": "tile_n", "depth": "tile_k", "warps": "num_warps", "stages": "num_stages", "group": "group_m",
    "slots": "epilogue_stages", "registers": "max_registers", "roles": "warp_specialized",
}  # fmt: skip
LOADS_C = ("residual", *SLOPES, "add", "start")  # epilogues that read a matrix


@dataclass(frozen=True)
class GemmProblem(Gemm):
    """`operation`: by BLAS's transposes: "nt": y = x weight^T, "nn": dx = dy weight, "tn": gradient of the weight. The depth of
    "tn" is the tokens, of the others the rows are. `kernel`: "triton", or "hopper", whose configs depend on the `epilogue`."""

    kernel: str = "triton"
    epilogue: str = ""

    @property
    def config_type(self) -> type:
        return HopperGemmConfig if self.kernel == "hopper" else GemmConfig

    @property
    def name(self) -> str:
        """Its name in an entry of the database."""
        what = f"hopper {self.epilogue}".strip() + " " if self.kernel == "hopper" else ""
        return f"{what}{self.operation} {self.dtype}, {self.rows} x {self.cols} from {self.depth}"

    @property
    def tokens(self) -> int:
        return self.depth if self.operation == "tn" else self.rows

    def default(self, arch: int, sms: int = gemm_config.WAVE) -> Config:
        if self.kernel == "hopper":
            cols = gemm_config.select_tile_n(self.operation, self.rows, self.cols, self.depth)
            return gemm_config.hopper_config(cols, loads_c=self.epilogue in LOADS_C)
        return gemm_config.select_config(self.operation, self.rows, self.cols, self.depth, self.dtype, arch, sms)

    def configs(self, arch: int) -> tuple[Config, ...]:
        """Every configuration, with the default rasterization."""
        return gemm_config.hopper_configs() if self.kernel == "hopper" else gemm_config.gemm_configs(self.dtype, arch)

    def __str__(self) -> str:
        return f"{super().__str__()} {self.epilogue}".strip()


@dataclass(frozen=True)
class AttentionProblem:
    """An attention kernel over `batch` sequences of `seq` tokens, with `heads` heads of `head` columns. `operation`: "forward"; of
    the backward pass "keys", for dk and dv, and "queries", for dq. `kv_heads`: of keys and values where they are fewer, else 0."""

    operation: str
    dtype: str
    batch: int
    seq: int
    heads: int
    head: int
    dropout: bool = False
    kv_heads: int = 0
    config_type = AttentionConfig

    @property
    def name(self) -> str:
        """Its name in an entry of the database."""
        rest = ", dropout" if self.dropout else ""
        heads = f"{self.heads} heads over {self.kv_heads}" if self.kv_heads else f"{self.heads} heads"
        return f"attention {self.operation} {self.dtype}, {self.batch} x {heads} of {self.head}, {self.seq} tokens{rest}"

    @property
    def flops(self) -> int:
        """The operations of the causal half: two matmuls forward, four for dk and dv, three for dq."""
        matmuls = {"forward": 2, "keys": 4, "queries": 3}[self.operation]
        return matmuls * self.batch * self.heads * self.seq * (self.seq + 1) * self.head

    @property
    def sizes(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("batch", "seq", "heads", "kv_heads", "head", "dropout")}

    @property
    def table(self) -> str:
        """The operation in attention_config's tables: a sum over a group of query heads needs more registers."""
        return "shared keys" if self.operation == "keys" and self.kv_heads else self.operation

    @property
    def register_bound(self) -> bool:
        """Whether it needs every register: random bits of dropout, or columns that no vector divides."""
        return self.dropout or self.head % 8 > 0

    def default(self, arch: int, sms: int = 0) -> AttentionConfig:
        """Warp-specialized where there is such a kernel for these heads, else Triton's. It does not depend on `sms`."""
        return self.warp_specialized(arch) or self.configs_in_triton(arch)[0]

    def warp_specialized(self, arch: int) -> AttentionConfig | None:
        if self.register_bound:
            return None
        return attention_config.warp_specialized_config(self.operation, self.head, self.dtype, arch)

    def configs(self, arch: int) -> tuple[Config, ...]:
        """Every configuration that is bitwise equal to the default."""
        usual = self.default(arch)
        return tuple(t for t in self.all_configs(arch) if attention_config.bitwise_equal(self.operation, t, usual))

    def rivals(self, arch: int) -> tuple[Config, ...]:
        """Configurations with other bits, which only a new default of the architecture could choose."""
        equal = self.configs(arch)
        return tuple(t for t in self.all_configs(arch) if t not in equal)

    def all_configs(self, arch: int) -> tuple[AttentionConfig, ...]:
        usual = self.default(arch)
        return (usual, *(t for t in self.configs_in_triton(arch) if t != usual))

    def configs_in_triton(self, arch: int) -> tuple[AttentionConfig, ...]:
        """Those of the kernels that every card has; the first where no other is chosen."""
        head = attention_config.padded_head_size(self.head)
        configs = attention_config.attention_configs(self.table, head, self.dtype, arch)
        return tuple(dict.fromkeys(map(attention_config.without_register_limit, configs))) if self.register_bound else configs

    def __str__(self) -> str:
        dropout = " dropout" if self.dropout else ""
        heads = f"{self.heads}/{self.kv_heads}" if self.kv_heads else f"{self.heads}"
        return f"attention {self.operation} {self.batch}x{heads}x{self.seq}x{self.head} {self.dtype}{dropout}"


Problem = GemmProblem | AttentionProblem

_counters: list[Counter[Problem]] = []


@cache
def version() -> str:
    h = hashlib.sha256()
    artefacts.add_sources(h, sorted(path for path in Path(__file__).parent.rglob("*.py") if path.name in FILES))
    return f"cuda-{h.hexdigest()[:16]}"


def folder() -> Path:
    return artefacts.cache_folder("tuning")


def database() -> Database:
    """The database of this version of the kernels, read once a process."""
    return Database.opened(folder(), version())


@cache
def shipped() -> dict[str, Entry]:
    return json.loads(SHIPPED.read_text())["entries"]


def machine(target: Target) -> str:
    """The part of a key that says where its timings hold."""
    return f"{target.name or 'any card'}, sm_{target.arch}, {target.sms} multiprocessors"


def key(target: Target, problem: Problem) -> str:
    return f"{machine(target)}: {problem.name}"


def from_entry(entry: Any, problem: Problem, arch: int) -> Config:
    """The configuration of an entry of the database. ValueError if the entry is malformed, or if this problem has no such
    configuration on this architecture (`configs`: those that are bitwise equal to the default)."""
    name = NAMES[problem.config_type]
    try:
        config = problem.config_type(**{str(OLD_FIELDS.get(field, field)): value for field, value in entry[name].items()})
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"expected {name} ({error!r})") from error
    known = problem.configs(arch)
    if not isinstance(config, AttentionConfig):
        known = [t for c in known for t in gemm_config.rasterizations(c)]  # pyright: ignore[reportArgumentType]
    if config not in known:
        raise ValueError(f"sm_{arch} has no {name} {config} for {problem.dtype}")
    return config


def to_entry(config: Config) -> dict[str, Any]:
    return {NAMES[type(config)]: asdict(config)}


def select_config(target: Target, problem: Problem) -> Any:
    """The configuration of a kernel: given by the target, else tuned (if the user asks for tuned ones), else the default. The
    problem's number of tokens is the planned maximum. An entry that does not fit is ignored with a warning."""
    for found in _counters:
        found[problem] += 1
    config = given_config(target.config, problem.operation, problem.config_type)
    if config is None and target.plain_attention and isinstance(problem, AttentionProblem):
        return problem.configs_in_triton(target.arch)[0]
    if config is None and requested():
        at, found = key(target, problem), database()
        entry = found.entries.get(at) or shipped().get(at)
        config = found.decoded(at, entry, lambda entry: from_entry(entry, problem, target.arch))
    return config or problem.default(target.arch, target.sms)


@contextmanager
def counting() -> Iterator[Counter[Problem]]:
    """Count the problems that are lowered within the context."""
    counter: Counter[Problem] = Counter()
    _counters.append(counter)
    try:
        yield counter
    finally:
        _counters.remove(counter)
