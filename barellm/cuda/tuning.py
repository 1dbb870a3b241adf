"""The tuning database as the CUDA backend uses it: tiles of Triton's products, forms of Hopper's, blocks of attention's kernels. A
key has the card's name."""

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

from barellm.cuda import choices
from barellm.cuda.choices import AttentionTile, Form, Tile
from barellm.cuda.kernel import Target
from barellm.program.ops.pointwise.elementwise import SLOPES
from barellm.runtime import artefacts
from barellm.runtime.tuning import Database, Entry, requested

SHIPPED = Path(__file__).with_name("tuned.json")  # what was measured on cards that people have: nothing yet
KERNELS = (
    "matmul", "hopper", "hopper_warp_specialized", "epilogue", "activations", "split_k", "attention", "attention_backward",
    "attention_mask", "attention_tiles", "hopper_attention", "hopper_attention_backward", "random", "common",
)  # fmt: skip
FILES = ("choices.py", "tuning.py", *(f"{name}.py" for name in KERNELS))  # wherever they lie below this folder

Choice = Tile | Form | AttentionTile
NAMES: dict[type, str] = {Tile: "tile", Form: "form", AttentionTile: "blocks"}  # in an entry
FETCHED = ("residual", *SLOPES, "add", "start")  # epilogues that read a matrix


@dataclass(frozen=True)
class GemmKey:
    """`rows` x `cols` of a result from a contraction of `depth`. Role "nt": y = x weight^T, "nn": dx = dy weight; "tn": gradient
    of the weight. Of "tn" the depth is the tokens, of the others the rows are. `kernel`: "triton" or "hopper", whose forms depend
    on the `epilogue` too."""

    role: str
    dtype: str
    rows: int
    cols: int
    depth: int
    kernel: str = "triton"
    epilogue: str = ""

    @property
    def kind(self) -> type:
        return Form if self.kernel == "hopper" else Tile

    @property
    def name(self) -> str:
        """The name of this subject in a key of the database."""
        what = f"hopper {self.epilogue}".strip() + " " if self.kernel == "hopper" else ""
        return f"{what}{self.role} {self.dtype}, {self.rows} x {self.cols} from {self.depth}"

    def default(self, arch: int) -> Choice:
        if self.kernel == "hopper":
            cols = choices.columns(self.role, self.rows, self.cols, self.depth)
            return choices.form(cols, fetched=self.epilogue in FETCHED)
        return choices.tile(self.role, self.rows, self.cols, self.depth, self.dtype, arch)

    def choices(self, arch: int) -> tuple[Choice, ...]:
        """Every tile or form, in the usual order of tiles."""
        return choices.forms() if self.kernel == "hopper" else choices.tiles(self.dtype, arch)


@dataclass(frozen=True)
class AttentionKey:
    """A kernel of attention over `batch` sequences of `seq` tokens, with `heads` heads of `head` columns. Role: "forward"; of the
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
        return AttentionTile

    @property
    def name(self) -> str:
        """The name of this subject in a key of the database."""
        rest = ", dropout" if self.dropout else ""
        heads = f"{self.heads} heads over {self.kv_heads}" if self.kv_heads else f"{self.heads} heads"
        return f"attention {self.role} {self.dtype}, {self.batch} x {heads} of {self.head}, {self.seq} tokens{rest}"

    @property
    def tiles(self) -> str:
        """The role under which `choices` has its tiles: a sum over several heads needs more registers."""
        return "shared keys" if self.role == "keys" and self.kv_heads else self.role

    @property
    def tight(self) -> bool:
        """Whether it needs every register: random bits of dropout, or columns that no vector divides."""
        return self.dropout or self.head % 8 > 0

    def default(self, arch: int) -> AttentionTile:
        t = choices.attention_tile(self.tiles, choices.padded(self.head), self.dtype, arch)
        return choices.unlimited(t) if self.tight else t

    def choices(self, arch: int) -> tuple[Choice, ...]:
        """Every tile with the default's bits."""
        usual = self.default(arch)
        return tuple(t for t in self.all_tiles(arch) if choices.equal_bits(self.role, t, usual))

    def rivals(self, arch: int) -> tuple[AttentionTile, ...]:
        """Tiles that would give other bits: only the default, which is the architecture's, could become one of them."""
        usual = self.default(arch)
        return tuple(t for t in self.all_tiles(arch) if not choices.equal_bits(self.role, t, usual))

    def all_tiles(self, arch: int) -> tuple[AttentionTile, ...]:
        found = choices.attention_tiles(self.tiles, choices.padded(self.head), self.dtype, arch)
        if self.tight:
            return tuple(dict.fromkeys(map(choices.unlimited, found)))
        other = choices.with_roles(self.role, self.head, self.dtype, arch)
        return (*found, other) if other else found


Key = GemmKey | AttentionKey

_forced: dict[Key, Choice] = {}
_asked: list[Counter[Key]] = []


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


def key(target: Target, subject: Key) -> str:
    return f"{machine(target)}: {subject.name}"


def from_entry(entry: Any, subject: Key, arch: int) -> Choice:
    """The choice that an entry stands for. It is a ValueError if it is no choice for this architecture, or gives other bits than
    the default."""
    kind, name = subject.kind, NAMES[subject.kind]
    try:
        choice = kind(**entry[name])
    except (KeyError, TypeError) as error:
        raise ValueError(f"expected {name} ({error!r})") from error
    known = subject.choices(arch)
    if choice not in [t for c in known for t in (choices.orders(c) if isinstance(c, Tile | Form) else (c,))]:
        raise ValueError(f"sm_{arch} has no {name} {choice} for {subject.dtype}")
    return choice


def to_entry(choice: Choice) -> dict[str, Any]:
    return {NAMES[type(choice)]: asdict(choice)}


def choose(target: Target, subject: Key) -> Any:
    """How a piece of work is cut: as it was tuned, else by default. Tokens are the planned ones."""
    for found in _asked:
        found[subject] += 1
    if subject in _forced:
        return _forced[subject]
    if requested():
        at = key(target, subject)
        entry = database().entries.get(at) or shipped().get(at)
        if entry is not None:
            try:
                return from_entry(entry, subject, target.arch)
            except ValueError as error:
                database().ignore(at, str(error))
    return subject.default(target.arch)


def ship(found: dict[str, Entry], path: Path = SHIPPED) -> int:
    """Put entries that were measured on a card among those that the package has. The number of those that are new or other."""
    entries = json.loads(path.read_text())["entries"]
    kept = (*NAMES.values(), "ratio")
    changed = {at: {k: v for k, v in entry.items() if k in kept} for at, entry in found.items()}
    changed = {at: entry for at, entry in changed.items() if entries.get(at) != entry}
    path.write_text(json.dumps({"entries": dict(sorted((entries | changed).items()))}, indent=1) + "\n")
    return len(changed)


@contextmanager
def forced(subject: Key, choice: Choice) -> Iterator[None]:
    """Within the context, this piece of work is cut like this wherever it is lowered."""
    _forced[subject] = choice
    try:
        yield
    finally:
        del _forced[subject]


@contextmanager
def watching() -> Iterator[Counter[Key]]:
    """Count the pieces of work that are lowered within the context."""
    found: Counter[Key] = Counter()
    _asked.append(found)
    try:
        yield found
    finally:
        _asked.remove(found)
