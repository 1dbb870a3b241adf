"""The files that a run leaves on disk, and how weights get there and back."""
