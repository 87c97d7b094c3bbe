"""Trajectories of a session: extended, branched, written down and read back."""

from __future__ import annotations

import json
import os
import time
from array import array
from itertools import count

import pytest

from rltool.chat.conversation import Conversation, Message, SentPicture, ToolCall
from rltool.engines.types import VersionSpan
from rltool.errors import RltoolError
from rltool.gateway.errors import NotFound, NotRecorded, TooMany, Unauthorized
from rltool.gateway.registry import Sessions, demand_key
from rltool.gateway.session import Session
from rltool.gateway.store import SessionStore
from rltool.gateway.trajectory import Seen, TurnRecord, common_prefix
from rltool.models.pictures import Place

IDS = count()


def user(text):
    return Message("user", text)


def said(text, **fields):
    return Message("assistant", text, **fields)


def called(call_id, **arguments):
    return said("", tool_calls=(ToolCall(call_id, "f", arguments),))


def retold(name, arguments):
    return str([{"id": "1", "type": "function", "function": {"name": name, "arguments": arguments}}])


def turn(session, prompt, sampled, *, base=None, cut=0, messages=(), reply=None, stopped=True, **fields):
    """Record one turn, as Turns does."""
    place = session.places[base] if base else None
    pictures = fields.pop("pictures", ())
    index, parent, shared = session.place(array("i", prompt), place, cut, pictures)
    record = TurnRecord(
        id=f"turn-{next(IDS)}",
        time=fields.pop("time", 1.5),
        api="chat",
        trajectory=index,
        parent=parent,
        shared=shared,
        reason="",
        base=base,
        context_ids=array("i", prompt[shared:]),
        sampled_ids=sampled,
        logprobs=[-0.1 * token for token in sampled],
        versions=(VersionSpan("v", 0, len(sampled)),),
        finish_reason="stop" if stopped else "length",
        stopped=stopped,
        messages=messages,
        reply=reply,
        pictures=tuple(seen for seen in pictures if seen.place.at >= shared),
        **fields,
    )
    session.apply(TurnRecord.from_json(json.loads(json.dumps(record.to_json()))))
    return record


def new_session():
    return Session("0" * 32, "digest", 1.0)


def tokens(session):
    return [t.token_ids.tolist() for t in session.trajectories]


def masks(session):
    return [list(t.loss_mask) for t in session.trajectories]


def test_a_turn_that_goes_on_extends_the_trajectory():
    session = new_session()
    first = turn(session, [1, 2], [3, 9], messages=(user("a"),), reply=said("b"))
    turn(session, [1, 2, 3, 9, 4], [5, 9], base=first.id, cut=4, messages=(user("c"),), reply=said("d"))
    assert tokens(session) == [[1, 2, 3, 9, 4, 5, 9]]
    assert masks(session) == [[0, 0, 1, 1, 0, 1, 1]]
    assert session.trajectories[0].versions == [VersionSpan("v", 2, 4), VersionSpan("v", 5, 7)]
    assert session.trajectories[0].logprobs.tolist() == pytest.approx([0, 0, -0.3, -0.9, 0, -0.5, -0.9])


def test_a_second_continuation_of_a_turn_is_a_branch_whose_shared_tokens_have_no_loss_again():
    session = new_session()
    first = turn(session, [1, 2], [3, 9], messages=(user("a"),), reply=said("b"))
    for last in (4, 5):
        prompt = [1, 2, 3, 9, last]
        turn(session, prompt, [6, 9], base=first.id, cut=4, messages=(user(str(last)),), reply=said("d"))
    assert tokens(session) == [[1, 2, 3, 9, 4, 6, 9], [1, 2, 3, 9, 5, 6, 9]]
    assert masks(session) == [[0, 0, 1, 1, 0, 1, 1], [0, 0, 0, 0, 0, 1, 1]]
    assert (session.trajectories[1].parent, session.trajectories[1].shared) == (0, 4)


def test_the_same_question_again_shares_its_whole_prompt():
    session = new_session()
    turn(session, [1, 2], [3, 9])
    turn(session, [1, 2], [4, 9])
    assert tokens(session) == [[1, 2, 3, 9], [1, 2, 4, 9]]
    assert masks(session) == [[0, 0, 1, 1], [0, 0, 1, 1]]


def test_another_beginning_shares_what_is_equal():
    session = new_session()
    turn(session, [1, 2, 3], [4, 9])
    turn(session, [1, 2, 7], [4, 9])
    turn(session, [8], [4, 9])
    assert [(t.parent, t.shared) for t in session.trajectories] == [(None, 0), (0, 2), (None, 0)]


def test_a_prompt_of_token_ids_that_goes_on_extends():
    session = new_session()
    turn(session, [1, 2], [3, 9])
    turn(session, [1, 2, 3, 9, 5], [6])
    assert tokens(session) == [[1, 2, 3, 9, 5, 6]]


def test_a_picture_is_part_of_what_is_shared():
    """7 is its placeholder."""
    session, prompt = new_session(), [1, 7, 7, 2, 7, 3]
    one, two, other = (Seen(name, Place(1, 1, 2, 9)) for name in "abc")
    last = Seen("d", Place(4, 1, 1, 9))
    turn(session, prompt, [4, 9], pictures=(one, last))
    turn(session, prompt, [5, 9], pictures=(one, last))
    turn(session, prompt, [6, 9], pictures=(one, last._replace(digest="e")))
    turn(session, prompt, [6, 9], pictures=(other, last))
    turn(session, prompt, [6, 9])
    turn(session, [1, 7, 7, 2, 7, 3, 4, 9, 8], [6, 9], pictures=(two, last))
    turn(session, [1, 7, 7, 2, 7, 3, 4, 9, 8], [6, 9], pictures=(one, last))
    assert [(t.parent, t.shared) for t in session.trajectories] == [(None, 0), (0, 6), (0, 4), (0, 1), (0, 1), (0, 1)]
    assert tokens(session)[0] == [*prompt, 4, 9, 8, 6, 9], "the last one goes on"
    found = [[seen.digest for seen in t.pictures] for t in session.trajectories]
    assert found == [["a", "d"], ["a", "d"], ["a", "e"], ["c", "d"], [], ["b", "d"]]
    assert session.trajectories[2].to_json(2)["picture_places"] == [1, 1, 2, 9, 4, 1, 1, 9]


def test_a_history_with_another_picture_is_another_one():
    session = new_session()
    shown = ((1, "one"), (1, "other"), (0, "one"))
    seen = [Message("user", "a", pictures=(SentPicture(*one),)) for one in shown]
    first = turn(session, [1, 7], [9], messages=(seen[0],), reply=said("b"), pictures=(Seen("one", Place(1, 1, 1, 9)),))
    found = [session.continued_by(Conversation((asked, said("b"), user("c")))) for asked in seen]
    assert [place and place.id for place in found] == [first.id, None, None]


def test_the_longest_history_is_continued_and_of_equal_ones_the_newest():
    session = new_session()
    first = turn(session, [1], [9], messages=(user("a"),), reply=said("b"))
    second = turn(session, [1, 9, 2], [9], base=first.id, cut=2, messages=(user("c"),), reply=said("d"))
    again = turn(session, [1], [9], messages=(user("a"),), reply=said("b"))

    def found(*messages, tools=()):
        place = session.continued_by(Conversation(messages, tools))
        return place and place.id

    history = (user("a"), said("b"), user("c"), said("d"))
    assert found(*history, user("e")) == second.id
    assert found(*history[:2], user("x")) == again.id
    assert found(user("a")) is None
    assert found(*history) == again.id  # its last message is not one that follows
    assert found(user("A"), *history[1:], user("e")) is None
    assert found(*history, user("e"), tools=({"type": "function"},)) is None


@pytest.mark.parametrize(
    ("recorded", "sent", "same"),
    [
        (said("b", reasoning="why"), said("b"), True),
        (said("b", reasoning="why"), said("b", reasoning="why\n"), True),
        (said("b", reasoning="why"), said("b", reasoning="else"), False),
        (said(" b\n"), said("b"), True),
        (said("b"), said("c"), False),
        (called("1", a=1), called("2", a=1), True),
        (called("1", a=1), called("1", a=2), False),
        (called("1"), said(""), False),
        (called("1", a=1), said("Calling tools:\n" + retold("f", {"a": 1})), True),  # as smolagents does
        (called("1", a=1), said("Calling tools:\n" + retold("f", {"a": 2})), False),
        (called("1", a=1), said("hm\nCalling tools:\n" + retold("f", {"a": 1})), False),
        (called("1", a=1), said("Calling tools:\n[open('x')]"), False),
        (said("b"), said("Calling tools:\n" + retold("f", {"a": 1})), False),
        (said("b"), user("b"), False),
    ],
)  # fmt: skip
def test_what_the_model_said_is_recognised_as_frameworks_send_it_back(recorded, sent, same):
    session = new_session()
    turn(session, [1], [9], messages=(user("a"),), reply=recorded)
    assert (session.continued_by(Conversation((user("a"), sent, user("c")))) is not None) is same


def test_a_call_with_the_defaults_of_its_tools_schema_is_the_call_without_them():
    schema = {"type": "object", "properties": {"a": {}, "all": {"default": False}}}
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    session = Session("0" * 32, "", 0.0)
    asked, key = (user("hi"),), Conversation((), (tool,)).tools_key
    first = turn(session, [1], [2], messages=asked, reply=called("x", a=1), tools_key=key)

    def continued(**arguments):
        return session.continued_by(Conversation((*asked, called("y", **arguments), user("go on")), (tool,)))

    for arguments in ({"a": 1, "all": False}, {"all": False, "a": 1}, {"a": 1}):
        assert continued(**arguments) is session.places[first.id]
    assert continued(a=1, all=True) is None and continued(all=False) is None and continued(a=1, other=False) is None


def test_what_others_said_is_compared_exactly():
    session = new_session()
    turn(session, [1], [9], messages=(user("a"),), reply=said("b"))
    assert session.continued_by(Conversation((user("a "), said("b"), user("c")))) is None


def test_common_prefixes():
    def shared(a, b):
        return common_prefix(array("i", a), array("i", b))

    assert shared([1, 2, 3], [1, 2, 3, 4]) == 3
    assert shared([1, 2, 3], [1, 2, 4]) == 2
    assert shared([5], [1]) == 0
    assert shared([], [1]) == 0
    for differs in range(20):
        other = list(range(20))
        other[differs] = -1
        assert shared(list(range(20)), other) == differs


# -- on disk


def store_of(tmp_path):
    return SessionStore(tmp_path / "sessions")


def sessions_of(tmp_path, clock=lambda: 100.0, **options):
    return Sessions(store_of(tmp_path), **{"max_sessions": 10, "idle_timeout": 60.0, **options}, clock=clock)


def written_session(tmp_path):
    """A session of three turns, one of them a branch, on disk and in memory."""
    sessions = sessions_of(tmp_path)
    session, key = sessions.create({"row": 7})
    store = store_of(tmp_path)
    call = ToolCall("call_1", "add", {"a": "ü"})
    reply = said("b", reasoning="why", tool_calls=(call,))
    first = turn(session, [1, 2], [3, 9], messages=(user("a"),), reply=reply, not_followed=("stop",))
    with store.writing(session) as file:
        file.turn(first)
    for last in (4, 5):
        record = turn(
            session, [1, 2, 3, 9, last], [6], base=first.id, cut=4, messages=(user(str(last)),), reply=said("d")
        )
        with store.writing(session) as file:
            file.turn(record)
    return session, key


def test_a_session_is_read_back_as_it_was(tmp_path):
    session, key = written_session(tmp_path)
    again = sessions_of(tmp_path).find(session.id)
    assert again.to_json() == session.to_json()
    assert again.places == session.places
    demand_key(again, key)


def test_a_line_that_was_being_written_is_cut_off(tmp_path):
    session, _ = written_session(tmp_path)
    file = store_of(tmp_path).path(session.id)
    whole = file.read_bytes()
    last = whole.rstrip(b"\n").rfind(b"\n") + 1
    file.write_bytes(whole[: last + 20])
    again = sessions_of(tmp_path).find(session.id)
    assert len(again.turns) == len(session.turns) - 1
    sessions_of(tmp_path).end(again, "x")
    assert file.read_bytes()[:last] == whole[:last]
    assert json.loads(file.read_bytes()[last:])["reason"] == "x"


def test_what_another_process_writes_is_read_before_a_session_is_used(tmp_path):
    session, _ = written_session(tmp_path)
    other = sessions_of(tmp_path)
    theirs = other.find(session.id)
    ours = sessions_of(tmp_path)
    mine = ours.find(session.id)
    record = turn(theirs, [1, 2, 3, 9, 4, 6], [7], base=theirs.turns[1].id, cut=6, messages=(user("on"),))
    with store_of(tmp_path).writing(theirs) as file:
        file.turn(record)
    assert ours.find(session.id) is mine and mine.to_json() == theirs.to_json()
    with store_of(tmp_path).writing(theirs) as file:
        file.mark(record.id, left_out="asked")
    theirs.mark(record.id, left_out="asked")
    with store_of(tmp_path).writing(mine) as file:  # nothing was asked of it since
        assert mine.left_out == theirs.left_out != {}
        file.mark(record.id, reward=2.0)
    assert other.find(session.id).rewards == {record.id: 2.0}
    other.end(theirs, "deleted")
    with pytest.raises(NotFound, match="has ended: deleted"):
        ours.find(session.id)
    assert ours.open == 0
    ours.end(mine, "again")
    assert store_of(tmp_path).path(session.id).read_text().count('"ended"') == 1


def test_a_session_that_another_process_uses_is_not_idle(tmp_path):
    now = [0.0]
    ours, theirs = (sessions_of(tmp_path, clock=lambda: now[0]) for _ in range(2))
    session, _ = ours.create({})
    now[0] = store_of(tmp_path).path(session.id).stat().st_mtime
    session.last_used = now[0]
    other = theirs.find(session.id)
    asleep = sessions_of(tmp_path, clock=lambda: now[0])
    other.in_progress = 1
    now[0] += 50.0
    theirs.expire()  # which tells the others
    now[0] += 20.0
    assert ours.expire() == asleep.expire() == theirs.expire() == 0
    assert session.ended is None
    other.in_progress = 0
    now[0] += 61.0
    assert ours.expire() == 1
    with pytest.raises(NotFound, match="timed out"):
        theirs.find(session.id)


def test_a_turn_that_cannot_be_written_leaves_no_trace(tmp_path, monkeypatch):
    session, _ = written_session(tmp_path)
    store = store_of(tmp_path)
    before = store.path(session.id).read_bytes()
    write = __import__("os").write
    monkeypatch.setattr("os.write", lambda descriptor, data: write(descriptor, data[:10]))
    with pytest.raises(NotRecorded, match="No space left"):
        sessions_of(tmp_path).end(session, "x")
    assert store.path(session.id).read_bytes() == before


def test_a_damaged_file_is_named(tmp_path):
    session, _ = written_session(tmp_path)
    file = store_of(tmp_path).path(session.id)
    file.write_text(file.read_text().replace("{", "[", 1))
    with pytest.raises(RltoolError, match=file.name):
        sessions_of(tmp_path).find(session.id)


def test_keys_are_the_sessions_own_and_not_on_disk(tmp_path):
    sessions = sessions_of(tmp_path)
    (one, key), (other, other_key) = sessions.create({}), sessions.create({})
    demand_key(one, key)
    for wrong in (other_key, None, "", "é"):
        with pytest.raises(Unauthorized):
            demand_key(one, wrong)
    file = store_of(tmp_path).path(one.id)
    assert key not in file.read_text()
    assert file.stat().st_mode & 0o777 == 0o600
    assert other.id != one.id


@pytest.mark.parametrize("name", ["0" * 32, "../../etc/passwd", "x", "A" * 32])
def test_unknown_sessions_are_not_found(tmp_path, name):
    with pytest.raises(NotFound):
        sessions_of(tmp_path).find(name)


def test_files_of_ended_sessions_are_removed_in_time_and_no_others(tmp_path):
    (ended, _), (is_open, _), (later, _) = (sessions_of(tmp_path).create({}) for _ in range(3))
    store = store_of(tmp_path)
    written = store.path(is_open.id).stat().st_mtime
    sessions = sessions_of(tmp_path, clock=lambda: written + 100)
    for one in (ended, later):
        sessions.end(sessions.find(one.id), "deleted")
    os.utime(store.path(ended.id), (written - 50, written - 50))
    os.utime(store.path(is_open.id), (written - 50, written - 50))
    assert sessions.remove_ended(120) == 1
    with pytest.raises(NotFound, match="there is no session"):
        sessions.look(ended.id)
    assert sessions.find(is_open.id) and sessions.look(later.id).ended


def test_an_ended_session_says_so_and_keeps_its_record(tmp_path):
    forgotten = []
    session, _ = written_session(tmp_path)
    sessions = sessions_of(tmp_path, on_end=forgotten.append)
    sessions.end(sessions.find(session.id), "deleted")
    for again in (sessions, sessions_of(tmp_path)):
        with pytest.raises(NotFound, match="has ended: deleted"):
            again.find(session.id)
        assert again.look(session.id).to_json()["trajectories"] == session.to_json()["trajectories"]
        assert again.open == 0
    assert forgotten == [session.id]


def test_sessions_are_limited_and_those_of_an_earlier_gateway_count(tmp_path):
    sessions_of(tmp_path).create({})
    sessions = sessions_of(tmp_path, max_sessions=2)
    assert (sessions.open, sessions.counts["resumable"]) == (1, 1)
    sessions.create({})
    with pytest.raises(TooMany):
        sessions.create({})


def test_idle_sessions_end_and_those_in_progress_do_not(tmp_path):
    now = [1000.0]
    sessions = sessions_of(tmp_path, clock=lambda: now[0])
    (idle, _), (busy, _), (used, _) = (sessions.create({}) for _ in range(3))
    busy.in_progress = 1
    now[0] += 61
    sessions.touch(used)
    assert sessions.expire() == 1
    assert idle.ended and not busy.ended and not used.ended
    assert sessions.counts["timed_out"] == 1


def test_a_session_that_nobody_took_up_again_ends(tmp_path):
    session, _ = sessions_of(tmp_path).create({})
    written = store_of(tmp_path).path(session.id).stat().st_mtime
    sessions = sessions_of(tmp_path, clock=lambda: written + 61)
    assert sessions.expire() == 1
    assert json.loads(store_of(tmp_path).path(session.id).read_text().splitlines()[-1])["event"] == "ended"


@pytest.mark.parametrize("ahead", [-7200.0, 7200.0])
def test_sessions_on_a_disk_whose_clock_differs_by_hours_are_idle_and_kept_as_long_as_they_should(
    tmp_path, monkeypatch, ahead
):
    """Here this host's clock is the one that is off."""
    started, here = time.monotonic(), time.time() - ahead
    monkeypatch.setattr("time.time", lambda: here + time.monotonic() - started)
    now = [here]
    first = sessions_of(tmp_path, clock=lambda: now[0])
    (idle, _), (ended, _) = (first.create({}) for _ in range(2))
    first.end(ended, "deleted")
    woken = sessions_of(tmp_path, clock=lambda: now[0])
    assert woken.find(idle.id).last_used == pytest.approx(here, abs=20.0)
    asleep = sessions_of(tmp_path, clock=lambda: now[0])
    for seconds, expired in ((30.0, 0), (100.0, 1)):
        now[0] = here + seconds
        assert [asleep.remove_ended(60.0), asleep.expire()] == [expired, expired]
        assert woken.expire() == 0 and woken.open == 1 - expired


def test_sessions_that_cannot_be_ended_are_named_and_hold_up_no_other(tmp_path):
    first = sessions_of(tmp_path)
    damaged, sound = (first.create({})[0] for _ in range(2))
    store_of(tmp_path).path(damaged.id).write_text("{not json\n{}\n")
    written = store_of(tmp_path).path(sound.id).stat().st_mtime
    sessions = sessions_of(tmp_path, clock=lambda: written + 61)
    with pytest.raises(RltoolError, match=damaged.id):
        sessions.expire()
    assert sessions.open == 0 and sessions.counts["timed_out"] == 1
    assert json.loads(store_of(tmp_path).path(sound.id).read_text().splitlines()[-1])["event"] == "ended"
    assert sessions.expire() == 0, "a damaged one does not come up each time"


def test_where_the_clock_of_files_cannot_be_read_the_others_end_all_the_same(tmp_path, monkeypatch):
    sessions_of(tmp_path).create({})
    now = [time.time()]
    sessions = sessions_of(tmp_path, clock=lambda: now[0])
    living, _ = sessions.create({})
    now[0] += 61
    with monkeypatch.context() as broken:
        broken.setattr(sessions.store, "ahead", lambda: os.stat(tmp_path / "gone"))
        with pytest.raises(RltoolError, match="No such file.*gone"):
            sessions.expire()
    assert living.ended and sessions.open == 1 and sessions.counts["timed_out"] == 1
    assert sessions.expire() == 1 and sessions.open == 0


# -- what does not count


def talk(session, prompt, *messages, reply, base=None, cut=0, at, began=None):
    """A turn that ends at second `at`."""
    ids = [*prompt, 100 + at]
    began = at - 1 if began is None else began
    return turn(
        session, prompt, ids[-1:], base=base, cut=cut, messages=messages, reply=said(reply), time=at,
        seconds=at - began,
    ).id  # fmt: skip


def test_a_reply_that_was_thrown_away_is_recognised():
    """mini-swe-agent's way: the same messages and an error text, without the reply."""
    session = Session("0" * 32, "", 0.0)
    first = talk(session, [1, 2], user("task"), reply="no format", at=1)
    second = talk(session, [1, 2, 3], user("task"), user("wrong format"), reply="good", at=3)
    assert session.left_out == {first: "discarded"}
    talk(session, [1, 2, 3, 103, 4], user("go on"), reply="done", base=second, cut=4, at=5)
    talk(session, [7], user("another task"), reply="sub-agent", at=7)
    assert session.left_out == {first: "discarded"}


def test_of_several_tries_the_one_that_is_continued_counts():
    session = Session("0" * 32, "", 0.0)
    first, second = [talk(session, [1, 2], user("task"), reply=text, at=at) for at, text in ((1, "a"), (3, "b"))]
    assert session.left_out == {first: "discarded"}
    talk(session, [1, 2, 101, 3], user("go on"), reply="done", base=first, cut=3, at=5)
    assert session.left_out == {}
    assert second in session.open_ends


def test_equal_requests_side_by_side_throw_nothing_away():
    session = Session("0" * 32, "", 0.0)
    for text in ("a", "b"):
        talk(session, [1, 2], user("task"), reply=text, at=2, began=0)
    assert session.left_out == {}


def test_a_reply_that_the_agent_has_rewritten_counts():
    session = Session("0" * 32, "", 0.0)
    talk(session, [1, 2], user("task"), reply="a", at=1)
    talk(session, [1, 2, 3], user("task"), said("a, in other words"), user("go on"), reply="b", at=3)
    assert session.left_out == {}


def test_marks_are_read_back(tmp_path):
    session, _ = written_session(tmp_path)
    first, second, _ = session.places
    for turn_id, marks in ((first, {"left_out": "unreceived"}), (second, {"left_out": "asked", "reward": 0.5})):
        session.mark(turn_id, **marks)
        with store_of(tmp_path).writing(session) as file:
            file.mark(turn_id, **marks)
    again = sessions_of(tmp_path).find(session.id)
    assert again.to_json() == session.to_json()
    assert again.left_out == {first: "unreceived", second: "asked"} and again.rewards == {second: 0.5}
    with pytest.raises(NotFound, match="has no turn"):
        session.mark("another")
