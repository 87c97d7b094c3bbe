"""Experts' products at once against one after the other, on the CPU, by torch's own grouped product there."""

import math
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from rltool.errors import RltoolError, UsageError
from rltool.megatron import experts
from rltool.megatron.experts import Groups, Shape, grouped_product, judged, sequential_product, stacked, wanted
from rltool.megatron.kernels import SILU
from rltool.megatron.layers import gate_of

CPU = torch.device("cpu")
REAL = F.grouped_mm


@pytest.fixture(autouse=True)
def nothing_remembered():
    judged.cache_clear()
    yield
    judged.cache_clear()


def randn(*shape, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def values_and_gradients(product, rows, dtype, inputs=24, outputs=16):
    x = randn(sum(rows), inputs, dtype=dtype).requires_grad_()
    weights = [part.clone().requires_grad_() for part in randn(len(rows), outputs, inputs, dtype=dtype)]
    output = product(x, Groups(rows, torch.tensor(rows).cumsum(0, dtype=torch.int32)), weights)
    output.backward(randn(sum(rows), outputs, dtype=dtype))
    return [output.detach(), x.grad, *(weight.grad for weight in weights)]


@pytest.mark.parametrize("rows", [[3, 0, 5, 1], [0, 0, 90, 0], [7], [0, 0, 0], [1, 1, 1, 1], [0, 40, 0, 2, 0]])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 0.02)])
def test_grouped_products_are_those_of_single_experts(rows, dtype, tolerance):
    found, expected = (values_and_gradients(f, rows, dtype) for f in (grouped_product, sequential_product))
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=tolerance, atol=tolerance)


def test_an_expert_without_rows_has_a_gradient_of_zeros_whatever_the_kernel_leaves_there(monkeypatch):
    def unwritten(a, b, offs):
        result = REAL(a, b, offs=offs)
        if result.dim() == 3:
            result[offs.diff(prepend=offs.new_zeros(1)) == 0] = math.nan
        return result

    monkeypatch.setattr(F, "grouped_mm", unwritten)
    gradients = values_and_gradients(grouped_product, [0, 4, 0, 2, 0], torch.float32)[2:]
    assert [bool(gradient.any()) for gradient in gradients] == [False, True, False, True, False]


def test_gradients_that_are_one_number_for_all_rows_are_taken():
    x, weights = randn(4, 8).requires_grad_(), [randn(8, 8).requires_grad_() for _ in range(2)]
    grouped_product(x, Groups([1, 3], torch.tensor([1, 4], dtype=torch.int32)), weights).sum().backward()
    torch.testing.assert_close(x.grad, torch.cat([weights[0].sum(0)[None], weights[1].sum(0).expand(3, 8)]))


def test_inputs_that_need_no_gradient_are_taken():
    x, weights = randn(4, 8), [randn(8, 8).requires_grad_() for _ in range(2)]
    grouped_product(x, Groups([1, 3], torch.tensor([1, 4], dtype=torch.int32)), weights).sum().backward()
    torch.testing.assert_close(weights[1].grad, x[1:].sum(0).expand(8, 8))


def test_weights_in_one_piece_of_memory_are_read_where_they_lie():
    whole = randn(3, 4, 8)
    pieces = list(whole.unbind())
    assert stacked(pieces).data_ptr() == whole.data_ptr() and torch.equal(stacked(pieces), whole)
    inner = stacked(pieces[1:])
    assert inner.data_ptr() == whole[1].data_ptr() and torch.equal(inner, whole[1:])


def neighbours(whole):
    """Tensors of their own whose memory follows one another, as an allocator may place them."""
    buffer = bytearray(whole.nbytes)
    size = whole[0].numel()
    pieces = [torch.frombuffer(buffer, dtype=torch.float32, count=size, offset=i * 4 * size) for i in range(len(whole))]
    return [piece.view(part.shape).copy_(part) for piece, part in zip(pieces, whole, strict=True)]


@pytest.mark.parametrize(
    "lie",
    [
        lambda whole: list(whole.flip(0).unbind())[::-1],
        lambda whole: [part.clone() for part in whole],
        lambda whole: [whole[0], whole[1], whole[2].clone()],
        lambda whole: list(torch.cat([whole, whole], dim=1)[:, :4].unbind()),
        neighbours,
    ],
    ids=["reversed", "apart", "the last apart", "with others in between", "neighbours by chance"],
)
def test_weights_that_lie_otherwise_are_copied(lie):
    whole = randn(3, 4, 8)
    pieces = lie(whole)
    result = stacked(pieces)
    assert torch.equal(result, whole)
    assert result.data_ptr() not in [piece.data_ptr() for piece in pieces]


def test_grouped_products_are_used_where_they_agree():
    assert judged(Shape(CPU, torch.float32, 16, 24)) and judged(Shape(CPU, torch.bfloat16, 16, 24), demanded=True)


def next_expert(a, b, offs):
    return REAL(a, b.roll(1, 0) if b.dim() == 3 else b, offs=offs)


def wrong_weight_gradient(a, b, offs):
    return REAL(a, b, offs=offs) * (1.05 if b.dim() == 2 else 1.0)


def one_row_off(a, b, offs):
    return REAL(a, b, offs=(offs + 1).clamp(max=offs[-1]))


def not_finite(a, b, offs):
    return REAL(a, b, offs=offs) * math.nan


def unsupported(a, b, offs):
    raise RuntimeError("strides should be multiple of 16 bytes")


@pytest.mark.parametrize("wrong", [next_expert, wrong_weight_gradient, one_row_off, not_finite, unsupported])
def test_a_kernel_that_is_wrong_is_not_used_and_the_log_says_so(monkeypatch, caplog, wrong):
    monkeypatch.setattr(F, "grouped_mm", wrong)
    shape = Shape(CPU, torch.bfloat16, 16, 24)
    assert not judged(shape)
    assert "24 to 16 features" in caplog.text and "experts run one after the other" in caplog.text
    with pytest.raises(RltoolError, match='set trainer.expert_products = "sequential"'):
        judged(shape, demanded=True)


def test_what_torch_does_not_take_is_not_used(caplog):
    assert not judged(Shape(CPU, torch.bfloat16, 10, 6)) and "16 bytes" in caplog.text
    assert not judged(Shape(CPU, torch.float64, 16, 24)) and "Double" in caplog.text


def test_trying_leaves_trainings_random_numbers_alone():
    state = torch.get_rng_state()
    judged(Shape(CPU, torch.float32, 16, 24))
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    ("products", "device", "dtype", "capability", "expected"),
    [
        ("auto", "cpu", torch.bfloat16, None, False),
        ("auto", "cuda", torch.bfloat16, (9, 0), True),
        ("auto", "cuda", torch.bfloat16, (8, 0), False),
        ("auto", "cuda", torch.float32, (9, 0), False),
        ("sequential", "cuda", torch.bfloat16, (9, 0), False),
        ("grouped", "cpu", torch.float32, None, True),
        ("grouped", "cuda", torch.bfloat16, (8, 0), True),
    ],
)
def test_where_grouped_products_are_tried(monkeypatch, products, device, dtype, capability, expected):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: capability)
    assert wanted(products, torch.device(device), dtype) is expected


def test_demanding_them_in_float32_on_a_gpu_is_refused():
    with pytest.raises(UsageError, match='needs model.dtype = "bfloat16"'):
        wanted("grouped", torch.device("cuda"), torch.float32)


@pytest.mark.parametrize(
    "change",
    [
        {"activation_func": F.gelu},
        {"activation_func_clamp_value": 7.0},
        {"glu_linear_offset": 1.0},
        {"gated_linear_unit": False},
        {"gated_linear_unit": False, "add_bias_linear": True},
        {"moe_apply_probs_on_input": True},
    ],
)
def test_experts_of_another_kind_stay_megatrons(change):
    plain = dict(
        gated_linear_unit=True,
        activation_func=F.silu,
        activation_func_clamp_value=None,
        glu_linear_offset=0.0,
        add_bias_linear=False,
        moe_apply_probs_on_input=False,
    )
    assert experts.computes(SimpleNamespace(**plain))
    biased = {"add_bias_linear": True, "activation_func_clamp_value": 7.0, "glu_linear_offset": 1.0}
    assert experts.computes(SimpleNamespace(**plain | biased)), "gpt-oss's"
    assert not experts.computes(SimpleNamespace(**plain | change))


def test_experts_with_biases_and_another_activation_are_refused_by_name():
    config = SimpleNamespace(activation_func=F.gelu, activation_func_clamp_value=None, glu_linear_offset=0.0)
    with pytest.raises(UsageError, match="experts with biases take silu"):
        gate_of(config)
    config.activation_func = F.silu
    assert gate_of(config) == SILU
