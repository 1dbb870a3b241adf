"""Which tests run: all of them in CI; elsewhere not the proofs of what did not change; a few of each kind with `--quick`.

A test marked `proof("barellm/cuda", ...)` is slow, and its outcome depends on the named paths and its own file alone. Outside CI
(the variable CI is not set) it is left out where none of them differs from the main branch, and on the main branch from the commit
before. It always runs where it is named on the command line, and where git cannot say what changed.

Where an instruction set makes the same code of an fp32 kernel as another one, the kernel is tested on one of them (`same_code`).
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
WIDE = ("avx512_bf16", "avx512")  # of which fp32 kernels have equal code, as those of amx_bf16


def add_options(parser: pytest.Parser) -> None:
    parser.addoption(
        "--quick", action="store_true", help="this machine's instruction set, one case of each kernel's tests"
    )


def git(*words: str) -> list[str]:
    """Lines of git's answer; CalledProcessError or OSError where it has none."""
    done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


def changed_paths() -> list[str] | None:
    """What differs from the main branch, or from the commit before on that branch itself; None where nobody knows."""
    try:
        (head,) = git("rev-parse", "HEAD")
        (base,) = git("merge-base", "HEAD", "main")
        since = base if base != head else f"{head}~1"
        return [*git("diff", "--name-only", since), *git("ls-files", "--others", "--exclude-standard")]
    except (OSError, ValueError, subprocess.CalledProcessError):
        return None


def unchanged_proof(item: pytest.Item, changed: list[str]) -> bool:
    """A proof, none of whose paths changed."""
    marks = list(item.iter_markers("proof"))
    paths = [item.nodeid.split("::")[0], *(path for mark in marks for path in mark.args)]
    return bool(marks) and not any(name.startswith(path) for name in changed for path in paths)


def parameters(item: pytest.Item) -> dict[str, Any]:
    return item.callspec.params if hasattr(item, "callspec") else {}  # pyright: ignore[reportAttributeAccessIssue]


def isa_of(item: pytest.Item) -> str:
    """The name of the instruction set that a test is for, "" where it is for none."""
    isa = parameters(item).get("isa", "")
    return getattr(isa, "name", isa)


def same_code(item: pytest.Item, names: set[str]) -> bool:
    """A test of an fp32 kernel whose code another instruction set of this machine, among `names`, has as well."""
    given = parameters(item)
    if "fp32" not in (given.get("dtype"), given.get("compute")):
        return False
    isa = isa_of(item)
    return (isa in WIDE[1:] and WIDE[0] in names) or (isa.startswith("amx_bf16") and WIDE[0] in names)


def quick(items: list[pytest.Item], best: str) -> list[pytest.Item]:
    """One case of each test and dtype, on the instruction set `best`; nothing slow."""
    kept: list[pytest.Item] = []
    seen: set[tuple[str, Any]] = set()
    for item in items:
        left_out = any(item.get_closest_marker(name) for name in ("slow", "proof", "oracle", "alone"))
        if left_out or isa_of(item) not in ("", best):
            continue
        given = parameters(item)
        kind = (item.nodeid.split("[")[0], str(given.get("dtype", given.get("compute"))))
        if kind not in seen:
            seen.add(kind)
            kept.append(item)
    return kept


def select(config: pytest.Config, items: list[pytest.Item]) -> None:
    from tests.cpu.check import ISAS

    named = config.args_source is not pytest.Config.ArgsSource.TESTPATHS
    changed = None if named or os.environ.get("CI") else changed_paths()
    if config.getoption("--quick"):
        kept = quick(items, ISAS[0])
    else:
        kept = [item for item in items if not same_code(item, set(ISAS))]
    if changed is not None:
        kept = [item for item in kept if not unchanged_proof(item, changed)]
    if len(kept) < len(items):
        here = {id(item) for item in kept}
        config.hook.pytest_deselected(items=[item for item in items if id(item) not in here])
        items[:] = kept
