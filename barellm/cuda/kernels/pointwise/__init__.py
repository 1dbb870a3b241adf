"""Element by element: activations, gates, dropout, initial values."""
