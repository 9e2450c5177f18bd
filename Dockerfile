# Grade or serve in a container, as an ordinary user:
#   docker build -t ladder .
#   docker run --rm -p 127.0.0.1:8000:8000 ladder
#   docker run --rm --network none -v "$PWD/submissions:/submissions" ladder ladder course grade /submissions/NAME
FROM python:3.12-slim

# g++ compiles the appendix's step for CPUs, make runs the Makefile.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ git make \
    && rm -rf /var/lib/apt/lists/*

RUN useradd --create-home --uid 1000 ladder
USER 1000
WORKDIR /home/ladder/inference-ladder
COPY --chown=ladder:ladder . .

# The demo's model is fetched now, so that a container without network can use it.
RUN make setup && .venv/bin/ladder fetch smollm2

ENV PATH=/home/ladder/inference-ladder/.venv/bin:$PATH
EXPOSE 8000
CMD ["ladder", "serve", "--host", "0.0.0.0"]
