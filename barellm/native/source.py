"""A run as C: the plan's offsets, the tables of calls, the scalars, and the bytes that a file needs, written as data.

Nothing here computes. A call is a function's name and where its arguments begin; an argument is a number, or an offset in the arena
to which `barellm_open` adds where the arena lies. That is all the linking there is."""

import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from barellm import models
from barellm.checkpoint import tensorfile
from barellm.config import Config
from barellm.cpu import specialisation, step
from barellm.cpu.isa import ISA
from barellm.cpu.lang import sync
from barellm.data import kinds, tokenizers
from barellm.errors import UserError
from barellm.program import dtypes, scalars
from barellm.program.builder import Program
from barellm.program.tensor import Tensor
from barellm.runtime import arena, lowering

PROGRAMS = ("init", "forward_backward", "optimizer_step", "eval", "decode")
OUTPUTS = {"forward_backward": "loss", "optimizer_step": "clip", "eval": "loss", "decode": "logits"}
FORMATS = ("fp32", "i32", "bf16", "fp16", "bf16_i16", "fp16_fp32", "e6m9", "ue6m10")
KEPT = ("fp32", "i32", "bf16", "bf16_i16", "fp16_fp32", "e6m9", "ue6m10")  # those that runtime.c takes apart
CUT = {"bytes": "BY_BYTE", "chars": "BY_CHARACTER"}  # tokenizers whose texts the program can cut
ORDERS = ("epoch", "random", "sequential")
FLAGS = {  # instruction set -> what Linux calls the instructions in /proc/cpuinfo
    "amx_bf16": "amx_tile amx_bf16 avx512_bf16 avx512bw avx512vl avx512dq fma",
    "avx512_bf16": "avx512_bf16 avx512bw avx512vl avx512dq fma",
    "avx512": "avx512f avx512bw avx512vl avx512dq fma",
    "avx2": "avx2 fma bmi2",
    "neon_bf16": "bf16",
}


@dataclass
class Image:
    """A run's programs with an address for every byte, and the texts that its checkpoints have. `blobs`: files by name."""

    config: Config
    programs: Mapping[str, Program]
    lowered: step.LoweredPrograms
    isa: ISA
    meta: str
    tokenizer: tokenizers.Tokenizer
    _arguments: list[int] = field(default_factory=list)
    _relocations: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Check that the C runtime supports these programs and tensors."""
        for name in PROGRAMS:
            p = self.programs[name]
            inputs = {t.name for t in p.named.values() if t.role == "input"}
            sizes = set(arena.limits_of(p))
            if other := sorted((inputs - {"tokens", "targets"}) | (sizes - {"batch", "seq"})):
                raise UserError(f"the program {name} reads {other[0]}, expected tokens, targets, batch and seq alone")
        for t in self.kept:
            if t.dtype not in KEPT:
                raise UserError(f"{t.name} is stored as {t.dtype}, expected one of {', '.join(KEPT)}")

    @cached_property
    def files(self) -> dict[str, bytes]:
        return kinds.tokenizer_files(self.tokenizer)

    @property
    def tensors(self) -> dict[str, Tensor]:
        return self.programs["init"].store.tensors

    @property
    def kept(self) -> list[Tensor]:
        """What a checkpoint has, in the order of its files."""
        return [t for role in ("parameter", "state") for t in self.tensors.values() if t.role == role]

    def blobs(self) -> dict[str, bytes]:
        """Binary contents that image.c includes, by file name."""
        by_role = {role: {t.name: t for t in self.kept if t.role == role} for role in ("parameter", "state")}
        return {
            "weights_header": tensorfile.header_of(by_role["parameter"])[0],
            "optimizer_header": tensorfile.header_of(by_role["state"])[0],
            "meta_text": self.meta.removeprefix("{\n").removesuffix("\n}").encode(),
            "token_table": np.cumsum([len(t) for t in self.tokenizer.tokens], dtype="<u4").tobytes()
            + b"".join(self.tokenizer.tokens),
            **{f"tokenizer_{i}": data for i, data in enumerate(self.files.values())},
        }

    def layout(self) -> str:
        """What compiled kernels know of the blocks of memory that they are given."""
        rows = [(f"SCALAR_{s.name.upper()}", s.index) for s in scalars.SCALARS.values()]
        rows += [("SCALARS", scalars.MOST), ("PROGRAMS", len(PROGRAMS))]
        rows += [(f"PROGRAM_{name.upper()}", i) for i, name in enumerate(PROGRAMS)]
        rows += [(name, getattr(sync, name)) for name in ("SHARED_NBYTES", "TABLE", "RECORD_NBYTES", "BARRIER", "GROUPS")]
        rows += [(name, value) for name, value in vars(specialisation).items() if name.startswith("RT_")]
        return "".join(f"#define {name} {value}\n" for name, value in rows)

    def source(self) -> str:
        return "\n".join(['#include "image.h"', *self._blobs(), *self._calls(), *self._tensors(), *self._constants(), *self._run()])

    def _offset(self, t: Tensor) -> int:
        return self.lowered.plan.offsets[t]

    def _address(self, region: lowering.Region) -> tuple[int, int]:
        start = self._offset(region.tensor)
        return start + region.start, start + region.stop

    def _calls(self) -> Iterable[str]:
        """C source of the call tables, arguments and relocations of all programs: an argument is a number, or an arena offset that
        is relocated when the arena is mapped."""
        yield from (f"extern kernel {symbol};" for symbol in sorted({spec.symbol() for spec in self.lowered.specs}))
        rows = []
        for name in PROGRAMS:
            calls = self.lowered.calls[name]
            barrier_after = step.barriers(calls, self._address)
            yield f"static const struct call calls_{name}[] = {{"
            for call, barrier in zip(calls, barrier_after, strict=True):
                yield f"    {{{call.spec.symbol()}, {len(self._arguments)}, {int(barrier)}}}, /* {call.op.name} */"
                for a in call.args:
                    if not isinstance(a, int):
                        self._relocations.append(len(self._arguments))
                    self._arguments.append(a if isinstance(a, int) else self._address(a)[0])
            yield "};" if calls else "    {0, 0, 0}};"
            p = self.programs[name]
            named = {n: t for n, t in p.named.items() if t in self.lowered.plan.offsets}
            places = [self._offset(named[n]) if n in named else -1 for n in ("tokens", "targets", OUTPUTS.get(name, ""))]
            sizes = arena.limits_of(p)
            numbers = ", ".join(map(str, [len(calls), *places, sizes.get("batch", 0), sizes.get("seq", 0)]))
            rows.append(f'    {{"{name}", calls_{name}, {numbers}}},')
        yield from ("const struct program programs[] = {", *rows, "};")
        yield from _array("const int64_t arguments[]", self._arguments)
        yield f"const int64_t argument_count = {len(self._arguments)};"
        yield from _array("const int32_t relocations[]", self._relocations)
        yield f"const int64_t relocation_count = {len(self._relocations)};"

    def _tensors(self) -> Iterable[str]:
        yield "const struct tensor tensors[] = {"
        for t in self.kept:
            yield f"    {{\"{t.name}\", '{t.role[0]}', {t.dtype.upper()}, {self._offset(t)}, {t.size}, {t.nbytes}}},"
        yield "};"
        yield from _array("const int64_t by_name[]", sorted(range(len(self.kept)), key=lambda i: self.kept[i].name))
        yield f"const int64_t tensor_count = {len(self.kept)};"

    def _constants(self) -> Iterable[str]:
        """C source of the constants' contents, as words of 64 bits, and a table of (offset in the arena, bytes, words)."""
        rows = []
        for t in self.tensors.values():
            if t.value is None:
                continue
            data = b"".join(np.ascontiguousarray(plane).tobytes() for plane in dtypes.encode(t.value, t.dtype))
            assert len(data) == t.nbytes, t.name
            words = np.frombuffer(data + bytes(-len(data) % 8), "<u8")
            yield from _array(f"static const uint64_t constant_{len(rows)}[]", (f"{w:#x}" for w in words.tolist()))
            rows.append(f"    {{{self._offset(t)}, {len(data)}, constant_{len(rows)}}},")
        yield from ("const struct constant constants[] = {", *(rows or ["    {0, 0, 0}"]), "};")
        yield f"const int64_t constant_count = {len(rows)};"

    def _blobs(self) -> Iterable[str]:
        """C source that includes the blobs (assembler's .incbin), and the tables of tokenizer files with names and hashes."""
        import xxhash

        rows = {}
        for name, data in self.blobs().items():
            lines = f'.balign 8\\n{name}_begin:\\n.incbin \\"{name}.bin\\"\\n{name}_end:\\n.byte 0'
            yield f'__asm__(".section .rodata\\n{lines}\\n.previous");'
            yield f'extern const char {name}_begin[] __attribute__((visibility("hidden")));'
            yield f'extern const char {name}_end[] __attribute__((visibility("hidden")));'
            rows[name] = f'{name}_begin, {name}_end, "{xxhash.xxh3_64_hexdigest(data)}"'
        for name in ("weights_header", "optimizer_header", "meta_text"):
            yield f'const struct blob {name} = {{"", {rows[name]}}};'
        yield "const struct blob tokenizer_files[] = {"
        for i, name in enumerate(self.files):
            yield f'    {{"{name}", {rows[f"tokenizer_{i}"]}}},'
        yield f"}};\nconst int64_t tokenizer_file_count = {len(self.files)};"
        tok = self.tokenizer
        yield from _array("static const int32_t ends[]", sorted(tok.ends))
        numbers = f"{tok.vocab_size}, {CUT.get(tok.name, 'BY_RULES')}, {tok.start}, ends, {len(tok.ends)}"
        yield f'const struct tokenizer tokenizer = {{{{"", {rows["token_table"]}}}, {numbers}}};'

    def _run(self) -> Iterable[str]:
        """C source of the run's sizes, schedule and default scalars; fields in the order of the driver's structs, floats as hex."""
        plan, thread_scratch, config = self.lowered.plan, self.lowered.thread_scratch, self.config
        train, optim = config.train, config.optim
        threads = self.lowered.threads
        yield f"const int64_t arena_bytes = {plan.arena_bytes}, private_offset = {self._offset(thread_scratch)};"
        yield f"const int64_t private_bytes = {thread_scratch.nbytes // threads}, most_threads = {threads};"
        rows = [f"{{{scalars.SCALARS[name].index}, {_bits(name, value)}}}" for name, value in scalars.defaults().items()]
        yield from _array("const int64_t defaults[][2]", rows)
        yield f"const int64_t default_count = {len(rows)};"
        # The rates of both optimizers are multiples of the schedule's (OptimConfig.rates).
        high, low = (optim.lr, optim.min_lr) if optim.lr else (optim.muon_lr, 0.0)
        muon = (optim.muon_lr_ratio if optim.lr else 1.0) if optim.has_muon else -1.0
        numbers = (high, low, 1.0 if optim.lr else 0.0, muon, optim.decay_fraction, optim.momentum, optim.momentum_start)
        steps = (optim.warmup, optim.momentum_warmup, optim.momentum_cooldown)
        rates = _list(float(x).hex() for x in numbers)
        yield f"const struct schedule schedule = {{{rates}, {_list(steps)}, {optim.schedule.upper()}}};"
        sizes = (
            train.micro_batch_size, train.seq, train.gradient_accumulation_steps, train.batch_rampup_from,
            train.batch_rampup_tokens, train.steps, train.seed,
        )  # fmt: skip
        sizes += (train.save_total_limit, train.keep_every)
        gradient = float(models.loss_gradient(config.model) or 0.0)
        model = f"{config.model.vocab_size}, {int(models.whole(config.model))}"
        yield f"const struct run run = {{{_list(sizes)}, {model}, {gradient.hex()}}};"
        yield f'const char *const instructions = "{FLAGS.get(self.isa.name, "")}";'

    def settings(self, *, final_tokens: int) -> str:
        """C source of what only the driver needs."""
        train = self.config.train
        every = (train.checkpoint_every, train.keep_every, train.sample_every)
        numbers = (train.seed, train.eval_every, train.eval_tokens, final_tokens, *every)
        fields = "int64_t seed, eval_every, eval_tokens, final_tokens, checkpoint_every, milestones, sample_every"
        order = ORDERS.index(self.config.data.order)
        return (
            f"#include <stdint.h>\nextern const struct settings {{ int order; {fields}; }} settings;\n"
            f"const struct settings settings = {{{order}, {_list(numbers)}}};\n"
        )


def _bits(name: str, value: int) -> int:
    return value if scalars.SCALARS[name].kind == "i64" else struct.unpack("<q", struct.pack("<d", value))[0]


def _list(values: Iterable[Any]) -> str:
    return ", ".join(map(str, values))


def _array(declared: str, values: Iterable[Any]) -> Iterable[str]:
    """An array's definition, which C does not allow to be empty, some values a line."""
    found = [str(v) for v in values] or ["0"]
    yield f"{declared} = {{"
    for i in range(0, len(found), 12):
        yield f"    {', '.join(found[i : i + 12])},"
    yield "};"
