"""Engines for the weight benchmark, started as somebody would by hand: stock, or with rltool's plugin, with no weights
of their own."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from benchmarks.children import end_session

KEY = "weight-benchmark"
REPOSITORY = Path(__file__).resolve().parents[1]
VLLM_GPU = ("--kv-cache-memory-bytes", str(4 << 30), "--max-model-len", "2048")
SGLANG_GPU = (
    "--attention-backend", "triton", "--sampling-backend", "pytorch", "--disable-cuda-graph",
    "--mm-feature-transport", "cpu", "--mem-fraction-static", "0.85", "--max-total-tokens", "65536",
)  # fmt: skip


@dataclass(frozen=True)
class EngineKind:
    """dialect: of its HTTP API; weight_backend: vLLM's --weight-transfer-config; flags: more of them."""

    dialect: str
    weight_backend: str | None
    flags: tuple[str, ...] = ()

    @property
    def plugin(self) -> bool:
        return self.weight_backend == "rltool"


KINDS = {
    "vllm": EngineKind("vllm", "nccl"),
    "plugin": EngineKind("vllm", "rltool"),
    "sglang": EngineKind("sglang", None),
    "adapters": EngineKind(
        "vllm", "rltool", ("--enable-lora", "--max-lora-rank", "32", "--max-loras", "4", "--max-cpu-loras", "4")
    ),
}
"""vllm: a stock server with vLLM's own backend; adapters: rltool's plugin, with LoRA."""


class Server:
    """One engine as a child process, in a session of its own; a context manager."""

    def __init__(
        self, kind: str, model: Path, work: Path, *, python: str, gpu: str | None, dtype: str, share: str,
        flags: Sequence[str] = (),
    ) -> None:  # fmt: skip
        """gpu: its CUDA_VISIBLE_DEVICES; None: it runs on the CPU. share: of the GPU's memory, for vLLM. flags: more of
        its own."""
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.url, self.log = f"http://127.0.0.1:{port}", work / f"{kind}.log"
        argv = _sglang(model, gpu, dtype) if kind == "sglang" else _vllm(kind, model, gpu, dtype, share)
        self.key_file = work / "key" if KINDS[kind].plugin else None
        if self.key_file is not None:
            self.key_file.write_text(KEY)
        environment = os.environ | _environment(kind, work, gpu)
        self._process = subprocess.Popen(
            [python, *argv, *flags, "--host", "127.0.0.1", "--port", str(port)],
            stdout=self.log.open("w"),
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env=environment,
            cwd=work,
            start_new_session=True,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        end_session(self._process)

    def wait_ready(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while True:
            try:
                self.call("GET", "/health", timeout=5)
                return
            except OSError:
                pass
            if self._process.poll() is not None or time.monotonic() > end:
                tail = "\n".join(self.log.read_text(errors="replace").splitlines()[-25:])
                raise RuntimeError(
                    f"the engine is not ready (exit status {self._process.poll()}); its log ends:\n{tail}"
                )
            time.sleep(0.5)

    def call(self, method: str, path: str, body: Any = None, *, timeout: float = 120.0) -> Any:
        """Decoded JSON, or None. Raises OSError (urllib's errors are such)."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            self.url + path, data, {"Content-Type": "application/json", "Authorization": f"Bearer {KEY}"}, method=method
        )
        with urllib.request.urlopen(request, timeout=timeout) as reply:
            text = reply.read()
        try:
            return json.loads(text) if text else None
        except json.JSONDecodeError:  # SGLang's /flush_cache answers in words
            return text.decode()


def fingerprint(server: Server, dialect: str, vocabulary: int) -> list[float]:
    """Log-probabilities of a greedy sample after a fixed prompt: equal weights, equal numbers."""
    prompt = [1 + 37 * i % (vocabulary - 1) for i in range(32)]
    if dialect == "sglang":
        sampling = {"max_new_tokens": 8, "temperature": 0, "ignore_eos": True}
        server.call("POST", "/flush_cache")
        reply = server.call(
            "POST", "/generate", {"input_ids": prompt, "sampling_params": sampling, "return_logprob": True}
        )
        return [entry[0] for entry in reply["meta_info"]["output_token_logprobs"]]
    sampling = {"max_tokens": 8, "temperature": 0, "logprobs": 0, "ignore_eos": True, "detokenize": False}
    reply = server.call("POST", "/inference/v1/generate", {"token_ids": prompt, "sampling_params": sampling})
    return [entry["logprob"] for entry in reply["choices"][0]["logprobs"]["content"]]


def checksums(server: Server) -> dict[str, str]:
    """Of a vLLM: RANK:parameter -> sha256."""
    return server.call("POST", "/weight_checker", {"action": "checksum"})["checksums"]


def _vllm(kind: str, model: Path, gpu: str | None, dtype: str, share: str) -> list[str]:
    argv = ["-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--served-model-name", "policy"]
    argv += ["--load-format", "dummy", "--skip-tokenizer-init", "--dtype", dtype]
    argv += [] if kind == "adapters" and gpu is not None else ["--enforce-eager"]  # its first token is to be a user's
    argv += ["--enable-scale-out", "--logprobs-mode", "processed_logprobs", "--max-num-seqs", "32"]
    argv += ["--weight-transfer-config", json.dumps({"backend": KINDS[kind].weight_backend})]
    argv += KINDS[kind].flags
    if KINDS[kind].plugin:
        argv += ["--worker-extension-cls", "rltool.engines.plugin.worker.WeightUpdateRecovery"]
        argv += ["--middleware", "benchmarks.weight_sync_middleware.CheckableMiddleware"]
    if gpu is None:
        return [*argv, "--max-model-len", "256"]
    return [*argv, *VLLM_GPU, "--gpu-memory-utilization", share, "--tensor-parallel-size", _workers(gpu)]


def _sglang(model: Path, gpu: str | None, dtype: str) -> list[str]:
    argv = ["-m", "sglang.launch_server", "--model-path", str(model), "--served-model-name", "policy"]
    argv += ["--load-format", "dummy", "--skip-tokenizer-init", "--dtype", dtype, "--random-seed", "1"]
    argv += ["--skip-server-warmup"]
    if gpu is None:
        argv += ["--device", "cpu", "--attention-backend", "torch_native", "--disable-cuda-graph"]
        argv += ["--disable-overlap-schedule", "--mem-fraction-static", "0.5", "--max-total-tokens", "4096"]
        return argv
    return [*argv, *SGLANG_GPU, "--tp-size", _workers(gpu), "--disable-custom-all-reduce"]


def _workers(gpus: str) -> str:
    return str(len(gpus.split(",")))


def _environment(kind: str, work: Path, gpu: str | None) -> dict[str, str]:
    common = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_SERVER_DEV_MODE": "1"}
    common |= {"SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0"}
    if KINDS[kind].plugin:
        common["RLTOOL_KEY_FILE"] = str(work / "key")
        common["PYTHONPATH"] = os.pathsep.join(
            filter(None, (str(_entry_point(work)), str(REPOSITORY), os.environ.get("PYTHONPATH")))
        )
    if kind == "adapters":  # the plugin says how long its parts take
        logging = work / "logging.json"
        handlers = {"out": {"class": "logging.StreamHandler", "stream": "ext://sys.stdout"}}
        loggers = {name: {"handlers": ["out"], "level": "INFO", "propagate": False} for name in ("vllm", "rltool")}
        logging.write_text(json.dumps({"version": 1, "handlers": handlers, "loggers": loggers}))
        common["VLLM_LOGGING_CONFIG_PATH"] = str(logging)
    if gpu is not None:
        return common | {"CUDA_VISIBLE_DEVICES": gpu}
    cpu = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
    return common | cpu | {"SGLANG_USE_CPU_ENGINE": "1", "CUDA_VISIBLE_DEVICES": ""}


def _entry_point(work: Path) -> Path:
    """The plugin's entry point, where rltool is run from its source and is not installed."""
    directory = work / "entry-point"
    info = directory / "rltool_source-0.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: rltool-source\nVersion: 0\n")
    (info / "entry_points.txt").write_text("[vllm.general_plugins]\nrltool = rltool.engines.plugin:register\n")
    return directory
