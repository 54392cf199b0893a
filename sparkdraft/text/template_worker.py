"""The child process in which chat templates run. text/template.py starts it and talks to it.

A chat template is a program that comes with a model's files. Jinja's sandbox keeps it from files and from Python's
internals, but not from endless loops or `9 ** 10**9`. So templates run here, under limits on CPU time and memory that
the operating system enforces. Jinja has the settings and helpers that Hugging Face gives it.

Tasks and answers are lines of JSON on standard input and output. It runs as a script and imports nothing of this
package, so that it starts quickly.
"""

from __future__ import annotations

import json
import resource
import signal
import sys
from datetime import datetime
from functools import lru_cache
from typing import Any

import jinja2
import jinja2.ext
import jinja2.meta
from jinja2.nodes import Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

# methods of strings
SEARCHES = ("split", "rsplit", "startswith", "endswith", "find", "rfind", "index", "count", "replace")
MAX_MESSAGE = 500  # characters of an error message, which a template may write itself


class _Generation(jinja2.ext.Extension):
    """{% generation %} marks what the model wrote, for training; here its body is rendered as it is."""

    tags = {"generation"}  # noqa: RUF012 (jinja2 declares it so)

    def parse(self, parser: Parser) -> list[Node]:
        next(parser.stream)
        # In its own scope, as in Hugging Face, where it is a call block.
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return [jinja2.nodes.Scope(body)]


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as models were trained on. Jinja's own filter escapes <, > and & for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


@lru_cache(maxsize=16)
def _compile(template: str) -> jinja2.Template:
    return _environment().from_string(template)


def describe(task: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {"variables": [], "looked_for": [], "fault": _fault(task["template"])}
    if not found["fault"]:
        tree = _environment().parse(task["template"])
        found["variables"] = sorted(jinja2.meta.find_undeclared_variables(tree))
        found["looked_for"] = sorted(_looked_for(tree))
    return found


def _fault(template: str) -> str:
    """Why a template can render no chat, with the line of the error; "" if it is valid Jinja."""
    try:
        _compile(template)
    except jinja2.TemplateSyntaxError as error:
        return f"line {error.lineno} of the chat template is wrong ({error.message or error})"
    except RecursionError:
        return "the chat template is nested too deeply"
    except (SyntaxError, ValueError) as error:  # of the Python that Jinja makes of it
        return f"the chat template is wrong ({getattr(error, 'msg', error)})"
    return ""


def _looked_for(tree: jinja2.nodes.Template) -> set[str]:
    """The constants that a template compares strings with or splits them at, not those that it only writes."""
    found: list[Node] = []
    for comparison in tree.find_all(jinja2.nodes.Compare):
        found += [comparison.expr, *(operand.expr for operand in comparison.ops)]
    for call in tree.find_all(jinja2.nodes.Call):
        if isinstance(call.node, jinja2.nodes.Getattr) and call.node.attr in SEARCHES:
            found += call.args[:1]
    return {node.value for node in found if isinstance(node, jinja2.nodes.Const) and isinstance(node.value, str)}


def render(task: dict[str, Any]) -> dict[str, Any]:
    pieces, size = [], 0
    try:
        for piece in _compile(task["template"]).generate(task["values"]):
            size += len(piece)
            if size > task["max_chars"]:
                return {"limit": f"writes more than {task['max_chars']:,} characters"}
            pieces.append(piece)
    except jinja2.TemplateError as error:
        return {"refused": f": {str(error.message or error)[:MAX_MESSAGE]}"}
    except MemoryError:
        raise
    except Exception as error:  # of plain Python: a missing role, a number where text should be
        return {"refused": f" ({str(error)[:MAX_MESSAGE] or type(error).__name__}): check their form"}
    return {"text": "".join(pieces)}


def answer(line: bytes) -> bytes:
    task = json.loads(line)
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    soft = task["max_bytes"] if hard == resource.RLIM_INFINITY else min(task["max_bytes"], hard)
    resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
    # SIGPROF keeps its default, so it ends the process even within one long operation of C code.
    signal.setitimer(signal.ITIMER_PROF, task["seconds"])
    try:
        return json.dumps(describe(task) if task["do"] == "describe" else render(task)).encode()
    except MemoryError:
        return json.dumps({"limit": f"takes more than {task['max_bytes'] >> 20:,} MiB of memory"}).encode()
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def main() -> None:
    for line in sys.stdin.buffer:
        sys.stdout.buffer.write(answer(line) + b"\n")
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
