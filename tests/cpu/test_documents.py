from __future__ import annotations

import pytest

from barellm.cpu.kernels.embedding import documents
from tests.cpu.check import ISAS, changed, check_op, isa_named
from tests.document_cases import bigram_case, boundary_case, document_case

each_isa = pytest.mark.parametrize("isa", [isa_named(n) for n in ISAS], ids=ISAS)


@each_isa
@pytest.mark.parametrize("shape", [(1, 1), (3, 1), (9, 2), (9, 3), (3, 37), (2, 129)], ids=str)
@pytest.mark.parametrize("grain", [8, documents.GRAIN])
@pytest.mark.parametrize("buckets", [2, 97, 5 * 50304])
@pytest.mark.parametrize("reserved", [False, True])
def test_bigram_ids(isa, shape, grain, buckets, reserved, monkeypatch):
    """Claims that begin at a row's first, second and later positions too."""
    changed(monkeypatch, documents, GRAIN=grain)
    check_op(isa=isa, **bigram_case(shape, buckets, reserved))


@each_isa
@pytest.mark.parametrize("grain", [8, 8192])
def test_documents_start_where_a_claim_does_too(isa, grain, monkeypatch):
    """Claims that begin within, at the end of and before documents, of one position, of none, and of all."""
    changed(monkeypatch, documents, GRAIN=grain)
    check_op(isa=isa, **document_case([[0, 3, 3, 8, 16, 17, 37], [0, 37, 37, 37, 37, 37, 37], [0, 0, 1, 2, 24, 36, 37]], 37))
    check_op(isa=isa, **document_case([[0], [0]], 19))


@each_isa
@pytest.mark.parametrize("shape", [(1, 1), (4, 37), (3, 300)], ids=str)
def test_cu_seqlens(isa, shape):
    check_op(isa=isa, **boundary_case(shape))
