"""Environments of nemo-gym through a gateway, by the package itself (requirements/nemo-gym.txt)."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import json
import os
import subprocess
import sys
import uuid
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from rltool.agents import nemo_gym_env
from rltool.agents.nemo_gym_env import NemoGymEnv
from rltool.agents.outcome import AgentFailed
from rltool.agents.recorded import samples_of
from rltool.agents.task import AgentTask
from rltool.errors import UsageError
from rltool.processes.marks import kill_marked
from rltool.rollout.sample import Sample
from tests.contract.gateway.running import PATIENT, ROOT, Gateway, played
from tests.contract.gateway.test_agents import stretches
from tests.e2e.engines import free_port, nemo_gym_python

LONGEST = 60_000
MARK = "RLTOOL_TEST_OF_GYM"
MODEL = "responses_api_models/openai_model/configs/openai_model.yaml"
AGENTS = {
    "example_multi_step": "example_multi_step_simple_agent",
    "example_session_state_mgmt": "example_session_state_mgmt_simple_agent",
    "example_multi_turn_gymnasium": "example_multi_turn_gymnasium_agent",
    "workplace_assistant": "workplace_assistant_simple_agent",
}


def test_without_the_package_it_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "nemo_gym", None)
    with pytest.raises(UsageError, match=r"pip install rltool\[nemo-gym\]"):
        NemoGymEnv(["resources_servers/mcqa/configs/mcqa.yaml"])


# -- with a stand-in for the package


class Config(dict[str, Any]):
    """omegaconf's, as far as it is asked."""

    def copy(self) -> Config:
        return copy.deepcopy(self)


@pytest.fixture
def env(monkeypatch: pytest.MonkeyPatch) -> NemoGymEnv:
    """One agent server, and two of resources."""
    resources = {name: {"resources_servers": {name: {"entrypoint": "app.py"}}} for name in ("one", "two")}
    agent = {"agent": {"responses_api_agents": {"simple": {"entrypoint": "app.py"}}}}

    def take(config: Any) -> None:
        taken.update(config | agent | resources)

    taken = Config()
    omegaconf = SimpleNamespace(create=Config, to_container=lambda settings, resolve: dict(settings))
    modules: dict[str, dict[str, Any]] = {
        "omegaconf": {"OmegaConf": omegaconf, "open_dict": contextlib.nullcontext},
        "nemo_gym.global_config": {
            "GlobalConfigDictParserConfig": lambda initial_global_config_dict, **_: initial_global_config_dict,
            "get_global_config_dict": lambda: taken, "set_global_config_dict": take,
        },
        "nemo_gym.config_types": {"BaseServerConfig": SimpleNamespace},
        "nemo_gym.server_utils": {"ServerClient": SimpleNamespace},
    }  # fmt: skip
    for name, contents in modules.items():
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(**contents))
    monkeypatch.setattr(sys, "path", [*sys.path])
    return NemoGymEnv(["any.yaml"])


TASK = AgentTask("http://gateway", "http://gateway", "key", "policy", {"metadata": {"task": {"a": 1}}}, 600, 5)


def answering(monkeypatch: pytest.MonkeyPatch, *statuses: int) -> list[str]:
    """Agent servers answer with these; where they were asked."""
    asked: list[str] = []

    async def read() -> bytes:
        return b'{"reward": 0.5}'

    async def post(url: str, json: Any) -> Any:
        asked.append(url)
        status = statuses[len(asked) - 1]
        return SimpleNamespace(status=status, ok=status == 200, read=read)

    async def request(method: str, url: str, json: Any) -> Any:
        while not (reply := await post(url, json)).ok:  # as Gym's asks again
            pass
        return reply

    utils = sys.modules["nemo_gym.server_utils"]
    monkeypatch.setattr(utils, "get_global_aiohttp_client", lambda: SimpleNamespace(post=post), raising=False)
    monkeypatch.setattr(utils, "request", request, raising=False)
    return asked


def test_an_episode_that_a_server_fails_is_asked_for_once(env, monkeypatch):
    @contextlib.asynccontextmanager
    async def serving(name: str, _: Any) -> AsyncIterator[str]:
        yield f"http://{name}"

    monkeypatch.setattr(env, "_serving", serving)
    asked = answering(monkeypatch, 500, 200)
    with pytest.raises(AgentFailed, match="agent: 500"):
        asyncio.run(env.run(TASK))
    assert asked == ["http://agent/run"], "a second one would play in the same session"


def test_after_a_failed_start_the_shared_servers_are_started_again_all_of_them_once(env, monkeypatch):
    events: list[str] = []

    @contextlib.asynccontextmanager
    async def serving(name: str, _: Any) -> AsyncIterator[str]:
        events.append(name)
        if events == ["one", "two"]:
            raise AgentFailed("two did not start")
        try:
            yield f"http://{name}"
        finally:
            events.append(f"end of {name}")

    monkeypatch.setattr(env, "_serving", serving)
    answering(monkeypatch, 200, 200)

    async def play() -> list[float]:
        with pytest.raises(AgentFailed, match="two did not start"):
            await env.run(TASK)
        assert events == ["one", "two", "end of one"]
        return [await env.run(TASK) for _ in range(2)]

    assert asyncio.run(play()) == [0.5, 0.5]
    shared = [event for event in events if "agent" not in event and "policy" not in event]
    assert shared[:5] == ["one", "two", "end of one", "one", "two"] and not {"one", "two"} & {*shared[5:]}


def test_a_server_that_does_not_start_in_time_holds_nobody_up(env, monkeypatch):
    class Hangs:
        model_fields: ClassVar[Any] = {"config": SimpleNamespace(annotation=SimpleNamespace(model_validate=dict))}

        def __init__(self, **_: Any) -> None:
            pass

        def setup_webserver(self) -> Any:
            async def app(scope: Any, receive: Any, send: Any) -> None:
                await asyncio.Event().wait()

            return app

        def setup_exception_middleware(self, app: Any) -> None:
            pass

    monkeypatch.setattr(nemo_gym_env, "START_SECONDS", 0.2)
    monkeypatch.setattr(nemo_gym_env, "server_class_of", lambda *_: Hangs)

    async def start() -> None:
        async with asyncio.timeout(30) as all_of_it:
            with pytest.raises(TimeoutError):
                async with env._serving("one", env._config):
                    pass
        assert not all_of_it.expired()

    asyncio.run(start())


# -- the package itself


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


THANKS = "Thanks for the update - I will get back to you tomorrow."
SCRIPTS = {
    # (replies of an episode, its reward): for one row of each environment's own examples after the other
    "example_multi_step": [
        ([call("get_synonym_value", synonym="a"), call("extract_synonym_values", synonym_values=[711, 407]), "."], 1.0),
        ([call("extract_synonym_values", synonym_values=[5]), "done"], 0.0),
    ],
    "example_session_state_mgmt": [  # 3, then 6 to begin with
        ([call("increment_counter", count=1), call("increment_counter", count=2), call("get_counter_value"), "6"], 1.0),
        ([call("increment_counter", count=1), "unknown"], 0.0),
    ],
    "example_multi_turn_gymnasium": [
        (["Paris", "two million", "the Eiffel tower"], 1.0),
        (["who knows", "nobody"], 0.0),
    ],
    "workplace_assistant": [
        ([call("email_reply_email", email_id="00000057", body=THANKS), "sent"], 1.0),
        (["I will not"], 0.0),
    ],
}  # fmt: skip


MODULE = """
import json, sys
from rltool.agents.nemo_gym_env import NemoGymEnv
envs = {name: NemoGymEnv([f"resources_servers/{name}/configs/{name}.yaml"]) for name in NAMES}
async def run(task):
    return await envs[task.row["label"]].run(task)
if __name__ == "__main__":
    for name, env in envs.items():
        for row in env.rows(f"resources_servers/{name}/data/example.jsonl"):
            print(json.dumps({**row, "label": name}))
"""


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_the_real_package_plays_and_its_rewards_are_those_of_the_package_alone(engine, tokenizer_dir, words, tmp_path):
    python, here = nemo_gym_python(), tmp_path / "here"
    here.mkdir()
    (here / "gym_envs.py").write_text(f"NAMES = {list(SCRIPTS)}{MODULE}")
    variables = os.environ | {"PYTHONPATH": str(ROOT)}
    printed = subprocess.run([python, "gym_envs.py"], cwd=here, env=variables, check=True, stdout=subprocess.PIPE)
    given = [json.loads(line) for line in printed.stdout.splitlines() if line.startswith(b"{")]
    rows = [row for name, episodes in SCRIPTS.items() for row in _first(given, name, len(episodes))]
    episodes = [episode for found in SCRIPTS.values() for episode in found]
    spelled = [words.spell(text) for texts, _ in episodes for text in texts]
    # Many of Gym's rows ask for one tool call at a time.
    options = {"max_model_len": LONGEST, "policy": PATIENT, "options": {"on_sampling": "override"}}
    with Gateway(tmp_path, tokenizer_dir, [engine], **options) as gateway:
        engine.max_model_len = LONGEST
        engine.script += spelled
        records, rewards = played(gateway, python, "gym_envs:run", rows, here)
        assert rewards == [reward for _, reward in episodes]
        for record, (texts, reward) in zip(records, episodes, strict=True):
            assert [turn["left_out"] for turn in record["turns"]] == [""] * len(texts)
            [sample] = samples_of(record, Sample(0, 0, 0, [1]), result=reward, max_tokens=LONGEST)
            assert stretches(sample, words) == [f"{text}<|im_end|>" for text in texts]

        engine.script += spelled
        assert alone(gateway, python, rows, here) == rewards


SLOWLY = {"RAY_raylet_start_wait_time_s": "600", "RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}
"""Gym starts a whole Ray, which takes minutes on two busy cores."""
ALONE = """
import asyncio, json, sys
from nemo_gym.cli.env import RunHelper
from nemo_gym.global_config import GlobalConfigDictParserConfig
from nemo_gym.rollout_collection import RolloutCollectionHelper
from omegaconf import OmegaConf

config, rows = json.loads(sys.argv[1]), json.load(open("rows.json"))
config = OmegaConf.create(config)
servers = RunHelper()
servers.start(GlobalConfigDictParserConfig(initial_global_config_dict=config, skip_load_from_cli=True))

async def play():
    found = []
    for row in rows:
        for rollout in RolloutCollectionHelper().run_examples([row]):
            found.append((await rollout)[1]["reward"])
    return found

print("rewards " + json.dumps(asyncio.run(play())), flush=True)
"""


def alone(gateway: Gateway, python: Path, rows: list[dict[str, Any]], here: Path) -> list[float]:
    """By Gym's own programs, as `gym env start` and `gym eval run` start them: its servers and Ray, each a process. The
    environment of each server, which Gym would install, is the one that it has."""
    session, mark = gateway.open(), uuid.uuid4().hex
    config = {
        "config_paths": [*(f"resources_servers/{name}/configs/{name}.yaml" for name in SCRIPTS), MODEL],
        "policy_base_url": session["openai_base_url"], "policy_api_key": session["key"], "policy_model_name": "policy",
        "skip_venv_if_present": True, "uv_venv_dir": str(here / "venvs"),
        "head_server": {"host": "127.0.0.1", "port": free_port()},
    }  # fmt: skip
    agents = [f"responses_api_agents/{name}_agent" for name in ("simple", "gymnasium")]
    for server in (*(f"resources_servers/{name}" for name in SCRIPTS), *agents, MODEL.split("/configs")[0]):
        (here / "venvs" / server).mkdir(parents=True)
        (here / "venvs" / server / ".venv").symlink_to(python.parent.parent)
    tasks = [{**row["metadata"]["task"], "agent_ref": {"name": AGENTS[row["label"]]}} for row in rows]
    (here / "rows.json").write_text(json.dumps(tasks))
    try:
        said = subprocess.run(
            [python, "-c", ALONE, json.dumps(config)], cwd=here, env=os.environ | {MARK: mark} | SLOWLY, check=True,
            stdout=subprocess.PIPE, text=True, timeout=600,
        ).stdout  # fmt: skip
    finally:
        kill_marked(MARK, mark)
    [line] = [line for line in said.splitlines() if line.startswith("rewards ")]
    return json.loads(line.removeprefix("rewards "))


def _first(rows: list[dict[str, Any]], name: str, number: int) -> list[dict[str, Any]]:
    return [row for row in rows if row["label"] == name][:number]
