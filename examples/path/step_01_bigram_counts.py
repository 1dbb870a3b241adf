"""1. Counting: a bigram language model is a table of how often each character follows each.

No training and no barellm yet: the probability of the next character, given the last one, is a count divided by its row's sum.
The loss is the mean of -log p over the validation text, in nats: the cross-entropy, which all later programs have to lower."""

from __future__ import annotations

import numpy as np
from common import dataset, ids_of, report


def main(_: int = 0) -> float:
    data = dataset()
    train, val = ids_of(data.train), ids_of(data.val)
    V = data.tokenizer.vocab_size
    counts_VV = np.ones((V, V))  # one of each, so that no pair is impossible: add-one smoothing
    np.add.at(counts_VV, (train[:-1], train[1:]), 1)
    p_VV = counts_VV / counts_VV.sum(1, keepdims=True)
    print(f"{len(train):,} characters to count, {len(val):,} to predict, {V} different ones")
    print(f"all equally likely: {np.log(V):.3f} nats")

    rng, ids = np.random.default_rng(1), [int(train[0])]
    for _ in range(100):
        ids.append(int(rng.choice(V, p=p_VV[ids[-1]])))
    print(f"sample: {data.tokenizer.decode(ids)!r}")
    return report(float(-np.log(p_VV[val[:-1], val[1:]]).mean()))


if __name__ == "__main__":
    main()
