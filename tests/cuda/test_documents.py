from __future__ import annotations

import pytest

from barellm.cuda.kernels.embedding import documents
from tests.cuda.check import check_op
from tests.document_cases import bigram_case, boundary_case, document_case


@pytest.mark.parametrize("shape", [(1, 1), (9, 2), (9, 3), (3, 37), (2, 1025)], ids=str)
@pytest.mark.parametrize("buckets", [2, 97, 5 * 50304])
@pytest.mark.parametrize("reserved", [False, True])
def test_bigram_ids(shape, buckets, reserved):
    check_op(**bigram_case(shape, buckets, reserved))


@pytest.mark.parametrize("block", [8, 1024])
def test_documents_start_where_a_program_does_too(block, monkeypatch):
    """Programs that begin within, at the end of and before documents, of one position, of none, and of all."""
    monkeypatch.setattr(documents, "BLOCK", block)
    check_op(**document_case([[0, 3, 3, 8, 16, 17, 37], [0, 37, 37, 37, 37, 37, 37], [0, 0, 1, 2, 24, 36, 37]], 37))
    check_op(**document_case([[0], [0]], 19))


@pytest.mark.parametrize("block", [8, 1024])
def test_cu_seqlens(block, monkeypatch):
    monkeypatch.setattr(documents, "BLOCK", block)
    for shape in ((1, 1), (4, 37)):
        check_op(**boundary_case(shape))
