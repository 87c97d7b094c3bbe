"""What is changed in vLLM's processes. By `register`: a server on the CPU waits without taking a core and starts with
one import of vLLM, the prefix cache is dropped without a look at every block of the KV cache, and batch-invariant
attention is so for heads of 64 too. By the workers' extension: FP8 keeps its scales, experts take adapters on the
CPU."""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Mapping, MutableMapping
from contextlib import suppress
from typing import Any, cast

from rltool.engines.plugin.guard import KEY_FILE_VARIABLE

BUSY_LOOP_VARIABLE = "RLTOOL_BUSY_LOOP_SECONDS"
NAP_SECONDS = 5e-4
FORK_VARIABLE = "RLTOOL_FORK_ENGINE_PROCESSES"
LORA_EXPERTS_VARIABLE = "RLTOOL_LORA_EXPERTS"
BATCH_INVARIANT_VARIABLE = "VLLM_BATCH_INVARIANT"
E8M0_VARIABLE = "VLLM_USE_DEEP_GEMM_E8M0"


def limit_busy_loop(environment: Mapping[str, str] = os.environ) -> None:
    """Let a reader sleep between polls after the time that the environment sets; without the variable nothing
    changes. Idempotent.

    vLLM's processes pass messages through shared memory, and a reader asks for the next one without pause for a second
    after the last (vllm/distributed/device_communicators/shm_broadcast.py, SpinCondition: busy_loop_s, no setting). On
    a GPU host that is a core of many for the sake of microseconds; on a CPU host the trainer waits for these cores.

    Lowering busy_loop_s would not do: it sends the reader to a socket, and vLLM looks again only after five seconds,
    which is what one rollout of some twenty took.
    """
    if BUSY_LOOP_VARIABLE not in environment:
        return
    seconds = float(environment[BUSY_LOOP_VARIABLE])
    try:
        from vllm.distributed.device_communicators.shm_broadcast import SpinCondition
    except ImportError:  # another vLLM, that waits in another way: an engine that takes a core is better than none
        return
    ask_again = getattr(SpinCondition.wait, "__wrapped__", SpinCondition.wait)

    def wait(self, timeout_ms: int | None = None) -> None:
        if seconds < time.monotonic() - self.last_read <= self.busy_loop_s:
            time.sleep(NAP_SECONDS)
        else:
            ask_again(self, timeout_ms)

    wait.__wrapped__ = ask_again  # type: ignore[attr-defined]
    SpinCondition.wait = wait


def fork_engine_processes(environment: Mapping[str, str] = os.environ) -> None:
    """Without the variable nothing changes. Idempotent.

    On a GPU vLLM forks its engine core and workers. On the CPU it spawns them (vllm/platforms/cpu.py), because libgomp
    does not survive a fork of its threads, and each imports vLLM again: that takes 24 s of CPU until a server is ready,
    not 10. With OMP_NUM_THREADS=1, which rltool starts its CPU engines with, there are no such threads."""
    if environment.get(FORK_VARIABLE) != "1":
        return
    try:
        from vllm.utils import system_utils
    except ImportError:  # another vLLM: it starts as it does
        return
    if getattr(system_utils, "_maybe_force_spawn", None) not in (None, _fork):
        system_utils._maybe_force_spawn = _fork
        os.register_at_fork(after_in_child=leave_servers_to_the_parent)


def _fork() -> None:
    """vLLM calls it when it is about to start a process: here it may override what the platform has set."""
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"


def leave_servers_to_the_parent() -> None:
    """Of sockets that are bound and not connected. If children had them as well, the port of an API server that dies
    would go on to take connections without an answer. The descriptor stays, and is of /dev/null: Python objects
    that hold its number close it later."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    for number in map(int, os.listdir("/proc/self/fd")):
        with suppress(OSError):  # no socket, or one that is neither bound nor connected
            if number != nowhere and _serves(number):
                os.dup2(nowhere, number, inheritable=False)
    os.close(nowhere)


def _serves(number: int) -> bool:
    with socket.socket(fileno=os.dup(number)) as one:
        if one.family not in (socket.AF_INET, socket.AF_INET6) or one.type != socket.SOCK_STREAM:
            return False
        with suppress(OSError):
            one.getpeername()
            return False
        return one.getsockname()[1] != 0


def reset_hashed_blocks(environment: Mapping[str, str] = os.environ) -> None:
    """Let the block pools of this process reset the blocks that hold a hash alone. Idempotent. Servers without the
    guard keep vLLM's own way.

    BlockPool.reset_prefix_cache (v1/core/block_pool.py of 0.32) sets the hash of each block anew, cached or not, in a
    Python loop: 6 ms for 100,000 blocks, twice in every weight sync, while the engine stands still. A GPU of 141 GB has
    six times as many beside a model of 0.5B. Blocks that hold a hash all stand in the pool's table of hashes, and what
    runs holds a few hundred."""
    if KEY_FILE_VARIABLE not in environment:
        return
    try:
        from vllm.v1.core.block_pool import BlockPool
    except ImportError:  # another vLLM: its own way is slower, not wrong
        return
    reset_all = BlockPool.reset_prefix_cache
    if getattr(reset_all, "rltool", False):
        return

    def reset_prefix_cache(pool: Any) -> bool:
        hashed = _hashed_blocks(pool)
        if hashed is None:
            return reset_all(pool)
        every, pool.blocks = pool.blocks, hashed
        try:
            return reset_all(pool)
        finally:
            pool.blocks = every

    patched = cast(Any, reset_prefix_cache)
    patched.rltool = True
    BlockPool.reset_prefix_cache = patched


def _hashed_blocks(pool: Any) -> list[Any] | None:
    """None: this pool keeps its blocks in another way, or looks some of them up by their numbers while it resets."""
    table = getattr(getattr(pool, "cached_block_hash_to_block", None), "_cache", None)
    if not isinstance(table, dict) or getattr(pool, "_reuse_watchers", None):
        return None
    found: list[Any] = []
    for blocks in table.values():  # one, or several with equal contents by their numbers
        found.extend(blocks.values() if isinstance(blocks, dict) else (blocks,))
    return found


def keep_causal_blocks(environment: Mapping[str, str] = os.environ) -> None:
    """Let a batch-invariant server sum over keys in the same blocks whether tokens are sampled or read. Without
    VLLM_BATCH_INVARIANT=1 nothing changes. Idempotent.

    FlashAttention 3 drops the causal mask of a batch whose longest query is one token (hopper/flash_api.cpp), but for
    heads of 128 in pages; without one, heads of 64 have blocks of 160 keys in place of 128 (hopper/tile_size.h), and a
    token other bits than in a batch that also reads a prompt: 4.5e-4 (KL) on an H200. A longest query of two, which no
    row has, keeps the mask, which masks nothing."""
    if environment.get(BATCH_INVARIANT_VARIABLE) != "1":
        return
    try:
        from vllm.v1.attention.backends import flash_attn
    except ImportError:  # another vLLM: the run that needs equal bits compares them
        return
    backend: Any = flash_attn
    attend = getattr(backend, "flash_attn_varlen_func", None)
    if attend is None or getattr(attend, "rltool", False):
        return

    def with_a_mask(*args: Any, **options: Any) -> Any:
        if options.get("fa_version") == 3 and options.get("max_seqlen_q") == 1:
            options["max_seqlen_q"] = 2
        return attend(*args, **options)

    patched = cast(Any, with_a_mask)
    patched.rltool = True
    backend.flash_attn_varlen_func = patched


def keep_block_scales(environment: MutableMapping[str, str] = os.environ) -> None:
    """Let a worker on Hopper multiply with the FP8 and the scales that it is sent, unless the environment decides, as
    vLLM itself does for a checkpoint whose scales are powers of two (scale_fmt). Elsewhere nothing changes.

    With DeepGEMM vLLM 0.32 rounds the scale of each block up to a power of two after every load, and the block anew
    for it (requant_weight_ue8m0_inplace in model_executor/layers/quantization/utils/fp8_utils.py). Hopper's kernel
    takes any scale (csrc/apis/layout.hpp of DeepGEMM); Blackwell's takes powers of two alone, and fails without."""
    platforms: Any = sys.modules.get("vllm.platforms")  # a worker has it; for others it is a matter of seconds
    if platforms is not None and platforms.current_platform.is_device_capability(90):
        environment.setdefault(E8M0_VARIABLE, "0")


def experts_with_adapters(environment: Mapping[str, str] = os.environ) -> None:
    """Let mixtures of experts take adapters on the CPU. Without the variable nothing changes. Idempotent.

    With --enable-lora vLLM 0.32 takes its Triton kernels for all experts (select_unquantized_moe_backend in
    model_executor/layers/fused_moe/oracle/unquantized.py); a CPU has neither these nor what is around them
    (torch.ops._moe_C.moe_align_block_size, PunicaWrapperCPU.add_lora_w13). Ours are in plain torch: to test with."""
    if LORA_EXPERTS_VARIABLE not in environment:
        return
    from vllm.model_executor.layers.fused_moe import modular_kernel, unquantized_fused_moe_method
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts
    from vllm.model_executor.layers.fused_moe.experts.lora_experts_mixin import LoRAExpertsMixin
    from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend

    class LoraExperts(LoRAExpertsMixin, CPUUnquantizedExperts):
        @staticmethod
        def _supports_activation(activation: Any) -> bool:
            return activation in (MoEActivation.SILU, MoEActivation.GELU, MoEActivation.GELU_TANH)

        @classmethod
        def _supports_grouped_gemm(cls, moe_config: Any) -> tuple[bool, str | None]:
            return (False, "its experts have biases") if moe_config.has_bias else (True, None)

        def process_weights_after_loading(self, layer: Any) -> None:
            """They stay as they are loaded."""

        def apply(
            self, output: Any, hidden_states: Any, w1: Any, w2: Any, topk_weights: Any, topk_ids: Any, activation: Any,
            *_: Any, **__: Any,
        ) -> None:  # fmt: skip
            from rltool.engines.plugin.adapters import experts_output  # which imports the module that calls this

            def activate(both: Any) -> Any:
                inner = both.new_empty(len(both), both.shape[-1] // 2)
                self.activation(activation, inner, both)
                return inner

            chosen = (topk_weights, topk_ids)
            output.copy_(experts_output(self._lora_context, hidden_states, (w1, w2), chosen, activate))

    method: Any = unquantized_fused_moe_method
    select = method.select_unquantized_moe_backend
    if getattr(select, "rltool", False):
        return

    def select_backend(moe_config: Any) -> Any:
        if not moe_config.is_lora_enabled:
            return select(moe_config)
        plain = modular_kernel.FusedMoEActivationFormat.Standard
        able, why = LoraExperts.is_supported_config(LoraExperts, moe_config, None, None, plain)
        if not able:
            raise ValueError(f"--enable-lora on the CPU, rltool's experts: {why}; start the server without adapters")
        return UnquantizedMoeBackend.CPU, LoraExperts

    patched = cast(Any, select_backend)
    patched.rltool = True
    method.select_unquantized_moe_backend = patched
