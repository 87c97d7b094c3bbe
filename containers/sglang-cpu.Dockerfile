# SGLang on CPUs, for tests: the environment that `make test` builds, by the same script, and rltool's command line to start it.
#
#   docker build -f containers/sglang-cpu.Dockerfile -t rltool-sglang-cpu .
#   docker run --rm --network host --shm-size 2g -v $PWD:/rltool rltool-sglang-cpu serve-engines MODEL --engine sglang --engine-python /opt/sglang/bin/python --device cpu --run demo
FROM python:3.11-slim
ARG RLTOOL_TORCH_INDEX=""
RUN apt-get update && apt-get install -y --no-install-recommends gcc g++ libnuma1 && rm -rf /var/lib/apt/lists/*
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY requirements ./requirements
COPY tests/sglang_cpu ./tests/sglang_cpu
COPY rltool ./rltool
RUN PIP_NO_CACHE_DIR=1 RLTOOL_TORCH_INDEX=$RLTOOL_TORCH_INDEX tests/sglang_cpu/setup.sh /opt/sglang
# Of its own: SGLang's pins conflict with rltool's other parts, and it needs nothing of rltool.
RUN python -m venv /opt/rltool && /opt/rltool/bin/pip install --no-cache-dir -c requirements/constraints.txt .
ENV PATH=/opt/rltool/bin:$PATH
WORKDIR /rltool
ENTRYPOINT ["rltool"]
