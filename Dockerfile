# docker build -t mig-manager:0.1.0 .
# What to pin for a release, and how to get the same bytes twice: docs/install.md#the-image
ARG PYTHON_IMAGE=python:3.12-slim

FROM ${PYTHON_IMAGE} AS build
# Hatchling's own default; a release passes the time of its commit.
ARG SOURCE_DATE_EPOCH=1580601600
# Reproducible bytecode: a fixed hash seed, and no bytecode from pip's own imports.
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PIP_ROOT_USER_ACTION=ignore \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONHASHSEED=0
WORKDIR /src
# Dependencies first: they change rarely. Only locked wheels, verified by hash.
COPY release/build.txt release/image.txt release/
COPY systemd/omit-unused systemd/
RUN python -m venv --without-pip /opt/mig-manager \
 && python -m pip --python /opt/mig-manager/bin/python install --no-cache-dir --no-compile \
    --no-deps --only-binary :all: --require-hashes --requirement release/image.txt \
 && systemd/omit-unused /opt/mig-manager/lib \
 && python -m venv /opt/builder \
 && /opt/builder/bin/pip install --no-cache-dir --no-deps --only-binary :all: --require-hashes \
    --requirement release/build.txt
COPY pyproject.toml README.md LICENSE ./
COPY release/generated_files.py release/project_urls.py release/
COPY mig_manager mig_manager
COPY profiles profiles
COPY docs/generator docs/generator
COPY systemd systemd
# A read-only root cannot store bytecode at run time. Without it, the agent starts five times slower
# and uses half as much memory again. Unchecked hashes instead of file times keep builds
# reproducible.
RUN /opt/builder/bin/python -m hatchling build --target wheel --directory /wheel \
 && python -m pip --python /opt/mig-manager/bin/python install --no-cache-dir --no-compile \
    --no-deps --no-index /wheel/*.whl \
 && python -m compileall -q --invalidation-mode unchecked-hash \
    /opt/mig-manager/lib
# The GPU operator starts nvidia-mig-manager; people call nvidia-mig-parted.
RUN printf '#!/bin/sh\nexec mig-manager agent "$@"\n' > /opt/mig-manager/bin/nvidia-mig-manager \
 && chmod 755 /opt/mig-manager/bin/nvidia-mig-manager \
 && ln -s mig-manager /opt/mig-manager/bin/nvidia-mig-parted

FROM ${PYTHON_IMAGE}
# The official images ship the standard library uncompiled.
RUN PYTHONHASHSEED=0 python -m compileall -q --invalidation-mode unchecked-hash \
    -x '/(ensurepip|idlelib|lib2to3|site-packages|test|tests)/' /usr/local/lib/python3*
COPY --from=build /opt/mig-manager /opt/mig-manager
# The NVIDIA_ variables ask NVIDIA's container toolkit for the driver, all GPUs, and the right to
# change MIG instances. Other runtimes ignore them. Simulated GPUs are stored where any user may
# write: simulating does not need root.
ENV PATH=/opt/mig-manager/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    XDG_STATE_HOME=/tmp \
    NVIDIA_DRIVER_CAPABILITIES=utility \
    NVIDIA_MIG_CONFIG_DEVICES=all \
    NVIDIA_VISIBLE_DEVICES=all
# Last, because they differ from build to build.
ARG PYTHON_IMAGE
ARG REVISION=""
ARG CREATED=""
LABEL org.opencontainers.image.title="mig-manager" \
      org.opencontainers.image.description="Node-local manager for NVIDIA Multi-Instance GPU" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="0.1.0" \
      org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.created="${CREATED}" \
      org.opencontainers.image.base.name="${PYTHON_IMAGE}"
# For docker and podman. Kubelet ignores it and probes the agent's port.
HEALTHCHECK --interval=30s --timeout=10s --start-period=120s --retries=3 \
    CMD ["/opt/mig-manager/bin/python", "-I", "-m", "mig_manager.agent.probe"]
# On SIGTERM the agent finishes or undoes its change: allow it --stop-timeout 300.
STOPSIGNAL SIGTERM
# No USER: only root may change MIG instances. Everything else works as any user, for example
# `docker run --user 65532`.
ENTRYPOINT ["mig-manager"]
CMD ["agent"]
