# Trainer, router and vLLM engines on CPUs: the environment that `make test` builds, by the same script.
#
#   docker build -f containers/cpu.Dockerfile -t rltool-cpu .
#   docker run --rm -it --shm-size 2g -v $PWD/runs:/rltool/runs rltool-cpu quickstart
FROM python:3.11-slim
ARG RLTOOL_TORCH_INDEX=""
RUN apt-get update && apt-get install -y --no-install-recommends gcc g++ libnuma1 && rm -rf /var/lib/apt/lists/*
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY requirements ./requirements
COPY rltool ./rltool
RUN PIP_NO_CACHE_DIR=1 RLTOOL_TORCH_INDEX=$RLTOOL_TORCH_INDEX requirements/setup.sh /opt/rltool
ENV PATH=/opt/rltool/bin:$PATH
WORKDIR /rltool
ENTRYPOINT ["rltool"]
