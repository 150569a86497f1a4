# Worker for the CPU. torch comes from a wheel in deploy/docker/wheels when one lies there, else from TORCH_INDEX.
ARG BASE=python:3.11-slim-bookworm

# What pyproject.toml names, as a file of its own: other changes of pyproject.toml leave the layers below alone.
FROM ${BASE} AS requirements
COPY pyproject.toml deploy/docker/dependencies.py /
RUN python /dependencies.py /pyproject.toml worker > /requirements.txt

FROM ${BASE} AS build
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
ARG TORCH_SPEC="torch==2.13.0"
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1 PIP_ROOT_USER_ACTION=ignore PIP_CONSTRAINT=/constraints.txt
COPY deploy/docker/constraints.txt /
RUN python -m venv --without-pip /opt/stepfence && pip install --quiet hatchling
COPY deploy/docker/wheels /wheels
# Without what torch needs itself: that comes from the ordinary index with the rest, in the versions of constraints.txt.
RUN if ls /wheels/torch-*.whl >/dev/null 2>&1; then set -- /wheels/torch-*.whl; \
    else set -- --index-url "${TORCH_INDEX}" "${TORCH_SPEC}"; fi \
    && pip --python /opt/stepfence/bin/python install --quiet --no-deps "$@"
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
# The model lives in the one, in a volume: fetched once. The cluster secret is mounted into the other.
RUN mkdir -p /var/cache/stepfence /run/stepfence && chown 10001:10001 /var/cache/stepfence /run/stepfence
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
