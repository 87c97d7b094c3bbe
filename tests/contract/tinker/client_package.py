"""What the released tinker client's package says, run by RLTOOL_CLIENTS_PYTHON: prints JSON.

routes: every route that it can call, as `METHOD path`, {} for what varies. A path that is written in a way that this
does not read is an error.
losses: the names of its LossFnType.
wire DIRECTORY: what it reads in the files there; its own request is written beside them.
"""

import ast
import json
import sys
from pathlib import Path
from typing import get_args

import numpy as np
import tinker
from tinker import types
from tinker.proto.request_conv import forward_backward_request_to_proto
from tinker.proto.response_conv import deserialize_proto_response

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


def routes():
    files = [file for file in Path(tinker.__file__).parent.rglob("*.py") if not file.name.endswith("_test.py")]
    return sorted({route for file in files for route in routes_in(file)})


def losses():
    return list(get_args(types.LossFnType))


def wire(directory):
    inputs = {"target_tokens": np.array([2, 3, 4]), "weights": np.array([1.0, 0.5, 0.0], np.float32)}
    tensors = {name: types.TensorData.from_numpy(value) for name, value in inputs.items()}
    datum = types.Datum(model_input=types.ModelInput.from_ints([1, 2, 3]), loss_fn_inputs=tensors)
    given = types.ForwardBackwardInput(data=[datum], loss_fn="ppo", loss_fn_config={"clip_low_threshold": 0.5})
    request = types.ForwardBackwardRequest(model_id="m", seq_id=7, forward_backward_input=given)
    (Path(directory) / "request").write_bytes(forward_backward_request_to_proto(request).SerializeToString())
    found = {}
    for file in Path(directory).glob("samples-*"):
        read = deserialize_proto_response(file.read_bytes(), types.SampleResponse)
        found[file.name] = {
            "sequences": [[each.tokens, each.logprobs, each.stop_reason] for each in read.sequences],
            "prompt": read.prompt_logprobs, "topk": read.topk_prompt_logprobs,
        }  # fmt: skip
    output = deserialize_proto_response((Path(directory) / "output").read_bytes(), types.ForwardBackwardOutput)
    rows = [{name: value.to_numpy().tolist() for name, value in each.items()} for each in output.loss_fn_outputs]
    return found | {"output": [rows, output.metrics]}


if __name__ == "__main__":
    print(json.dumps(globals()[sys.argv[1]](*sys.argv[2:])))
