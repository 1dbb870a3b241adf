"""Everything that only a machine with a GPU can show, in stages; `make gpu-check` runs them. docs/cuda.md says what each shows."""
