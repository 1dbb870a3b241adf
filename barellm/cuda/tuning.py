"""The tuning database as the CUDA backend uses it: configurations of Triton's GEMM, of Hopper's and of
attention's kernels. An entry's name has the card's."""

from __future__ import annotations

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
from barellm.runtime.tuning import Database, Entry, requested

SHIPPED = Path(__file__).with_name("tuned.json")  # what was measured on cards that people have: nothing yet
KERNELS = (
    "matmul", "hopper", "hopper_warp_specialized", "epilogue", "activations", "split_k", "attention", "attention_backward",
    "attention_mask", "attention_tiles", "hopper_attention", "hopper_attention_backward", "random", "common",
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
class GemmKey:
    """`rows` x `cols` of a result from a contraction of `depth`. `role`: BLAS's transposes: "nt": y = x weight^T, "nn": dx = dy
    weight; "tn": gradient of the weight. Of "tn" the depth is the tokens, of the others the rows are. `kernel`: "triton" or
    "hopper", whose configurations depend on the `epilogue` too."""

    role: str
    dtype: str
    rows: int
    cols: int
    depth: int
    kernel: str = "triton"
    epilogue: str = ""

    @property
    def kind(self) -> type:
        return HopperGemmConfig if self.kernel == "hopper" else GemmConfig

    @property
    def name(self) -> str:
        """Its name in an entry of the database."""
        what = f"hopper {self.epilogue}".strip() + " " if self.kernel == "hopper" else ""
        return f"{what}{self.role} {self.dtype}, {self.rows} x {self.cols} from {self.depth}"

    def default(self, arch: int) -> Config:
        if self.kernel == "hopper":
            cols = gemm_config.select_tile_n(self.role, self.rows, self.cols, self.depth)
            return gemm_config.hopper_config(cols, loads_c=self.epilogue in LOADS_C)
        return gemm_config.select_config(self.role, self.rows, self.cols, self.depth, self.dtype, arch)

    def configs(self, arch: int) -> tuple[Config, ...]:
        """Every configuration, with the default rasterization."""
        return gemm_config.hopper_configs() if self.kernel == "hopper" else gemm_config.gemm_configs(self.dtype, arch)


@dataclass(frozen=True)
class AttentionKey:
    """An attention kernel over `batch` sequences of `seq` tokens, with `heads` heads of `head` columns. Role: "forward"; of the
    backward pass "keys", for dk and dv, and "queries", for dq. `kv_heads`: of keys and values where they are fewer, else 0."""

    role: str
    dtype: str
    batch: int
    seq: int
    heads: int
    head: int
    dropout: bool = False
    kv_heads: int = 0

    @property
    def kind(self) -> type:
        return AttentionConfig

    @property
    def name(self) -> str:
        """Its name in an entry of the database."""
        rest = ", dropout" if self.dropout else ""
        heads = f"{self.heads} heads over {self.kv_heads}" if self.kv_heads else f"{self.heads} heads"
        return f"attention {self.role} {self.dtype}, {self.batch} x {heads} of {self.head}, {self.seq} tokens{rest}"

    @property
    def config_role(self) -> str:
        """The role in attention_config: a sum over a group of query heads needs more registers."""
        return "shared keys" if self.role == "keys" and self.kv_heads else self.role

    @property
    def register_bound(self) -> bool:
        """Whether it needs every register: random bits of dropout, or columns that no vector divides."""
        return self.dropout or self.head % 8 > 0

    def default(self, arch: int) -> AttentionConfig:
        head = attention_config.padded_head_size(self.head)
        t = attention_config.select_attention_config(self.config_role, head, self.dtype, arch)
        return attention_config.without_register_limit(t) if self.register_bound else t

    def configs(self, arch: int) -> tuple[Config, ...]:
        """Every configuration that is bitwise equal to the default."""
        usual = self.default(arch)
        return tuple(t for t in self.all_configs(arch) if attention_config.bitwise_equal(self.role, t, usual))

    def rivals(self, arch: int) -> tuple[AttentionConfig, ...]:
        """Configurations with other bits, which only a new default of the architecture could choose."""
        usual = self.default(arch)
        return tuple(t for t in self.all_configs(arch) if not attention_config.bitwise_equal(self.role, t, usual))

    def all_configs(self, arch: int) -> tuple[AttentionConfig, ...]:
        found = attention_config.attention_configs(
            self.config_role, attention_config.padded_head_size(self.head), self.dtype, arch
        )
        if self.register_bound:
            return tuple(dict.fromkeys(map(attention_config.without_register_limit, found)))
        other = attention_config.warp_specialized_config(self.role, self.head, self.dtype, arch)
        return (*found, other) if other else found


Key = GemmKey | AttentionKey

_forced: dict[Key, Config] = {}
_counters: list[Counter[Key]] = []


@cache
def _opened(folder: Path, version: str) -> Database:
    return Database(folder, version)


@cache
def version() -> str:
    h = hashlib.sha256()
    artefacts.add_sources(h, sorted(path for path in Path(__file__).parent.rglob("*.py") if path.name in FILES))
    return f"cuda-{h.hexdigest()[:16]}"


def folder() -> Path:
    return artefacts.cache_folder("tuning")


def database() -> Database:
    """The database of this version of the kernels, read once a process."""
    return _opened(folder(), version())


@cache
def shipped() -> dict[str, Entry]:
    return json.loads(SHIPPED.read_text())["entries"]


def machine(target: Target) -> str:
    """The part of a key that says where its timings hold."""
    return f"{target.name or 'any card'}, sm_{target.arch}, {target.sms} multiprocessors"


def entry_name(target: Target, key: Key) -> str:
    return f"{machine(target)}: {key.name}"


def from_entry(entry: Any, key: Key, arch: int) -> Config:
    """The configuration of an entry of the database. ValueError if the entry is malformed, or if the configuration is none that
    this key has on this architecture (`configs`: those that are bitwise equal to the default)."""
    kind, name = key.kind, NAMES[key.kind]
    try:
        fields = {str(OLD_FIELDS.get(field, field)): value for field, value in entry[name].items()}
        config = kind(**fields)
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"expected {name} ({error!r})") from error
    known = key.configs(arch)
    if not isinstance(config, AttentionConfig):
        known = [t for c in known for t in gemm_config.rasterizations(c)]  # pyright: ignore[reportArgumentType]
    if config not in known:
        raise ValueError(f"sm_{arch} has no {name} {config} for {key.dtype}")
    return config


def to_entry(choice: Config) -> dict[str, Any]:
    return {NAMES[type(choice)]: asdict(choice)}


def select_config(target: Target, key: Key) -> Any:
    """The configuration of a kernel: `forced`, else tuned (if the user asks for tuned ones), else the default. The key's tokens are
    the planned maximum. An entry that does not fit is ignored with a warning."""
    for found in _counters:
        found[key] += 1
    if key in _forced:
        return _forced[key]
    if requested():
        at = entry_name(target, key)
        entry = database().entries.get(at) or shipped().get(at)
        if entry is not None:
            try:
                return from_entry(entry, key, target.arch)
            except ValueError as error:
                database().ignore(at, str(error))
    return key.default(target.arch)


def ship(found: dict[str, Entry], path: Path = SHIPPED) -> int:
    """Put entries that were measured on a card among those that the package has. The number of those that are new or other."""
    entries = json.loads(path.read_text())["entries"]
    kept = (*NAMES.values(), "ratio")
    changed = {at: {k: v for k, v in entry.items() if k in kept} for at, entry in found.items()}
    changed = {at: entry for at, entry in changed.items() if entries.get(at) != entry}
    path.write_text(json.dumps({"entries": dict(sorted((entries | changed).items()))}, indent=1) + "\n")
    return len(changed)


@contextmanager
def forced(key: Key, choice: Config) -> Iterator[None]:
    """Within the context, this key has this configuration wherever it is lowered."""
    _forced[key] = choice
    try:
        yield
    finally:
        del _forced[key]


@contextmanager
def counting() -> Iterator[Counter[Key]]:
    """Count the keys that are lowered within the context."""
    found: Counter[Key] = Counter()
    _counters.append(found)
    try:
        yield found
    finally:
        _counters.remove(found)
