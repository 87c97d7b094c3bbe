"""`rltool gateway`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from rltool.config.gateway import GatewayConfig
from rltool.config.loader import load_config
from rltool.errors import UsageError
from rltool.gateway.launch import plan_gateway, start_gateway
from rltool.processes.hosts import is_loopback
from rltool.processes.supervise import ProcessGroup, run_command
from rltool.terminal import Console

console = Console()


def gateway(
    addresses: Annotated[
        list[str] | None, typer.Argument(help="@endpoints.json or engine URLs; default: the run's endpoints.json.")
    ] = None,
    run: Annotated[str | None, typer.Option("--run", help="Run to use; default: the newest.")] = None,
    router: Annotated[
        str | None, typer.Option(help="URL of a router that turns go through; endpoints.json may name it already.")
    ] = None,
    detach: Annotated[
        bool, typer.Option("--detach", help="Return when it serves; it lives on until `rltool stop`.")
    ] = False,
    host: Annotated[str | None, typer.Option(help="Address to listen on (default: 127.0.0.1).")] = None,
    port: Annotated[int | None, typer.Option(help="Port to listen on (default: a free one).")] = None,
    processes: Annotated[
        int | None, typer.Option(help="Processes behind that port, which share sessions (default: 1).")
    ] = None,
    key_file: Annotated[
        Path | None, typer.Option(help="File with the key that opens sessions (default: one that is made).")
    ] = None,
    engine_key_file: Annotated[
        Path | None, typer.Option(help="File with the key of engines or a router given as URLs.")
    ] = None,
    model: Annotated[
        Path | None, typer.Option(help="Directory with tokenizer and chat template (default: the engine's).")
    ] = None,
    aliases: Annotated[
        list[str] | None, typer.Option(help="Another name that agents may ask for the model by; repeatable.")
    ] = None,
    max_model_len: Annotated[
        int | None, typer.Option(help="Longest sequence in tokens (default: the engine's limit).")
    ] = None,
    tool_parser: Annotated[
        str | None, typer.Option(help="A format of docs/agents.md, by vLLM's name (default: auto).")
    ] = None,
    template_arguments: Annotated[
        str | None, typer.Option(metavar="JSON", help="Further arguments of the chat template, as a JSON object.")
    ] = None,
    temperature: Annotated[float | None, typer.Option(help="Of every turn: the run's (default: 1.0).")] = None,
    top_p: Annotated[float | None, typer.Option(help="Of every turn: the run's (default: 1.0).")] = None,
    top_k: Annotated[int | None, typer.Option(help="Of every turn: the run's (default: -1, all tokens).")] = None,
    max_response_tokens: Annotated[int | None, typer.Option(help="Of one turn (default: 1024).")] = None,
    on_sampling: Annotated[
        str | None,
        typer.Option(help="override or refuse requests for other sampling than the run's (default: refuse)."),
    ] = None,
    train_cancelled: Annotated[
        bool | None, typer.Option(help="Train what agents were sent of streams that they cancelled (default: no).")
    ] = None,
    max_sessions: Annotated[int | None, typer.Option(help="Open at once (default: 10000).")] = None,
    max_turns: Annotated[int | None, typer.Option(help="Of one session (default: 1000).")] = None,
    max_session_tokens: Annotated[int | None, typer.Option(help="Of one session (default: 4000000).")] = None,
    max_turns_at_once: Annotated[int | None, typer.Option(help="Of one session (default: 64).")] = None,
    max_body_bytes: Annotated[int | None, typer.Option(help="Of one request (default: 8 MiB).")] = None,
    max_picture_bytes: Annotated[int | None, typer.Option(help="Of one image's file (default: 4 MiB).")] = None,
    max_picture_pixels: Annotated[int | None, typer.Option(help="Of one image (default: 16777216).")] = None,
    max_session_pictures: Annotated[int | None, typer.Option(help="Different ones (default: 256).")] = None,
    idle_timeout: Annotated[
        float | None, typer.Option(help="Seconds without a turn that end a session (default: 3600).")
    ] = None,
    turn_timeout: Annotated[float | None, typer.Option(help="Seconds for one turn (default: 600).")] = None,
    keep_sessions: Annotated[
        float | None, typer.Option(help="Seconds that files of ended sessions are kept (default: 604800, a week).")
    ] = None,
    max_restarts: Annotated[
        int | None, typer.Option(help="How often a gateway that dies is started again (default: 5).")
    ] = None,
    ready_timeout: Annotated[float | None, typer.Option(help="Seconds until it must serve (default: 120).")] = None,
) -> None:
    """Start a gateway: agents use OpenAI's or Anthropic's API, and it records each session's exact tokens."""
    given = {
        "host": host, "port": port, "processes": processes, "key_file": key_file, "engine_key_file": engine_key_file,
        "model": model,
        "aliases": tuple(aliases) if aliases else None, "max_model_len": max_model_len, "tool_parser": tool_parser,
        "template_arguments": None if template_arguments is None else _json_object(template_arguments),
        "temperature": temperature, "top_p": top_p, "top_k": top_k, "max_response_tokens": max_response_tokens,
        "on_sampling": on_sampling, "train_cancelled": train_cancelled, "max_sessions": max_sessions,
        "max_turns": max_turns, "max_session_tokens": max_session_tokens, "max_turns_at_once": max_turns_at_once,
        "max_body_bytes": max_body_bytes, "max_picture_bytes": max_picture_bytes,
        "max_picture_pixels": max_picture_pixels, "max_session_pictures": max_session_pictures,
        "idle_timeout": idle_timeout, "turn_timeout": turn_timeout,
        "keep_sessions": keep_sessions, "max_restarts": max_restarts, "ready_timeout": ready_timeout,
    }  # fmt: skip
    flags = {name: (f"--{name.replace('_', '-')}", value) for name, value in given.items()}
    config = load_config(GatewayConfig, flags=flags).config
    plan = plan_gateway(addresses or [], router, run)

    def bring_up(group: ProcessGroup) -> None:
        url, parts = start_gateway(config, plan, group, report=_log)
        if not is_loopback(config.host):
            where = f"listening on {config.host}: reachable from other hosts, guarded by keys, not encrypted"
            console.print(where, style="yellow")
        where = f"through {plan.router_url}" if plan.router_url else f"{len(plan.engines)} engine(s)"
        _log(f"gateway ready: {url}, model {parts.served_name}, {where}, run {plan.run.name}")
        _log(f'open a session: curl -X POST {url}/sessions -H "Authorization: Bearer $(cat {parts.key_file})"')
        _log(f"detached; end it with: rltool stop --run {plan.run.name}" if detach else "Ctrl-C ends it")

    raise typer.Exit(run_command("gateway-command", plan.run, bring_up, detach=detach, note=console.print))


def _json_object(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError as error:
        raise UsageError(f"--template-arguments: not JSON: {error}") from error
    if not isinstance(found, dict):
        raise UsageError(f"--template-arguments: a JSON object is wanted, not {text}")
    return found


def _log(line: str) -> None:
    console.print(line)
