"""Renders chat templates in a process of its own, which its parent ends when a template takes too long.

A template is a program of a stranger's. It runs in jinja2's sandbox, sees plain JSON values alone, and its process may not grow
beyond MEMORY. This file runs by its path, and so imports nothing of barellm."""

# pyright: reportMissingImports=false
import json
import sys
from datetime import datetime
from functools import lru_cache
from typing import Any

MEMORY = 1 << 30
LONGEST = 1 << 26  # characters of a rendered text


@lru_cache(maxsize=8)
def compiled(template: str) -> Any:
    """(template, environment): a jinja2 sandbox with the filters and functions that transformers provides to chat templates."""
    from jinja2 import nodes
    from jinja2.exceptions import SecurityError, TemplateError
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment
    from jinja2.utils import Namespace

    class Generation(Extension):
        """{% generation %}, which marks what an assistant says: by the variable generation_mark, if there is one."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            mark = nodes.Output([nodes.Name("generation_mark", "load", lineno=line)], lineno=line)
            return nodes.Scope([mark, *body, mark]).set_lineno(line)

    class Public(Namespace):
        """A namespace whose names have no underscore in front."""

        def __init__(*args: Any, **values: Any) -> None:
            self, *given = args
            values = dict(*given, **values)
            for name in values:
                _public(name)
            Namespace.__init__(self, values)

        def __setitem__(self, name: str, value: Any) -> None:
            _public(name)
            super().__setitem__(name, value)

    def _public(name: Any) -> None:
        if str(name).startswith("_"):
            raise SecurityError(f"a namespace cannot have {name!r}")

    def raise_exception(message: Any) -> None:
        raise TemplateError(message)

    def tojson(value: Any, ensure_ascii=False, indent=None, separators=None, sort_keys=False) -> str:
        how = {"indent": indent, "separators": separators, "sort_keys": sort_keys}
        return json.dumps(value, ensure_ascii=ensure_ascii, **how)

    class Mapping:
        """`dict`, of which a template can only make objects."""

        def __call__(self, *args: Any, **values: Any) -> dict:
            return dict(*args, **values)

        def fromkeys(self, *args: Any) -> dict:
            return dict.fromkeys(*args)

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols])
    environment.filters["tojson"] = tojson
    environment.globals |= {"raise_exception": raise_exception, "strftime_now": lambda how: datetime.now().strftime(how)}
    environment.globals |= {"dict": Mapping(), "namespace": Public}
    return environment.from_string(template), environment


def literals(template: str) -> list[str]:
    """The texts that stand in a template itself."""
    from jinja2 import nodes

    tree = compiled(template)[1].parse(template)
    found = [node.data for node in tree.find_all(nodes.TemplateData)]
    return found + [node.value for node in tree.find_all(nodes.Const) if isinstance(node.value, str)]


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """Answer one request: the rendered text for each of `variables`, or the template's literals, or an error in words."""
    try:
        if "variables" not in request:
            return {"literals": literals(request["template"])}
        template, texts = compiled(request["template"])[0], []
        for variables in request["variables"]:
            pieces, size = [], 0
            for piece in template.generate(**variables):
                pieces.append(piece)
                size += len(piece)
                if size > LONGEST:
                    return {"error": f"it wrote more than {LONGEST} characters"}
            texts.append("".join(pieces))
        return {"texts": texts}
    except MemoryError:
        return {"error": "it needs too much memory"}
    except Exception as error:  # whatever a template's own expressions raise
        return {"error": f"{type(error).__name__}: {error}"[:500]}


def main() -> None:
    """Answer requests, one JSON object per line, with limited memory."""
    try:
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    except (ImportError, OSError, ValueError):  # not on every system
        pass
    for line in sys.stdin.buffer:
        sys.stdout.buffer.write(json.dumps(answer(json.loads(line))).encode() + b"\n")
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
