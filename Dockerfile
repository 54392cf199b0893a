# One image for CPUs and for CUDA 13, on aarch64 and x86_64. docs/containers.md: how to build it, run it and change it.
#
#   docker build -t sparkdraft:cpu .
#   docker build -t sparkdraft:cuda --build-arg ACCELERATOR=cu130 .
#
# Any Debian or Ubuntu with Python 3.11 or newer will do. torch's wheels bring CUDA's libraries and the host its driver,
# so the base needs no CUDA.
ARG BASE=debian:bookworm-slim

FROM ${BASE} AS base
# g++ stays: CPU kernels are compiled for the machine that they run on, and Triton compiles what starts its kernels.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends ca-certificates g++ python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/* \
    && python3 -m venv /opt/sparkdraft
ENV PATH=/opt/sparkdraft/bin:$PATH

FROM base AS package
ARG PIP_ARGS=
COPY . /src
# hadolint ignore=SC2086
RUN pip wheel --no-cache-dir ${PIP_ARGS} --no-deps --wheel-dir /wheel /src

FROM base
# cpu, or cu130 for NVIDIA GPUs
ARG ACCELERATOR=cpu
ARG TORCH=torch==2.13.0
ARG TORCH_INDEX=https://download.pytorch.org/whl/${ACCELERATOR}
# anything else that pip should know, such as another index
ARG PIP_ARGS=
# One layer each for torch, for the other packages and for ours: an update of ours is 25 MB.
# hadolint ignore=DL3013,SC2086
RUN pip install --no-cache-dir --index-url "${TORCH_INDEX}" ${PIP_ARGS} "${TORCH}"
WORKDIR /opt/sparkdraft
COPY pyproject.toml constraints.txt ./
# hadolint ignore=SC2086
RUN python -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["dependencies"], sep="\n")' \
        > requirements.txt \
    && pip install --no-cache-dir ${PIP_ARGS} -c constraints.txt -r requirements.txt
# hadolint ignore=DL3013,SC2086
RUN --mount=type=bind,from=package,source=/wheel,target=/wheel \
    pip install --no-cache-dir ${PIP_ARGS} --no-deps /wheel/*.whl

# Everything that is written goes to /cache (models, compiled kernels, profiles) and /tmp: the rest may be read-only.
RUN useradd --uid 10001 --user-group --no-create-home --home-dir /cache --shell /usr/sbin/nologin sparkdraft \
    && install -d -o sparkdraft -g sparkdraft /cache
ENV HOME=/cache XDG_CACHE_HOME=/cache USER=sparkdraft \
    PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1 \
    NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility \
    SPARKDRAFT_HOST=0.0.0.0
VOLUME ["/cache"]
WORKDIR /cache
USER 10001:10001
EXPOSE 8000
# 503 until the model is loaded and warm, which may include a download. Requests drain for 30 s after SIGTERM.
HEALTHCHECK --start-period=30m --interval=15s --timeout=10s --retries=3 \
    CMD ["python", "-m", "sparkdraft.server.healthcheck"]
STOPSIGNAL SIGTERM
ENTRYPOINT ["sparkdraft"]
CMD ["serve"]
