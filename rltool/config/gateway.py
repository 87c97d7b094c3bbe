"""Configuration of `rltool gateway`."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from rltool.config.base import Config

ToolParser = Literal[
    "auto", "hermes", "qwen3_coder", "glm45", "deepseek_v3", "kimi_k2", "mistral", "llama3_json", "openai", "none"
]  # fmt: skip


class GatewayConfig(Config):
    host: str = "127.0.0.1"
    """Address to listen on; agents on other hosts need another one than loopback."""
    port: int = Field(default=0, ge=0, le=65535)
    """0 picks a free port. Agents find a gateway that was started again only where it has the same port."""
    processes: int = Field(default=1, ge=1, le=64)
    """Processes behind the one address, which share sessions through the run's directory; max_sessions and
    max_turns_at_once are of each. One alone has the queue of remote agents."""
    key_file: Path | None = None
    """File with the key that opens sessions; default: state/gateway.key of the run, which is made. Each session has a
    key of its own."""
    engine_key_file: Path | None = None
    """File with the key of engines or a router given as URLs; engines of an endpoints.json have theirs named there."""
    model: Path | None = None
    """Hugging Face directory with tokenizer and chat template; default: the directory that the engine names."""
    aliases: tuple[str, ...] = ()
    """Names of other models that are answered by this one, for agents with a fixed model name."""
    max_model_len: int | None = Field(default=None, ge=2)
    """Longest sequence in tokens; default: the engine's limit. A router reports none."""
    tool_parser: ToolParser = "auto"
    """How the model writes tool calls and reasoning, by vLLM's names (docs/agents.md); auto: as its chat template."""
    template_arguments: dict[str, Any] = {}
    """Further arguments of the chat template, as JSON, such as {"enable_thinking": false}."""
    temperature: float = Field(default=1.0, gt=0, le=2)
    """Of every request, whatever the agent asks; the trainer's `sampling.temperature` must be the same."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Of every request; as the trainer's."""
    top_k: int = Field(default=-1, ge=-1)
    """Of every request; -1 keeps all tokens."""
    max_response_tokens: int = Field(default=1024, ge=1)
    """Of one turn; an agent may ask for fewer."""
    on_sampling: Literal["override", "refuse"] = "refuse"
    """What happens to a request for another temperature, penalties, or a parameter that is not known: refused, or
    served with the settings above and a header that names what was not followed."""
    train_cancelled: bool = False
    """Whether what an agent was sent of a stream that it then cancelled is trained; it is recorded in any case."""
    max_sessions: int = Field(default=10_000, ge=1)
    """Sessions that are open at once."""
    max_turns: int = Field(default=1000, ge=1)
    """Turns of one session."""
    max_session_tokens: int = Field(default=4_000_000, ge=1)
    """Tokens that one session may record, prompts and responses of all its trajectories together."""
    max_turns_at_once: int = Field(default=64, ge=1)
    """Turns of one session that are in progress at once."""
    max_body_bytes: int = Field(default=8 * 1024 * 1024, ge=1024)
    """Of one request."""
    max_picture_bytes: int = Field(default=4 * 1024 * 1024, ge=1024)
    """Of one image's file."""
    max_picture_pixels: int = Field(default=16 * 1024 * 1024, ge=1)
    """Of one image, before the model's image processor makes it smaller."""
    max_session_pictures: int = Field(default=256, ge=1)
    """Different images of one session, which are kept beside its file."""
    idle_timeout: float = Field(default=3600.0, gt=0)
    """Seconds without a turn after which a session is ended."""
    turn_timeout: float = Field(default=600.0, gt=0)
    """Seconds for one turn, over all engines that are tried."""
    keep_sessions: float = Field(default=604_800.0, gt=0)
    """Seconds that the file of a session is kept after its end; default: a week."""
    max_restarts: int = Field(default=5, ge=0)
    """How often `rltool gateway` starts a gateway that died again, under its port; one that has lived for 10 minutes
    since has all of them again."""
    ready_timeout: float = Field(default=120.0, gt=0)
    """Seconds until the gateway must serve."""
