"""SGLang's digests of tensors on a GPU, computed here, against SGLang's own kernel: in Triton's interpreter, without a
GPU, by SGLang's interpreter."""

from __future__ import annotations

import json
import subprocess

import pytest

from rltool.weights.verify.digests import sglang_cuda
from tests.e2e.engines import sglang_python
from tests.unit.weights.verify.test_digests import OF_THE_KERNEL, random_vector

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.timeout(600)]

ASK_THE_KERNEL = """
import json, sys
import torch
from sglang.kernels.ops.memory import gpu_tensor_hash as module


def words(tensor):
    flat = tensor.contiguous().reshape(-1).view(torch.uint8)
    return torch.cat([flat, flat.new_zeros(-len(flat) % 4)]).view(torch.uint32)


class OnNoGpu(torch.Tensor):
    is_cuda = True


module._as_uint32_words = words  # asks for a GPU, as gpu_tensor_hash does
found = []
for index, elements in json.loads(sys.argv[1]):
    tensor = torch.randn(elements, generator=torch.Generator().manual_seed(index))
    hashes = [module.gpu_tensor_hash(t.as_subclass(OnNoGpu)) for t in (tensor, tensor.bfloat16())]
    found.append([f"{value:016x}" for value in hashes])
print(json.dumps(found))
"""


def test_the_installed_sglangs_kernel_gives_the_same_digests():
    asked = [*((index, elements) for index, (elements, *_) in enumerate(OF_THE_KERNEL)), (77, 12_345)]
    done = subprocess.run(
        [sglang_python(), "-c", ASK_THE_KERNEL, json.dumps(asked)],
        capture_output=True, text=True, timeout=300, env={"TRITON_INTERPRET": "1", "PATH": "/usr/bin:/bin"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    kernel = [tuple(digests) for digests in json.loads(done.stdout.splitlines()[-1])]
    assert kernel[:-1] == [entry[1:] for entry in OF_THE_KERNEL]
    tensors = [random_vector(*place) for place in asked]
    assert kernel == [(sglang_cuda(tensor), sglang_cuda(tensor.bfloat16())) for tensor in tensors]
