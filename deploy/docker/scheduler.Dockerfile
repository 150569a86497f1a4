# Scheduler and front end: no torch. The scripted worker, which needs none either, runs from this image too.
ARG BASE=python:3.11-slim-bookworm

FROM ${BASE} AS build
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1 PIP_CONSTRAINT=/src/deploy/docker/constraints.txt
WORKDIR /src
RUN python -m venv /opt/stepfence
# Dependencies first: they change less often than the code.
COPY pyproject.toml deploy/docker/constraints.txt deploy/docker/dependencies.py deploy/docker/
RUN python deploy/docker/dependencies.py deploy/docker/pyproject.toml > /tmp/requirements.txt \
    && /opt/stepfence/bin/pip install --quiet -r /tmp/requirements.txt
COPY pyproject.toml README.md LICENSE ./
COPY protos protos
COPY scheduler_svc scheduler_svc
COPY worker_svc worker_svc
RUN /opt/stepfence/bin/pip install --quiet --no-deps . \
    && /opt/stepfence/bin/pip uninstall --quiet --yes pip setuptools

FROM ${BASE}
COPY --from=build /opt/stepfence /opt/stepfence
ENV PATH=/opt/stepfence/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 STEPFENCE_LOG_FORMAT=json
USER 10001:10001
ENTRYPOINT ["stepfence"]
CMD ["scheduler", "--listen", "0.0.0.0:50052"]
EXPOSE 50051 50052 9400
# Alive, not ready: a scheduler without workers is healthy. The front end's service overrides this.
HEALTHCHECK --interval=10s --timeout=8s --start-period=30s --retries=3 \
    CMD ["stepfence", "health", "--target", "127.0.0.1:50052", "--timeout", "5"]
