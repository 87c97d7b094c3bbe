"""What the ipc transport sends to SGLang, read by SGLang's own unpickler and bucket; memory of the host stands in for
what torch would open on a GPU."""

from __future__ import annotations

import base64
import json
import subprocess

import pytest

from rltool.engines.types import TensorMeta
from rltool.weights.transports.sglang_tensors import serialized_bucket
from tests.e2e.engines import sglang_python

pytestmark = [pytest.mark.e2e, pytest.mark.long]

BUCKET = (
    TensorMeta("a", "bfloat16", (2, 3)), TensorMeta("b", "bfloat16", (4,)), TensorMeta("c", "float8_e4m3fn", (2, 4)),
    TensorMeta("c_scale_inv", "float32", (1, 1)),
)  # fmt: skip
READER = """
import json, sys
import torch
from torch.multiprocessing import reductions

opened = []

def rebuild(*arguments):
    opened.append(arguments)
    return torch.arange(arguments[1][0], dtype=torch.uint8)

reductions.rebuild_cuda_tensor = rebuild
from sglang.srt.utils.common import MultiprocessingSerializer
from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket, FlattenedTensorMetadata

content = MultiprocessingSerializer.deserialize(sys.stdin.read())
metadata = [
    FlattenedTensorMetadata(m.name, m.shape, m.dtype, m.start_idx, m.end_idx, m.numel) for m in content["metadata"]
]
tensors = FlattenedTensorBucket(
    flattened_tensor=content["flattened_tensor"], metadata=metadata
).reconstruct_tensors()
[arguments] = opened
print(json.dumps({
    "device": arguments[6], "handle": arguments[7].hex(), "bytes": arguments[8],
    "tensors": [[name, str(t.dtype), list(t.shape), t.reshape(-1).view(torch.uint8).tolist()] for name, t in tensors],
}))
"""


def test_sglang_reads_the_bucket_that_is_made_without_it():
    handle = bytes(range(64))
    payload = serialized_bucket(BUCKET, "8f6e-01", base64.b64encode(handle).decode(), 100)
    done = subprocess.run(
        [sglang_python(), "-c", READER], input=payload, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert (found["device"], found["handle"], found["bytes"]) == ("8f6e-01", handle.hex(), 100)
    assert found["tensors"] == [
        ["a", "torch.bfloat16", [2, 3], list(range(12))],
        ["b", "torch.bfloat16", [4], list(range(12, 20))],
        ["c", "torch.float8_e4m3fn", [2, 4], list(range(20, 28))],
        ["c_scale_inv", "torch.float32", [1, 1], list(range(28, 32))],
    ]
