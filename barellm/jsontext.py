"""JSON that somebody else may have written."""

import json
from typing import Any

TOO_DEEP = "it has lists or objects too deep in each other"


def loads(content: bytes | str) -> Any:
    """json.loads, whose every failure is a ValueError."""
    try:
        return json.loads(content)
    except RecursionError as error:
        raise ValueError(TOO_DEEP) from error
