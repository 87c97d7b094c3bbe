"""Agents of released clients and frameworks, as their users write them: none of them knows rltool. Run by the Python of
requirements/clients.txt, `python client_programs.py NAME`, with the base URLs and the key in the environment.

Each asks the model to add two numbers with a tool, and prints the model's last words.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

QUESTION = "What is 2 + 3?"
OPENAI_URL, CLAUDE_URL, KEY = (
    os.environ[name] for name in ("OPENAI_BASE_URL", "ANTHROPIC_BASE_URL", "OPENAI_API_KEY")
)
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}, "required": ["a", "b"]}
CHAT_TOOL = {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": SCHEMA}}


def add(a: int, b: int) -> int:
    """Adds two numbers.

    Args:
        a: one number
        b: the other one
    """
    return a + b


def litellm_loop(model: str, base: str) -> str:
    import litellm

    messages = [{"role": "user", "content": QUESTION}]
    for _ in range(2):
        reply = litellm.completion(
            model, messages=messages, tools=[CHAT_TOOL], api_base=base, api_key=KEY, max_tokens=200
        )
        said = reply.choices[0].message
        messages.append(said.model_dump())
        messages += [{"role": "tool", "tool_call_id": call.id, "content": "5"} for call in said.tool_calls or []]
    return said.content


def litellm_openai() -> str:
    return litellm_loop("openai/policy", OPENAI_URL)


def litellm_anthropic() -> str:
    return litellm_loop("anthropic/policy", CLAUDE_URL)


def pydantic_ai_loop(model) -> str:
    from pydantic_ai import Agent

    return Agent(model, tools=[add]).run_sync(QUESTION).output


def pydantic_ai_openai() -> str:
    from pydantic_ai.models.openai import OpenAIChatModel

    return pydantic_ai_loop(OpenAIChatModel("policy"))


def pydantic_ai_anthropic() -> str:
    from pydantic_ai.models.anthropic import AnthropicModel

    return pydantic_ai_loop(AnthropicModel("policy"))


def langgraph_loop(model) -> str:
    from langgraph.prebuilt import create_react_agent

    said = create_react_agent(model, [add]).invoke({"messages": [("user", QUESTION)]})
    return said["messages"][-1].text


def langgraph_openai() -> str:
    from langchain_openai import ChatOpenAI

    return langgraph_loop(ChatOpenAI(model="policy"))


def langgraph_anthropic() -> str:
    from langchain_anthropic import ChatAnthropic

    return langgraph_loop(ChatAnthropic(model="policy", max_tokens=200))


def openai_agents_loop(api: str) -> str:
    import agents

    agents.set_default_openai_api(api)
    agents.set_tracing_disabled(True)
    agent = agents.Agent("adder", tools=[agents.function_tool(add)], model="policy")
    return asyncio.run(agents.Runner.run(agent, QUESTION)).final_output


def openai_agents_chat() -> str:
    return openai_agents_loop("chat_completions")


def openai_agents_responses() -> str:
    return openai_agents_loop("responses")


def smolagents() -> str:
    from smolagents import OpenAIModel, ToolCallingAgent, tool

    # Its default is tool_choice="required", which would change the distribution.
    model = OpenAIModel("policy", api_base=OPENAI_URL, api_key=KEY, tool_choice="auto")
    agent = ToolCallingAgent([tool(add)], model, max_steps=3)
    return str(agent.run(QUESTION))


def dspy() -> str:
    import dspy

    lm = dspy.LM("openai/policy", api_base=OPENAI_URL, api_key=KEY, cache=False)
    with dspy.context(lm=lm):
        return dspy.Predict("question -> answer")(question=QUESTION).answer


def mini_swe_agent() -> str:
    """The program itself, in this directory."""
    program = Path(sys.executable).with_name("mini")
    argv = [str(program), "-m", "openai/policy", "-t", QUESTION, "-y", "--exit-immediately", "-o", "trajectory.json"]
    environment = os.environ | {
        "OPENAI_API_BASE": OPENAI_URL, "MSWEA_CONFIGURED": "true", "MSWEA_COST_TRACKING": "ignore_errors",
        "MSWEA_GLOBAL_CONFIG_DIR": os.getcwd(),
    }  # fmt: skip
    ended = subprocess.run(argv, env=environment, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if ended.returncode:
        sys.exit(ended.stdout[-3000:] + ended.stderr[-3000:])
    return Path("answer.txt").read_text()


if __name__ == "__main__":
    print("SAID", globals()[sys.argv[1]]())
