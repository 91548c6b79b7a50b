# syntax=docker/dockerfile:1
# The router smg, for servers that are found by their label in Kubernetes or named on the command line:
#   docker build -f deploy/docker/router.Dockerfile -t engine-router:1.13.0 .
#   docker run --rm --network host engine-router:1.13.0 launch --port 30000 --worker-urls http://127.0.0.1:30001

ARG PYTHON=3.11-slim-bookworm

FROM python:${PYTHON} AS build
RUN python -m venv /opt/router
ENV PATH=/opt/router/bin:$PATH \
    PIP_NO_CACHE_DIR=1 \
    PIP_DISABLE_PIP_VERSION_CHECK=1
# The version whose options were tried; the extra `route` of pyproject.toml has it, too.
RUN pip install smg==1.13.0

FROM python:${PYTHON}
# tini is process 1: signals reach smg from its first moment on.
RUN apt-get update \
 && apt-get install -y --no-install-recommends tini \
 && rm -rf /var/lib/apt/lists/* \
 && useradd --uid 10001 --user-group --no-create-home --shell /usr/sbin/nologin router
COPY --from=build /opt/router /opt/router
ENV PATH=/opt/router/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    HOME=/tmp
USER 10001:10001
WORKDIR /tmp
EXPOSE 30000
# Open streams come to their end; new requests are refused.
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=15s --timeout=5s --start-period=1m --retries=4 \
  CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:30000/health', timeout=4)"]
ENTRYPOINT ["tini", "--", "smg"]
CMD ["launch", "--host", "0.0.0.0", "--port", "30000"]
