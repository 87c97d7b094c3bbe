"""Which attention kernel is chosen on a GPU. The kernels are plain torch here, so that the choice runs on the CPU."""

import math
import os
import sys
import types

import pytest
import torch
import torch.nn.functional as F
from megatron.core.transformer import TransformerConfig

from rltool.errors import RltoolError, UsageError
from rltool.megatron import attention, layers
from rltool.megatron.attention import Shape, check_backend, disagreement, judged
from rltool.megatron.layers import plain_attention
from rltool.megatron.packing import pack

CPU = torch.device("cpu")


def shape(**changed):
    return Shape(
        **{
            "device": CPU,
            "dtype": torch.bfloat16,
            "heads": 4,
            "groups": 2,
            "dim": 8,
            "scale": None,
            "window": None,
            "blocks": False,
            **changed,
        }
    )


def reference(query, key, value, packed, scale=None, window=None, *, top_left=False):
    """Block after block, in the definition's own terms."""
    outputs = []
    for block in range(len(packed.cu_seqlens_q) - 1):
        q = query[packed.cu_seqlens_q[block] : packed.cu_seqlens_q[block + 1]].transpose(0, 1)
        k, v = (x[packed.cu_seqlens_kv[block] : packed.cu_seqlens_kv[block + 1]].transpose(0, 1) for x in (key, value))
        before = 0 if top_left else k.size(1) - q.size(1)
        at, seen_by = torch.arange(k.size(1)), before + torch.arange(q.size(1))[:, None]
        mask = at <= seen_by
        if window is not None:
            mask &= at > seen_by - window
        outputs.append(
            F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=True).transpose(0, 1)
        )
    return torch.cat(outputs)


class DotProductAttention(torch.nn.Module):
    """Takes what Transformer Engine's takes. `wrong` is how it misbehaves."""

    wrong = ""

    def __init__(
        self,
        num_attention_heads,
        kv_channels,
        num_gqa_groups,
        attention_dropout,
        qkv_format,
        attn_mask_type,
        window_size,
        softmax_scale,
    ):
        super().__init__()
        if self.wrong == "unsupported":
            raise ValueError("no kernel for this configuration")
        assert (qkv_format, attention_dropout) == ("thd", 0.0)
        self.window = None if window_size is None else window_size[0] + 1
        self.scale = softmax_scale

    def forward(self, query, key, value, *, cu_seqlens_q, cu_seqlens_kv, max_seqlen_q, max_seqlen_kv, attn_mask_type):
        assert os.environ["NVTE_UNFUSED_ATTN"] == "0"
        packed = types.SimpleNamespace(cu_seqlens_q=cu_seqlens_q, cu_seqlens_kv=cu_seqlens_kv)
        if self.wrong == "one sequence":
            packed.cu_seqlens_q = packed.cu_seqlens_kv = cu_seqlens_q[[0, -1]]
        if self.wrong == "gradient":
            key = key.detach() + 0 * key
        window = None if self.wrong == "no window" else self.window
        top_left = attn_mask_type == "padding_causal" or self.wrong == "top left"
        out = reference(query, key, value, packed, self.scale, window, top_left=top_left)
        return (out * math.nan if self.wrong == "nan" else out).flatten(1)


@pytest.fixture
def installed(monkeypatch):
    """Transformer Engine, and a torch kernel to compare it with; no choice is remembered from elsewhere."""
    for cached in (
        attention.judged,
        attention._dot_product_attention,
        attention._varlen_parameters,
        attention._takes_grouped_queries,
    ):
        cached.cache_clear()
    package, module = types.ModuleType("transformer_engine"), types.ModuleType("transformer_engine.pytorch")
    module.DotProductAttention = type("DotProductAttention", (DotProductAttention,), {})
    package.pytorch = module
    monkeypatch.setitem(sys.modules, "transformer_engine", package)
    monkeypatch.setitem(sys.modules, "transformer_engine.pytorch", module)
    monkeypatch.setattr(attention, "torch_attention", reference)
    yield module.DotProductAttention
    for cached in (
        attention.judged,
        attention._dot_product_attention,
        attention._varlen_parameters,
        attention._takes_grouped_queries,
    ):
        cached.cache_clear()


@pytest.mark.parametrize(
    "case", [{}, {"groups": 4}, {"window": 20}, {"blocks": True}, {"blocks": True, "window": 20}, {"scale": 0.3}]
)
def test_transformer_engine_is_used_where_it_agrees(installed, case):
    assert judged(shape(**case), backend="auto") is attention.transformer_engine_attention


@pytest.mark.parametrize(
    ("wrong", "case"),
    [
        ("one sequence", {}),
        ("gradient", {}),
        ("nan", {}),
        ("no window", {"window": 20}),
        ("no window", {"window": 300}),
        ("top left", {"blocks": True}),
        ("unsupported", {}),
    ],
)
def test_it_is_not_used_where_it_is_wrong_and_the_log_says_so(installed, caplog, wrong, case):
    installed.wrong = wrong
    assert judged(shape(**case), backend="auto") is reference
    assert "4 heads in 2 groups of 8" in caplog.text and "it is not used" in caplog.text
    with pytest.raises(RltoolError, match='set trainer.attention = "torch"'):
        judged(shape(**case), backend="transformer_engine")


def test_without_transformer_engine_torch_serves_in_silence(installed, monkeypatch, caplog):
    for package in ("transformer_engine.pytorch", "flash_attn.cute"):
        monkeypatch.setitem(sys.modules, package, None)
    assert judged(shape(), backend="auto") is reference and not caplog.text
    with pytest.raises(UsageError, match="cannot be imported here"):
        check_backend("transformer_engine", torch.device("cuda"), torch.bfloat16)
    check_backend("auto", torch.device("cuda"), torch.bfloat16)


def flash_attn_varlen_func(
    q,
    k,
    v,
    qv=None,
    cu_seqlens_q=None,
    cu_seqlens_k=None,
    max_seqlen_q=None,
    max_seqlen_k=None,
    *,
    softmax_scale=None,
    causal=False,
    window_size=(None, None),
):
    """FlashAttention 4's, with the arguments that count. Its windows count the keys before a query."""
    assert causal and window_size[1] in (None, 0)
    packed = types.SimpleNamespace(cu_seqlens_q=cu_seqlens_q, cu_seqlens_kv=cu_seqlens_k)
    return reference(q, k, v, packed, softmax_scale, None if window_size[0] is None else window_size[0] + 1), None


@pytest.fixture
def flash_attn(installed, monkeypatch):
    """FlashAttention 4 beside Transformer Engine; `use` puts another function in its place."""
    package, module = types.ModuleType("flash_attn"), types.ModuleType("flash_attn.cute")
    package.cute, module.flash_attn_varlen_func = module, flash_attn_varlen_func
    monkeypatch.setitem(sys.modules, "flash_attn", package)
    monkeypatch.setitem(sys.modules, "flash_attn.cute", module)
    return module


@pytest.mark.parametrize(
    "case", [{}, {"groups": 4}, {"window": 20}, {"blocks": True}, {"blocks": True, "window": 20}, {"scale": 0.3}]
)
def test_flash_attention_4_comes_first_where_it_agrees(flash_attn, case, capsys):
    attention._say_once.cache_clear()
    assert judged(shape(**case), backend="auto") is attention.flash_attention_4
    assert judged(shape(**case, heads=8), backend="auto") is attention.flash_attention_4
    assert capsys.readouterr().out.splitlines() == ["attention: FlashAttention 4"], "once, whatever the shapes"
    assert judged(shape(**case), backend="auto") is attention.flash_attention_4
    assert judged(shape(**case), backend="flash_attention_4") is attention.flash_attention_4
    assert judged(shape(**case), backend="transformer_engine") is attention.transformer_engine_attention


def test_the_next_kernel_serves_where_flash_attention_4_is_wrong(flash_attn, caplog):
    flash_attn.flash_attn_varlen_func = lambda *args, **options: flash_attn_varlen_func(
        *args, **{**options, "softmax_scale": 0.5}
    )
    assert judged(shape(), backend="auto") is attention.transformer_engine_attention
    assert "FlashAttention 4's attention" in caplog.text and "it is not used" in caplog.text
    with pytest.raises(RltoolError, match='set trainer.attention = "torch"'):
        judged(shape(), backend="flash_attention_4")


@pytest.mark.parametrize(("device", "dtype"), [("cpu", torch.bfloat16), ("cuda", torch.float32)])
def test_demanding_it_where_it_cannot_serve_is_refused(installed, device, dtype):
    with pytest.raises(UsageError, match="needs a GPU and model.dtype"):
        check_backend("transformer_engine", torch.device(device), dtype)


@pytest.mark.parametrize("before", [None, "1"])
def test_its_kernel_with_whole_score_matrices_is_ruled_out_in_its_calls_alone(installed, monkeypatch, before):
    """Megatron refuses to build a model where the variable is 0, and sets it to 1 where it is not set."""
    monkeypatch.delenv("NVTE_UNFUSED_ATTN", raising=False)
    if before is not None:
        monkeypatch.setenv("NVTE_UNFUSED_ATTN", before)
    assert judged(shape(), backend="transformer_engine") is attention.transformer_engine_attention
    assert os.environ.get("NVTE_UNFUSED_ATTN") == before
    installed.wrong = "unsupported"
    judged(shape(groups=4), backend="auto")
    assert os.environ.get("NVTE_UNFUSED_ATTN") == before


def test_trying_kernels_leaves_trainings_random_numbers_alone(installed):
    state = torch.get_rng_state()
    disagreement(reference, reference, shape())
    assert torch.equal(torch.get_rng_state(), state)


class Varlen:
    """torch's varlen_attn of some version: `grouped` is what it makes of fewer key heads than query heads."""

    def __init__(self, grouped):
        self.grouped, self.key_heads = grouped, []

    def of_2_11(
        self, query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, return_aux=None, scale=None, window_size=(-1, -1)
    ):
        self.key_heads.append(key.size(1))
        if key.size(1) != query.size(1) and self.grouped == "refuses":
            raise RuntimeError("number of heads must match")
        if key.size(1) != query.size(1) and self.grouped == "wrong":
            key, value = key.flip(1), value.flip(1)
        packed = types.SimpleNamespace(cu_seqlens_q=cu_seq_q, cu_seqlens_kv=cu_seq_k)
        assert window_size != (-1, -1)
        return reference(query, key, value, packed, scale, None if window_size[0] < 0 else window_size[0] + 1)

    def of_2_13(
        self, query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, scale=None, window_size=(-1, -1), enable_gqa=False
    ):
        assert enable_gqa == (query.size(1) != key.size(1))
        return self.of_2_11(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, scale=scale, window_size=window_size)

    def older(self, query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, is_causal=False):
        assert is_causal
        return self.of_2_11(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, window_size=(-1, 0))


@pytest.fixture
def varlen(installed, monkeypatch):
    def use(kind, grouped="right"):
        chosen = Varlen(grouped)
        monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", getattr(chosen, kind))
        return chosen

    monkeypatch.undo()
    return use


@pytest.mark.parametrize(
    ("kind", "grouped", "heads"),
    [
        ("of_2_11", "right", 2),
        ("of_2_11", "refuses", 4),
        ("of_2_11", "wrong", 4),
        ("of_2_13", "right", 2),
        ("older", "right", 2),
    ],
)
@pytest.mark.parametrize("groups", [2, 4])
def test_torchs_kernel_gets_keys_repeated_only_where_it_must(varlen, kind, grouped, heads, groups):
    used = varlen(kind, grouped)
    assert disagreement(attention.torch_attention, reference, shape(groups=groups)) < 0.01
    assert used.key_heads[-1] == (heads if groups == 2 else 4)


@pytest.mark.parametrize("case", [{"window": 20}, {"blocks": True}, {"blocks": True, "window": 20}, {"scale": 0.3}])
@pytest.mark.parametrize("kind", ["of_2_11", "of_2_13"])
def test_torchs_kernel_is_told_all_that_matters(varlen, kind, case):
    varlen(kind)
    assert disagreement(attention.torch_attention, reference, shape(**case)) < 0.01


@pytest.mark.parametrize("case", [{"window": 20}, {"scale": 0.3}])
def test_an_old_torch_that_cannot_is_refused(varlen, case):
    varlen("older")
    with pytest.raises(NotImplementedError, match="update torch"):
        disagreement(attention.torch_attention, reference, shape(**case))


def flash_forward(query, key, value, packed, scale, window):
    """FlashAttention's forward pass by its definition, for one sequence: output and log-sum-exp."""
    scores, values = scores_of(query, key, value, window)
    weights = scores.softmax(-1)
    return (weights @ values).transpose(0, 1), scores.logsumexp(-1), scores.new_empty(0), scores.new_empty(0)


def flash_backward(by_out, query, key, value, out, total, state, unused, packed, scale, window):
    """Its backward pass (Dao 2023, algorithm 2), of what it is given: output, log-sum-exp, and their gradient."""
    scores, values = scores_of(query, key, value, window)
    weights, given = (scores - total.unsqueeze(-1)).exp(), by_out.transpose(0, 1)
    delta = (by_out * out).sum(-1).t().unsqueeze(-1)
    by_scores = weights * (given @ values.transpose(1, 2) - delta) * query.size(-1) ** -0.5
    repeats = query.size(1) // key.size(1)
    keys = key.transpose(0, 1).repeat_interleave(repeats, 0)

    def grouped(x):
        return x.unflatten(0, (-1, repeats)).sum(1).transpose(0, 1)

    by_query = (by_scores @ keys).transpose(0, 1)
    by_key = grouped(by_scores.transpose(1, 2) @ query.transpose(0, 1))
    return by_query, by_key, grouped(weights.transpose(1, 2) @ given)


def scores_of(query, key, value, window):
    repeats, n = query.size(1) // key.size(1), len(query)
    keys, values = (x.transpose(0, 1).repeat_interleave(repeats, 0) for x in (key, value))
    at = torch.arange(n)
    seen = (at <= at[:, None]) & (at > at[:, None] - (window or n))
    scores = query.transpose(0, 1) @ keys.transpose(1, 2) * query.size(-1) ** -0.5
    return scores.masked_fill(~seen, -math.inf), values


@pytest.mark.parametrize("window", [None, 4])
def test_sinks_around_flash_attention_are_those_in_the_softmax_gradients_included(monkeypatch, window):
    monkeypatch.setattr(attention, "_flash_forward", flash_forward)
    monkeypatch.setattr(attention, "flash_backward", flash_backward)
    generator = torch.Generator().manual_seed(0)
    shapes = ((9, 4, 8), (9, 2, 8), (9, 2, 8), (4,))
    inputs = [torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in shapes]
    by_output = torch.randn(9, 4, 8, generator=generator, dtype=torch.float64)

    def plain(query, key, value, sinks):
        at = torch.arange(9)
        options = {"attn_mask": (at <= at[:, None]) & (at > at[:, None] - (window or 9)), "is_causal": False}
        heads = (x.transpose(0, 1)[None] for x in (query, key, value))
        return plain_attention(None, sinks, *heads, **options, scale=None, enable_gqa=True)[0].transpose(0, 1)

    def run(attend):
        leaves = [x.clone().requires_grad_() for x in inputs]
        output = attend(*leaves)
        return [output.detach(), *torch.autograd.grad(output, leaves, by_output)]

    found = run(lambda *leaves: attention.attention_with_sinks(*leaves, None, None, window))
    for ours, expected in zip(found, run(plain), strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("dim", "values"), [(12, 12), (20, 12), (16, 16)])
def test_heads_of_odd_sizes_are_padded_to_a_multiple_of_eight(monkeypatch, dim, values):
    """FlashAttention takes no others; the scale stays that of the head's own size."""
    given = []

    def kernel(query, key, value, packed, scale, window):
        given.append((query.size(-1), key.size(-1), value.size(-1)))
        return reference(query, key, value, packed, scale, window)

    monkeypatch.setattr(layers, "has_kernels", lambda query: True)
    monkeypatch.setattr(layers, "kernel_for", lambda *_, **__: kernel)
    config = TransformerConfig(num_layers=1, hidden_size=4 * dim, num_attention_heads=4, num_query_groups=2)
    attention = layers.PackedCausalAttention(config, 1, None, "self")
    torch.manual_seed(0)
    query, key, value = (torch.randn(9, 1, heads, size) for heads, size in ((4, dim), (2, dim), (2, values)))
    rows = pack(torch.tensor([4, 5]), CPU)
    found = attention(query, key, value, packed_seq_params=rows)
    monkeypatch.undo()
    torch.testing.assert_close(found, attention(query, key, value, packed_seq_params=rows))
    assert given == [(-(-dim // 8) * 8,) * 3]
