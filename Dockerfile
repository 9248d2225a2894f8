# The server's image. Layers, least frequently changed first: dependencies, GPU kernels, application.
#
#   docker build -t convgrad .                                   CUDA 13; kernels for all architectures
#   docker build -t convgrad --build-arg ARCHITECTURES=sm_90a .  kernels for the H100 and H200 only
#   docker build -t convgrad:cpu --build-arg ACCELERATOR=cpu .   without CUDA
#
# ACCELERATOR selects a lock file in deploy/locks: cpu, cuda12, cuda13 or ray-cuda13. Kernels are
# compiled ahead for ARCHITECTURES, and only those whose names contain one of KERNELS; all others are compiled
# on first use, into the volume. A cache mount keeps compiled kernels by the hash of their source, so
# that the next build compiles only those that have changed. PYTHON_IMAGE may be any image with Python
# 3.11 to 3.13 and venv.

ARG PYTHON_IMAGE=python:3.12.15-slim-bookworm@sha256:34386ef0cb081344d7ec1c103ba398e6e9f64e9ab3a1509accc92a4e24a07258

FROM ${PYTHON_IMAGE} AS wheel
WORKDIR /source
COPY deploy/locks/build.txt deploy/locks/
RUN python3 -m venv /opt/build \
 && /opt/build/bin/pip install --no-cache-dir --require-hashes -r deploy/locks/build.txt
COPY pyproject.toml README.md LICENSE ./
COPY client client
COPY service service
# Builds the wheel, CPU kernels included, with the tools installed above; needs no network.
RUN /opt/build/bin/hatchling build -t wheel -d /wheel

FROM ${PYTHON_IMAGE} AS dependencies
ARG ACCELERATOR=cuda13
COPY deploy/locks/${ACCELERATOR}.txt /locks/
# pip is in an environment of its own, which is not shipped.
RUN python3 -m venv /opt/pip && python3 -m venv --without-pip /opt/convgrad \
 && /opt/pip/bin/pip --python /opt/convgrad/bin/python install \
      --no-cache-dir --require-hashes -r "/locks/${ACCELERATOR}.txt"

FROM dependencies AS kernels
ARG ACCELERATOR=cuda13
ARG ARCHITECTURES="sm_80 sm_86 sm_89 sm_90a sm_100 sm_120"
ARG KERNELS=""
WORKDIR /source
# Only the files that compiling reads, so that other changes to the server keep this layer cached.
COPY client/convgrad/__init__.py client/convgrad/_version.py client/convgrad/errors.py \
     client/convgrad/dtypes.py client/convgrad/
COPY client/convgrad/check client/convgrad/check
COPY client/convgrad/contract client/convgrad/contract
COPY client/convgrad/layers client/convgrad/layers
COPY client/convgrad/wire client/convgrad/wire
COPY service/convgrad_service/__init__.py service/convgrad_service/process.py \
     service/convgrad_service/
COPY service/convgrad_service/problems service/convgrad_service/problems
COPY service/convgrad_service/plans service/convgrad_service/plans
COPY service/convgrad_service/backends service/convgrad_service/backends
COPY service/convgrad_service/server/__init__.py \
     service/convgrad_service/server/kernels_command.py service/convgrad_service/server/
RUN --mount=type=cache,id=convgrad-kernels,target=/cubins \
    mkdir /kernels \
 && if [ "${ACCELERATOR}" != cpu ] && [ -n "${ARCHITECTURES}" ]; then \
      # shellcheck disable=SC2086
      PYTHONPATH=client:service /opt/convgrad/bin/python -c "import sys; \
        from convgrad_service.server.kernels_command import kernels; sys.exit(kernels(sys.argv[1:]))" \
        --cache /cubins --copy-to /kernels --match ${KERNELS} --arch ${ARCHITECTURES}; fi

FROM dependencies AS application
COPY deploy/locks/sbom.txt /locks/
RUN python3 -m venv /opt/sbom \
 && /opt/sbom/bin/pip install --no-cache-dir --require-hashes -r /locks/sbom.txt
COPY --from=wheel /wheel /wheel
# Installed twice: apart, to become a layer, and beside its dependencies, for the SBOM.
RUN /opt/pip/bin/pip --python /opt/convgrad/bin/python install \
      --no-cache-dir --no-deps --no-index --prefix /application /wheel/*.whl \
 && ln -s /opt/convgrad/kernels \
      "$(echo /application/lib/python3*/site-packages/convgrad_service/backends/cuda)/_cubins" \
 && /opt/pip/bin/pip --python /opt/convgrad/bin/python install \
      --no-cache-dir --no-deps --no-index /wheel/*.whl \
 && /opt/sbom/bin/cyclonedx-py environment --output-reproducible --of JSON \
      -o /application/sbom.cdx.json /opt/convgrad/bin/python

FROM ${PYTHON_IMAGE}
ARG PYTHON_IMAGE
# Remove the base image's package installers.
RUN mkdir -p /var/cache/convgrad && chown 10001:10001 /var/cache/convgrad \
 && rm -rf /usr/local/bin/pip* /usr/local/lib/python3*/site-packages/pip* \
      /usr/local/lib/python3*/ensurepip /usr/lib/python3*/ensurepip /usr/share/python-wheels
COPY --from=dependencies /opt/convgrad /opt/convgrad
COPY --from=kernels /kernels /opt/convgrad/kernels
COPY --from=application /application /opt/convgrad
# A numeric user, so that Kubernetes can verify runAsNonRoot. The root file system may be read-only:
# nothing is written outside the volume, not even bytecode.
USER 10001:10001
ENV PATH="/opt/convgrad/bin:${PATH}" \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    HOME=/var/cache/convgrad \
    CONVGRAD_HTTP_HOST=0.0.0.0 \
    CONVGRAD_MANAGEMENT_PORT=8002 \
    CONVGRAD_KERNEL_CACHE=/var/cache/convgrad/kernels \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
VOLUME /var/cache/convgrad
EXPOSE 8000 8001 8002
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=5s --start-period=30s --retries=3 \
    CMD ["convgrad", "probe"]
ENTRYPOINT ["convgrad"]
CMD ["serve"]
# Last, because they change with every build.
ARG VERSION=unknown
ARG REVISION=unknown
ARG CREATED=unknown
ARG SOURCE=unknown
LABEL org.opencontainers.image.title="convgrad" \
      org.opencontainers.image.description="Convolution and pooling gradients as a service" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.vendor="The convgrad authors" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.created="${CREATED}" \
      org.opencontainers.image.source="${SOURCE}" \
      org.opencontainers.image.base.name="${PYTHON_IMAGE}"
