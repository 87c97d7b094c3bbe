"""Environments of NVIDIA's nemo-gym (0.4) as agents: their resources servers, agent servers and `verify`, unchanged.

Gym's servers run in the worker's process, on loopback: those of resources (and of other models) once, with a session
of their own for each episode; the agent server and Gym's own model server, which asks the session at the gateway, once
for each episode. The package is needed where agents run, not where the trainer does.
"""

from __future__ import annotations

import ast
import asyncio
import contextlib
import importlib
import json
import socket
import sys
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rltool.agents.outcome import AgentFailed
from rltool.agents.task import AgentTask
from rltool.errors import UsageError
from rltool.processes.tasks import Background, beside

AGENTS, MODELS = "responses_api_agents", "responses_api_models"
POLICY = {
    MODELS: {
        "openai_model": {"entrypoint": "app.py", "openai_base_url": "", "openai_api_key": "", "openai_model": ""},
    }
}
START_SECONDS = 120.0
FAILURE = "_ng_failure_class"
"""In the reply of an agent server whose rollout failed."""


class NemoGymEnv:
    """`run` is the agent, `rows` is its data set.

    config_paths: as Gym's command line has them, of the environment and of further models, without the policy's.
    settings: what overrides them. agent: name of the agent server, where the configuration has several.
    """

    def __init__(
        self, config_paths: Sequence[str], *, agent: str = "", settings: Mapping[str, Any] | None = None
    ) -> None:
        """UsageError without the package, for what Gym refuses, and for a server other than the agent's that asks the
        policy: what it asks would be trained."""
        try:
            from nemo_gym.global_config import (
                GlobalConfigDictParserConfig,
                get_global_config_dict,
                set_global_config_dict,
            )
            from omegaconf import OmegaConf
        except ImportError as error:
            raise UsageError(
                f"{error}: environments of nemo-gym need Python 3.12 and `pip install rltool[nemo-gym]`"
            ) from None
        sys.path.insert(0, str(Path.cwd()))  # servers of the user's own lie there, as with Gym's command line
        try:
            first = OmegaConf.create({"config_paths": list(config_paths), "policy_model": POLICY, **(settings or {})})
            set_global_config_dict(
                GlobalConfigDictParserConfig(
                    initial_global_config_dict=first, skip_load_from_cli=True, skip_load_from_dotenv=True
                )
            )
        except Exception as error:
            raise UsageError(f"nemo-gym refuses {list(config_paths)}: {type(error).__name__}: {error}") from error
        self._config = get_global_config_dict()
        servers = self._servers()
        agents = [name for name, (kind, _, _) in servers.items() if kind == AGENTS]
        if agent not in agents and (agent or len(agents) != 1):
            raise UsageError(f"agent = {agent!r}: the configuration has {', '.join(agents) or 'none'}")
        self._agent = agent or agents[0]
        self._policy = servers[self._agent][2].get("model_server", {}).get("name", "policy_model")
        alone = {self._agent, self._policy}
        self._shared = [name for name, (kind, _, _) in servers.items() if name not in alone and kind != AGENTS]
        for name in self._shared:
            if any(_refers(value, self._policy) for value in servers[name][2].values()):
                raise UsageError(f"{name} asks {self._policy}, which is trained: give it a model of its own")
        self._background = Background()
        self._started: asyncio.Task[None] | None = None
        self._stack: contextlib.AsyncExitStack | None = None

    def _servers(self) -> dict[str, tuple[str, str, Any]]:
        """name -> its kind, its type, its settings."""
        found = {}
        for name, kinds in self._config.items():
            if hasattr(kinds, "items") and len(kinds) == 1:
                [(kind, types)] = kinds.items()
                if kind in (AGENTS, MODELS, "resources_servers") and len(types) == 1:
                    found[name] = (kind, *next(iter(types.items())))
        return found

    def rows(self, path: str = "") -> Iterator[dict[str, Any]]:
        """The tasks of that file of Gym's, or of the first of the agent's data sets that is here, as rows of a data set
        (docs/data.md). The episode goes by the task in `metadata`; `prompt` is for people, and for
        sampling.max_prompt_tokens."""
        from nemo_gym import PARENT_DIR

        declared = [data["jsonl_fpath"] for data in self._servers()[self._agent][2].get("datasets") or []]
        places = [place / name for name in ([path] if path else declared) for place in (Path.cwd(), PARENT_DIR)]
        file = next((place for place in places if place.is_file()), None)
        if file is None:
            raise UsageError(f"no file of tasks: {', '.join(map(str, places))}")
        for line in file.read_text().splitlines():
            task = json.loads(line)
            given = task["responses_create_params"].get("input") or ""
            texts = [given] if isinstance(given, str) else [item.get("content") for item in given]
            yield {"prompt": "\n\n".join(text for text in texts if isinstance(text, str)), "metadata": {"task": task}}

    async def run(self, task: AgentTask) -> float:
        """Play the row's task. Returns the reward of `verify`. AgentFailed with what a server said."""
        from nemo_gym.server_utils import get_global_aiohttp_client

        row = task.row["metadata"].get("task")
        if row is None:
            raise AgentFailed("the row's metadata has no `task`: write the data set with NemoGymEnv.rows")
        if self._started is None or (self._started.done() and self._stack is None):
            self._started = self._background.start(self._start_shared(), "servers of nemo-gym", awaited=True)
        await asyncio.shield(self._started)
        config = self._config.copy()
        [policy] = config[self._policy][MODELS].values()
        policy.update({"openai_base_url": task.base_url, "openai_api_key": task.api_key, "openai_model": task.model})
        async with contextlib.AsyncExitStack() as stack:
            for name in (self._policy, self._agent):
                url = await stack.enter_async_context(self._serving(name, config))
            # Not Gym's own `request`, which asks again: that would play twice in one session.
            reply = await get_global_aiohttp_client().post(f"{url}/run", json=row)
            said = (await reply.read()).decode(errors="replace")
        if not reply.ok:
            plain = said.replace("\\", "")  # each server has quoted what the next one said
            raise AgentFailed(f"{self._agent}: {reply.status}: {plain[-500:]}")
        result = json.loads(said)
        if result.get(FAILURE):
            raise AgentFailed(f"{self._agent}: {result[FAILURE]}")
        return float(result["reward"])

    async def _start_shared(self) -> None:
        """Servers that stay until this process ends; none, where one did not start."""
        async with contextlib.AsyncExitStack() as stack:
            for name in self._shared:
                await stack.enter_async_context(self._serving(name, self._config))
            self._stack = stack.pop_all()

    @contextlib.asynccontextmanager
    async def _serving(self, name: str, config: Any) -> AsyncIterator[str]:
        """Gym's server of that name, on a free port, which goes into `config`. Yields its URL."""
        import uvicorn
        from nemo_gym.config_types import BaseServerConfig
        from nemo_gym.server_utils import ServerClient
        from omegaconf import OmegaConf, open_dict

        kind, type_, _ = self._servers()[name]
        settings = config[name][kind][type_]
        place = socket.create_server(("127.0.0.1", 0))
        with open_dict(settings):
            settings["host"], settings["port"] = place.getsockname()
        server_class = server_class_of(kind, type_, settings["entrypoint"])
        given: Any = OmegaConf.to_container(settings, resolve=True)
        client = ServerClient(
            head_server_config=BaseServerConfig(host="127.0.0.1", port=1), global_config_dict=config
        )  # a head server only tells others the configuration
        made = server_class(
            config=server_class.model_fields["config"].annotation.model_validate({**given, "name": name}),
            server_client=client,
        )
        app = made.setup_webserver()
        made.setup_exception_middleware(app)
        server: Any = uvicorn.Server(uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=1))
        server.capture_signals = contextlib.nullcontext  # they are the worker's
        async with beside(server.serve([place])) as (serving,):
            try:
                async with asyncio.timeout(START_SECONDS):
                    while not server.started:
                        if serving.done():
                            raise AgentFailed(f"{name} did not start")
                        await asyncio.sleep(0.01)
                yield f"http://127.0.0.1:{settings['port']}"
            finally:
                server.should_exit = True
                if server.started:
                    await serving
                place.close()


def _refers(value: Any, name: str) -> bool:
    return hasattr(value, "get") and value.get("name") == name and value.get("type") == MODELS


def server_class_of(kind: str, type_: str, entrypoint: str) -> Any:
    """The class that the entry point of a server runs. Gym starts it as a program, beside which its modules lie."""
    module = importlib.import_module(f"{kind}.{type_}")
    folders = [Path(folder) for folder in module.__path__]
    folder = next(folder for folder in folders if (folder / entrypoint).exists())
    if str(folder) not in sys.path:
        sys.path.append(str(folder))
    called = [
        node.func.value.id
        for node in ast.walk(ast.parse((folder / entrypoint).read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and isinstance(node.func.value, ast.Name)
        and node.func.attr == "run_webserver"
    ]  # fmt: skip
    if not called:
        raise UsageError(f"{folder / entrypoint} runs no server")
    return getattr(importlib.import_module(f"{kind}.{type_}.{Path(entrypoint).stem}"), called[0])
