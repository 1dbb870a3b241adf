"""barellm's command with every fusion left out, so that each op is a kernel of its own: what fusing gives.

python -m benchmarks.unfused bench step gpt2-124m --batch 4 --seq 64
"""

from __future__ import annotations

import os
import sys

from barellm.cli.main import main

if __name__ == "__main__":
    os.environ["BARELLM_FUSION"] = "0"
    sys.exit(main(sys.argv[1:]))
