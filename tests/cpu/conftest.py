import os

import pytest

from barellm.cpu import step


@pytest.fixture(autouse=True)
def one_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where every core has a worker, a session starts no process that helps it to compile."""
    if os.environ.get("PYTEST_XDIST_WORKER"):
        monkeypatch.setattr(step, "allowed_cpus", lambda: (0,))
