# Everything a contributor types. `make` alone lists it.
# Needs Python 3.11 to 3.13 with venv, and make; the rest is installed into .venv on first use.

PYTHON ?= python3
VENV   := .venv
PY     := $(VENV)/bin/python
READY  := $(VENV)/.ready
LOCK   := deploy/locks/dev.txt
CPU    := service/convgrad_service/backends/cpu
# PyTorch is measured against, never depended on, so it stays outside the environment.
PEER   := build/peer
JAX_PEER := build/jax-peer
DEPLOY := build/deploy-tools
DIST   := build/dist-tools
SITE   := build/site-tools
EXAMPLES := build/examples-tools
GENERATORS := build/generators
TYPESCRIPT := client/typescript
PAGE   := service/ui
BROWSER := build/browser
LOAD   := build/load-tools
ATTACK := build/attack-tools
RAY    := build/ray-tools
# Triton's server comes in a wheel; it embeds a Python 3.11 that has a shared library, as those of
# distributions have.
TRITON := build/triton
PERF_ANALYZER := build/perf-analyzer
TRITON_PYTHON ?= /usr/bin/python3.11
DURATION ?= 20m
# Of `make attack`: QUICK_ATTACK=1 is the part that takes a minute.
QUICK_ATTACK ?=
# Of `make load-open`; URL= names a server that runs already.
RATE ?= 50
MIX  ?= resnet50
URL  ?=
TRAINING := tests/perf/results/training.jsonl
# Of `make check-deploy`: IF_POSSIBLE=1 says what is missing for it instead of failing.
IF_POSSIBLE ?=
# Of `make load`, `make soak` and `make ray`: STORE=1 keeps the figures, for docs/load.md.
STORE ?=

# Of `make test` and its relatives: FRESH=1 draws other random inputs than last time.
FRESH ?=
DRAWN := $(if $(FRESH),--fresh)
QUICK := not slow and not gpu and not deploy and not gpu_code and not processes

.DEFAULT_GOAL := help
.PHONY: $(shell sed -n 's/^\([a-z-]*\):.*##.*/\1/p' $(firstword $(MAKEFILE_LIST)))

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-11s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

$(READY): $(LOCK) pyproject.toml service/hatch_build.py
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(0 if (3, 11) <= v <= (3, 13) else "convgrad needs Python 3.11 to 3.13; %s is %d.%d. Try: make PYTHON=python3.12" % ((sys.executable,) + v))'
	@echo "Setting up $(VENV) (once; about a minute)"
	@test -x $(PY) || $(PYTHON) -m venv $(VENV)
	@$(PY) -m pip install --quiet --disable-pip-version-check --require-hashes -r $(LOCK)
	@$(PY) -m pip install --quiet --disable-pip-version-check --no-build-isolation --no-deps -e .
	@touch $@

kernels: $(READY) ## compile the CPU kernels that changed
	@$(PY) $(CPU)/compile.py >/dev/null

demo: kernels ## train a small network through a running server, check every operation
	@$(PY) -m convgrad demo

serve: kernels ## serve on port 8000, or CONVGRAD_HTTP_PORT, until interrupted
	@$(PY) -m convgrad serve

# Two parts at a time, for two cores: pytest computes in one, or waits for servers.
test: kernels ## every test that needs neither a GPU nor much time
	@$(MAKE) --no-print-directory --jobs=2 --output-sync=target test-servers test-kernels test-units

test-kernels: kernels ## of those, what the CPU's kernels compute
	@OPENBLAS_NUM_THREADS=1 $(PY) -m pytest -o cache_dir=.pytest_cache/$@ -m "$(QUICK)" $(DRAWN) tests/kernels

test-units: kernels ## and the parts one by one
	@$(PY) -m pytest -o cache_dir=.pytest_cache/$@ -m "$(QUICK)" $(DRAWN) tests/unit

test-servers: kernels ## and the servers, the client, the rest
	@$(PY) -m pytest -o cache_dir=.pytest_cache/$@ -m "$(QUICK)" $(DRAWN) \
	    --ignore=tests/kernels --ignore=tests/unit --ignore=tests/attack

test-gpu-code: kernels ## GPU kernels without a GPU: each family in the emulator, a sample compiled by NVRTC
	@$(MAKE) --no-print-directory --jobs=2 --output-sync=target test-gpu-code-first test-gpu-code-second

FIRST_KERNEL_TESTS := $(wildcard tests/kernels/test_*.py) tests/kernels/depthwise tests/kernels/fused
test-gpu-code-first: TESTS = $(FIRST_KERNEL_TESTS) tests/unit/backends/cuda/test_compile.py
test-gpu-code-second: TESTS = tests/kernels $(FIRST_KERNEL_TESTS:%=--ignore=%)
test-gpu-code-first test-gpu-code-second: kernels
	@OPENBLAS_NUM_THREADS=1 $(PY) -m pytest -o cache_dir=.pytest_cache/$@ -m "gpu_code and not slow and not gpu" $(DRAWN) $(TESTS)

test-processes: kernels ## servers of several processes: children killed, hung and flooded, every transport compared
	@$(PY) -m pytest -m "processes and not slow" $(DRAWN) tests/contract tests/client

# Attacks have a target of their own, which installs what they need.
test-slow: kernels ## the larger random sweeps, each time over other inputs
	@$(PY) -m pytest -m "slow and not gpu and not deploy" --fresh --ignore=tests/attack

test-faults: kernels ## twenty kills under load, ten thousand requests: nothing fails, nothing grows
	@$(PY) -m pytest -m slow tests/contract/test_worker_deaths.py tests/contract/test_no_growth.py

test-torch: kernels $(PEER) ## convgrad.torch, PyTorch's answers next to ours, the documents' snippets that use it
	@PYTHONPATH=$(PEER) $(PY) -m pytest -m "not gpu" tests/kernels/test_second_opinion_torch.py \
	    tests/contract/test_documentation.py tests/torch

test-jax: kernels $(JAX_PEER)/.ready ## convgrad.jax, JAX's answers next to ours, the documents' snippets that use it
	@PYTHONPATH=$(JAX_PEER) $(PY) -m pytest tests/contract/test_documentation.py tests/jax

test-examples: kernels $(EXAMPLES)/.ready $(PEER) ## every program in examples/, PyTorch's, JAX's and the notebook too
	@PYTHONPATH=$(PEER) $(PY) -m pytest tests/contract/test_examples.py \
	    --examples-python $(EXAMPLES)/bin/python

test-ui: kernels ui $(BROWSER)/.ready ## the page at /ui in Chromium, if it is installed; its built files are its sources'
	@git diff --exit-code --stat -- service/convgrad_service/http_api/page \
	    || { echo "the page was not built from these sources: commit what make ui made"; exit 1; }
	@PYTHONPATH=$(BROWSER) $(PY) -m pytest -m slow tests/ui

test-gpu: kernels ## every kernel test on this machine's GPU, stores the outcome; the server's too
	@$(PY) tests/kernels/gpu_check.py --git-sha $$(git rev-parse --short=12 HEAD)
	@$(PY) -m pytest -m gpu tests/contract/test_on_gpu.py tests/torch tests/jax

compile-all: $(READY) ## compile the GPU kernels that changed, for every architecture; needs no GPU; SLICE=100 stops after as many seconds
	@$(PY) -m tests.perf.compile_kernels $(if $(SLICE),--seconds $(SLICE))

check-manifests: $(READY) $(DEPLOY)/.ready ## lint the Dockerfile; validate the chart's manifests, KServe's and compose
	@$(DEPLOY)/bin/hadolint Dockerfile
	@rm -rf build/manifests && $(PY) -m tests.deploy.chart build/manifests
	@# What other projects define has its schemas in tests/deploy/schemas; so has compose.
	@$(DEPLOY)/bin/kubernetes-validate --strict \
	    $$(grep -LE '^apiVersion: .*(coreos|keda|gateway)' build/manifests/*.yaml)
	@$(DEPLOY)/bin/python tests/deploy/validate.py build/manifests
	@$(DEPLOY)/bin/python tests/deploy/compare_helm.py build/manifests
	@if command -v docker-compose >/dev/null; then \
	    docker-compose --profile cpu --profile gpu --profile monitoring -f deploy/compose/compose.yaml config -q; \
	else echo "LEFT OUT: docker-compose, which is not here, did not read the compose file"; fi

docs: $(READY) $(SITE)/.ready ## build the documentation in build/site; every internal link and anchor must lead somewhere
	@NO_MKDOCS_2_WARNING=1 $(SITE)/bin/mkdocs build --quiet --strict
	@! grep -rnoE --include='*.html' '<(script|img|link)[^>]* (src|href)="?https?:[^ >]*' build/site \
	    || { echo "the site fetches these from elsewhere, and would not work offline"; exit 1; }

check-clients: kernels $(GENERATORS)/.ready $(TYPESCRIPT)/node_modules/.ready ## the TypeScript client, and clients generated from the OpenAPI document, call a server
	@$(PY) -m pytest -m deploy tests/deploy/test_generated_clients.py \
	    tests/deploy/test_typescript_client.py --generators $(GENERATORS)

typescript-types: $(READY) $(TYPESCRIPT)/node_modules/.ready ## write the TypeScript client's types from the OpenAPI document
	@$(PY) -m tests.deploy.openapi_document $(TYPESCRIPT)/openapi.json
	@cd $(TYPESCRIPT) && npm run --silent types -- src/openapi.ts

$(TYPESCRIPT)/node_modules/.ready: $(TYPESCRIPT)/package-lock.json
	@cd $(TYPESCRIPT) && npm ci --silent
	@touch $@

ui: $(PAGE)/node_modules/.ready ## build the page that a server shows at /ui
	@cd $(PAGE) && npm run --silent build -- --logLevel warn

$(PAGE)/node_modules/.ready: $(PAGE)/package-lock.json
	@cd $(PAGE) && npm ci --silent
	@touch $@

$(BROWSER)/.ready: deploy/locks/ui.txt
	@$(PY) -m pip install --quiet --disable-pip-version-check --require-hashes --target $(BROWSER) -r $<
	@touch $@

# PROJECT_URL=https://… is the repository's address, for the metadata of what is published, by default
# that of git's origin.
dist: $(READY) $(DIST)/.ready ## build both distributions (source, wheels, aarch64 too), check them, install them where nothing else is
	@$(PY) -m tests.deploy.build_dist build/dist
	@$(DIST)/bin/twine check --strict build/dist/*
	@$(PY) -m pytest -s -m deploy tests/deploy/test_dist.py --built-dist build/dist

check-load: kernels $(LOAD)/.ready ## whether the load tests work: each wire answered, nothing failed, at whatever speed
	@$(PY) -m tests.load.run --locust $(LOAD)/bin/locust --only smoke --seconds 8

check-ray: kernels $(RAY)/.ready ## Ray Serve on two simulated nodes: its answers to the bit, a proxy on each node, one killed under load
	@PYTHONPATH=client:service:. $(RAY)/bin/python -W ignore -m tests.ray_cluster.run \
	    --nodes 2 --only answers contract proxies death

check-deploy: check-manifests check-load check-ray ## those, and build the image without a daemon, run it, ask it; needs root, buildah, debootstrap
	@missing="$$(tests/deploy/missing.sh build/image)"; \
	if [ -n "$$missing" ] && [ -n "$(IF_POSSIBLE)" ]; then \
	    echo "LEFT OUT: the image was neither built nor run, because $$missing"; \
	elif [ -n "$$missing" ]; then \
	    echo "the image cannot be built here: $$missing"; exit 1; \
	else \
	    tests/deploy/build_image.sh build/image ACCELERATOR=cpu \
	    && $(PY) -m pytest -m deploy tests/deploy --image build/image; \
	fi

load: kernels $(LOAD)/.ready ## a server under realistic loads, and a ramp past its limit; reports in build/load
	@$(PY) -m tests.load.run --locust $(LOAD)/bin/locust $(if $(STORE),--store)

load-open: kernels ## requests at random times at RATE a second, of MIX: latencies from when each was due
	@$(PY) -m tests.load.open_loop --rate $(RATE) --mix $(MIX) $(if $(URL),--url $(URL)) $(if $(STORE),--store)

soak: kernels $(LOAD)/.ready ## a server under a steady load for DURATION (20m, 8h): nothing fails, nothing grows
	@$(PY) -m tests.load.soak --locust $(LOAD)/bin/locust --duration $(DURATION) $(if $(STORE),--store)

attack: kernels $(if $(QUICK_ATTACK),,$(ATTACK)/.ready) ## attacks on a server's processes: what others notice, what memory stays, what it says; QUICK_ATTACK=1 is CI's part
	@$(PY) -m pytest -s $(if $(QUICK_ATTACK),-m "not slow",--fresh) tests/attack

ray: kernels $(RAY)/.ready $(LOAD)/.ready ## the Ray Serve application on a local cluster; a node is killed under load
	@PYTHONPATH=client:service:. $(RAY)/bin/python -W ignore -m tests.ray_cluster.run $(if $(STORE),--store)

$(DEPLOY)/.ready: deploy/locks/deploy.txt
$(DIST)/.ready: deploy/locks/dist.txt
$(EXAMPLES)/.ready: deploy/locks/examples.txt
$(GENERATORS)/.ready: deploy/locks/generators.txt
$(SITE)/.ready: deploy/locks/docs.txt
$(LOAD)/.ready: deploy/locks/load.txt
$(ATTACK)/.ready: deploy/locks/attack.txt
$(RAY)/.ready: deploy/locks/ray.txt
$(DEPLOY)/.ready $(DIST)/.ready $(EXAMPLES)/.ready $(GENERATORS)/.ready $(SITE)/.ready $(LOAD)/.ready $(ATTACK)/.ready $(RAY)/.ready:
	@$(PYTHON) -m venv $(@D)
	@$(@D)/bin/pip install --quiet --disable-pip-version-check --require-hashes -r $<
	@touch $@

fuzz: kernels ## 10,000 malformed bodies against a real server
	@$(PY) -m pytest tests/contract/test_fuzz_bodies.py \
	    --fuzz-examples=10000 --timeout=1800 --fresh

check: lint type ## lint and types

lint: $(READY) ## ruff: rules and format
	@$(PY) -m ruff check .
	@$(PY) -m ruff format --check .

type: $(READY) ## mypy, strict
	@$(PY) -m mypy
	@$(PY) -m mypy tests/perf

format: $(READY) ## let ruff format and mend what it can
	@$(PY) -m ruff check --fix .
	@$(PY) -m ruff format .

$(JAX_PEER)/.ready: deploy/locks/jax.txt
	@$(PY) -m pip install --quiet --disable-pip-version-check --require-hashes --target $(JAX_PEER) -r $<
	@touch $@

$(PEER):
	@$(PY) -m pip install --quiet --disable-pip-version-check --target $(PEER) torch==2.13.0

bench-cpu: kernels $(PEER) ## the CPU kernels beside PyTorch's, in one run
	@PYTHONPATH=$(PEER) $(PY) -m tests.perf.bench_cpu
	@PYTHONPATH=$(PEER) $(PY) -m tests.perf.bench_cpu_networks

bench-gpu: $(READY) ## the GPU kernels beside PyTorch's; needs a GPU, CuPy and PyTorch in the environment
	@$(PY) -m tests.perf.bench_gpu

bench-cold: $(READY) ## how long a layer's first request waits for a compiler; needs no GPU, but free cores
	@$(PY) -m tests.perf.bench_cold

bench-cold-server: kernels ## cold requests on a server with a GPU, and what they cost warm ones
	@$(PY) -m tests.perf.bench_cold_server

bench-networks: $(READY) ## every convolution of whole networks beside cuDNN; needs what bench-gpu needs
	@$(PY) -m tests.perf.bench_networks
	@$(PY) -m tests.perf.bench_networks --types
	@$(PY) -m tests.perf.bench_networks --others

bench-families: $(READY) ## what each family of GPU kernels wins, beside the best plan without it; needs bench-gpu's
	@$(PY) -m tests.perf.bench_families --wider --random 300

tune: $(READY) ## time all families' configurations on many layers, and fit the choice of kernels to that; needs bench-gpu's
	@$(PY) -m tests.perf.sweep_dense --out build/dense.jsonl && $(PY) -m tests.perf.fit_dense build/dense.jsonl --write

bench-training: $(READY) ## training steps of whole networks with convgrad.torch and without; needs bench-gpu's, torchvision, timm
	@$(PY) -m tests.perf.bench_training --out $(TRAINING)

bench-losses: $(READY) ## losses of a ResNet-50 over 200 steps, ours beside several runs of PyTorch's; needs bench-training's
	@$(PY) -m tests.perf.bench_losses --out tests/perf/results/losses.jsonl

bench-jax: $(READY) ## convolutions in jitted JAX programs, ours and XLA's; needs JAX with CUDA, and CuPy
	@XLA_PYTHON_CLIENT_PREALLOCATE=false $(PY) -m tests.perf.bench_jax --out tests/perf/results/jax.jsonl

bench-host: $(READY) ## what a backward pass costs the host, ours and PyTorch's; needs what bench-gpu needs
	@$(PY) -m tests.perf.bench_host --out tests/perf/results/host.jsonl

bench-engine-gpu: kernels ## the whole server on a GPU: shared memory, CUDA's too, stored tensors, HTTP
	@$(PY) -m tests.perf.bench_engine_gpu

bench-devices: kernels ## one GPU and several: side by side, a problem split, a worker killed
	@$(PY) -m tests.perf.bench_devices

bench-wire: kernels ## decoding and encoding, stage by stage
	@$(PY) -m tests.perf.bench_wire

bench-nonfinite: kernels ## NaN, infinities and subnormals beside finite data, on the GPU or else the CPU
	@$(PY) -m tests.perf.bench_nonfinite

bench-sums: kernels ## how fast the shares of a split sum are added up
	@$(PY) -m tests.perf.bench_sums

$(TRITON)/.ready: deploy/locks/triton.txt
	@rm -rf $(TRITON)
	@$(TRITON_PYTHON) -m venv --without-pip $(TRITON)
	@$(PY) -m pip --python $(TRITON)/bin/python install --quiet --disable-pip-version-check \
	    --no-deps --require-hashes -r deploy/locks/triton.txt
	@touch $@

$(PERF_ANALYZER)/.ready: deploy/locks/perf_analyzer.txt
	@rm -rf $(PERF_ANALYZER)
	@$(PY) -m pip install --quiet --disable-pip-version-check --target $(PERF_ANALYZER) \
	    --no-deps --require-hashes -r deploy/locks/perf_analyzer.txt
	@touch $@

test-perf-analyzer: kernels $(TRITON)/.ready $(PERF_ANALYZER)/.ready ## Triton's perf_analyzer against our server
	@$(PY) -m pytest tests/contract/test_perf_analyzer.py

bench-serve: kernels $(TRITON)/.ready ## the whole way of a request, beside the real Triton server
	@$(PY) -m tests.perf.bench_serve $(TRITON)

bench-front-ends: kernels ## a large problem over HTTP through 1, 2 and 4 front-end processes
	@$(PY) -m tests.perf.bench_front_ends

readme: $(READY) ## write the README's tables and plots again from the stored results
	@$(PY) -m tests.perf.plot_load
	@# Fails where figures are older than their kernels, of which no plot is drawn then.
	@$(PY) -m tests.perf.readme_tables
	@$(PY) -m tests.perf.plot_networks
	@$(PY) -m tests.perf.page_networks
	@$(PY) tests/perf/plot_gpu.py

COMPILE := -m uv pip compile --universal --python-version 3.11 --generate-hashes --upgrade --quiet

lock: $(READY) ## resolve the dependencies again, with hashes, for every supported Python
	@$(PY) -m pip install --quiet --disable-pip-version-check uv
	@$(PY) $(COMPILE) pyproject.toml --extra demo --group dev --output-file $(LOCK)
	@$(PY) $(COMPILE) pyproject.toml --extra service --extra otel --output-file deploy/locks/cpu.txt
	@$(PY) $(COMPILE) pyproject.toml --extra cuda12 --extra otel --output-file deploy/locks/cuda12.txt
	@$(PY) $(COMPILE) pyproject.toml --extra cuda13 --extra otel --output-file deploy/locks/cuda13.txt
	@$(PY) $(COMPILE) pyproject.toml --extra ray --extra cuda13 --extra otel --output-file deploy/locks/ray-cuda13.txt
	@$(PY) $(COMPILE) pyproject.toml --extra ray --output-file deploy/locks/ray.txt
	@$(PY) $(COMPILE) --group build --output-file deploy/locks/build.txt
	@$(PY) $(COMPILE) --group sbom --output-file deploy/locks/sbom.txt
	@$(PY) $(COMPILE) --group ui --output-file deploy/locks/ui.txt
	@$(PY) $(COMPILE) --group dist --output-file deploy/locks/dist.txt
	@$(PY) $(COMPILE) --group jax --constraints $(LOCK) --output-file deploy/locks/jax.txt
	@$(PY) $(COMPILE) pyproject.toml --group examples --output-file deploy/locks/examples.txt
	@$(PY) $(COMPILE) --group generators --output-file deploy/locks/generators.txt
	@$(PY) $(COMPILE) --group docs --output-file deploy/locks/docs.txt
	@$(PY) $(COMPILE) --group attack --output-file deploy/locks/attack.txt
	@$(PY) $(COMPILE) --group deploy --output-file deploy/locks/deploy.txt
	@$(PY) $(COMPILE) pyproject.toml --group load --output-file deploy/locks/load.txt

clean: ## remove what the other targets made
	rm -rf $(VENV) build dist demo-output $(CPU)/_native service/convgrad_service/backends/cuda/_cubins .mypy_cache .ruff_cache .pytest_cache .hypothesis
