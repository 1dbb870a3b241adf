"""The environment variables that barellm reads, and a word about one that it does not."""

from __future__ import annotations

import os
import sys
from functools import cache

from barellm.errors import nearest

NAMES = ("BARELLM_CACHE", "BARELLM_GPT2_VOCAB", "BARELLM_ISA", "BARELLM_MEMORY_LIMIT", "BARELLM_MESSAGES", "BARELLM_PIN",
         "BARELLM_POISON", "BARELLM_RANKS", "BARELLM_RANK_LIMIT", "BARELLM_THREADS", "BARELLM_TUNING", "BARELLM_WAIT")  # fmt: skip
OTHERS = ("BARELLM_GOLDEN", "BARELLM_SHARED")  # of the tests


@cache
def warn_of_unknown() -> None:
    """Write one line on stderr, once a process, for each variable BARELLM_... that nothing reads."""
    for name in sorted(os.environ):
        if name.startswith("BARELLM_") and name not in NAMES + OTHERS:
            print(f"barellm: warning: nothing reads {name}{nearest(name, NAMES)}", file=sys.stderr)
