"""What a training step is: tensors, primitive ops, the reverse walk, the memory plan. Imports nothing of the rest."""
