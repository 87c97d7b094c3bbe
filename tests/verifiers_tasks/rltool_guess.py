"""A taskset of verifiers with an `Env` of its own around one agent: a number is guessed, the game answers."""

from __future__ import annotations

from collections.abc import Iterator

import verifiers.v1 as vf

GUESSES = 3


class GuessData(vf.TaskData):
    secret: int


class Guess(vf.Task[GuessData]):
    pass


class Guesses(vf.Taskset[Guess]):
    def load(self) -> Iterator[Guess]:
        for secret in (7, 3):
            yield Guess(GuessData(prompt="Guess a number below 10.", secret=secret), self.config.task)


class GuessConfig(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig()


class GuessEnv(vf.Env[GuessConfig]):
    async def run(self, task: Guess, agents: vf.Agents) -> None:
        async with agents.player.interaction(task) as interaction:
            segment = await interaction.turn()
            for guess in range(GUESSES):
                right = segment.last_reply == str(task.data.secret)
                if right or segment.terminated or guess == GUESSES - 1:
                    break
                segment = await interaction.turn("higher" if int(segment.last_reply) < task.data.secret else "lower")
        interaction.trace.record_reward("found", float(right), 0.75)


__all__ = ["GuessEnv", "Guesses"]
