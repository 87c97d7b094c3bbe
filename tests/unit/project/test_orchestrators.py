"""The manifests of recipes/hardware are what Kubernetes' schemas allow, its script does with Slurm's commands what
docs/hosts.md says, and every rltool command in them parses."""

from __future__ import annotations

import copy
import os
import re
import shlex
import shutil
import signal
import stat
import subprocess
import time
from contextlib import suppress
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path

import kubernetes_validate
import pytest
import yaml

from rltool.cli import load_command

HARDWARE = Path(__file__).resolve().parents[3] / "recipes" / "hardware"
SCRIPT = (HARDWARE / "slurm.sh").read_text()
MANIFESTS = list(yaml.safe_load_all((HARDWARE / "kubernetes.yaml").read_text()))
RAY_JOB = yaml.safe_load((HARDWARE / "kuberay.yaml").read_text())
KUBERNETES = ("1.30", "1.37")
"""The oldest release that is compared, and the newest whose schemas the package has."""


RAY_JOB_FIELDS = {"entrypoint", "shutdownAfterJobFinishes", "backoffLimit", "rayClusterSpec"}
RAY_CLUSTER_FIELDS = {"rayVersion", "headGroupSpec", "workerGroupSpecs"}
GROUP_FIELDS = {"groupName", "replicas", "minReplicas", "maxReplicas", "rayStartParams", "template"}
"""Of KubeRay's ray.io/v1 (ray-operator/apis/ray/v1), those that are used; no package has its schemas."""


def ray_groups() -> list[dict]:
    cluster = RAY_JOB["spec"]["rayClusterSpec"]
    return [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]


def pods() -> list[dict]:
    own = [manifest["spec"]["template"] for manifest in MANIFESTS if "template" in manifest["spec"]]
    return own + [group["template"] for group in ray_groups()]


def test_ranks_of_kuberay_have_whole_hosts_and_the_ray_that_is_installed():
    """Every host has what a rank reads and writes: pods of head and workers are the same."""
    spec, (head, *workers) = RAY_JOB["spec"], ray_groups()
    assert (RAY_JOB["apiVersion"], RAY_JOB["kind"]) == ("ray.io/v1", "RayJob")
    assert spec.keys() == RAY_JOB_FIELDS and spec["rayClusterSpec"].keys() == RAY_CLUSTER_FIELDS
    assert all(group.keys() == GROUP_FIELDS for group in workers)
    assert all(group["replicas"] == group["minReplicas"] == group["maxReplicas"] for group in workers)
    assert all(group["template"] == head["template"] for group in workers)
    assert spec["rayClusterSpec"]["rayVersion"] == version("ray")
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "host"}, **head["template"]}
    for release in KUBERNETES:
        kubernetes_validate.validate(pod, release, strict=True)
    engines = next(manifest for manifest in MANIFESTS if manifest["kind"] == "StatefulSet")
    addresses = ",".join(f"engines-{i}.engines:8101" for i in range(engines["spec"]["replicas"]))
    assert f"--rollout-external {addresses} " in spec["entrypoint"]


@pytest.mark.parametrize("manifest", MANIFESTS, ids=lambda manifest: manifest["kind"])
def test_a_manifest_names_itself_and_what_it_selects(manifest):
    for release in KUBERNETES:
        kubernetes_validate.validate(manifest, release, strict=True)
    assert re.fullmatch(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?", manifest["metadata"]["name"])
    if manifest["kind"] == "StatefulSet":
        spec = manifest["spec"]
        assert spec["selector"]["matchLabels"].items() <= spec["template"]["metadata"]["labels"].items()
        services = {m["metadata"]["name"]: m["spec"]["selector"] for m in MANIFESTS if m["kind"] == "Service"}
        assert services[spec["serviceName"]].items() <= spec["template"]["metadata"]["labels"].items()
    if manifest["kind"] == "Job":  # a job's pods may not be restarted always, which is the default
        assert manifest["spec"]["template"]["spec"]["restartPolicy"] in ("Never", "OnFailure")


@pytest.mark.parametrize(
    ("path", "value"),
    [(("restartPolicy",), 3), (("containers", 0, "ports"), 8101), (("containers", 0, "gpu"), 1)],
    ids=["type", "list", "unknown field"],
)
def test_the_schemas_refuse_a_manifest_with_a_mistake(path, value):
    job = copy.deepcopy(next(manifest for manifest in MANIFESTS if manifest["kind"] == "Job"))
    at = job["spec"]["template"]["spec"]
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = value
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(job, KUBERNETES[-1], strict=True)


@pytest.mark.parametrize("pod", pods(), ids=lambda pod: pod["spec"]["containers"][0]["name"])
def test_what_a_container_mounts_is_a_volume_of_its_pod(pod):
    volumes = {volume["name"] for volume in pod["spec"]["volumes"]}
    for container in pod["spec"]["containers"]:
        assert container["name"] and container["image"]
        assert {mount["name"] for mount in container["volumeMounts"]} <= volumes
        assert all(mount["mountPath"].startswith("/") for mount in container["volumeMounts"])


def commands() -> list[list[str]]:
    """Words of every rltool command in manifests and script."""
    found = [line[line.index("rltool ") :] for line in SCRIPT.splitlines() if "rltool train" in line]
    found.append(RAY_JOB["spec"]["entrypoint"])
    for pod in pods():
        (container,) = pod["spec"]["containers"]
        if "command" not in container:  # KubeRay's own, `ray start`
            continue
        words = [*container["command"], *container["args"]]
        found.append(words[-1].partition("exec ")[2] if words[0] == "sh" else shlex.join(words))
    return [shlex.split(command) for command in found]


@pytest.mark.parametrize("words", commands(), ids=lambda words: " ".join(words[:2]))
def test_every_command_parses(words):
    known = {option for parameter in load_command(words[1]).params for option in parameter.opts}
    assert words[0] == "rltool" and {word for word in words if word.startswith("--")} <= known
    assert any(word == "--config" for word in words) or any(a == "--run" for a, _ in pairwise(words))


def test_the_script_is_one_for_the_shell():
    done = subprocess.run([shutil.which("bash") or "bash", "-n"], input=SCRIPT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert len(commands()) == 4


FAKES = {
    "scontrol": "printf 'first\\nsecond\\nthird\\n'",
    "hostname": "echo '10.0.0.1 172.17.0.1 '",
    "openssl": "echo 0123abcd",
    # Runs what it is given, without Slurm's options.
    "srun": 'echo "srun $*" >> "$LOG"; while [[ $1 == -* ]]; do case $1 in -?) shift;; esac; shift; done; exec "$@"',
    # --block: as long as Ray lives.
    "ray": 'echo "$BASHPID ray $*" >> "$LOG"; exec sleep 600',
    "rltool": """trap 'echo saved >> "$LOG"; exit 7' TERM; echo "rltool $*" >> "$LOG"; while :; do sleep 0.05; done""",
}
"""What the script calls: the commands of Slurm and of hosts with rltool. rltool ends after SIGTERM, with a code."""


@pytest.mark.parametrize("hosts", [1, 3])
def test_the_script_starts_ray_on_every_host_and_sigterm_reaches_train_alone(tmp_path: Path, hosts):
    commands = tmp_path / "bin"
    commands.mkdir()
    for name, body in FAKES.items():
        (commands / name).write_text(f"#!/bin/bash\n{body}\n")
        (commands / name).chmod(0o755)
    (tmp_path / "log").touch()
    (tmp_path / "job.sh").write_text(SCRIPT)
    environment = {
        "PATH": f"{commands}:{os.environ['PATH']}", "HOME": str(tmp_path), "LOG": str(tmp_path / "log"),
        "SLURM_NNODES": str(hosts), "SLURM_JOB_NODELIST": "nodes",
    }  # fmt: skip

    def calls() -> list[str]:
        return (tmp_path / "log").read_text().splitlines()

    def rays() -> dict[int, str]:
        found = [line.partition(" ") for line in calls() if line[0].isdigit()]
        return {int(pid): words for pid, _, words in found}

    job = subprocess.Popen(["bash", tmp_path / "job.sh"], env=environment, cwd=tmp_path, start_new_session=True)
    try:
        nodes = min(hosts, 2)  # srun starts the others in one call
        deadline = time.monotonic() + 60
        while len(rays()) < nodes or not any(line.startswith("rltool") for line in calls()):
            assert job.poll() is None and time.monotonic() < deadline, calls()
            time.sleep(0.02)
        job.send_signal(signal.SIGTERM)
        assert job.wait(60) == 7, "the job ends as train does"
        for pid in rays():
            os.kill(pid, 0)  # Ray lives until the checkpoint is written
    finally:
        with suppress(ProcessLookupError):
            os.killpg(job.pid, signal.SIGKILL)
    key = tmp_path / ".rltool-ray-token"
    assert key.read_text() == "0123abcd\n" and stat.S_IMODE(key.stat().st_mode) == 0o600
    head = "ray start --head --node-ip-address 10.0.0.1 --port 6379 --block"
    worker = "ray start --address 10.0.0.1:6379"
    others = [f"srun --nodes={hosts - 1} --ntasks={hosts - 1} -x first {worker} --block"] if hosts > 1 else []
    one = "srun --nodes=1 --ntasks=1 -w first"
    train = "rltool train --config run.toml --ray-address 10.0.0.1:6379 --restarts 3"
    expected = [f"{one} hostname --ip-address", f"{one} {head}", *others, train, "saved"]
    assert sorted(line for line in calls() if not line[0].isdigit()) == sorted(expected)
