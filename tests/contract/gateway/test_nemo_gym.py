"""Environments of nemo-gym through a gateway, by the package itself (requirements/nemo-gym.txt)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from rltool.agents.nemo_gym_env import NemoGymEnv
from rltool.agents.recorded import samples_of
from rltool.errors import UsageError
from rltool.rollout.sample import Sample
from tests.contract.gateway.running import PATIENT, ROOT, Gateway, played
from tests.contract.gateway.test_agents import stretches
from tests.e2e.engines import nemo_gym_python

LONGEST = 60_000


def test_without_the_package_it_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "nemo_gym", None)
    with pytest.raises(UsageError, match=r"pip install rltool\[nemo-gym\]"):
        NemoGymEnv(["resources_servers/mcqa/configs/mcqa.yaml"])


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
def test_the_real_package_plays_and_judges(engine, tokenizer_dir, words, tmp_path):
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


def _first(rows: list[dict[str, Any]], name: str, number: int) -> list[dict[str, Any]]:
    return [row for row in rows if row["label"] == name][:number]
