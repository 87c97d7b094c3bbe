"""Agent programs from npm (requirements/programs), as released: how each is told of a session of the gateway, and kept
in a directory of its own without any other host. Each plays one task: `sum.txt` is to have 5 in it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.http_server import Quiet, answering

TASK = "Create the file sum.txt with the text 5 in it."
SUB_TASK = "Count the files here."
SECONDS = 240.0
FILES = {
    "claude": "@anthropic-ai/claude-code-*/claude",
    "codex": "@openai/codex-*/vendor/*/bin/codex",
    "opencode": "opencode-*/bin/opencode",
}
"""The program of this platform, below node_modules. What npm puts into .bin only starts it."""
Reply = str | Callable[[str], str]
"""What the model says, or what it makes that of: the prompt's text."""


@dataclass(frozen=True)
class Played:
    """said: standard output and error; elsewhere: hosts that it wanted to talk to."""

    said: str
    elsewhere: list[str]


@dataclass
class Place:
    """Directories of one program, none of which is there yet."""

    root: Path
    work: Path = field(init=False)
    home: Path = field(init=False)

    def __post_init__(self) -> None:
        self.work, self.home = self.root / "work", self.root / "home"
        for directory in (self.work, self.home, self.root / "tmp"):
            directory.mkdir(parents=True)


def claude(session: Mapping[str, Any], place: Place) -> tuple[list[str], dict[str, str]]:
    options = ["-p", TASK, "--model", "policy", "--allowedTools", "Bash,Read,Write,Edit,Agent,ToolSearch"]
    return options, {
        "ANTHROPIC_BASE_URL": session["anthropic_base_url"], "ANTHROPIC_API_KEY": session["key"],
        "CLAUDE_CONFIG_DIR": str(place.home / ".claude"), "ANTHROPIC_SMALL_FAST_MODEL": "policy",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1", "DISABLE_AUTOUPDATER": "1", "DISABLE_TELEMETRY": "1",
        "CLAUDE_CODE_DISABLE_BACKGROUND_TASKS": "1",
    }  # fmt: skip


def codex(session: Mapping[str, Any], place: Place) -> tuple[list[str], dict[str, str]]:
    home = place.home / ".codex"
    home.mkdir()
    (home / "config.toml").write_text(f"""
model = "policy"
model_provider = "rltool"
web_search = "disabled"
check_for_update_on_startup = false
[analytics]
enabled = false
[features]
plugins = false
apps = false
[model_providers.rltool]
name = "rltool"
base_url = "{session["openai_base_url"]}"
env_key = "RLTOOL_KEY"
wire_api = "responses"
""")
    options = ["exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", TASK]
    return options, {"CODEX_HOME": str(home), "RLTOOL_KEY": session["key"]}


def opencode(session: Mapping[str, Any], place: Place) -> tuple[list[str], dict[str, str]]:
    xdg = {name: str(place.home / name) for name in ("config", "data", "state", "cache")}
    own = place.home / "config" / "opencode"
    (own / "node_modules").mkdir(parents=True)
    # It would ask npm for its plugins' package otherwise.
    there = {"dependencies": {"@opencode-ai/plugin": "*"}}
    (own / "package.json").write_text(json.dumps(there))
    (own / "package-lock.json").write_text(json.dumps({"packages": {"": there}}))
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "options": {"baseURL": session["openai_base_url"], "apiKey": session["key"]},
        "models": {"policy": {"limit": {"context": 1_000_000, "output": 100_000}, "tool_call": True}},
    }
    config = {"share": "disabled", "autoupdate": False, "provider": {"rltool": provider}}
    (own / "opencode.json").write_text(json.dumps(config | {"model": "rltool/policy", "small_model": "rltool/policy"}))
    return ["run", TASK], {
        "OPENCODE_DISABLE_AUTOUPDATE": "1", "OPENCODE_DISABLE_MODELS_FETCH": "1", "OPENCODE_PURE": "1",
        "OPENCODE_DISABLE_LSP_DOWNLOAD": "1", **{f"XDG_{name.upper()}_HOME": path for name, path in xdg.items()},
    }  # fmt: skip


PROGRAMS = {"claude": claude, "codex": codex, "opencode": opencode}


def play(
    folder: Path, name: str, session: Mapping[str, Any], place: Place, options: Sequence[str] = (),
    variables: Mapping[str, str] | None = None,
) -> Played:  # fmt: skip
    """Run one to its end. folder: with node_modules; options, variables: further ones of the program's. Its children
    end with it."""
    [*_, program] = sorted(folder.glob(f"node_modules/{FILES[name]}"))
    argv, own = PROGRAMS[name](session, place)
    with no_other_hosts() as (proxy, elsewhere):
        proxies = {"HTTP_PROXY": proxy, "HTTPS_PROXY": proxy, "ALL_PROXY": proxy, "NO_PROXY": "127.0.0.1,localhost"}
        environment = {
            "PATH": os.environ["PATH"], "HOME": str(place.home), "TMPDIR": str(place.root / "tmp"), **proxies,
            **{name.lower(): value for name, value in proxies.items()}, **own, **(variables or {}),
        }  # fmt: skip
        process = subprocess.Popen(
            [str(program), *argv, *options], cwd=place.work, env=environment, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
        )  # fmt: skip
        try:
            said, _ = process.communicate(timeout=SECONDS)
        finally:
            end_group(process)
    assert process.returncode == 0, said[-4000:]
    return Played(said, elsewhere)


def end_group(process: subprocess.Popen[str]) -> None:
    with suppress(ProcessLookupError):  # all have ended
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


@contextmanager
def no_other_hosts() -> Iterator[tuple[str, list[str]]]:
    """(URL of a proxy that refuses everything, what it was asked for)."""
    asked: list[str] = []

    class Refusing(Quiet):
        def refuse(self) -> None:
            asked.append(self.path)
            self.send_error(403)

        do_CONNECT = do_GET = do_POST = do_HEAD = refuse

    with answering(Refusing) as url:
        yield url, asked


def call(name: str, **arguments: Any) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments)}}}\n</tool_call>'


LAST = "It is done."
PATCH = """apply_patch <<'EOF'
*** Begin Patch
*** Update File: sum.txt
@@
-2
+5
*** End Patch
EOF"""


def waits_for_agent(text: str) -> str:
    agent = text.rpartition('"agent_id":"')[2].partition('"')[0]
    return call("multi_agent_v1__wait_agent", targets=[agent], timeout_ms=60_000)


def replies(name: str, work: Path) -> list[Reply]:
    """What the model says in the program's own conversation: commands, a file edited by the program's tool, two calls
    at once, and what it has besides: a search for tools, a sub-agent."""
    file = str(work / "sum.txt")
    match name:
        case "claude":
            return [
                call("Bash", command="echo 2 > sum.txt", description="Writes"),
                call("Read", file_path=file) + "\n" + call("Bash", command="ls", description="Lists"),
                "One more.\n" + call("Edit", file_path=file, old_string="2", new_string="5"),
                call("ToolSearch", query="select:WebFetch", max_results=1),
                call("Agent", description="Counts", prompt=SUB_TASK, subagent_type="claude"),
                call("Bash", command="cat sum.txt", description="Reads"),
                LAST,
            ]
        case "codex":
            return [
                call("exec_command", cmd="echo 2 > sum.txt"),
                call("exec_command", cmd="cat sum.txt") + "\n" + call("exec_command", cmd="ls"),
                "One more.\n" + call("exec_command", cmd=PATCH),
                call("multi_agent_v1__spawn_agent", message=SUB_TASK),
                waits_for_agent,
                call("exec_command", cmd="cat sum.txt"),
                LAST,
            ]
        case _:
            return [
                call("bash", command="echo 2 > sum.txt", description="Writes"),
                call("read", filePath=file) + "\n" + call("bash", command="ls", description="Lists"),
                "One more.\n" + call("edit", filePath=file, oldString="2", newString="5"),
                call("todowrite", todos=[{"content": "Count", "status": "pending", "priority": "low"}]),
                call("task", description="Counts", prompt=SUB_TASK, subagent_type="general"),
                call("bash", command="cat sum.txt", description="Reads"),
                LAST,
            ]


SUB_REPLIES: dict[str, list[Reply]] = {
    "claude": [call("Bash", command="ls | wc -l", description="Counts"), "One file."],
    "codex": [call("exec_command", cmd="ls | wc -l"), "One file."],
    "opencode": [call("bash", command="ls | wc -l", description="Counts"), "One file."],
}
TITLE = "A file with a sum"


def answer(name: str, work: Path, text: str) -> str:
    """What the scripted model says to a prompt: how often it has spoken in it already decides."""
    spoken = text.count("<|im_start|>assistant\n") - 1
    asked = "".join(text.split("<|im_start|>user\n")[1:4])
    if TASK in asked and "<tool_response>" not in text and "title" in text.partition("<|im_start|>user")[0][:400]:
        return TITLE
    mine = SUB_REPLIES[name] if SUB_TASK in asked and TASK not in asked else replies(name, work)
    said = mine[min(spoken, len(mine) - 1)]
    return said if isinstance(said, str) else said(text)


PLAIN = "You write files."
SHELLS = {"claude": ("Bash", "command"), "codex": ("exec_command", "cmd"), "opencode": ("bash", "command")}


def plain(name: str, root: Path) -> tuple[list[str], dict[str, str]]:
    """Options and variables with which a program has a shell, a short system prompt, and nothing beside."""
    if name == "claude":
        return ["--system-prompt", PLAIN, "--tools", "Bash"], {}
    if name == "codex":
        said = root / "instructions.md"
        said.write_text(PLAIN)
        settings = [f'model_instructions_file="{said}"', "features.multi_agent=false", "features.goals=false"]
        left_out = [f"include_{what}=false" for what in ("permissions_instructions", "environment_context")]
        return [word for setting in (*settings, *left_out) for word in ("-c", setting)], {}
    agents = {"build": {"prompt": PLAIN, "tools": {"*": False, "bash": True}}, "title": {"disable": True}}
    return [], {"OPENCODE_CONFIG_CONTENT": json.dumps({"agent": agents})}


def plain_replies(name: str) -> list[str]:
    tool, field = SHELLS[name]
    more = {} if name == "codex" else {"description": "Writes"}
    return [call(tool, **{field: "echo 5 > sum.txt"}, **more), LAST]
