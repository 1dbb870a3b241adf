"""Ops on the tokens of a packed row, and on the places where its documents begin. Shapes: tokens (B, T), cu_seqlens (B, S) i32."""

import numpy as np

from barellm.program.graph import Graph
from barellm.program.ops.base import Op, Spec, Tensor, describe

HASH = 36313, 27191  # what a token and the one before are multiplied with


class BigramIds(Op):
    """ids[t] = (36313 tokens[t] xor 27191 tokens[t - 1]) mod (buckets - 1) for a table of `buckets` rows. Position 0 has the last
    row, which no pair has. The integers have 32 bits and wrap around; the remainder is not negative. Pairs may span documents.

    With `reserved` the number of that row, buckets - 1, stands in the row of tokens too before pairs are hashed: position 1 has
    (36313 tokens[1] xor 27191 (buckets - 1)) mod (buckets - 1), as in modded-nanogpt, which hashes in place."""

    name = "bigram_ids"
    flops_per_element = (4, "tokens")

    def infer(self, tokens: Tensor) -> dict[str, Spec]:
        if len(tokens.shape) != 2 or tokens.dtype != "i32":
            raise ValueError(f"bigram_ids expects tokens (B, T) i32: {describe(tokens=tokens)}")
        if self.buckets < 2:
            raise ValueError(f"bigram_ids expects at least 2 buckets, found {self.buckets}")
        return {"ids": (tokens.shape, "i32")}

    def reference(self, tokens):
        own = tokens.astype(np.int32)
        before = own.copy()
        if self.reserved:
            before[:, 0] = self.buckets - 1
        ids = np.full_like(own, self.buckets - 1)
        ids[:, 1:] = (np.int32(HASH[0]) * own[:, 1:] ^ np.int32(HASH[1]) * before[:, :-1]) % np.int32(self.buckets - 1)
        return {"ids": ids}


class CuSeqlens(Op):
    """cu_seqlens has 0, then the positions of `separator` beyond 0 in their order, then T as often as there is room: documents
    without a token. A row has `slots` entries, one more than the most tokens, so that every row has room for its documents."""

    name = "cu_seqlens"
    flops_per_element = (1, "tokens")

    def infer(self, tokens: Tensor) -> dict[str, Spec]:
        if len(tokens.shape) != 2 or tokens.dtype != "i32":
            raise ValueError(f"cu_seqlens expects tokens (B, T) i32: {describe(tokens=tokens)}")
        return {"cu_seqlens": ((tokens.shape[0], int(tokens.shape[1]) + 1), "i32")}

    def reference(self, tokens):
        B, T = tokens.shape
        found = np.full((B, int(self.cu_seqlens.shape[1])), T, np.int32)
        for row, begins in zip(found, tokens == self.separator, strict=True):
            at = np.flatnonzero(begins[1:]) + 1
            row[0], row[1 : 1 + len(at)] = 0, at
        return {"cu_seqlens": found}


class DocumentStarts(Op):
    """starts[t] = the position at which the document of token t begins. cu_seqlens has these positions in order, the first is 0;
    entries that are not needed are T. Documents may be empty. `tokens` tells the shape and is not read."""

    name = "document_starts"
    flops_per_element = (1, "starts")

    def infer(self, cu_seqlens: Tensor, tokens: Tensor) -> dict[str, Spec]:
        fits = len(cu_seqlens.shape) == 2 and len(tokens.shape) >= 2 and cu_seqlens.shape[0] == tokens.shape[0]
        if not fits or cu_seqlens.dtype != "i32":
            found = describe(cu_seqlens=cu_seqlens, tokens=tokens)
            raise ValueError(f"document_starts expects cu_seqlens (B, S) i32 and tokens (B, T): {found}")
        return {"starts": (tokens.shape[:2], "i32")}

    def index_limits(self) -> dict[str, tuple[int, int]]:
        return {"cu_seqlens": (0, int(self.tokens.shape[1]))}

    def reference(self, cu_seqlens, tokens):
        begun = cu_seqlens[:, None, :] <= np.arange(tokens.shape[1])[None, :, None]
        return {"starts": np.where(begun, cu_seqlens[:, None, :], 0).max(-1).astype(np.int32)}

    def bytes(self) -> int:
        return self.cu_seqlens.nbytes + self.starts.nbytes


class Calls(Graph):
    def bigram_ids(self, tokens: Tensor, *, buckets: int, reserved: bool = False) -> Tensor:
        """tokens (B, T) i32 -> rows (B, T) i32 of a table with `buckets` rows, one for each pair of neighbours. `reserved`: the
        pair of position 1 has the number of the last row for its first token, as in modded-nanogpt."""
        return self.apply(BigramIds, tokens=tokens, buckets=buckets, reserved=reserved).ids

    def cu_seqlens(self, tokens: Tensor, *, separator: int) -> Tensor:
        """tokens (B, T) i32 -> (B, T + 1) i32: where documents begin, each with the token `separator`, padded with T."""
        return self.apply(CuSeqlens, tokens=tokens, separator=separator).cu_seqlens

    def document_starts(self, cu_seqlens: Tensor, tokens: Tensor) -> Tensor:
        """(B, T) i32: where the document of each token begins. cu_seqlens (B, S) i32 ascends from 0, padded with T."""
        return self.apply(DocumentStarts, cu_seqlens=cu_seqlens, tokens=tokens).starts
