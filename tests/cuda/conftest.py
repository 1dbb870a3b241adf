"""`--device`: where the checks of single ops run. "interpreter" (the default), "cuda" for this machine's GPU, or "mock", the driver
in Python, through which a session of the GPU's kind is rehearsed. On the last two only checks of ops run: the rest needs no GPU."""

import pytest

from tests.cuda import check

DEVICES = ("interpreter", "mock", "cuda")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--device", default=DEVICES[0], choices=DEVICES, help="where the checks of CUDA ops run")


def pytest_configure(config: pytest.Config) -> None:
    check.DEVICE = config.getoption("--device")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if DEVICES[0] == check.DEVICE:
        return
    ops = [
        item for item in items if isinstance(item, pytest.Function) and "check_op" in item.function.__code__.co_names
    ]
    config.hook.pytest_deselected(items=[item for item in items if item not in ops])
    items[:] = ops


@pytest.fixture(autouse=True)
def mock_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    if check.DEVICE == "mock":
        from tests.cuda.mock import Gpu

        Gpu().install(monkeypatch)
