"""The description of a training step: tensors, primitive ops, the reverse walk, the memory plan."""
