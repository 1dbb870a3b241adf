"""The needs of a step, known before it runs: memory, operations, bytes, and the roofline."""
