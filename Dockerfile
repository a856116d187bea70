# `longctx serve` as a container, for CPUs:  docker build -t longctx:cpu .
# For GPUs with a driver of CUDA 13 (or 12): docker build --build-arg ACCELERATOR=cuda13 -t longctx:cuda13 .
# examples/docker/README.md says how it is run. What is sent to the builder: .dockerignore.
ARG PYTHON=3.12

FROM python:${PYTHON}-slim-bookworm AS wheel
WORKDIR /src
COPY . .
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheel .

FROM python:${PYTHON}-slim-bookworm
ARG ACCELERATOR=""
ARG EXTRAS="serve,transfer,distributed,gguf,hub"
# Whoever owns the files of keys and secrets that are given to the container: others may not read them.
ARG UID=1000
ENV PYTHONUNBUFFERED=1 PIP_ROOT_USER_ACTION=ignore LONGCTX_CACHE=/var/cache/longctx
# By these NVIDIA's runtime knows what to mount; nothing else reads them.
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
RUN useradd --uid "${UID}" --create-home longctx \
    && install --directory --owner=longctx /var/cache/longctx /models
# The requirements alone, of an empty package, so that this large layer stays when the code changes.
WORKDIR /src
COPY pyproject.toml setup.py README.md LICENSE ./
RUN mkdir longctx \
    && echo '__version__ = "0"' > longctx/__init__.py \
    && pip install --no-cache-dir "/src[${EXTRAS}${ACCELERATOR:+,${ACCELERATOR}}]" \
    && pip uninstall --yes longctx-jax \
    && rm -rf /src/*
RUN --mount=type=bind,from=wheel,source=/wheel,target=/wheel pip install --no-cache-dir --no-deps /wheel/*.whl
USER ${UID}
WORKDIR /home/longctx
EXPOSE 8000
# It lives while weights load and programs compile; /ready says when it takes requests.
HEALTHCHECK --interval=10s --timeout=5s --start-period=10m --retries=3 \
    CMD ["python", "-c", "from urllib.request import urlopen; urlopen('http://127.0.0.1:8000/health', timeout=4)"]
ENTRYPOINT ["longctx"]
# Other hosts reach the container's address, so this needs --api-key-file, or --allow-anonymous.
CMD ["serve", "--host", "0.0.0.0"]
