"""The needs of a step, known before it runs: memory, operations, bytes, and the time that no step can beat."""
