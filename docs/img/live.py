"""The picture of docs/live.md: the page of the README's run, in Debian's chromium.

python docs/img/live.py
"""

from __future__ import annotations

import json
import shutil
import subprocess
import tempfile
from contextlib import chdir
from pathlib import Path

from PIL import Image

from barellm import models
from barellm.cli.main import main as barellm
from barellm.config import overrides

ROOT = Path(__file__).parents[2]
FILE = ROOT / "docs" / "img" / "live.png"
SIZE = (1280, 905)


def main() -> None:
    rows = [json.loads(line) for line in (ROOT / "benchmarks/results/train-default.jsonl").read_text().splitlines()]
    with tempfile.TemporaryDirectory() as folder:
        run, page, shot = Path(folder, "default"), Path(folder, "page.html"), Path(folder, "shot.png")
        run.mkdir()
        (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        config = overrides.changed(models.preset("default"), {"train.minutes": 0.0, "train.steps": rows[-1]["steps"]})
        (run / "config.json").write_text(json.dumps(overrides.to_json(config)))
        with chdir(folder):  # the page has the name by which the run was asked for
            barellm(["plot", run.name, "--out", page.name])
        chromium = shutil.which("chromium") or "chromium"
        size = f"--window-size={SIZE[0]},{SIZE[1]}"
        command = [chromium, "--headless", "--no-sandbox", "--hide-scrollbars", size, f"--screenshot={shot}", f"file://{page}"]
        subprocess.run(command, check=True, capture_output=True)
        Image.open(shot).convert("RGB").quantize(256, Image.Quantize.MAXCOVERAGE).save(FILE, optimize=True)


if __name__ == "__main__":
    main()
