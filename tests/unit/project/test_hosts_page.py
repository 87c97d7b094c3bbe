"""docs/hosts.md: its manifests have what Kubernetes demands of their kinds, its script is a shell script, and every
rltool command in them parses."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from itertools import pairwise
from pathlib import Path

import pytest
import yaml

from rltool.cli import load_command

PAGE = (Path(__file__).resolve().parents[3] / "docs" / "hosts.md").read_text()
SCRIPT = re.search(r"```bash\n(.*?)```", PAGE, re.DOTALL)[1]
MANIFESTS = list(yaml.safe_load_all(re.search(r"```yaml\n(.*?)```", PAGE, re.DOTALL)[1]))
VERSIONS = {"Service": "v1", "StatefulSet": "apps/v1", "Job": "batch/v1"}


def pods() -> list[dict]:
    return [manifest["spec"]["template"] for manifest in MANIFESTS if "template" in manifest["spec"]]


@pytest.mark.parametrize("manifest", MANIFESTS, ids=lambda manifest: manifest["kind"])
def test_a_manifest_names_itself_and_what_it_selects(manifest):
    assert manifest["apiVersion"] == VERSIONS[manifest["kind"]]
    assert re.fullmatch(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?", manifest["metadata"]["name"])
    if manifest["kind"] == "StatefulSet":
        spec = manifest["spec"]
        assert spec["selector"]["matchLabels"].items() <= spec["template"]["metadata"]["labels"].items()
        services = {m["metadata"]["name"]: m["spec"]["selector"] for m in MANIFESTS if m["kind"] == "Service"}
        assert services[spec["serviceName"]].items() <= spec["template"]["metadata"]["labels"].items()
    if manifest["kind"] == "Job":  # a job's pods may not be restarted always, which is the default
        assert manifest["spec"]["template"]["spec"]["restartPolicy"] in ("Never", "OnFailure")


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
    for pod in pods():
        (container,) = pod["spec"]["containers"]
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
    assert len(commands()) == 3
