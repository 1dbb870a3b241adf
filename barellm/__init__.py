"""barellm: GPT training, fine-tuning and inference from Python, without a deep-learning framework."""

__version__ = "0.1.0"
_MODULES = {"Model": "api", "load": "api", "Run": "runs", "Step": "runs", "train": "runs"}


def __getattr__(name: str) -> object:
    """What Python programs call, imported when it is asked for: `import barellm` alone stays light. __init__.pyi has the types."""
    from importlib import import_module

    if name == "kernels":
        return import_module("barellm.kernels")
    if name not in _MODULES:
        raise AttributeError(f"module 'barellm' has no attribute {name!r}")
    return getattr(import_module(f"barellm.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*_MODULES, "kernels", "__version__"})
