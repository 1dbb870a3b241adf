"""barellm's command with every fusion left out, so that each op is a kernel of its own: what fusing gives.

python -m benchmarks.unfused bench step gpt2-124m --batch 4 --seq 64
"""

from __future__ import annotations

import sys

from barellm.cli.main import main
from barellm.program import fusion
from barellm.runtime import lowering

if __name__ == "__main__":
    lowering.fuse = lambda ops, table, **more: fusion.fuse(ops, [], **more)
    sys.exit(main(sys.argv[1:]))
