"""The fake vLLM keeps the contract that the real one keeps (tests/e2e/test_vllm_server.py runs the same assertions)."""

import asyncio

import pytest

from rltool.engines.client import EngineClient
from rltool.engines.endpoints import EngineEndpoint
from tests.contract.vllm_contract import CONTRACT


@pytest.mark.parametrize("clause", CONTRACT, ids=lambda clause: clause.__name__)
def test_contract(fake_vllm, key_file, clause):
    fake_vllm.seconds, fake_vllm.batch.slots = 0.3, fake_vllm.max_num_seqs

    async def run():
        engine = EngineEndpoint(url=fake_vllm.url, dialect="vllm", key_file=key_file, boot_id=fake_vllm.boot_id)
        async with EngineClient() as client:
            await clause(client, engine)

    asyncio.run(run())
