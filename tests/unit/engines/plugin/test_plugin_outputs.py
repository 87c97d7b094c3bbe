"""Tokens that an engine core holds back: what the front end gets is the same, in fewer pieces."""

import sys
from queue import SimpleQueue
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest

from rltool.engines.plugin.outputs import LIMIT_VARIABLE, WHOLE_OR_ALONE, OutputHolder, hold_outputs


class Logprobs(tuple):
    """A stand-in of vLLM's named tuple: (token ids, log-probabilities, ranks, None)."""

    def __new__(cls, *columns):
        return super().__new__(cls, columns)


def output(request, *tokens, finish=None, **fields):
    logprobs = Logprobs(
        np.array([[t] for t in tokens]), np.array([[-t / 10] for t in tokens]), np.array([1] * len(tokens)), None
    )
    rest = {
        name: None
        for name in (
            *WHOLE_OR_ALONE,
            "kv_transfer_params",
            "ec_transfer_params",
            "spec_decode_metrics",
            "stop_reason",
            "events",
        )
    }
    return SimpleNamespace(**rest | {"request_id": request, "new_token_ids": list(tokens),
        "new_logprobs": logprobs if tokens else None,
                                     "finish_reason": finish, "num_nans_in_logits": 0} | fields)  # fmt: skip


def always(_request):
    return True


def tokens_of(outputs):
    return [(o.request_id, o.new_token_ids, o.finish_reason) for o in outputs]


def test_tokens_wait_until_there_are_enough_or_the_sample_ends():
    holder = OutputHolder(3)
    assert tokens_of(holder.sift([output("a", 1), output("b", 5)], 0, always)) == []
    assert tokens_of(holder.sift([output("a", 2), output("b", 6, finish="stop", stop_reason=6)], 0, always)) == [
        ("b", [5, 6], "stop")
    ]
    (sent,) = holder.sift([output("a", 3)], 0, always)
    assert tokens_of([sent]) == [("a", [1, 2, 3], None)]
    assert [column.tolist() for column in sent.new_logprobs[:3]] == [
        [[1], [2], [3]],
        [[-0.1], [-0.2], [-0.3]],
        [1, 1, 1],
    ]
    assert tokens_of(holder.sift([output("a", 4, finish="length")], 0, always)) == [("a", [4], "length")]
    assert holder.release_all() == {}


def test_of_joined_outputs_the_last_one_says_how_the_sample_ended():
    holder = OutputHolder(9)
    holder.sift([output("a", 1, events=["queued"], prefill_stats="p")], 0, always)
    (sent,) = holder.sift(
        [output("a", 2, finish="stop", stop_reason=2, num_nans_in_logits=4, events=["done"])], 0, always
    )
    assert (sent.stop_reason, sent.num_nans_in_logits, sent.events, sent.prefill_stats) == (
        2,
        4,
        ["queued", "done"],
        "p",
    )


def test_steps_with_other_numbers_of_alternatives_are_joined_at_the_narrowest():
    """vLLM gives every request of a batch as many as the one that asks for the most: others come and go."""
    holder = OutputHolder(2)
    wide = output("a", 1)
    wide.new_logprobs = Logprobs(np.array([[1, 7, 8]]), np.array([[-0.1, -0.7, -0.8]]), np.array([3]), None)
    holder.sift([wide], 0, always)
    (sent,) = holder.sift([output("a", 2)], 0, always)
    assert [column.tolist() for column in sent.new_logprobs[:3]] == [[[1], [2]], [[-0.1], [-0.2]], [3, 1]]


def test_the_schedulers_own_list_is_left_alone():
    holder, first = OutputHolder(9), output("a", 1)
    theirs = first.new_token_ids
    holder.sift([first], 0, always)
    holder.sift([output("a", 2)], 0, always)
    assert theirs == [1]


def test_requests_that_are_streamed_and_outputs_with_more_than_tokens_go_at_once_and_in_order():
    holder = OutputHolder(9)
    assert tokens_of(holder.sift([output("a", 1)], 0, lambda request: request != "a")) == [("a", [1], None)]
    holder.sift([output("b", 1)], 0, always)
    assert tokens_of(holder.sift([output("b", 2, pooling_output="x")], 0, always)) == [
        ("b", [1], None),
        ("b", [2], None),
    ]


def test_what_is_held_can_be_released_by_request_by_client_or_dropped():
    holder = OutputHolder(9)
    holder.sift([output("a", 1), output("b", 2)], 0, always)
    holder.sift([output("c", 3), output("d", 4)], 1, always)
    assert tokens_of(holder.release(["b", "unknown"])) == [("b", [2], None)]
    holder.drop(["d", "unknown"])
    assert {client: tokens_of(outputs) for client, outputs in holder.release_all().items()} == {
        0: [("a", [1], None)],
        1: [("c", [3], None)],
    }


def test_holding_no_tokens_is_refused():
    with pytest.raises(ValueError, match="at least 1"):
        OutputHolder(0)


@pytest.mark.parametrize("how", [("abort",), ("error", "the engine is paused")])
def test_what_is_held_goes_before_the_end_of_a_request_whatever_vllm_says_of_the_end(monkeypatch, how):
    """The reason alone, or, since 0.33, an error as well."""

    class Core:
        _weight_version = "v"
        engine_index = 0

        def __init__(self):
            self.output_queue, self.scheduler = SimpleQueue(), SimpleNamespace(requests={"a": None})

        def _attach_weight_version(self, outputs): ...

        def set_weight_version(self, weight_version): ...

        def abort_requests(self, request_ids): ...

        def _send_finish_outputs_to_client(self, req_ids, client_index, *how):
            self.output_queue.put((client_index, how))

    final = object()
    found = {
        "vllm.sampling_params": {"RequestOutputKind": SimpleNamespace(FINAL_ONLY=final)},
        "vllm.v1.engine": {"EngineCoreOutputs": SimpleNamespace},
        "vllm.v1.engine.core": {"EngineCoreProc": Core},
    }
    for name in ("vllm", "vllm.v1", *found):
        module = ModuleType(name)
        vars(module).update(found.get(name, {}))
        monkeypatch.setitem(sys.modules, name, module)
    hold_outputs({LIMIT_VARIABLE: "9"})
    core = Core()
    core.scheduler.requests["a"] = SimpleNamespace(sampling_params=SimpleNamespace(output_kind=final, stop=None))
    message = SimpleNamespace(outputs=[output("a", 1)])
    core._attach_weight_version({3: message})
    assert message.outputs == []
    core._send_finish_outputs_to_client(["a"], 3, *how)
    client, held = core.output_queue.get_nowait()
    assert (client, tokens_of(held.outputs)) == (3, [("a", [1], None)])
    assert core.output_queue.get_nowait() == (3, how)
