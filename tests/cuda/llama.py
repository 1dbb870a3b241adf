"""A network like Llama's for tests: RMSNorm, rotary positions, grouped queries over packed q | k | v, SwiGLU, an untied head."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from barellm.assembly.programs import initialise
from barellm.optim.adamw import adamw
from barellm.program.builder import Program, Store
from barellm.program.tensor import Dim, Tensor
from tests.cpu.test_models import OPTIM


@dataclass(frozen=True)
class Llama:
    layers: int = 1
    heads: int = 12
    kv_heads: int = 4
    head_size: int = 64
    hidden: int = 2048
    vocab_size: int = 50304
    max_seq: int = 1024

    @property
    def widths(self) -> tuple[int, int, int]:
        """Columns of q, k and v."""
        return self.heads * self.head_size, self.kv_heads * self.head_size, self.kv_heads * self.head_size


def trunk(p: Program, m: Llama, tokens: Tensor, attend: Callable[..., Tensor]) -> Tensor:
    C, F = m.widths[0], m.hidden

    def norm(name: str, x: Tensor) -> Tensor:
        return p.rmsnorm(x, p.parameter(name, (C,), value=1.0))

    def linear(name: str, x: Tensor, N: int, K: int) -> Tensor:
        return p.linear(x, p.parameter(name, (N, K), std=K**-0.5))

    x = p.embedding(tokens, p.parameter("wte", (m.vocab_size, C), std=0.5))
    tables = p.rope_tables(m.max_seq, m.head_size, theta=500.0)
    for name in (f"h.{i}" for i in range(m.layers)):
        with p.segment(name):
            qkv = linear(f"{name}.qkv", norm(f"{name}.n1", x), sum(m.widths), C)
            q, k, v = p.split(p.rope(qkv, tables, heads=m.heads + m.kv_heads), m.widths)
            x = p.add(x, linear(f"{name}.proj", attend(name, q, k, v), C, C))
            gate, up = p.split(linear(f"{name}.gate_up", norm(f"{name}.n2", x), 2 * F, C), 2)
            x = p.add(x, linear(f"{name}.down", p.swiglu(gate, up), C, F))
    return norm("norm", x)


def programs(m: Llama, shape: tuple[int, int], compute: str, *, recompute: bool = False) -> dict[str, Program]:
    """init, micro, update, eval and decode."""
    store = Store()
    made = {name: Program(store, compute=compute) for name in ("micro", "eval", "decode", "init", "update")}
    heads: dict[str, Any] = {"heads": m.heads, "kv_heads": m.kv_heads}
    dims = Dim("batch", shape[0]), Dim("seq", shape[1])

    def head(p: Program) -> Tensor:
        return p.parameter("head", (m.vocab_size, m.widths[0]), std=0.1)

    for p in (made["micro"], made["eval"]):
        h = trunk(p, m, p.input("tokens", dims), lambda name, *qkv, p=p: p.attention(*qkv, **heads))
        p.output("loss", p.classifier(h, head(p), p.input("targets", dims), valid_vocab=m.vocab_size))
    made["micro"].backward(made["micro"].named["loss"], recompute=recompute)

    def cached(name: str, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        caches = [p.cache(f"{name}.{kind}_cache", (1, m.max_seq, m.widths[1]), compute) for kind in "kv"]
        return p.attention_cached(q, k, v, *caches, **heads)

    p = made["decode"]
    tokens = p.input("tokens", (Dim("batch", 1), Dim("seq", m.max_seq)))
    p.output("logits", p.last_logits(trunk(p, m, tokens, cached), head(p)))
    initialise(made["init"])
    adamw(made["update"], OPTIM)
    return made


def open_llama(kind: Callable[..., Any], m: Llama, shape: tuple[int, int], compute: str, **options: Any) -> Any:
    """As `tests.cpu.test_models.open_session` does it for GPT-2."""
    build = partial(programs, recompute=options.pop("recompute", False))
    return kind(build(m, shape, compute), **options)
