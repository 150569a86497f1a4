# Worker for the CPU. torch comes from a wheel in deploy/docker/wheels when one lies there, else from TORCH_INDEX.
ARG BASE=python:3.11-slim-bookworm

FROM ${BASE} AS build
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
ARG TORCH_SPEC="torch>=2.11,<2.14"
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1 PIP_CONSTRAINT=/src/deploy/docker/constraints.txt
WORKDIR /src
RUN python -m venv /opt/stepfence
COPY deploy/docker/constraints.txt deploy/docker/dependencies.py deploy/docker/
COPY deploy/docker/wheels /wheels
RUN if ls /wheels/torch-*.whl >/dev/null 2>&1; \
    then /opt/stepfence/bin/pip install --quiet /wheels/torch-*.whl; \
    else /opt/stepfence/bin/pip install --quiet --index-url "${TORCH_INDEX}" "${TORCH_SPEC}"; fi
COPY pyproject.toml deploy/docker/
RUN python deploy/docker/dependencies.py deploy/docker/pyproject.toml worker > /tmp/requirements.txt \
    && /opt/stepfence/bin/pip install --quiet -r /tmp/requirements.txt
COPY pyproject.toml README.md LICENSE ./
COPY protos protos
COPY scheduler_svc scheduler_svc
COPY worker_svc worker_svc
RUN /opt/stepfence/bin/pip install --quiet --no-deps . \
    && /opt/stepfence/bin/pip uninstall --quiet --yes pip setuptools

FROM ${BASE}
COPY --from=build /opt/stepfence /opt/stepfence
# The model lives here, in a volume: fetched once.
RUN mkdir -p /var/cache/stepfence && chown 10001:10001 /var/cache/stepfence
ENV PATH=/opt/stepfence/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 STEPFENCE_LOG_FORMAT=json \
    STEPFENCE_CACHE_DIR=/var/cache/stepfence
USER 10001:10001
ENTRYPOINT ["stepfence"]
CMD ["worker", "--listen", "0.0.0.0:50061"]
EXPOSE 50061
VOLUME /var/cache/stepfence
# Ready once the model is loaded; the first start fetches it.
HEALTHCHECK --interval=10s --timeout=8s --start-period=600s --retries=3 \
    CMD ["stepfence", "health", "--ready", "--target", "127.0.0.1:50061", "--timeout", "5"]
