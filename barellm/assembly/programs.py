"""The programs of a model, over one store: init, forward_backward, optimizer_step, eval, score, decode."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from barellm import models
from barellm.assembly.logits import logits_of
from barellm.config import AdapterConfig, ModelConfig
from barellm.errors import UserError
from barellm.models import adapters
from barellm.models.user_model import mistakes_named, place
from barellm.program import dtypes, exponent_stats, ops
from barellm.program.builder import Program, Store
from barellm.program.matmul_formats import MatmulFormats
from barellm.program.tensor import Dim, Documents, Tensor

SHORT = 64  # positions: no backend feeds a prompt in smaller pieces
MOST_TOKENS = 1 << 24  # of one micro-batch: far beyond any machine's memory, and its plan still takes seconds only


@mistakes_named
def build(
    model: ModelConfig, *, batch: int = 0, seq: int = 0, compute: str | dtypes.Precision = "fp32",
    optimizer: Callable[[Program], None] | Mapping[str, Callable[[Program], None]] | None = None, recompute: bool = False,
    start_reduce_scatter: Callable[[Program], None] | None = None, ranges: bool = False, eval_batch: int = 0, eval_seq: int = 0,
    decode_batch: int = 0, decode_seq: int = 0, score_batch: int = 0, score_seq: int = 0, adapter: AdapterConfig | None = None,
    documents: bool = False, exact: bool = False, formats: MatmulFormats | None = None,
) -> tuple[Store, dict[str, Program]]:  # fmt: skip
    """A store and its programs by name. What is 0 or None is left out. With `documents` the inputs "positions" and "starts" say
    what each token of training and evaluation sees (`program.tensor.Documents`). `formats`: those that training simulates.

    init                    parameters from the scalar seed, with `adapter` those that are trained
    init_frozen             with `adapter`: the others
    forward_backward        of one micro-batch, up to `batch` sequences of up to `seq` tokens; output "loss" (with `optimizer`);
                            then what `start_reduce_scatter` appends
    forward_backward_stats  with `ranges`: the same, and exponent statistics of every tensor (`program.exponent_stats`)
    optimizer_step          gradient clipping and optimizer, as `optimizer` appends them; where it is a mapping, a program for each
                            of its names
    eval                    forward without dropout of up to `eval_batch` sequences of up to `eval_seq` tokens (0: as in
                            forward_backward); output "loss"
    score                   the same of up to `score_batch` sequences of up to `score_seq` tokens; outputs "losses" and "margins" of
                            each target
    decode                  one token of up to `decode_batch` sequences, `decode_seq` positions in the KV cache (0: max_seq);
                            output "logits"
    prefill                 with `exact`, by which a token has the same bits in a prompt and alone: up to the last layer's keys and
                            values, for pieces of a prompt before the last
    """
    eval_batch, eval_seq = eval_batch or batch, eval_seq or seq
    if (longest := max(seq, eval_seq, decode_seq, score_seq)) > model.max_seq:
        raise UserError(f"seq is {longest}, the model has {model.max_seq} positions (model.max_seq)")
    if max(1, batch) * seq > MOST_TOKENS:
        tokens, C = batch * seq, model.d_model
        found = f"a micro-batch of {batch} x {seq} has {tokens} tokens, expected at most {MOST_TOKENS}"
        needed = f"{4 * tokens * C / 2**20:.1f} MiB ({tokens} tokens x {C} channels x 4 bytes)"
        raise UserError(f"{found}: its residual stream alone would need {needed}")
    architecture, store, frozen = models.of(model), Store(), adapter is not None and adapter.active
    store.one_arithmetic = exact
    store.positions = max(longest, (decode_seq or model.max_seq) if decode_batch else 0)
    programs = {"init": Program(store, compute=compute)}
    if adapter is not None and frozen:
        adapters.freeze(store, adapter, programs["init"].compute)
    architecture.declare(programs["init"], model)
    if adapter is not None and frozen:
        adapters.declare(programs["init"], model, adapter)
        programs["init_frozen"] = Program(store, compute=compute)
        initialise(programs["init_frozen"], frozen=True)
    initialise(programs["init"])
    declared = store.of_role("parameter")
    if optimizer is not None:
        for name in ("forward_backward", "forward_backward_stats") if ranges else ("forward_backward",):
            p = programs[name] = Program(store, compute=compute)
            loss = p.output("loss", _loss(p, model, batch, seq, training=True, documents=documents))
            forward = formats.round_forward(p) if formats else []
            gradients = p.backward(loss, recompute=recompute)
            if formats:
                formats.round_gradients(p, forward)
            if start_reduce_scatter is not None:
                start_reduce_scatter(p)
            if name == "forward_backward_stats":
                exponent_stats.add_exponent_stats(p, gradients)
        for name, append in ({"optimizer_step": optimizer} if callable(optimizer) else optimizer).items():
            programs[name] = Program(store, compute=compute)
            append(programs[name])
    if eval_batch:
        p = programs["eval"] = Program(store, compute=compute)
        p.output("loss", _loss(p, model, eval_batch, eval_seq, training=False, documents=documents))
    if score_batch:
        p = programs["score"] = Program(store, compute=compute)
        _loss(p, model, score_batch, score_seq, training=False)
        if not p.ops[-1].name.endswith("cross_entropy"):
            found = f"the loss of {models.name_of(model)} is {p.ops[-1].name}"
            raise UserError(f"{found}, expected cross_entropy: it has no loss of a target by itself")
        for name, t in zip(("losses", "margins"), p.score_tokens(), strict=True):
            p.output(name, t)
    if decode_batch:
        p = programs["decode"] = Program(store, compute=compute)
        tokens = p.input("tokens", (Dim("batch", decode_batch), Dim("seq", decode_seq or model.max_seq)))
        p.output("logits", _decode(p, model, tokens))
        if exact and not models.whole(model) and tokens.shape[1] > SHORT:
            p = programs["prefill"] = Program(store, compute=compute)
            _decode(p, model, p.input("tokens", tokens.shape))
            p.eliminate_dead()
    if others := [t.name for t in store.of_role("parameter") if t not in declared]:
        raise UserError(f"{place(architecture.forward)}: the parameter {others[0]} is not in declare: nothing initialises it")
    for name, p in programs.items():
        if both := sorted(p.named.keys() & store.tensors.keys()):
            raise ValueError(f"{both[0]} is an input or output of {name} and a {store.tensors[both[0]].role}: rename one")
    return store, programs


def _decode(p: Program, model: ModelConfig, tokens: Tensor) -> Tensor:
    """fp32 logits (B, 1, Vp) of the last position. A model that has no `decode` of its own says those of all."""
    architecture = models.of(model)
    if hasattr(architecture, "decode"):
        return architecture.decode(p, model, tokens)
    return p.apply(ops.LastRow, x=logits_of(p, model, tokens)).y


def _loss(p: Program, model: ModelConfig, batch: int, seq: int, *, training: bool, documents: bool = False) -> Tensor:
    """Append the model's loss (1,) for (batch, seq) tokens. UserError if its `forward` returns anything else."""
    shape, forward = (Dim("batch", batch), Dim("seq", seq)), models.of(model).forward
    p.training = training
    arguments: dict[str, Any] = {"training": training}
    if documents:
        arguments["documents"] = Documents(p.input("positions", shape), p.input("starts", shape))
    loss = forward(p, model, p.input("tokens", shape), p.input("targets", shape), **arguments)
    if not isinstance(loss, Tensor) or tuple(loss.shape) != (1,):
        found = f"a tensor {tuple(loss.shape)}" if isinstance(loss, Tensor) else repr(loss)
        raise UserError(f"{place(forward)}: forward gives {found}, expected the loss, a tensor (1,)")
    return loss


def initialise(p: Program, *, frozen: bool = False) -> None:
    """Append the initialization of all frozen, or all trained, parameters; random ones depend on the scalar seed."""
    copies = []
    for stream, t in enumerate(p.store.of_role("parameter")):
        if t.frozen != frozen:
            continue
        kind, number = t.init or ("constant", 0.0)
        if kind == "normal":
            p.apply(ops.NormalInit, param=t, std=number, stream=stream, valid_rows=t.valid_rows, bf16=t.bf16 or None)
        elif kind == "uniform":
            p.apply(ops.UniformInit, param=t, bound=number, stream=stream, valid_rows=t.valid_rows, bf16=t.bf16 or None)
        elif kind == "transposed":
            copies.append((p.store.tensors[str(number)], t))
        else:
            value = float(dtypes.round_to_bf16(np.array(number))) if t.bf16 else number
            p.apply(ops.ConstantInit, param=t, value=value, valid_rows=t.valid_rows)
    for source, target in copies:
        p.transpose_copy(source, target)
