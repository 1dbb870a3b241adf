"""Ops whose batch and length are plain numbers instead of sizes of the run: eight kernels took them for 0 and computed nothing."""

from __future__ import annotations

import numpy as np
import pytest

from barellm.program import ops
from tests import check
from tests.cpu.check import EPS, ISAS, Given, Session, check_op, isa_named, persistent, tokens
from tests.document_cases import bigram_case, boundary_case, document_case

B, T, C, V = 3, 7, 19, 11


class Plain(int):
    """In place of `tensor.Dim`: the number alone."""

    def __new__(cls, name: str, most: int) -> int:  # pyright: ignore
        return most


def normal(*shape: int, seed: int = 1) -> Given:
    return tokens(np.random.default_rng(seed).standard_normal(shape))


IDS = tokens(np.random.default_rng(4).integers(0, V, (B, T), dtype=np.int32), "i32")
TABLES = {name: persistent(normal(V, C, seed=seed).values) for name, seed in (("wte", 2), ("wpe", 3))}
GRADIENT = {"modes": {"dweight": "store"}, "bounds": {"dweight": 4 * EPS * B * T}}
CASES = {
    "embedding": {"op_type": ops.Embedding, "given": {"tokens": IDS, **TABLES}},
    "embedding_dwte": {"op_type": ops.EmbeddingDwte, "given": {"tokens": IDS, "dy": normal(B, T, C)}, "rows": V, **GRADIENT},
    "embedding_dwpe": {"op_type": ops.EmbeddingDwpe, "given": {"dy": normal(B, T, C)}, "rows": T, **GRADIENT},
    "last_row": {"op_type": ops.LastRow, "given": {"x": normal(B, T, C)}},
    "dropout": {"op_type": ops.Dropout, "given": {"x": normal(B, T, C)}, "rate": 0.2, "stream": 3, "bounds": {"y": EPS}},
    "bigram_ids": bigram_case((B, T), 53, True),
    "document_starts": document_case([[0, 3, 3, 8], [0, 9, 9, 9], [0, 1, 2, 9]], 9),
    "cu_seqlens": boundary_case((B, T)),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_sizes_may_be_numbers(case, monkeypatch):
    monkeypatch.setattr(check, "Dim", Plain)
    run = Session.run
    monkeypatch.setattr(Session, "run", lambda session, program, *, batch, seq, **scalars: run(session, program, **scalars))
    check_op(isa=isa_named(ISAS[0]), **{**case, "plan": None})
