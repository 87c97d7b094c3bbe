# vLLM engines on NVIDIA GPUs, with rltool's plugin. The wheels bring CUDA; the host brings the driver.
#
#   docker build -f containers/vllm-cuda.Dockerfile -t rltool-vllm-cuda .
#   docker run --rm --gpus all --network host --shm-size 16g -v $PWD:/rltool rltool-vllm-cuda serve-engines MODEL --gpus 0 --run gpu
FROM python:3.12-slim
RUN apt-get update && apt-get install -y --no-install-recommends gcc g++ libnuma1 && rm -rf /var/lib/apt/lists/*
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY requirements ./requirements
COPY rltool ./rltool
RUN pip install --no-cache-dir -r requirements/vllm-cuda.txt .
# The same as the trainer's.
RUN pip install --no-cache-dir --no-deps --target /opt/nccl -r requirements/nccl.txt
ENV VLLM_NCCL_SO_PATH=/opt/nccl/nvidia/nccl/lib/libnccl.so.2
WORKDIR /rltool
ENTRYPOINT ["rltool"]
