"""The tuner's child process on the driver in Python."""

import pytest

from barellm.cuda.tuner.harness import Harness
from barellm.runtime.tuner.child import Child, serve
from tests.simulators.mock import Gpu

if __name__ == "__main__":
    Gpu().install(pytest.MonkeyPatch())
    serve(Child(lambda work: Harness(work, calls=1)))
