# Worker for NVIDIA GPUs: torch with its CUDA libraries from the package index (several GB). Needs a host with the NVIDIA
# container toolkit. FLASH_ATTN may name a flash-attn wheel (URL or path in deploy/docker/wheels) to install as well.
ARG BASE=python:3.11-slim-bookworm

# What pyproject.toml names, as a file of its own: other changes of pyproject.toml leave the layers below alone.
FROM ${BASE} AS requirements
COPY pyproject.toml deploy/docker/dependencies.py /
RUN python /dependencies.py /pyproject.toml worker > /requirements.txt

FROM ${BASE} AS build
ARG TORCH_SPEC="torch==2.13.0"
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1 PIP_ROOT_USER_ACTION=ignore PIP_CONSTRAINT=/constraints.txt
COPY deploy/docker/constraints.txt /
RUN python -m venv --without-pip /opt/stepfence && pip install --quiet hatchling
RUN pip --python /opt/stepfence/bin/python install --quiet "${TORCH_SPEC}"
COPY --from=requirements /requirements.txt /
RUN pip --python /opt/stepfence/bin/python install --quiet -r /requirements.txt
ARG FLASH_ATTN=""
COPY deploy/docker/wheels /wheels
RUN if [ -n "${FLASH_ATTN}" ]; then \
    cd /wheels && pip --python /opt/stepfence/bin/python install --quiet --no-deps "${FLASH_ATTN}"; fi
# The code becomes a layer of its own.
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY protos protos
COPY scheduler_svc scheduler_svc
COPY worker_svc worker_svc
RUN pip wheel --quiet --no-deps --no-build-isolation --wheel-dir /wheel . \
    && pip --python /opt/stepfence/bin/python install --quiet --no-deps --prefix /opt/code /wheel/*.whl

FROM ${BASE}
COPY --from=build /opt/stepfence /opt/stepfence
COPY --from=build /opt/code /opt/stepfence
# The model lives in the one, in a volume: fetched once. The cluster secret is mounted into the other.
RUN mkdir -p /var/cache/stepfence /run/stepfence && chown 10001:10001 /var/cache/stepfence /run/stepfence
ENV PATH=/opt/stepfence/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 STEPFENCE_LOG_FORMAT=json \
    STEPFENCE_CACHE_DIR=/var/cache/stepfence NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
USER 10001:10001
ENTRYPOINT ["stepfence"]
CMD ["worker", "--listen", "0.0.0.0:50061", "--device", "cuda", "--dtype", "bfloat16"]
EXPOSE 50061
VOLUME /var/cache/stepfence
# Ready once the model is loaded; the first start fetches it.
HEALTHCHECK --interval=10s --timeout=8s --start-period=600s --retries=3 \
    CMD ["stepfence", "health", "--ready", "--target", "127.0.0.1:50061", "--timeout", "5"]
