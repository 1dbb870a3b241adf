"""The tuner's child process on a GPU: `python -m barellm.cuda.tuner.child`."""

from __future__ import annotations

from barellm.cuda.tuner.harness import Harness
from barellm.runtime.tuner.child import Child, serve

if __name__ == "__main__":
    serve(Child(Harness))
