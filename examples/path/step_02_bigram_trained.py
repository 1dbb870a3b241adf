"""2. Learning: the same table, found by gradient descent, with the training loop in full.

Row i of the table holds the logits of what follows character i. The forward pass looks rows up (an embedding) and takes the
cross-entropy; `backward` appends the gradients; Adam moves the table. It can get no better than counting, and comes close."""

from __future__ import annotations

from common import BATCH, SEQ, dataset, report, steps_asked

from barellm.assembly.programs import initialise
from barellm.config import OptimConfig
from barellm.data.loader import Batches
from barellm.optim.adamw import adamw
from barellm.program.builder import Program, Store
from barellm.program.ops.cross_entropy import CrossEntropy
from barellm.program.tensor import Dim, Tensor
from barellm.runtime.backend import backend

RATE = 0.1  # of a table alone; networks need less


def forward(p: Program, V: int) -> Tensor:
    """The loss (1,), a sum over targets times the run's scalar inv_targets."""
    shape = (Dim("batch", BATCH), Dim("seq", SEQ))
    tokens_BT, targets_BT = p.input("tokens", shape), p.input("targets", shape)
    logits_BTV = p.embedding(tokens_BT, p.parameter("table", (V, V), std=0.02))
    return p.output("loss", p.apply(CrossEntropy, logits=logits_BTV, targets=targets_BT, valid_vocab=V).loss)


def main(steps: int) -> float:
    data = dataset()
    store, V = Store(), data.tokenizer.vocab_size
    programs = {name: Program(store, compute="fp32") for name in ("init", "forward_backward", "optimizer_step", "eval")}
    programs["forward_backward"].backward(forward(programs["forward_backward"], V))
    forward(programs["eval"], V)
    adamw(programs["optimizer_step"], OptimConfig(weight_decay=0.0, clip=0.0))
    initialise(programs["init"])
    session = backend("cpu").open_session(programs)  # plans the memory, compiles the kernels

    def run(name: str, batches: Batches, first: int) -> float:
        tokens_BT, targets_BT = batches.batch(first, BATCH)
        session.write("tokens", tokens_BT)
        session.write("targets", targets_BT)
        session.run(name, batch=BATCH, seq=SEQ, inv_targets=1 / targets_BT.size)
        return float(session.read("loss")[0])

    session.run("init", seed=1337)
    batches = Batches(data.train, seq=SEQ, seed=1337)
    for step in range(steps):
        loss = run("forward_backward", batches, step * BATCH)
        session.run("optimizer_step", step=step + 1, lr=RATE)
        if step % 100 == 0 or step == steps - 1:
            print(f"step {step}: {loss:.3f}")
    val = Batches(data.val, seq=SEQ, seed=0, order="sequential")
    losses = [run("eval", val, first) for first in range(0, val.windows - BATCH + 1, BATCH)]
    session.close()
    return report(sum(losses) / len(losses))


if __name__ == "__main__":
    main(steps_asked())
