"""Winners of a tuning on a card become part of the package."""

import json
from pathlib import Path

from barellm.cuda.tuning import NAMES, SHIPPED
from barellm.runtime.tuner.database import Entry


def ship(found: dict[str, Entry], path: Path = SHIPPED) -> int:
    """Put entries that were measured on a card among those that the package has. The number of those that are new or other."""
    entries = json.loads(path.read_text())["entries"]
    kept = (*NAMES.values(), "ratio")
    changed = {at: {k: v for k, v in entry.items() if k in kept} for at, entry in found.items()}
    changed = {at: entry for at, entry in changed.items() if entries.get(at) != entry}
    path.write_text(json.dumps({"entries": dict(sorted((entries | changed).items()))}, indent=1) + "\n")
    return len(changed)
