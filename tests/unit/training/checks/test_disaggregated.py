"""What a run asks of a policy whose engines prefill and decode apart."""

from __future__ import annotations

import pytest

from rltool.engines.endpoints import EngineEndpoint
from rltool.errors import UsageError
from rltool.training.checks.disaggregated import check_halves, check_regular, check_role

BOTH = ("prefill", "decode")


@pytest.mark.parametrize(
    ("roles", "kinds", "router", "mode"),
    [
        (BOTH, ("vllm",), False, "abort"),
        (BOTH, ("sglang",), False, "auto"),
        (BOTH, ("sglang",), True, "abort"),
        (BOTH, ("sglang",), True, None),
        (("regular",), ("vllm", "sglang", None), True, "keep"),
    ],
)
def test_what_a_run_takes(roles, kinds, router, mode):
    check_halves(roles, kinds, router=router, pause_mode=mode)


@pytest.mark.parametrize(
    ("roles", "kinds", "router", "mode", "said"),
    [
        (BOTH, ("sglang", "vllm"), False, "abort", "all vLLM's or all SGLang's"),
        (("prefill", "regular"), ("vllm",), False, "abort", "prefill and decode go together"),
        ((*BOTH, "regular"), ("sglang",), True, "abort", "without regular ones"),
        (BOTH, ("vllm",), True, "abort", "leave the router out"),
        (BOTH, ("vllm",), False, "keep", 'set weights.pause_mode = "abort"'),
        (BOTH, ("sglang",), True, "keep", 'set weights.pause_mode = "abort"'),
    ],
)
def test_what_a_run_cannot_do_with_them_is_refused(roles, kinds, router, mode, said):
    with pytest.raises(UsageError, match=said):
        check_halves(roles, kinds, router=router, pause_mode=mode)


def test_other_models_are_asked_at_regular_engines_alone():
    engines = [EngineEndpoint(url=f"http://{role}:1", role=role) for role in ("regular", "decode", "prefill")]
    check_regular(engines[:1], "model 'judge'")
    with pytest.raises(UsageError, match="model 'judge' has engines of role decode, prefill"):
        check_regular(engines, "model 'judge'")


def test_an_engine_that_joins_has_a_role_that_the_run_knows():
    def engine(role: str) -> EngineEndpoint:
        return EngineEndpoint(url=f"http://{role}:1", role=role)

    check_role(engine("decode"), [engine("prefill")])
    check_role(engine("regular"), [engine("regular")])
    check_role(engine("prefill"), [])
    for joining, there in (("prefill", "regular"), ("regular", "decode")):
        with pytest.raises(UsageError, match=f"has the role {joining}"):
            check_role(engine(joining), [engine(there)])
