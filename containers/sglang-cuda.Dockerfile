# SGLang engines on NVIDIA GPUs. It uses the NCCL of its own torch: where the trainer's differs, weights go over gloo (weights.transport = "gloo").
#
#   docker build -f containers/sglang-cuda.Dockerfile -t rltool-sglang-cuda .
#   docker run --rm --gpus all --network host --shm-size 16g -v $PWD:/rltool rltool-sglang-cuda serve-engines MODEL --engine sglang --gpus 0 --run gpu
FROM python:3.12-slim
RUN apt-get update && apt-get install -y --no-install-recommends gcc g++ libnuma1 && rm -rf /var/lib/apt/lists/*
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY requirements ./requirements
COPY rltool ./rltool
RUN pip install --no-cache-dir -r requirements/sglang-cuda.txt .
WORKDIR /rltool
ENTRYPOINT ["rltool"]
