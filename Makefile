# The two commands a new user needs are `make serve` and `make test`; both set everything up.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.installed
PIP = $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
ARGS ?=
MODEL ?=
# Without MODEL, the demo replaces a model that cannot be fetched.
CHECKPOINT = --default-checkpoint=smollm2-135m
ifneq ($(MODEL),)
CHECKPOINT = --checkpoint=$(MODEL)
endif
USERS ?= 5
SECONDS ?= 60
WORKLOAD = --workload chat:3,shared:1
SEEDS ?= 100
STEPS ?= 5000

.PHONY: serve test test-quick test-long test-fallbacks test-fleet test-vllm test-vllm-long fuzz fuzz-serve fuzz-gateway chaos chaos-serve lint format bench vllm leaks clients loadtest setup kubernetes-check clean

serve: $(READY)  ## set up, then serve SmolLM2-135M until Ctrl-C (MODEL=demo, MODEL=a folder)
	@# One decode worker: each reads all weights in each step, and two share this machine's memory.
	@exec $(BIN)/mooncake serve $(CHECKPOINT) --decode 1 $(ARGS)

# Every server of a test is a dozen processes of Python, which compile all of the product when nobody
# may keep what comes out: a tenth of the time.
test test-quick test-long test-fallbacks test-fleet test-vllm: export PYTHONDONTWRITEBYTECODE =

test: $(READY)  ## set up, then run the tests, the real Triton included (ARGS="-k name" picks some)
	@# Three processes for two cores: tests under Triton wait for their servers.
	@exec $(BIN)/python -m pytest -m "not long" -n 3 $(ARGS)

test-quick: $(READY)  ## the quick tests that start no server, in three to five minutes
	@exec $(BIN)/python -m pytest -m "not e2e and not servers and not long and not slow" -n 2 $(ARGS)

test-long: $(READY)  ## torture, freezes, full disks, whole traces, slow servers: what `make test` leaves out
	@exec $(BIN)/python -m pytest -m long --ignore=tests/fleet --ignore=tests/chaos_serve \
		--ignore=tests/vllm $(ARGS)

test-fallbacks: $(READY)  ## the store's tests without native code, without the index replica, without both
	MOONCAKE_NATIVE=off $(BIN)/python -m pytest -m "not long" -n 2 tests/mooncake_store $(ARGS)
	MOONCAKE_INDEX_REPLICA=off $(BIN)/python -m pytest -m "not long" -n 2 tests/mooncake_store $(ARGS)
	MOONCAKE_NATIVE=off MOONCAKE_INDEX_REPLICA=off $(BIN)/python -m pytest -m "not long" -n 2 \
		tests/mooncake_store tests/backends/engine $(ARGS)

test-fleet: $(READY)  ## three hosts in network namespaces (as root), 20 s of chaos-serve among it
	@exec $(BIN)/python -m pytest tests/fleet tests/chaos_serve $(ARGS)

test-vllm: $(READY)  ## servers whose workers run vLLM, and tests inside its interpreter; needs `make vllm`
	$(BIN)/python -m pytest -m "not torture" tests/vllm $(ARGS)
	@# The folder would have no test left without vLLM, which pytest calls a failure.
	@if test -x .venv-vllm/bin/python; then .venv-vllm/bin/python -m pytest tests/vllm/inside $(ARGS); fi

test-vllm-long: $(READY)  ## kills, freezes and flipped bytes with vLLM, and its model families (MOONCAKE_DAMAGE_S=300)
	@exec $(BIN)/python -m pytest -m torture tests/vllm $(ARGS)

fuzz: $(READY)  ## random walks of the store's core (SEEDS=10 STEPS=1000 for less)
	$(BIN)/python -m tests.fuzz --seeds $(SEEDS) --steps $(STEPS) $(ARGS)

fuzz-serve: $(READY)  ## the whole system under faults on a virtual clock, by seed (SEEDS=10000)
	$(BIN)/python -m tests.fuzz_serve --seeds $(SEEDS) $(ARGS)

fuzz-gateway: CASES = 2000
fuzz-gateway: $(READY)  ## requests made of the description of OpenAI's interface (CASES=20000)
	$(BIN)/python -m tests.fuzz_gateway --cases $(CASES) $(ARGS)

chaos: SECONDS = 300
chaos: $(READY)  ## processes of the store, killed and stopped under load (SECONDS=20 for less)
	$(BIN)/python -m tests.chaos --seconds $(SECONDS) $(ARGS)

chaos-serve: SECONDS = 600
chaos-serve: $(READY)  ## a fleet of three hosts under injected faults (ARGS="--seed 7" repeats one)
	$(BIN)/python -m tests.chaos_serve --seconds $(SECONDS) $(ARGS)

lint: $(READY)  ## style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(READY)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(READY)  ## measure what README.md and bench/RESULTS.md quote
	$(BIN)/python -m bench.reuse $(ARGS)
	$(BIN)/python -m bench.overhead
	$(BIN)/python -m bench.store
	$(BIN)/python -m bench.ssd_tier

vllm: $(READY)  ## vLLM for CPUs, for `mooncake serve --engine vllm` and bench.headline: two minutes, 3.5 GB
	$(BIN)/python -m bench.headline.environment $(ARGS)

leaks: $(READY)  ## ten minutes of load; what grows or stays behind (ARGS="--seconds 180" for less)
	$(BIN)/python -m bench.leaks $(ARGS)

clients: $(READY)  ## public clients, unchanged (ARGS="curl --url 127.0.0.1:8001" for some)
	$(BIN)/python -m bench.clients $(ARGS)

loadtest: $(READY)  ## users for a while, and a report (USERS=20 SECONDS=60 ARGS="--workload chat")
	@exec $(BIN)/python -m loadtest.users --users $(USERS) --seconds $(SECONDS) $(WORKLOAD) $(ARGS)

# kubernetes-validate and its schemas (108 MB) are for this check only, so they have an environment
# of their own.
.venv-kubernetes/.installed:
	@$(PYTHON) -m venv .venv-kubernetes
	@.venv-kubernetes/bin/pip install --quiet --disable-pip-version-check kubernetes-validate==1.34.1
	@touch $@

kubernetes-check: .venv-kubernetes/.installed  ## deploy/kubernetes against Kubernetes' schemas; needs kubectl
	@exec .venv-kubernetes/bin/python deploy/kubernetes/check_manifests.py \
		deploy/kubernetes/base deploy/kubernetes/overlays/*

setup: $(READY)

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(0 if (3, 10) <= v <= (3, 13) else f"Python 3.10-3.13 is needed, {sys.executable} is {v[0]}.{v[1]}; try make PYTHON=python3.11")'
	@echo "Setting up $(VENV) (470 MB to download, 2 GB on disk, one to five minutes, once) ..."
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@# The pip that comes with an older Python takes three times as long to find the same versions.
	@$(PIP) --upgrade pip setuptools 2>$(VENV)/setup.log || { cat $(VENV)/setup.log; exit 1; }
	@# torch by exact version: see constraints.txt.
	@$(PIP) --no-compile --no-build-isolation --config-settings editable_mode=compat \
		'$(shell grep '^torch==' constraints.txt)' -e '.[bundled,test]' \
		2>$(VENV)/setup.log || { cat $(VENV)/setup.log; exit 1; }
	@# pip would do this on one core. Files of packages that are for a newer Python do not compile.
	@$(BIN)/python -m compileall -qq -j 0 $(VENV)/lib || true
	@# Seconds of a compiler, which the first process that needs it would wait for.
	@$(BIN)/python -c 'from mooncake_store.native.library import library; library()'
	@touch $(READY)

clean:
	rm -rf $(VENV) .venv-clients .venv-kubernetes .venv-vllm .mooncake build *.egg-info
