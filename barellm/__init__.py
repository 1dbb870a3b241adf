"""barellm: GPT training from Python with nothing in between."""

__version__ = "0.1.0"
