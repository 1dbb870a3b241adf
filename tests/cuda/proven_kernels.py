"""What the compiler makes of kernels, asked once: a case that passed is not compiled again while its kernels, the compiler and
its checks are the same.

proven_kernels.json has a digest for each case: of everything that decides the machine code (sources, constants, types, options,
Triton's version, the card) and of everything that judges it. Compiling is deterministic, so an equal digest is an equal outcome.
Where it differs, the kernels are compiled and judged.

BARELLM_GOLDEN=write records what passes; BARELLM_GOLDEN=anew compiles everything
"""

from __future__ import annotations

import hashlib
import inspect
import json
import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from barellm.cuda import compile as cuda_compile
from barellm.cuda.kernel import Specialisation
from barellm.inspect import device_code
from tests.cuda import cubin, sass
from tests.cuda.sass import Row, rows

PROVEN = Path(__file__).with_name("proven_kernels.json")
JUDGES = [module.__file__ for module in (cuda_compile, device_code, cubin, sass)]


def prove(
    case: str,
    specs: Mapping[Specialisation, str],
    arch: int,
    check: Callable[[dict[str, Row]], None],
    *,
    expected: Callable[[], object] = lambda: None,
) -> None:
    """Call `check` with a row for each kernel, by its label, unless the case is proven. `expected`: what else its outcome depends
    on."""
    mode = os.environ.get("BARELLM_GOLDEN")
    known: dict[str, str] = json.loads(PROVEN.read_text()) if PROVEN.exists() else {}
    if mode not in ("write", "anew") and known.get(case) == digest(specs, arch, check, expected()):
        return
    check(rows(specs, arch))
    if mode == "write":
        known[case] = digest(specs, arch, check, expected())
        PROVEN.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n")


def digest(
    specs: Mapping[Specialisation, str], arch: int, check: Callable[[dict[str, Row]], None], expected: object
) -> str:
    """Everything that decides whether a case passes."""
    h = hashlib.sha256(json.dumps(expected, sort_keys=True).encode())
    for file in JUDGES:
        assert file
        h.update(Path(file).read_bytes())
    h.update(inspect.getsource(check.func if isinstance(check, partial) else check).encode())
    for key in sorted(cuda_compile.digest_of(spec, arch) for spec in specs):
        h.update(key.encode())
    return h.hexdigest()[:16]
