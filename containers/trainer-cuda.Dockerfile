# Trainer and router on NVIDIA GPUs, on the versions that were measured there (docs/benchmarks.md). The wheels bring CUDA; the host brings the driver.
#
#   docker build -f containers/trainer-cuda.Dockerfile -t rltool-trainer-cuda .
#   docker run --rm --gpus all --network host --shm-size 16g -v $PWD:/rltool rltool-trainer-cuda train --config run.toml --run gpu
FROM python:3.12-slim
# A compiler: Triton builds its launchers with it.
RUN apt-get update && apt-get install -y --no-install-recommends gcc g++ && rm -rf /var/lib/apt/lists/*
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY requirements ./requirements
COPY rltool ./rltool
RUN pip install --no-cache-dir -r requirements/megatron-0.19.txt ".[train,router,quickstart,data,math]"
# Beside torch's own: every rank of a weight transfer must load the very NCCL that the engine has.
RUN pip install --no-cache-dir --no-deps --target /opt/nccl -r requirements/nccl.txt
ENV VLLM_NCCL_SO_PATH=/opt/nccl/nvidia/nccl/lib/libnccl.so.2
WORKDIR /rltool
ENTRYPOINT ["rltool"]
