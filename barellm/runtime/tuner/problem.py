"""What is tuned, and with what: a problem (an operation and its sizes), and the candidates for its configuration."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Gemm:
    """A GEMM of M = `rows`, N = `cols`, K = `depth`. `operation`: which GEMM of a linear layer, as the backend names them."""

    operation: str
    dtype: str
    rows: int
    cols: int
    depth: int

    @property
    def flops(self) -> int:
        return 2 * self.rows * self.cols * self.depth

    @property
    def sizes(self) -> dict[str, Any]:
        return {"rows": self.rows, "cols": self.cols, "depth": self.depth}

    def __str__(self) -> str:
        return f"{self.operation} {self.rows} x {self.cols} from {self.depth} {self.dtype}"


def given_config(config: Any, operation: str, config_type: type) -> Any:
    """What a caller gave as `config` for kernels that take this type: one for all, or by operation; None where it did not."""
    found = config.get(operation) if isinstance(config, dict) else config
    return found if isinstance(found, config_type) else None


@dataclass(frozen=True)
class Candidate:
    """A configuration to try, and by name a faulty kernel where a self-test injects one. `other_bits`: than the default's, so
    that it is only reported, never kept."""

    config: Any
    fault: str = ""
    other_bits: bool = False

    def __str__(self) -> str:
        return f"{self.fault} {self.config}".strip()
