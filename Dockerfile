# The server's image. Three stages: what builds, what is built, what runs.
#
#   docker build -t convgrad .                                  CUDA 13; kernels for the H100 and H200
#   docker build -t convgrad:cpu --build-arg ACCELERATOR=cpu .  no CUDA in it
#   docker build -t convgrad --build-arg ARCHITECTURES="sm_80 sm_86 sm_89 sm_90a sm_100 sm_120" .
#
# ACCELERATOR picks a lock in deploy/locks: cpu, cuda12 or cuda13. ARCHITECTURES are compiled
# ahead; kernels of others compile on first use, into the cache's volume. PYTHON_IMAGE may be any
# image with Python 3.11 to 3.13 and venv: pin it by digest where builds must repeat.

ARG PYTHON_IMAGE=python:3.12-slim-bookworm

FROM ${PYTHON_IMAGE} AS wheel
WORKDIR /source
COPY deploy/locks/build.txt deploy/locks/
RUN python3 -m venv /opt/build \
 && /opt/build/bin/pip install --no-cache-dir --require-hashes -r deploy/locks/build.txt
COPY pyproject.toml README.md LICENSE ./
COPY client client
COPY service service
# Needs no network: the tools above build the wheel, its CPU kernels included.
RUN /opt/build/bin/hatchling build -t wheel -d /wheel

FROM ${PYTHON_IMAGE} AS install
ARG ACCELERATOR=cuda13
COPY deploy/locks/${ACCELERATOR}.txt /locks/
# pip stays outside what is shipped.
RUN python3 -m venv /opt/pip && python3 -m venv --without-pip /opt/convgrad \
 && /opt/pip/bin/pip --python /opt/convgrad/bin/python install \
      --no-cache-dir --require-hashes -r "/locks/${ACCELERATOR}.txt"
COPY --from=wheel /wheel /wheel
RUN /opt/pip/bin/pip --python /opt/convgrad/bin/python install \
      --no-cache-dir --no-deps --no-index /wheel/*.whl
ARG ARCHITECTURES="sm_90a"
RUN if [ "${ACCELERATOR}" != cpu ] && [ -n "${ARCHITECTURES}" ]; then \
      # shellcheck disable=SC2086
      /opt/convgrad/bin/convgrad kernels --arch ${ARCHITECTURES}; fi

FROM ${PYTHON_IMAGE}
ARG VERSION=unknown
ARG REVISION=unknown
LABEL org.opencontainers.image.title="convgrad" \
      org.opencontainers.image.description="Convolution and pooling gradients as a service" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"
# The base brings a pip, which nothing here needs.
RUN mkdir -p /var/cache/convgrad && chown 10001:10001 /var/cache/convgrad \
 && rm -rf /usr/local/bin/pip* /usr/local/lib/python3*/site-packages/pip*
COPY --from=install /opt/convgrad /opt/convgrad
# A fixed number, so that a platform can demand a user that is not root. The root file system may
# be read-only: nothing outside the volume is written, bytecode neither.
USER 10001:10001
ENV PATH="/opt/convgrad/bin:${PATH}" \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    HOME=/var/cache/convgrad \
    CONVGRAD_HTTP_HOST=0.0.0.0 \
    CONVGRAD_KERNEL_CACHE=/var/cache/convgrad/kernels \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
VOLUME /var/cache/convgrad
EXPOSE 8000 8001
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=5s --start-period=30s --retries=3 \
    CMD ["convgrad", "probe"]
ENTRYPOINT ["convgrad"]
CMD ["serve"]
