"""Attention configurations: blocks of queries and keys, warps, pipeline stages, register limits, by kernel, head size and card."""

from dataclasses import dataclass, field, replace

from barellm.cuda.gemm_config import tuned_arch


@dataclass(frozen=True)
class AttentionConfig:
    """Configuration of an attention kernel: blocks of `queries` x `keys` scores. `max_registers`: of a thread, where the compiler
    would take more than let two programs share a multiprocessor; 0 where it decides. `warp_specialized`: a producer warp and
    consumer warpgroups, in a kernel of its own (kernels/hopper_attention.py, hopper_attention_backward.py), with `num_stages`
    stages."""

    queries: int
    keys: int
    num_warps: int
    num_stages: int
    max_registers: int = 0
    warp_specialized: bool = field(default=False, kw_only=True)

    def __str__(self) -> str:
        limit = f" {self.max_registers}r" if self.max_registers else ""
        kind = " warp-specialized" if self.warp_specialized else ""
        return f"{self.queries}x{self.keys} {self.num_warps}w {self.num_stages}s{limit}{kind}"


# By (kernel, head size up to): what neither spills nor overflows shared memory. Before sm_90, and on sm_120, tensor cores take
# their operands from registers. On sm_90 two programs share a multiprocessor where the head size is 64: the matmuls of one overlap
# the softmax of the other. Three stages: with two, an iteration waits for loads that the one before it issued at its end.
_ATTENTION = {
    "fp32": {
        ("forward", 64): AttentionConfig(32, 32, 8, 1),
        ("forward", 128): AttentionConfig(32, 32, 16, 1),
        ("keys", 64): AttentionConfig(32, 32, 8, 1),
        ("queries", 64): AttentionConfig(32, 32, 8, 1),
        ("queries", 128): AttentionConfig(32, 32, 16, 1),
    },
    "bf16": {
        ("forward", 64): AttentionConfig(128, 64, 8, 3, 128),
        ("forward", 128): AttentionConfig(128, 64, 8, 3),
        ("forward", 256): AttentionConfig(64, 32, 8, 1),
        ("keys", 64): AttentionConfig(64, 64, 4, 3),
        ("keys", 128): AttentionConfig(64, 128, 8, 2),
        ("shared keys", 64): AttentionConfig(64, 128, 8, 3),
        ("shared keys", 128): AttentionConfig(64, 64, 8, 3),
        ("queries", 64): AttentionConfig(128, 64, 8, 3, 128),
        ("queries", 128): AttentionConfig(128, 64, 8, 3),
        ("few", 128): AttentionConfig(16, 64, 4, 2),
        ("many", 128): AttentionConfig(64, 64, 4, 2),
    },
    "bf16 in registers": {
        ("forward", 64): AttentionConfig(128, 64, 8, 3),
        ("forward", 128): AttentionConfig(128, 64, 8, 3),
        ("forward", 256): AttentionConfig(64, 32, 8, 1),
        ("keys", 64): AttentionConfig(64, 128, 8, 2),
        ("keys", 128): AttentionConfig(64, 64, 8, 2),
        ("queries", 64): AttentionConfig(128, 64, 8, 2),
        ("queries", 128): AttentionConfig(64, 64, 8, 2),
        ("few", 128): AttentionConfig(16, 64, 4, 2),
        ("many", 128): AttentionConfig(64, 64, 4, 2),
    },
}
# Head sizes up to which dk and dv of a block of keys are in one program's registers. Beyond that, which is fp32 with more than 128
# columns, a program has HEAD_SIZE_CHUNK of them and recomputes the scores: with all 256 it would spill (on sm_90a by 301 LDL and
# STL).
MAX_HEAD_SIZE_DKV = {"fp32": 128, "bf16": 256, "fp16": 256}
HEAD_SIZE_CHUNK = 64
_ANY_HEAD_SIZE = {
    "fp32": AttentionConfig(16, 16, 8, 1),
    "bf16": AttentionConfig(32, 32, 8, 1),
    "fp16": AttentionConfig(32, 32, 8, 1),
}


def padded_head_size(columns: int) -> int:
    """The head size in a tile: a power of two that tensor cores take."""
    return max(16, 1 << (columns - 1).bit_length())


def _operands(dtype: str, arch: int) -> str:
    """The row of the tables: fp16 takes the registers, bytes and cycles that bf16 takes."""
    if dtype == "fp32":
        return dtype
    return "bf16 in registers" if tuned_arch(arch) < 90 else "bf16"


def select_attention_config(operation: str, head: int, dtype: str, arch: int) -> AttentionConfig:
    """The default configuration: that of the smallest listed head size which holds `head`, the padded one. `operation`: the kernel:
    "forward"; "keys" (dk and dv), "shared keys" of grouped queries, and "queries" (dq) of the backward pass; "few" or "many" new
    tokens over a KV cache. Blocks of keys are 16 or multiples of 32, for dropout's random bits; in the forward pass and for dq they
    divide the block of queries."""
    table = _ATTENTION[_operands(dtype, arch)]
    if operation == "shared keys" and (operation, 64) not in table:
        operation = "keys"
    elif operation == "keys" and (f"shared {operation}", 64) in table and arch != 90:
        operation = "shared keys"  # with sums in tensor memory, four warps spill
    fits = [(most, t) for (r, most), t in table.items() if r == operation and head <= most]
    return min(fits, key=lambda row: row[0])[1] if fits else _ANY_HEAD_SIZE[dtype]


def select_masked_config(operation: str, head: int, dtype: str, arch: int) -> AttentionConfig:
    """The configuration for sliding-window and document masks, smaller than the default: every block is masked, which takes
    registers, and blocks that reach far beyond a window compute scores that are masked."""
    t = without_register_limit(select_attention_config("shared keys" if operation == "keys" else operation, head, dtype, arch))
    if operation == "forward" and t.queries > 64:
        return AttentionConfig(64, 64, 4, 2)
    if operation == "keys" and t.keys > 64:
        in_registers = _operands(dtype, arch) == "bf16 in registers"
        return AttentionConfig(32, 64, 4, 2) if in_registers else AttentionConfig(64, 64, 8, 2)
    return t


def without_register_limit(t: AttentionConfig) -> AttentionConfig:
    """The same without a register limit, for kernel instances that would spill under it."""
    return replace(t, max_registers=0)


# By head size: the warp-specialized forward pass, the default on sm_90 where it applies. On an H200 it takes 0.82 of the time of
# the configuration above, for heads of 64 at 64 x 1024. Its blocks of keys give other bits.
WARP_SPECIALIZED = {
    64: AttentionConfig(128, 128, 4, 4, warp_specialized=True),
    128: AttentionConfig(128, 128, 4, 2, warp_specialized=True),
}
# The same of the backward pass, by kernel and head size: 0.82 (keys) and 0.97 (queries) of the time there.
WARP_SPECIALIZED_BACKWARD = {
    ("keys", 64): AttentionConfig(64, 128, 4, 4, warp_specialized=True),
    ("keys", 128): AttentionConfig(64, 128, 4, 2, warp_specialized=True),
    ("queries", 64): AttentionConfig(128, 64, 4, 4, warp_specialized=True),
    ("queries", 128): AttentionConfig(128, 64, 4, 2, warp_specialized=True),
}

_Blocks = dict[tuple[str, int], tuple[tuple[int, ...], ...]]

# What the tuner tries besides: queries, keys, warps, stages and a register limit, in bf16; the most promising first. None spills.
# On sm_90 four warps do 64 queries or keys in as many registers as eight do 128, twice as many programs at a time.
_TRIED: dict[str, _Blocks] = {
    "bf16": {
        ("forward", 64): (
            (64, 64, 4, 3, 128), (128, 64, 8, 2, 128), (128, 64, 8, 4, 128), (128, 64, 4, 3), (64, 128, 4, 3),
            (128, 128, 8, 3), (128, 128, 8, 2),
        ),
        ("forward", 128): ((128, 64, 8, 2), (64, 64, 4, 2), (64, 64, 4, 3), (128, 128, 8, 2)),
        ("keys", 64): ((64, 128, 8, 3), (32, 64, 4, 3, 168), (64, 64, 4, 2), (32, 128, 8, 3, 128), (64, 128, 8, 2)),
        ("keys", 128): ((32, 128, 8, 2), (64, 64, 8, 2), (32, 128, 8, 3)),
        ("shared keys", 64): ((64, 64, 4, 3), (64, 128, 8, 2), (64, 64, 4, 2), (64, 128, 8, 1)),
        ("shared keys", 128): ((64, 64, 8, 2), (32, 64, 8, 2)),
        ("queries", 64): (
            (64, 64, 4, 3, 168), (128, 64, 8, 2, 128), (128, 64, 8, 3), (64, 64, 4, 3, 128), (128, 128, 8, 2),
            (128, 32, 8, 3, 128),
        ),
        ("queries", 128): ((128, 64, 8, 2), (64, 64, 4, 2), (128, 32, 8, 2), (128, 32, 8, 3), (64, 64, 4, 1)),
    },
    "bf16 in registers": {
        ("forward", 64): ((64, 64, 4, 3), (128, 128, 8, 3)),
        ("forward", 128): ((64, 64, 4, 2),),
        ("keys", 64): ((64, 128, 8, 3), (32, 128, 8, 3)),
        ("shared keys", 64): ((64, 128, 8, 3), (32, 128, 8, 3)),
        ("queries", 64): ((64, 64, 4, 3), (128, 64, 8, 3), (64, 64, 4, 2), (128, 32, 8, 3)),
        ("queries", 128): ((128, 32, 8, 2), (128, 32, 8, 3), (64, 64, 4, 1)),
    },
}  # fmt: skip


def attention_configs(operation: str, head: int, dtype: str, arch: int) -> tuple[AttentionConfig, ...]:
    """Every configuration of an attention kernel on this architecture, the default first; those of sm_90 were looked at there
    only."""
    default = select_attention_config(operation, head, dtype, arch)
    tried = _TRIED.get(_operands(dtype, arch), {}).get((operation, head), ()) if arch <= 90 or tuned_arch(arch) < 90 else ()
    return (default, *(AttentionConfig(*t) for t in tried if AttentionConfig(*t) != default))


def bitwise_equal(operation: str, a: AttentionConfig, b: AttentionConfig) -> bool:
    """Whether both give bitwise equal results. Gradients are chains over the keys, or the queries, in their order, of probabilities
    that each has its own; what a block adds beyond the diagonal are zeros. The online softmax of the forward pass rescales its sums
    for every block of keys."""
    return a.warp_specialized == b.warp_specialized and (operation != "forward" or a.keys == b.keys)


def warp_specialized_config(operation: str, head: int, dtype: str, arch: int) -> AttentionConfig | None:
    """The configuration of the warp-specialized kernel; None where there is none."""
    if arch != 90 or dtype == "fp32":
        return None
    return WARP_SPECIALIZED.get(head) if operation == "forward" else WARP_SPECIALIZED_BACKWARD.get((operation, head))
