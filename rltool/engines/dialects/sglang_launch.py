"""How an SGLang server is started: its command line, its environment, and what its flags mean. The part of the dialect
for `rltool serve-engines` and managed engines.

Sources (SGLang 0.5.23): sglang/srt/arg_groups/fields (parallel.py, disagg.py), kv_pool_runtime.py (memory).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rltool.config.serve import Device, EngineLaunch
from rltool.engines.dialects.protocol import Installation, Launches, MemoryFlags, ParallelFlags, config_of
from rltool.engines.dialects.routed_experts import FLAG as ROUTED_EXPERTS_FLAG

CPU_KV_TOKENS = 32768
"""Size of the KV cache on a CPU, where SGLang would otherwise take a share of the host's memory."""
CPU_MEMORY_SHARE = "0.5"
"""--mem-fraction-static on a CPU. SGLang takes whatever leaves the host's free memory while it loads for its own
weights, and does not start where that is more than this share. The KV cache has the size above all the same."""

RENDEZVOUS_FLAG = "--nccl-port"

NO_FP8_ON_CPU = "on a CPU it packs FP8 for AMX when it starts, and takes none afterwards: use GPUs, or vLLM"
NO_LATENT_FP8 = "it was not seen to be sent latent attention in FP8: use vLLM"

LAUNCHER = (
    "import os, runpy, sys, tempfile; "
    "tempfile.tempdir = os.environ.get('RLTOOL_TEMPORARY'); "
    "sys.argv += ['--api-key=' + open(sys.argv.pop(1)).read().strip()]; "
    "runpy.run_module('sglang.launch_server', run_name='__main__', alter_sys=True)"
)
"""SGLang takes its key by flag only, and any user of the host can read a command line: so the flag is added inside the
process, as one word with its value, for a key may begin like a flag. SGLang's log starts with all its arguments, the
key among them: the log file must not be readable by others (0600). Its front end names the sockets of all its
processes, in a temporary directory of its own; theirs is the usual one (no TMPDIR), for compilers keep caches there."""


class SglangLaunching(Launches):
    """See rltool.engines.dialects.protocol.Launches."""

    temporary_in = "RLTOOL_TEMPORARY"
    worker_title = "sglang::"
    installation = Installation(
        module="sglang",
        packages=("sglang",),
        extra="sglang",
        note="wants an environment of its own, for its requirements conflict with vLLM's",
        apart=(
            "python3 -m venv .venv-sglang && .venv-sglang/bin/python -m pip install sglang=={newest}; then "
            "--engine-python .venv-sglang/bin/python",
            "tests/sglang_cpu/setup.sh .venv-sglang, in a checkout; then --engine-python .venv-sglang/bin/python",
        ),
    )
    parallel = ParallelFlags(
        tensor=("--tp-size", "--tensor-parallel-size", "--tp"),
        pipeline=("--pp-size", "--pipeline-parallel-size"),
        data=("--dp-size", "--data-parallel-size", "--dp"),
        within_tensor="--enable-dp-attention",
    )
    memory = MemoryFlags(
        fraction="--mem-fraction-static",
        of_free=True,
        sleep=("--enable-memory-saver",),
        keep_weights=("--enable-weights-cpu-backup",),
    )
    tokenizer_flags = ("--tokenizer", "--skip-tokenizer-init", "--skip_tokenizer_init")
    # Where transformers has heads without: a bias that no checkpoint names keeps the random numbers that torch began
    # with, and every score has them added.
    biased_heads = ("Qwen2ForSequenceClassification", "Qwen3ForSequenceClassification")

    def argv(self, launch: EngineLaunch) -> list[str]:
        argv = [str(launch.python), "-P", "-c", LAUNCHER, str(launch.key_file)]
        argv += ["--model-path", str(launch.model), "--served-model-name", launch.served_name]
        argv += ["--host", launch.host, "--port", str(launch.port), "--tp-size", str(launch.tp)]
        argv += ["--random-seed", str(launch.seed)]  # its own: replicas with the same one return identical samples
        argv += ["--weight-version", f"boot-{launch.boot_id}"]
        # The warm-up is a text; a tokenizer that knows none of its characters makes it an empty batch, which kills the
        # server.
        argv += ["--skip-server-warmup"]
        argv += ["--enable-metrics"]  # else it has no /metrics
        argv += ["--incremental-streaming-output"]  # else each event of a stream has all tokens before it, too
        if launch.task == "classify":
            argv += ["--is-embedding"]
        if launch.return_routed_experts:
            argv += [ROUTED_EXPERTS_FLAG]
        if launch.lora_rank:
            slots = str(launch.lora_slots)
            argv += ["--enable-lora", "--max-lora-rank", str(launch.lora_rank), "--lora-target-modules", "all"]
            argv += ["--max-loras-per-batch", slots, "--max-loaded-loras", slots]
        dtype = launch.dtype
        if launch.device == "cpu":
            dtype = dtype or "float32"
            argv += ["--device", "cpu", "--attention-backend", "torch_native"]
            argv += ["--disable-cuda-graph", "--disable-overlap-schedule"]
            argv += ["--mem-fraction-static", CPU_MEMORY_SHARE, "--max-total-tokens", str(CPU_KV_TOKENS)]
            argv += ["--sleep-on-idle"]  # its scheduler otherwise polls, and takes half a core from the trainer
        if dtype is not None:
            argv += ["--dtype", dtype]
        if launch.max_model_len is not None:
            argv += ["--context-length", str(launch.max_model_len)]
        if launch.trust_remote_code:
            argv += ["--trust-remote-code"]
        return [*argv, *_flags_in_its_group(launch), *launch.extra_args]

    def environment(self, launch: EngineLaunch) -> dict[str, str]:
        environment = {
            # Otherwise /health, which routers ask, is a generation that fails while we pause the engine.
            "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0",
            "HF_HUB_OFFLINE": "1",
            "CUDA_VISIBLE_DEVICES": ",".join(map(str, launch.gpus)),
        }
        if launch.device == "cpu":
            environment |= {"SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": "1"}
            if launch.world_size > 1:  # one core for each: else it wants a NUMA node for each
                environment["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(map(str, range(launch.world_size)))
        return environment

    def takes_rendezvous_port(self, flags: Sequence[str], replicas: int) -> bool:
        """Left alone, 0.5.17 takes an ephemeral port and binds it seconds later, when another engine may have it.

        Replicas would all be given the same port, on which the second cannot listen (launch_dp_schedulers in
        srt/managers/data_parallel_controller.py); with --dist-init-addr its port is taken.
        """
        given = {flag.partition("=")[0] for flag in flags}
        return replicas == 1 and not given & {RENDEZVOUS_FLAG, "--dist-init-addr", "--nccl-init-addr"}

    def no_adapters(self, device: Device) -> str | None:
        """lora/lora_manager.py of 0.5.23 allocates pinned memory."""
        return "on a CPU it takes no adapters (its pinned memory needs a GPU)" if device == "cpu" else None

    def no_fp8(self, device: Device, model: Path) -> str | None:
        """_amx_process_weight_after_loading in srt/layers/amx_utils.py, of 0.5.17 and 0.5.23."""
        if device == "cpu":
            return NO_FP8_ON_CPU
        return None if config_of(model).get("kv_lora_rank") is None else NO_LATENT_FP8

    def no_fp8_after_sleep(self, backend: str | None) -> str | None:
        """The scales of the cache, which no checkpoint has, come back as 0: 0.5.17 asserts that they are none."""
        if backend not in ("disk", "delta"):
            return None
        return 'loads no FP8 from a directory after it has slept: take transport "auto", "ipc" or "gloo"'

    def no_routed_experts(self, device: Device) -> str | None:
        return None


def _flags_in_its_group(launch: EngineLaunch) -> list[str]:
    """On several hosts, or half of prefill and decode."""
    argv: list[str] = []
    if launch.dist_init is not None:
        argv += ["--nnodes", str(launch.nodes), "--node-rank", str(launch.node_rank)]
        argv += ["--dist-init-addr", launch.dist_init]
    if launch.rendezvous_port is not None:
        argv += [RENDEZVOUS_FLAG, str(launch.rendezvous_port)]
    if launch.role in ("prefill", "decode"):
        argv += ["--disaggregation-mode", launch.role]
    if launch.role == "decode" and launch.device == "cpu":
        argv += ["--disaggregation-decode-retraction-backup", "none"]  # its pool of host memory is pinned with CUDA
    if launch.bootstrap_port is not None:
        argv += ["--disaggregation-bootstrap-port", str(launch.bootstrap_port)]
    return argv
