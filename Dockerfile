# docker build -t mig-manager:0.1.0 .
ARG PYTHON_IMAGE=python:3.12-slim

FROM ${PYTHON_IMAGE} AS build
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY mig_manager mig_manager
COPY profiles profiles
# Without compiled modules, and a read-only root leaves no place for them later, the agent starts
# five times slower and takes half as much memory again. Most of the image would be compiled
# modules of the Kubernetes client that the agent never loads: they stay as they are.
RUN python -m venv /opt/mig-manager \
 && /opt/mig-manager/bin/pip install --no-cache-dir --no-compile . \
 && /opt/mig-manager/bin/pip uninstall --yes pip \
 && python -m compileall -q -x '/kubernetes/(aio|client/(api|models))/(?!__init__)' /opt/mig-manager/lib
# What NVIDIA's operator starts in the image of its MIG manager.
RUN printf '#!/bin/sh\nexec mig-manager agent "$@"\n' > /opt/mig-manager/bin/nvidia-mig-manager \
 && chmod 755 /opt/mig-manager/bin/nvidia-mig-manager

FROM ${PYTHON_IMAGE}
LABEL org.opencontainers.image.title="mig-manager" \
      org.opencontainers.image.description="Node-local manager for NVIDIA Multi-Instance GPU" \
      org.opencontainers.image.licenses="Apache-2.0"
# The official images ship the standard library uncompiled.
RUN python -m compileall -q -x '/(ensurepip|idlelib|lib2to3|site-packages|test|tests)/' \
    /usr/local/lib/python3*
COPY --from=build /opt/mig-manager /opt/mig-manager
# The last three ask NVIDIA's container toolkit for the driver, for all GPUs, and for the right to
# change their MIG instances; where it is not in charge they mean nothing.
ENV PATH=/opt/mig-manager/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    NVIDIA_DRIVER_CAPABILITIES=utility \
    NVIDIA_MIG_CONFIG_DEVICES=all \
    NVIDIA_VISIBLE_DEVICES=all
# As root, because the driver lets nobody else change MIG instances. Without HEALTHCHECK: kubelet
# does not look at it.
ENTRYPOINT ["mig-manager"]
CMD ["agent"]
