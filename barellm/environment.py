"""The environment variables that barellm reads: a word about one that it does not, and what switches may be."""

import os
import sys
from functools import cache

from barellm.errors import UserError, nearest

NAMES = ("BARELLM_CACHE", "BARELLM_FUSION", "BARELLM_GPT2_VOCAB", "BARELLM_ISA", "BARELLM_MEMORY_LIMIT", "BARELLM_MESSAGES",
         "BARELLM_PIN", "BARELLM_POISON", "BARELLM_RANKS", "BARELLM_RANK_LIMIT", "BARELLM_SELF_CHECK", "BARELLM_THREADS",
         "BARELLM_TUNING", "BARELLM_WAIT")  # fmt: skip
OTHERS = ("BARELLM_GOLDEN", "BARELLM_RECORD_OUTPUTS", "BARELLM_SHARED")  # of the tests
SWITCHES = {f"BARELLM_{name}": ("0", "1") for name in ("FUSION", "MESSAGES", "PIN", "POISON", "SELF_CHECK", "TUNING")}
SWITCHES |= {"BARELLM_WAIT": ("futex", "condition")}


@cache
def check() -> None:
    """Write one line on stderr, once a process, for each variable BARELLM_... that nothing reads. UserError for a switch that is
    set to something else than its values: it would be taken for unset."""
    for name in sorted(os.environ):
        if name.startswith("BARELLM_") and name not in NAMES + OTHERS:
            print(f"barellm: warning: nothing reads {name}{nearest(name, NAMES)}", file=sys.stderr)
    for name, known in SWITCHES.items():
        if (found := os.environ.get(name, "")) and found not in known:
            raise UserError(f"{name} is {found!r}, expected {' or '.join(known)}, or unset")
