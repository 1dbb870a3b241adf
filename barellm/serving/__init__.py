"""Models and runs over HTTP."""
