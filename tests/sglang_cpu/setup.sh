#!/usr/bin/env bash
# Builds an environment in which the stock SGLang serves on a CPU, for tests: no GPU and no AMX needed, about 2 minutes.
#
#   tests/sglang_cpu/setup.sh VENV_DIR
#
# PYTHON              interpreter to build it with (default python3; 3.11 is the one tested)
# RLTOOL_TORCH_INDEX  index that offers torch's CPU build, if the default one does not (empty: the default index)
#
# SGLang's pins conflict with vLLM's, so it never shares an environment with it; rltool itself is not installed here, since
# SGLang is driven over HTTP alone. A finished environment of the same recipe is left as it is.
set -euo pipefail

here=$(cd "$(dirname "$0")" && pwd)
requirements="$here/../../requirements/sglang-cpu.txt"
torchvision="$here/../../requirements/torchvision_on_cpu.py"
venv=${1:?usage: setup.sh VENV_DIR}
recipe=$(cat "$here/setup.sh" "$here/sglang_cpu_stub.py" "$torchvision" "$requirements" | sha256sum | cut -d' ' -f1)
stamp="$venv/.recipe"

if [[ -f "$stamp" && "$(cat "$stamp")" == "$recipe" ]]; then
    echo "$venv is up to date"
    exit 0
fi

rm -f "$stamp"
"${PYTHON:-python3}" -m venv "$venv"
"$venv/bin/python" -m pip install --quiet --disable-pip-version-check pip==26.3
pip=("$venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-compile)

torch_index=()
if [[ -n "${RLTOOL_TORCH_INDEX:-}" ]]; then
    torch_index=(--index-url "$RLTOOL_TORCH_INDEX")
fi
# First, and by its exact version: a range that admits a newer torch pulls gigabytes of CUDA packages.
"${pip[@]}" "${torch_index[@]+"${torch_index[@]}"}" torch==2.13.0
"${pip[@]}" -r "$requirements"
"${pip[@]}" --no-deps sglang==0.5.23 torchvision==0.28.0

site=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
cp "$here/sglang_cpu_stub.py" "$torchvision" "$site/"
# .pth files, because SGLang's scheduler and detokenizer are spawned processes: each must have the stubs before its first import.
echo 'import sglang_cpu_stub' > "$site/sglang_cpu_stub.pth"
echo 'import torchvision_on_cpu' > "$site/torchvision_on_cpu.pth"

"$venv/bin/python" -c 'import sglang, torchvision, sgl_kernel; print("sglang", sglang.__version__)'
echo "$recipe" > "$stamp"
