# syntax=docker/dockerfile:1
# `engine serve` on CPUs (x86-64). From the root of the repository:
#   docker build -f deploy/docker/cpu.Dockerfile --build-arg COMMIT=$(git rev-parse HEAD) -t engine:cpu .
#   docker run --rm -p 127.0.0.1:30000:30000 -v engine-models:/var/cache/engine/models engine:cpu

ARG PYTHON=3.11-slim-bookworm

FROM python:${PYTHON} AS build
RUN apt-get update \
 && apt-get install -y --no-install-recommends g++ \
 && rm -rf /var/lib/apt/lists/*
RUN python -m venv /opt/engine
ENV PATH=/opt/engine/bin:$PATH \
    PIP_NO_CACHE_DIR=1 \
    PIP_DISABLE_PIP_VERSION_CHECK=1
# Torch's own index has builds without CUDA, which are gigabytes smaller.
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
WORKDIR /src
# A layer of its own: a change of the engine's code does not fetch torch again.
COPY constraints.txt ./
RUN pip install --extra-index-url ${TORCH_INDEX} -c constraints.txt torch setuptools
COPY . .
ARG COMMIT=
RUN test -z "${COMMIT}" || echo "${COMMIT}" > runtime/COMMIT
RUN pip install --extra-index-url ${TORCH_INDEX} -c constraints.txt --no-build-isolation .
# The kernels for every x86 instruction set, whatever this machine has: the engine chooses when it starts, and the image
# has no compiler. Takes some 20 s each on one core.
WORKDIR /
RUN ENGINE_CACHE_DIR=/opt/cache python -c "\
from engine.model_runner.kernels.cpu.build import build; \
from engine.model_runner.kernels.cpu.compiler import ISAS; \
[print(build(isa)) for isa in ISAS if isa != 'portable']"

FROM python:${PYTHON}
# tini is process 1: signals reach the engine from its first moment on, and orphans are reaped.
RUN apt-get update \
 && apt-get install -y --no-install-recommends tini \
 && rm -rf /var/lib/apt/lists/* \
 && useradd --uid 10001 --user-group --home-dir /var/cache/engine --shell /usr/sbin/nologin engine \
 && mkdir -p /var/cache/engine/models /var/cache/engine/crashes \
 && chown -R engine:engine /var/cache/engine
COPY --from=build /opt/engine /opt/engine
# Owned by root, so that the engine can read and run them, and cannot change them.
COPY --from=build /opt/cache/kernels /var/cache/engine/kernels
ENV PATH=/opt/engine/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    ENGINE_CACHE_DIR=/var/cache/engine \
    HF_HOME=/var/cache/engine/models/huggingface
USER 10001:10001
WORKDIR /var/cache/engine
VOLUME /var/cache/engine/models
EXPOSE 30000
# SIGTERM drains: running answers end within --drain-timeout (30 s). Docker kills after 10 s: docker stop --timeout 60.
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=15s --timeout=5s --start-period=15m --retries=4 \
  CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:30000/health', timeout=4)"]
ENTRYPOINT ["tini", "--", "engine"]
CMD ["serve", "--host", "0.0.0.0", "--port", "30000"]
