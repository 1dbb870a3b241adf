"""How good a model is: loss on text that it has not seen."""
