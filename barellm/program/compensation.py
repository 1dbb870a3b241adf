"""Weight quantization that minimizes the matmul's error instead of each element's: GPTQ (Frantar et al. 2022).
A matrix's columns are quantized one after the other. The rounding error of a column is compensated in the columns that follow, in
the proportions that minimize the matmul's squared error for inputs with given second moments."""

from dataclasses import replace

import numpy as np

from barellm.errors import UserError
from barellm.program.quantization import GROUPS, Scheme, dequantize, halves, joined, nearest_codes, quantize, scales_of

DAMPING = 0.01  # of the mean second moment is added to each, for inputs that hardly vary
TOGETHER = max(GROUPS)  # columns whose errors reach those behind them in one matmul


def compensated_codes(w_NK: np.ndarray, moments_KK: np.ndarray, how: Scheme, *, name: str = "w") -> tuple[np.ndarray, np.ndarray]:
    """(codes (N, K), scales (N, groups)) of the weight w_NK by GPTQ, in `quantize`'s format. `moments_KK`: the sum of x x^T over
    inputs x. A group's scale is set when its first column is reached; row exponents are `quantize`'s. `name`: for its errors."""
    _, exponents = halves(quantize(w_NK, how, name=name)[1].astype(np.float32))
    w, (N, K) = np.ldexp(np.array(w_NK, np.float64), -exponents), w_NK.shape
    limit = np.finfo(np.float16).max
    upper = _spread(moments_KK)
    group, alone = how.group or K, replace(how, group=1)
    codes = np.empty((N, K), np.uint8 if how.table else np.int8)
    scales = np.empty((N, how.groups(K)), np.float16)
    # Lazy batches (GPTQ, section 3.3): an error goes at once to the columns up to `last`, and to those behind with the others.
    for first in range(0, K, TOGETHER):
        last = min(first + TOGETHER, K)
        errors = np.empty((N, last - first))
        for k in range(first, last):
            if k % group == 0:
                part = w[:, k : k + group].astype(np.float32)
                scales[:, k // group] = np.clip(scales_of(part.max(1), part.min(1), how), -limit, limit)
            scale = scales[:, k // group]
            codes[:, k] = nearest_codes(w[:, k].astype(np.float32), scale, how)
            value = dequantize(codes[:, k : k + 1], scale[:, None].astype(np.float64), alone)[:, 0]
            errors[:, k - first] = (w[:, k] - value) / upper[k, k]
            w[:, k + 1 : last] -= np.outer(errors[:, k - first], upper[k, k + 1 : last])
        w[:, last:] -= errors @ upper[first:last, last:]
    return codes, joined(scales, exponents)


def _spread(moments_KK: np.ndarray) -> np.ndarray:
    """Upper triangular U with U^T U = inverse of the damped moments: row k says how an error in column k is spread."""
    if not np.isfinite(moments_KK).all():
        raise UserError("the activations on the text to calibrate with are not finite")
    K = len(moments_KK)
    mean = np.trace(moments_KK) / K
    if mean == 0:  # nothing ever comes in: no error counts
        return np.eye(K)
    damped = moments_KK.astype(np.float64) + DAMPING * mean * np.eye(K)
    return np.linalg.cholesky(np.linalg.inv(damped)).T
