"""Flags of an SGLang process that is one of several."""

from __future__ import annotations

from rltool.config.serve import EngineLaunch


def flags_in_its_group(launch: EngineLaunch) -> list[str]:
    """On several hosts, or half of prefill and decode (SGLang 0.5.23, sglang/srt/arg_groups/fields: parallel.py,
    disagg.py)."""
    argv = []
    if launch.dist_init is not None:
        argv += ["--nnodes", str(launch.nodes), "--node-rank", str(launch.node_rank)]
        argv += ["--dist-init-addr", launch.dist_init]
    if launch.role in ("prefill", "decode"):
        argv += ["--disaggregation-mode", launch.role]
    if launch.role == "decode" and launch.device == "cpu":
        argv += ["--disaggregation-decode-retraction-backup", "none"]  # its pool of host memory is pinned with CUDA
    if launch.bootstrap_port is not None:
        argv += ["--disaggregation-bootstrap-port", str(launch.bootstrap_port)]
    return argv
