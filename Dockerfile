# syntax=docker/dockerfile:1
# The evaluator as an image. For GPUs: docker build --build-arg TENSORFLOW=cuda .
# For `--cluster`, and for the nodes of the cluster: docker build --build-arg CLUSTER=ray .
# `make pin-base` adds the digest of the base: python:3.11-slim@sha256:...
ARG BASE=python:3.11-slim

FROM ${BASE} AS build
ARG TENSORFLOW=cpu
ARG CLUSTER=none
WORKDIR /src
COPY pyproject.toml hatch_build.py README.md LICENSE ./
COPY requirements requirements
COPY proto proto
COPY clients clients
COPY checkpoints checkpoints
COPY experiments experiments
COPY trainer trainer
COPY evaluator evaluator
COPY service service
COPY cli cli
# The environment has the same path as in the final image, because its scripts name their interpreter by path.
RUN hashed() { /opt/understudy/bin/pip "$@" --no-cache-dir --require-hashes --no-deps --only-binary :all:; } \
    && python -m venv /opt/understudy \
    && hashed install --requirement requirements/pip.txt \
    && hashed install --requirement "requirements/image-${TENSORFLOW}.txt" \
    && if [ "${CLUSTER}" != none ]; then hashed install --requirement "requirements/cluster-${CLUSTER}.txt"; fi \
    && hashed download --dest /build --requirement requirements/build.txt \
    && /opt/understudy/bin/pip install --no-cache-dir --no-deps --no-index --find-links /build . \
    && rm -rf /opt/understudy/lib/python3*/site-packages/tensorflow/include \
    && /opt/understudy/bin/pip uninstall --yes pip setuptools wheel

FROM ${BASE}
RUN useradd --uid 10001 --user-group --no-create-home --home-dir /state understudy \
    && install -d --owner understudy --group understudy --mode 1777 /state
COPY --from=build /opt/understudy /opt/understudy
# Large messages in huge pages: a message of 64 MiB would otherwise hold other calls up for three times as long.
ENV PATH=/opt/understudy/bin:$PATH \
    GLIBC_TUNABLES=glibc.malloc.hugetlb=1 \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    TF_CPP_MIN_LOG_LEVEL=2 \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility \
    CUDA_CACHE_PATH=/state/cuda-cache \
    CUDA_CACHE_MAXSIZE=4294967296 \
    UNDERSTUDY_ADDRESS_FILE=/dev/shm/understudy-address \
    UNDERSTUDY_HOST=0.0.0.0
USER 10001:10001
WORKDIR /state
VOLUME /state
EXPOSE 8500 8501
# For a GPU newer than TensorFlow's kernels, the first start compiles them, which takes minutes.
HEALTHCHECK --interval=10s --timeout=10s --start-period=900s --retries=3 \
    CMD ["understudy", "health"]
STOPSIGNAL SIGTERM
ENTRYPOINT ["understudy"]
CMD ["serve", "--help"]
