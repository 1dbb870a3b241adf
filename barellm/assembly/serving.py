"""The programs of continuous batching: texts at positions of their own, each in a slot, a row of the KV caches.

    serve          one token of each of up to `slots` texts (at least QUANTIZED_ROWS)
    serve_prompt   up to `piece` tokens of the prompt of one text
    serve_piece    the same without logits, for pieces before the last
    serve_echo     the same, with the logits of all of them as "every" (B, T, Vp) fp32

Inputs: tokens and positions (B, T), slots (B,), i32. Output "logits" (B, 1, Vp) fp32: of the last position."""

import inspect

from barellm import models
from barellm.config import ModelConfig
from barellm.errors import UserError
from barellm.models.user_model import mistakes_named
from barellm.program import ops
from barellm.program.builder import Program, Store
from barellm.program.tensor import Dim, Tensor

QUANTIZED_ROWS = 5  # fewer rows are multiplied with quantized weights in an order of additions that depends on their number


@mistakes_named
def serving_programs(model: ModelConfig, *, slots: int, positions: int, piece: int, compute: str) -> dict[str, Program]:
    """The module's four programs over one store, with KV caches of `slots` x `positions`. UserError: a model without a KV cache."""
    if models.whole(model) or "caches" not in inspect.signature(models.of(model).decode).parameters:
        lacks = "KV cache" if models.whole(model) else "parameter caches in its decode"
        raise UserError(f"{models.name_of(model)} has no {lacks}: its texts cannot be generated side by side")
    found, store = {}, Store()
    store.positions, store.one_arithmetic = positions, True
    prompts = [(f"serve_{what}", 1, piece) for what in ("prompt", "piece", "echo")]
    for name, batch, seq in (("serve", max(slots, QUANTIZED_ROWS), 1), *prompts):
        p = found[name] = Program(store, compute=compute)
        rows = (Dim("batch", batch), Dim("seq", seq))
        places = {"positions": p.input("positions", rows), "slots": p.input("slots", rows[:1])}
        logits = models.of(model).decode(p, model, p.input("tokens", rows), (slots, positions), **places)
        if name == "serve_piece":
            p.eliminate_dead()
            continue
        p.output("logits", logits)
        if name == "serve_echo":
            p.output("every", _every(p))
    return found


def _every(p: Program) -> Tensor:
    """The logits (B, T, Vp) of all positions, made as those of the last."""
    at = next(i for i, op in enumerate(p.ops) if isinstance(op, ops.LastRow))
    x = p.ops[at].x
    for op in p.ops[at + 1 :]:
        x = p.apply(type(op), **(op.inputs | {"x": x}), **op.attrs).y
    return x
