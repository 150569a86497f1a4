# Scheduler and front end: no torch. The scripted worker, which needs none either, runs from this image too.
ARG BASE=python:3.11-slim-bookworm

# What pyproject.toml names, as a file of its own: other changes of pyproject.toml leave the layers below alone.
FROM ${BASE} AS requirements
COPY pyproject.toml deploy/docker/dependencies.py /
RUN python /dependencies.py /pyproject.toml > /requirements.txt

FROM ${BASE} AS build
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1 PIP_ROOT_USER_ACTION=ignore PIP_CONSTRAINT=/constraints.txt
COPY deploy/docker/constraints.txt /
RUN python -m venv --without-pip /opt/stepfence && pip install --quiet hatchling
COPY --from=requirements /requirements.txt /
RUN pip --python /opt/stepfence/bin/python install --quiet -r /requirements.txt
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
# The volume with the cluster secret takes its owner from here.
RUN mkdir -p /run/stepfence && chown 10001:10001 /run/stepfence
ENV PATH=/opt/stepfence/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 STEPFENCE_LOG_FORMAT=json
USER 10001:10001
ENTRYPOINT ["stepfence"]
CMD ["scheduler", "--listen", "0.0.0.0:50052"]
EXPOSE 8000 50051 50052 9400
# Alive, not ready: a scheduler without workers is healthy. compose.yaml asks the front end another question.
HEALTHCHECK --interval=10s --timeout=8s --start-period=30s --retries=3 \
    CMD ["stepfence", "health", "--target", "127.0.0.1:50052", "--timeout", "5"]
