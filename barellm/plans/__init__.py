"""What a step needs before it runs: memory, operations, bytes, and the time that no step can beat."""
