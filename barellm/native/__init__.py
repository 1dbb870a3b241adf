"""A run as a program without Python: its step as data, a small runtime in C, linked by the system's compiler."""
