"""The places of caches if `BARELLM_CACHE` does not say. This file imports only the standard library."""

import contextlib
import os
from pathlib import Path


def user_cache() -> Path | None:
    """XDG_CACHE_HOME/barellm, else ~/.cache/barellm; None for a user without a home, as in some containers."""
    xdg = os.environ.get("XDG_CACHE_HOME")
    if xdg:
        return Path(xdg) / "barellm"
    home = os.path.expanduser("~")
    return None if home == "~" else Path(home) / ".cache" / "barellm"


def temporary_cache() -> Path | None:
    """This user's folder in the system's temporary directory; None if another user made it, as its code could not be trusted."""
    import tempfile

    folder = Path(tempfile.gettempdir()) / f"barellm-{os.getuid()}"
    with contextlib.suppress(OSError):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if folder.stat().st_uid == os.getuid():
            return folder
    return None
