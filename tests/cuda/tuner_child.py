"""The tuner's harness on the driver in Python: its child process imports this module."""

import pytest

from barellm.cuda.tuner import harness
from tests.simulators.mock import Gpu

Gpu().install(pytest.MonkeyPatch())


def Harness(problem):
    return harness.Harness(problem, calls=1)
