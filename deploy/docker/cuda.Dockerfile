# syntax=docker/dockerfile:1
# `engine serve` on NVIDIA GPUs (x86-64). From the root of the repository:
#   docker build -f deploy/docker/cuda.Dockerfile --build-arg COMMIT=$(git rev-parse HEAD) -t engine:cuda .
#   docker run --rm --gpus all --shm-size 1g -p 127.0.0.1:30000:30000 -v engine-models:/var/cache/engine/models \
#     engine:cuda
# torch's wheels bring the CUDA libraries; the host needs the driver and the NVIDIA container toolkit.

ARG PYTHON=3.11-slim-bookworm

FROM python:${PYTHON} AS build
RUN python -m venv /opt/engine
ENV PATH=/opt/engine/bin:$PATH \
    PIP_NO_CACHE_DIR=1 \
    PIP_DISABLE_PIP_VERSION_CHECK=1
# Or cuda-torch211. Without constraints.txt: the kernels pin a torch of their own.
ARG EXTRA=cuda
WORKDIR /src
COPY . .
ARG COMMIT=
RUN test -z "${COMMIT}" || echo "${COMMIT}" > runtime/COMMIT
RUN pip install ".[${EXTRA}]"

FROM python:${PYTHON}
# gcc: Triton builds the launchers of its kernels at run time.
RUN apt-get update \
 && apt-get install -y --no-install-recommends tini gcc libc6-dev libnuma1 \
 && rm -rf /var/lib/apt/lists/* \
 && useradd --uid 10001 --user-group --home-dir /var/cache/engine --shell /usr/sbin/nologin engine \
 && mkdir -p /var/cache/engine/models /var/cache/engine/crashes /var/cache/engine/triton \
 && chown -R engine:engine /var/cache/engine
COPY --from=build /opt/engine /opt/engine
ENV PATH=/opt/engine/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    ENGINE_CACHE_DIR=/var/cache/engine \
    HF_HOME=/var/cache/engine/models/huggingface \
    TRITON_CACHE_DIR=/var/cache/engine/triton \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
USER 10001:10001
WORKDIR /var/cache/engine
VOLUME /var/cache/engine/models
EXPOSE 30000
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=15s --timeout=5s --start-period=15m --retries=4 \
  CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:30000/health', timeout=4)"]
ENTRYPOINT ["tini", "--", "engine"]
CMD ["serve", "--device", "cuda", "--host", "0.0.0.0", "--port", "30000"]
