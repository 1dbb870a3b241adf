"""Models as flat forwards over a Program, and the programs that a model needs."""
