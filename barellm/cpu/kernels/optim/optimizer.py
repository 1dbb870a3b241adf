"""AdamW (Loshchilov and Hutter 2019) and cautious AdamW: one pass over gradient, both moments and the weight. All tensors flat, `n`
elements; clip (2) = [gradient norm, factor that clips it], whose factor is NaN if the norm is not finite: then nothing changes."""

from collections.abc import Iterator
from typing import Any

from barellm.cpu.kernel import PLANES, Lowering, Op, lowering
from barellm.cpu.kernels.storage import Moment, Weight, moment_operand, weight_operands
from barellm.cpu.lang import Value, random

GRAIN = 65536  # elements of a work item: 2 MB of memory, some 40 us


def power(k, base: float, exponent) -> Value:
    """base^exponent in double, by squaring; exponent (i64) >= 0."""
    result, square, left = k.var(k.const(1.0, "double")), k.var(k.const(base, "double")), k.var(exponent)
    with k.while_(lambda: left.value > 0):
        odd = (left.value & 1).differs(0)
        result.value = result.value * k.select(odd, square.value, 1.0)
        square.value = square.value * square.value
        left.value = left.value >> 1
    return result.value


def adamw(k, param, param_lo, m, v, grad, clip, n, stream, first, *, beta1, beta2, eps, weight_decay, lr_scale, cautious,
        bf16) -> None:  # fmt: skip
    """The kernel: AdamW of `n` elements, param = p (1 - lr wd) - lr m^ / (sqrt(v^) + eps), lr = the run-time scalar times
    `lr_scale`; m, v (n): moments (storage.py), which are updated; grad, clip: as the module says. The step's factors are computed
    in double. `cautious` (modded-nanogpt): u = lr m^ / (sqrt(v) + eps) with the second bias correction in lr, then p - u - (lr^2 wd
    p where u makes p smaller). With a `stream` 16-bit moments are rounded stochastically, by its random bits from element `first`
    on. `bf16`: the new weight is rounded to it. `param_lo`: a weight's second plane, or None."""
    lr, step = k.scalar("lr"), k.scalar("step")
    lr = lr if lr_scale == 1.0 else lr * lr_scale
    # With the bias corrections of m and of v.
    step_size, root = lr / (1.0 - power(k, beta1, step)), k.sqrt(1.0 - power(k, beta2, step))
    if cautious:
        rate, decay = k.splat(step_size * root), k.splat(lr * lr * weight_decay)
    else:
        rate, unbias, shrink = k.splat(step_size), k.splat(1.0 / root), k.splat(1.0 - lr * weight_decay)
    scale = clip.get(1)
    weights, means, squares = Weight(k, param, param_lo, bf16), Moment(k, m, "e6m9"), Moment(k, v, "ue6m10")
    # What the gradient is multiplied with: clipping and (1 - beta) in one; the second before it is squared.
    for_mean, for_square = k.splat(scale * (1.0 - beta1)), k.splat(scale * (1.0 - beta2) ** 0.5)
    key = None if stream is None else random.sample_key(k, k.scalar("seed"), step, 0, stream)

    def new_weight(p, numerator, root) -> Value:
        """The weight after the step, from p, `numerator` = lr m^ and `root` = sqrt(v)."""
        if not cautious:
            return k.fma(p, shrink, -(numerator / k.fma(root, unbias, k.to(eps, k.vec))))
        update = numerator / (root + eps)
        return p - update - k.select(update * p > 0.0, p * decay, 0.0)

    # NaN means that the gradient's norm is not finite: the update is skipped.
    with k.parallel_range(k.select(scale.equals(scale), n, 0), GRAIN) as (begin, end):
        for i, mask, dithers in pairs(k, begin, end) if key is None else dithered_pairs(k, begin, end, key, first):
            updated, new_m, new_v = [], [], []
            for j in range(len(dithers)):
                offset = i + j * k.lanes
                g = grad.load(offset, mask)
                root = g * for_square  # its square is (1 - beta2) g^2
                new_m.append(k.fma(means.load(offset, mask), beta1, g * for_mean))
                new_v.append(k.fma(root, root, squares.load(offset, mask) * beta2))
                updated.append(new_weight(weights.load(offset, mask), rate * new_m[j], k.sqrt(new_v[j])))
            # 14 of the 32 random bits: e6m9 drops as many of fp32's 23.
            means.store_all(new_m, i, mask, dither=None if key is None else [bits & 0x3FFF for bits in dithers])
            # The upper 13: ue6m10 drops as many.
            squares.store_all(new_v, i, mask, dither=None if key is None else [bits >> 19 for bits in dithers])
            weights.store_all(updated, i, mask)


# Index of one or two adjacent vectors, the mask of one that is alone, random bits for the rounding of each.
Pairs = Iterator[tuple[Value, Value | None, list[Any]]]


def pairs(k, begin, end) -> Pairs:
    """The vectors of elements [begin, end) two by two, without random bits: a loop as those of loops.py."""
    full_end = begin + ((end - begin) & -2 * k.lanes)
    with k.loop(begin, full_end, 2 * k.lanes) as i:
        yield i, None, [None, None]
    with k.loop(full_end, end, k.lanes) as i:
        yield i, k.mask_first(end - i), [None]


def dithered_pairs(k, begin, end, key, origin) -> Pairs:
    """As `pairs`, with random words (i32 lanes): [word, word] for a pair of vectors, [word] for one. A call of the generator serves
    a block of SHARED_WIDTH elements; `begin` starts a block, and so does `origin`, the tensor's element that these begin with (a
    rank's shard). The next block's words, a chain of 80 operations, are computed between this one's vectors (pipelining)."""
    width, vectors = random.SHARED_WIDTH, random.SHARED_WIDTH // k.lanes  # elements and vectors of a block
    *_, first_words = random.shared_words(k, key, (origin + begin) // width)
    next_words = [k.var(word) for word in first_words]

    def block(first, *, masked: bool) -> Pairs:
        """The elements first .. first + width, where `masked` only those before `end`; it generates the next words."""
        words = [word.value for word in next_words]
        generator = random.shared_words(k, key, (origin + first) // width + 1)
        for j in range(0, vectors, 2):
            index = first + j * k.lanes
            bits = [random.shared_word(k, words, i * k.lanes) for i in (j, j + 1)]
            if masked:
                for i in range(2):
                    yield index + i * k.lanes, k.mask_first(end - index - i * k.lanes), [bits[i]]
            else:
                yield index, None, bits
            # These two vectors' share of the generator's GROUPS steps.
            for _ in range(random.GROUPS * j // vectors, random.GROUPS * (j + 2) // vectors):
                computed = next(generator)
        for word, new in zip(next_words, computed, strict=True):
            word.value = new

    full_end = begin + ((end - begin) & -width)
    with k.loop(begin, full_end, width) as first:
        yield from block(first, masked=False)
    with k.loop(full_end, end, width) as first:
        yield from block(first, masked=True)


@lowering("adamw", "cautious_adam", floats="fp32", also={"param": PLANES, "m": "e6m9", "v": "ue6m10"}, spans="param grad")
def lower_adamw(op: Op, c: Lowering) -> None:
    operands = {**weight_operands("param", op.outputs["param"]), "m": moment_operand(op.outputs["m"]),
                "v": moment_operand(op.outputs["v"]), "grad": op.grad, "clip": op.clip, "n": op.grad.size,
                "stream": op.stream, "first": op.grad.first_element if op.stream is not None else None}  # fmt: skip
    names = ("beta1", "beta2", "eps", "weight_decay", "lr_scale")
    constants = {name: float(getattr(op, name)) for name in names} | {"cautious": op.name == "cautious_adam", "bf16": bool(op.bf16)}
    c.call(adamw, operands, constants, writes="param param_lo m v")
