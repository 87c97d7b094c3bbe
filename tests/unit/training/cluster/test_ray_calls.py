"""Which of several failures is the one to read, with Ray's own errors, made by hand; how waits for ranks end."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch
from ray.exceptions import ActorDiedError, NodeDiedError, OwnerDiedError, RayTaskError

from rltool.engines.dialects.checksums import ParameterLayout
from rltool.errors import EngineError, HostLost, PartLost, RltoolError, RunFault, SaveFailed, UsageError
from rltool.megatron.runtime import OtherRankFailed
from rltool.training.cluster import ray_calls
from rltool.training.cluster.ray_calls import DeadlinePassed, cause, get_all, has_crashed, rank_names
from rltool.training.ranks.rank_handles import RankHandles
from rltool.weights.transport import Receiver, Rendezvous
from tests.ranks import plan_of

GLOO = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:525] Read error [127.0.0.1]:3: Connection reset by peer"


def raised(error: Exception) -> RayTaskError:
    return RayTaskError("train_step", "Traceback ...", error)


@pytest.mark.parametrize("first", [GLOO, "Connection closed by peer", "Timed out waiting 1000ms for recv operation"])
def test_a_rank_that_died_is_named_though_its_peer_complained_first(first):
    found = cause({"trainer rank 0": raised(RuntimeError(first)), "trainer rank 1": ActorDiedError()}, [])
    assert isinstance(found, PartLost) and str(found).startswith("trainer rank 1 died:")


def test_what_a_rank_says_of_itself_comes_before_what_its_peer_says_of_it():
    own = raised(ValueError("out of memory"))
    assert cause({"trainer rank 0": raised(RuntimeError(GLOO)), "trainer rank 1": own}, []) is own
    own = SaveFailed("no space")
    assert cause({"a": raised(OtherRankFailed("the save failed on rank 1")), "b": raised(own)}, []) is own


@pytest.mark.parametrize("first", ["trainer rank 0", "trainer rank 1"], ids=["alone", "beside a complaint of its peer"])
def test_a_rank_without_gpu_memory_says_who_holds_it_and_what_to_set(first):
    text = (
        "CUDA out of memory. Tried to allocate 158.00 MiB. GPU 0 has a total capacity of 139.80 GiB of which 63.12 MiB "
        "is free. Process 2353 has 8.95 GiB memory in use. If reserved but unallocated memory is large try setting "
        "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True."
    )
    others = {"trainer rank 0": raised(RuntimeError(GLOO))} if first == "trainer rank 1" else {}
    where = "\x1b[36mray::TrainerActor.forward_backward()\x1b[39m (pid=5357, ip=127.0.0.1)"
    own = RayTaskError("train_step", where, torch.OutOfMemoryError(text))
    found = cause(others | {first: own}, ["trainer rank 2"])
    assert isinstance(found, PartLost)
    assert str(found).startswith(f"{first} ran out of GPU memory in forward_backward: CUDA out of memory. Tried")
    assert "Process 2353 has 8.95 GiB" in str(found) and "PYTORCH" not in str(found)
    for setting in ("max_tokens_per_micro_batch", "recompute", "logprob_tokens_per_micro_batch"):
        assert f"trainer.{setting}" in str(found)


def test_samples_that_died_with_their_owner_are_a_lost_part_and_a_dead_rank_comes_before_them():
    lost = raised(OwnerDiedError("ab" * 28, b"", "call site"))
    found = cause({"trainer rank 0": raised(RuntimeError(GLOO)), "trainer rank 1": lost}, [])
    assert isinstance(found, PartLost) and has_crashed(lost)
    assert str(found).startswith("trainer rank 1 was to read what another process of the run held")
    assert str(cause({"trainer rank 1": lost, "a": ActorDiedError()}, [])).startswith("a died:")


def test_a_rank_that_hangs_is_named_by_those_that_waited_for_it_in_vain():
    found = cause({"trainer rank 0": raised(RuntimeError(GLOO))}, ["trainer rank 1", "trainer rank 2"])
    assert str(found).startswith("trainer rank 1 and trainer rank 2 hangs: no answer, and trainer rank 0 waited for it")
    assert isinstance(found, PartLost) and "trainer.rendezvous_timeout" in str(found)


def test_complaints_about_each_other_alone_are_a_lost_connection_and_our_own_stay_as_they_are():
    found = cause({"trainer rank 0": raised(RuntimeError(GLOO)), "trainer rank 1": raised(RuntimeError(GLOO))}, [])
    assert str(found).startswith(f"trainer rank 0 and trainer rank 1 lost the connection between them: {GLOO}. Does")
    assert isinstance(found, PartLost)
    found = cause({"trainer rank 1": raised(RuntimeError(GLOO))}, [])
    assert str(found).startswith(f"trainer rank 1 lost a peer: {GLOO}")
    ours = OtherRankFailed("x")
    assert cause({"trainer rank 0": raised(ours)}, []) is ours


@pytest.mark.parametrize("guesses", ["There are some potential root causes.", "Some common causes include:", ""])
def test_a_death_is_told_in_one_line_with_its_pid_and_what_to_do(guesses):
    error = ActorDiedError()
    error.args = ()
    text = (
        "The actor died unexpectedly before finishing this task.\n\tclass_name: TrainerActor\n\tpid: 4711\n\tip: ::1\n"
        "Worker exit type: SYSTEM_ERROR Worker exit detail: Worker unexpectedly exits with a connection error code 2. "
        "End of file. "
    )
    if guesses:
        text += f"{guesses} (1) The process is killed by the\nOOM killer. (2) ..."
    error._error_msg = error.error_msg = text
    said = str(cause({"trainer rank 1": error}, []))
    assert said == (
        "trainer rank 1 (pid 4711) died: Worker unexpectedly exits with a connection error code 2. End of file. It was "
        "killed (by the kernel for memory? see `dmesg`), or crashed. See its log (`rltool logs`); go on with "
        "`rltool train --resume`"
    )


@pytest.mark.parametrize("head", [None, "10.0.0.1:6379"])
def test_a_rank_that_went_with_its_host_says_from_where_that_is_gone_and_ends_with_a_code_of_its_own(monkeypatch, head):
    class Context:
        gcs_address = head

    monkeypatch.setattr(ray_calls.ray, "is_initialized", lambda: head is not None)
    monkeypatch.setattr(ray_calls.ray, "get_runtime_context", Context)
    error = ActorDiedError()
    error._error_msg = error.error_msg = (
        "The actor died unexpectedly before finishing this task.\n\tclass_name: TrainerActor\n\tpid: 110\n"
        "\tip: 10.0.0.3\nThe actor died because its node has died. Node Id: f4c1\n\tthe actor's node was terminated "
        "unexpectedly: health check failed due to missing too many heartbeats."
    )
    found = cause({"trainer rank 0": raised(RuntimeError(GLOO)), "trainer rank 1 on host c": error}, [])
    assert isinstance(found, HostLost) and found.exit_code == 4
    assert str(found).startswith(
        f"trainer rank 1 on host c was lost with its host, 10.0.0.3: from Ray's head at {head or 'its address'} that "
        "is gone (health check failed due to missing too many heartbeats). Either the host went down, or the network"
    )
    assert isinstance(cause({"a": NodeDiedError("gone")}, []), HostLost)


def test_ranks_are_named_with_their_hosts_where_there_are_several():
    assert rank_names(2) == rank_names(2, ["a", "a"]) == ["trainer rank 0", "trainer rank 1"]
    assert rank_names(2, ["a", "b"]) == ["trainer rank 0 on host a", "trainer rank 1 on host b"]


# -- the waits


class FakeRay:
    """Refs are indices; ends[i] = (poll at which it is ready, its result or error)."""

    def __init__(self, *ends):
        self.ends, self.polls = ends, 0

    def wait(self, refs, num_returns, timeout):
        self.polls += 1
        done = [ref for ref in refs if self.ends[ref][0] <= self.polls]
        return done, [ref for ref in refs if ref not in done]

    def get(self, refs, timeout=None):
        values = [self.ends[ref][1] for ref in (refs if isinstance(refs, list) else [refs])]
        for value in values:
            if isinstance(value, BaseException):
                raise value
        return values if isinstance(refs, list) else values[0]

    def now(self):
        """A poll is a second."""
        return float(self.polls)


@pytest.fixture
def ends(monkeypatch):
    def install(*values):
        fake = FakeRay(*values)
        monkeypatch.setattr(ray_calls, "ray", fake)
        monkeypatch.setattr(ray_calls.time, "monotonic", fake.now)
        return fake

    return install


NEVER = 10**9
WHO = ["trainer rank 0", "trainer rank 1"]


def test_results_come_in_order(ends):
    ends((3, "a"), (1, "b"))
    assert get_all([0, 1], 60, "deadlines.x", who=WHO) == ["a", "b"]


def test_the_death_of_one_rank_ends_the_wait_for_all(ends):
    fake = ends((NEVER, None), (2, ActorDiedError()))
    with pytest.raises(PartLost, match="trainer rank 1 died"):
        get_all([0, 1], 1000, "deadlines.x", who=WHO)
    assert fake.polls == 2


def test_a_complaint_waits_a_little_for_the_death_that_it_comes_of(ends):
    ends((1, raised(RuntimeError(GLOO))), (4, ActorDiedError()))
    with pytest.raises(PartLost, match="trainer rank 1 died"):
        get_all([0, 1], 1000, "deadlines.x", who=WHO)


def test_after_a_crash_a_rank_that_hangs_is_not_waited_for_until_the_deadline(ends):
    fake = ends((1, raised(RuntimeError(GLOO))), (NEVER, None))
    with pytest.raises(PartLost, match="trainer rank 1 hangs"):
        get_all([0, 1], 1000, "deadlines.x", who=WHO)
    assert fake.polls < 1 + ray_calls.PEER_SECONDS + 3


def test_an_error_of_ours_waits_for_all_ranks_because_a_checkpoint_may_follow(ends):
    fake = ends((1, raised(OtherRankFailed("see rank 1"))), (500, raised(SaveFailed("no space"))))
    with pytest.raises(SaveFailed, match="no space"):
        get_all([0, 1], 1000, "deadlines.x", who=WHO)
    assert fake.polls == 500


def test_a_rank_that_hangs_while_rank_0_is_done_is_found_without_a_collective_that_fails(ends):
    fake = ends((5, "a"), (NEVER, None))
    with pytest.raises(PartLost, match=r"trainer rank 1 hangs: no answer, 30 s \(trainer.rendezvous_timeout\) after"):
        get_all([0, 1], 1000, "deadlines.x", who=WHO, lag=30)
    assert 35 <= fake.polls < 40


def test_rank_0_may_take_longer_than_the_others_for_it_completes_a_checkpoint(ends):
    ends((500, "a"), (1, "b"))
    assert get_all([0, 1], 1000, "deadlines.x", who=WHO, lag=30) == ["a", "b"]


def test_a_deadline_names_itself_and_who_is_late(ends):
    ends((1, "a"), (NEVER, None))
    with pytest.raises(DeadlinePassed, match=r"trainer rank 1 did not answer within deadlines.x = 7 s") as late:
        get_all([0, 1], 7, "deadlines.x", who=WHO)
    assert isinstance(late.value, RunFault)


LAYOUT = ParameterLayout("float32")


def handles(*outcomes):
    """RankHandles over ranks whose weight_checksums is an awaitable made from each outcome."""

    class Rank:
        def __init__(self, outcome):
            self.weight_checksums = self
            self._outcome = outcome

        def remote(self, layout):
            return self._outcome

    return RankHandles([Rank(outcome) for outcome in outcomes], [], None, plan_of({}))


async def fails(error):
    raise error


async def hangs():
    await asyncio.Event().wait()


async def gives(value):
    return value


def test_the_rollout_manager_learns_of_a_rank_that_died_while_another_hangs():
    async def story():
        with pytest.raises(PartLost, match="trainer rank 1 died"):
            await handles(hangs(), fails(ActorDiedError())).weight_checksums(LAYOUT)

    asyncio.run(asyncio.wait_for(story(), 30))


def test_after_a_crash_the_rollout_manager_does_not_wait_for_a_rank_that_hangs(monkeypatch):
    monkeypatch.setattr("rltool.training.ranks.rank_handles.PEER_SECONDS", 0.05)

    async def story():
        with pytest.raises(PartLost, match="trainer rank 0 hangs"):
            await handles(hangs(), fails(raised(RuntimeError(GLOO)))).weight_checksums(LAYOUT)

    asyncio.run(asyncio.wait_for(story(), 30))


def test_the_rollout_manager_waits_for_all_ranks_and_raises_our_own_errors_as_they_are():
    ended = []

    async def late():
        await asyncio.sleep(0)
        ended.append(1)
        raise UsageError("of rank 1")

    async def story():
        with pytest.raises(UsageError, match="of rank 1"):
            await handles(fails(raised(OtherRankFailed("see rank 1"))), late()).weight_checksums(LAYOUT)
        assert await handles(gives("first"), gives("second")).weight_checksums(LAYOUT) == "first"

    asyncio.run(asyncio.wait_for(story(), 30))
    assert ended == [1]


def test_only_the_ranks_that_send_to_an_engine_are_asked_for_its_next_bucket():
    asked: list[int] = []

    class Rank:
        """On a GPU of the engine, if it has a handle for that."""

        def __init__(self, number, handles, reason=None):
            self.host, self.ready = self.Method(self._host), self.Method(self._ready)
            self.number, self.handles, self.reason = number, handles, reason

        class Method:
            def __init__(self, call):
                self.remote = call

        async def _host(self, receivers, group, directory):
            return {"http://e": Rendezvous("ipc", 3, group, handles=self.handles)} if self.handles else {}

        async def _ready(self, url, version, number, seconds):
            asked.append(self.number)
            return self.reason

    async def story():
        engine = Receiver("http://e", "vllm", "ipc", 2, ("a", "b"))
        found = [Rank(0, {}), Rank(1, {"a": "A", "b": ""}), Rank(2, {"a": "", "b": "B"})]
        ranks = RankHandles(found, [], None, plan_of({}))
        meeting = await ranks.host([engine], "g", Path("/"))
        assert meeting["http://e"].handles == {"a": "A", "b": "B"}
        await ranks.ready("http://e", "v", 0, 1.0)
        assert sorted(asked) == [1, 2]
        ranks = RankHandles([Rank(0, {"a": "A", "b": "B"}, reason="CUDA error")], [], None, plan_of({}))
        await ranks.host([engine], "g", Path("/"))
        with pytest.raises(EngineError, match="CUDA error"):
            await ranks.ready("http://e", "v", 0, 1.0)

    asyncio.run(asyncio.wait_for(story(), 30))


def test_what_a_fault_is():
    assert issubclass(DeadlinePassed, RunFault) and issubclass(PartLost, RunFault)
    assert not issubclass(UsageError, RunFault) and issubclass(RunFault, RltoolError)
