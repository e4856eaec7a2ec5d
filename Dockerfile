# docker build -t mig-manager:0.1.0 .
# What to pin for a release, and how to get the same bytes twice: docs/install.md#the-image
ARG PYTHON_IMAGE=python:3.12-slim

FROM ${PYTHON_IMAGE} AS build
# Hatchling's own default; a release says the time of its commit.
ARG SOURCE_DATE_EPOCH=1580601600
# What is compiled shall depend neither on the order of sets nor on what pip happens to import.
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PIP_ROOT_USER_ACTION=ignore \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONHASHSEED=0
WORKDIR /src
# First what seldom changes. Only what the lock files name, only ready-made, only by its hash.
COPY release/build.txt release/image.txt release/
RUN python -m venv --without-pip /opt/mig-manager \
 && python -m pip --python /opt/mig-manager/bin/python install --no-cache-dir --no-compile \
    --no-deps --only-binary :all: --require-hashes --requirement release/image.txt \
 && python -m venv /opt/builder \
 && /opt/builder/bin/pip install --no-cache-dir --no-deps --only-binary :all: --require-hashes \
    --requirement release/build.txt
COPY pyproject.toml README.md LICENSE ./
COPY mig_manager mig_manager
COPY profiles profiles
# Without compiled modules, and a read-only root leaves no place for them later, the agent starts
# five times slower and takes half as much memory again. Most of the image would be compiled
# modules of the Kubernetes client that the agent never loads: they stay as they are. What is
# compiled carries no times of files, which differ from build to build.
RUN /opt/builder/bin/python -m hatchling build --target wheel --directory /wheel \
 && python -m pip --python /opt/mig-manager/bin/python install --no-cache-dir --no-compile \
    --no-deps --no-index /wheel/*.whl \
 && python -m compileall -q --invalidation-mode unchecked-hash \
    -x '/kubernetes/(aio|client/(api|models))/(?!__init__)' /opt/mig-manager/lib
# What NVIDIA's operator starts in the image of its MIG manager, and what people call in there.
RUN printf '#!/bin/sh\nexec mig-manager agent "$@"\n' > /opt/mig-manager/bin/nvidia-mig-manager \
 && chmod 755 /opt/mig-manager/bin/nvidia-mig-manager \
 && ln -s mig-manager /opt/mig-manager/bin/nvidia-mig-parted

FROM ${PYTHON_IMAGE}
# The official images ship the standard library uncompiled.
RUN PYTHONHASHSEED=0 python -m compileall -q --invalidation-mode unchecked-hash \
    -x '/(ensurepip|idlelib|lib2to3|site-packages|test|tests)/' /usr/local/lib/python3*
COPY --from=build /opt/mig-manager /opt/mig-manager
# The NVIDIA_ ones ask NVIDIA's container toolkit for the driver, for all GPUs, and for the right
# to change their MIG instances; where it is not in charge they mean nothing. Simulated GPUs are
# kept where any user may write, as those who only look or simulate need not be root.
ENV PATH=/opt/mig-manager/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    XDG_STATE_HOME=/tmp \
    NVIDIA_DRIVER_CAPABILITIES=utility \
    NVIDIA_MIG_CONFIG_DEVICES=all \
    NVIDIA_VISIBLE_DEVICES=all
# Last, as they differ from build to build.
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
# For docker and podman; kubelet does not look at it and asks the agent's port itself.
HEALTHCHECK --interval=30s --timeout=10s --start-period=120s --retries=3 \
    CMD ["/opt/mig-manager/bin/python", "-I", "-m", "mig_manager.cli.probe"]
# The agent then finishes or undoes what it is at: leave it --stop-timeout 300.
STOPSIGNAL SIGTERM
# No USER: the driver lets nobody but root change MIG instances. All else works as any user, such
# as `docker run --user 65532`.
ENTRYPOINT ["mig-manager"]
CMD ["agent"]
