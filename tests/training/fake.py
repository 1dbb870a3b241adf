"""A session without kernels: arithmetic on two tensors that depends on every input, in bits."""

from __future__ import annotations

import numpy as np

from barellm.program.tensor import Tensor


class FakeSession:
    """`optimizer_step` changes parameters and state from the tokens seen since the last one, `lr` and `step`."""

    def __init__(self, *, seed: int = 1, rows: int = 5) -> None:
        shapes = {"w": (rows, 3), "b": (7,)}
        self.tensors = {}
        for name, shape in shapes.items():
            self.tensors[name] = Tensor(name, shape, "fp32", "parameter")
            self.tensors[f"{name}.grad"] = Tensor(f"{name}.grad", shape, "fp32", "gradient")
            self.tensors[f"{name}.m"] = Tensor(f"{name}.m", shape, "fp32", "state")
        self.tensors["skipped"] = Tensor("skipped", (1,), "i32", "state")
        rng = np.random.default_rng(seed)
        self.arrays = {
            t.name: rng.normal(size=t.shape).astype(np.float32)
            if t.role == "parameter"
            else np.zeros(t.shape, np.int32 if t.dtype == "i32" else np.float32)
            for t in self.tensors.values()
        }
        self.inputs: dict[str, np.ndarray] = {}
        self.runs: list[tuple[str, dict]] = []
        self.before_run = lambda entry: None

    def run(self, entry: str, **scalars) -> None:
        self.before_run(entry)
        self.runs.append((entry, scalars))
        a = self.arrays
        if entry in ("forward_backward", "eval"):
            assert self.inputs["tokens"].shape == (scalars["batch"], scalars["seq"])
            mixed = np.float32((self.inputs["tokens"] * np.arange(1, scalars["seq"] + 1)).sum() % 1009) / np.float32(1009)
            valid = np.count_nonzero(self.inputs["targets"] >= 0)
            self.loss = np.array([(abs(a["w"].mean()) + mixed * 0.01) * valid * scalars["inv_targets"]], np.float32)
            if entry == "forward_backward":
                for name in ("w", "b"):
                    gradient = mixed + a[name] * np.float32(0.1)
                    a[f"{name}.grad"] = gradient + (a[f"{name}.grad"] if scalars["accumulate"] else 0)
        elif entry == "init":
            rng = np.random.default_rng(scalars["seed"])
            for name in ("w", "b"):
                a[name] = rng.normal(size=a[name].shape).astype(np.float32)
                a[f"{name}.m"] = np.zeros_like(a[name])  # a real process starts with a new arena
        elif entry == "optimizer_step":
            for name in ("w", "b"):
                a[f"{name}.m"] = np.float32(0.9) * a[f"{name}.m"] + a[f"{name}.grad"]
                a[name] = a[name] - np.float32(scalars["lr"] / scalars["step"] ** 0.5) * a[f"{name}.m"]

    def write(self, name: str, array: np.ndarray) -> None:
        self.inputs[name] = np.array(array)

    def read(self, name: str) -> np.ndarray:
        if name == "loss":
            return self.loss
        if name == "clip":
            return np.array([1.0, 1.0], np.float32)
        if name == "logits":
            return np.sin(np.arange(4096, dtype=np.float32) * self.arrays["w"].sum() + self.inputs["tokens"].sum())
        return self.arrays[name].copy()

    def read_rows(self, name: str, lo: int, hi: int) -> np.ndarray:
        return self.arrays[name][lo:hi].copy()

    def write_rows(self, name: str, lo: int, array: np.ndarray) -> None:
        assert array.dtype == self.arrays[name].dtype
        self.arrays[name][lo : lo + len(array)] = array
