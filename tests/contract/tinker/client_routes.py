"""Every route that the released tinker client can call, as `METHOD path`, {} for what varies: of its package's source.

Run by RLTOOL_CLIENTS_PYTHON. A path that is written in a way that this does not read is an error.
"""

import ast
import json
from pathlib import Path

import tinker

PREFIX = "/api/v1/"
VERBS = {"get", "post", "put", "delete", "patch"}


def text_of(node):
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else ""
    if isinstance(node, ast.JoinedStr):
        return "".join(part.value if isinstance(part, ast.Constant) else "{}" for part in node.values)
    return ""


def routes_in(file):
    tree = ast.parse(file.read_text())
    read = set()
    for call in ast.walk(tree):
        if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Attribute) or not call.args:
            continue
        name, arguments = call.func.attr.removeprefix("_"), call.args
        if name == "request":
            name, arguments = text_of(call.args[0]).lower(), call.args[1:]
        if name in VERBS and arguments and text_of(arguments[0]).startswith(PREFIX):
            read |= {id(part) for part in ast.walk(arguments[0])}
            yield f"{name.upper()} {text_of(arguments[0]).removeprefix(PREFIX)}"
    others = [text_of(node) for node in ast.walk(tree) if id(node) not in read and text_of(node).startswith(PREFIX)]
    assert not others, (file, others)


if __name__ == "__main__":
    files = [file for file in Path(tinker.__file__).parent.rglob("*.py") if not file.name.endswith("_test.py")]
    print(json.dumps(sorted({route for file in files for route in routes_in(file)})))
