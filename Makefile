# One virtual environment serves every target. A stamp is written when an installation is complete. Without the first
# one (interrupted, copied from elsewhere, its Python gone) the environment is made anew; an old one is only updated.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
INSTALLED_FOR_TESTS := $(VENV)/.installed_for_test
# A worker for each core, but for so many that memory would be short.
WORKERS ?= logical --maxprocesses 8

usable := $(shell test "$$(cat $(INSTALLED) 2>/dev/null)" = "$(CURDIR)" && $(BIN)/python -m pip --version 2>/dev/null)
ifeq ($(usable),)
.PHONY: $(INSTALLED)
endif

# Runs the commands $(2) and prints how long they took.
timed = @start=$$(date +%s); set -x; $(2); { status=$$?; set +x; } 2>/dev/null; seconds=$$(($$(date +%s) - start)); \
	printf '%s: %d.%d minutes\n' "$(1)" $$((seconds / 60)) $$((seconds % 60 / 6)); exit $$status

.PHONY: quickstart real real-rlhf results overopt compare lora against-trl long-horizon games memory-table bench same-run same-numbers torture fuzz cut-options test messages proof proof-ci vllm-test real-test docs browser-test check

quickstart results overopt compare lora: $(INSTALLED)
	$(BIN)/python -m examples.mini_farm.$@

# A real model in 19 minutes; REAL="--model HuggingFaceTB/SmolLM2-135M-Instruct" for one from the hub.
REAL ?=
real: $(VENV)/.installed_for_real
	$(BIN)/python -m examples.sentences.run $(REAL)

# RLHF on the same model: pairs of its answers, a reward model, PPO; 55 minutes of processor time.
real-rlhf: $(VENV)/.installed_for_real
	$(BIN)/python -m examples.mini_farm.real $(REAL)

# The same training by TRL, which gets .venv-trl; AGAINST="--seeds 1 2" for fewer seeds, "--quick" for small models.
AGAINST ?=
against-trl: $(INSTALLED)
	$(BIN)/python -m examples.mini_farm.against_trl $(AGAINST)

# Row by row: interrupted, it continues with the row that it was at; hours on two cores.
long-horizon: $(INSTALLED)
	OMP_NUM_THREADS=1 $(BIN)/python -m examples.long_horizon.table

# Row by row too; half an hour on one core.
games: $(INSTALLED)
	OMP_NUM_THREADS=1 $(BIN)/python -m examples.games.table

memory-table: $(INSTALLED)
	$(BIN)/python -m examples.memory_table

# Against TRL, which gets environments of its own, GRPO and the bare model compute, on SmolLM2-135M's shape: an hour.
# BENCH="--quick" takes three minutes; other flags are those of the first program.
BENCH ?=
bench: $(INSTALLED)
	$(BIN)/python -m tests.tools.benchmarks.step $(BENCH)
	$(BIN)/python -m tests.tools.benchmarks.critic_cost $(filter --quick,$(BENCH))

# Kills runs at every kind of moment and compares what they leave with a run left alone; half an hour on two cores, and
# an hour more with a vLLM (VLLM_PYTHON, or what vllm-test makes).
torture: $(INSTALLED)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.tools.torture

# Ten minutes of mutated input that no test run has seen; FUZZ="--minutes 60 --seed 1" for others.
FUZZ ?=
fuzz: $(INSTALLED_FOR_TESTS)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.fuzz $(FUZZ)

# Under DeepSpeed too.
same-run: $(INSTALLED_FOR_TESTS)
	$(BIN)/python -m examples.same_run

# What a change that claims to move no number is held to; BASE is the commit to compare the working tree with.
BASE ?= f9ff48ea
same-numbers: $(INSTALLED_FOR_TESTS)
	$(BIN)/python -m tests.tools.same_numbers $(BASE)

# Cuts the wiring of one option after the other: the test that shows it must fail.
cut-options: $(INSTALLED_FOR_TESTS)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.tools.cut_options

test: check
	$(call timed,tests,$(BIN)/python -m pytest -n $(WORKERS) --durations 20)

# Every sentence with which the package refuses something, in tests/messages.txt: read its diff.
messages: $(INSTALLED)
	$(BIN)/python -m tests.tools.messages

# What takes long and proves one more case: every ZeRO stage with every layout, moves between process counts, nodes, and
# of a real vLLM the other families, with shuffled requests, and kills; SmolLM2-135M.
proof: $(INSTALLED_FOR_TESTS)
	$(call timed,proof,$(BIN)/python -m pytest -n $(WORKERS) -m proof --durations 20)
	$(MAKE) vllm-test VLLM_TEST='-m proof'
	$(MAKE) real-test

# The part of it that every change must pass: process counts, ZeRO, FSDP2, resuming, killed runs, the wheel, notebooks,
# examples, fuzz.
proof-ci: $(INSTALLED_FOR_TESTS)
	$(call timed,proof-ci,$(BIN)/python -m pytest -n $(WORKERS) -m proof --durations 5 \
		tests/integration/test_processes.py tests/integration/test_resume_processes.py tests/integration/test_zero.py \
		tests/integration/test_launch_configs.py tests/integration/test_dying.py tests/integration/test_torture.py \
		tests/integration/test_installed.py tests/integration/test_notebook.py tests/integration/test_refusals.py \
		tests/generation/test_slots.py tests/examples/test_mini_farm_miniature.py tests/fuzz \
		tests/estimate_memory/test_estimator.py tests/generation/test_vllm_process.py tests/generation/test_vllm.py \
		tests/distributed/test_preemption.py tests/distributed/test_launcher.py tests/environments/test_two_turn_game.py \
		tests/independent/test_ppo_step.py tests/models/test_trial.py tests/adapters/test_adapter_runs.py \
		tests/examples/test_games.py tests/examples/test_long_horizon.py tests/examples/test_mini_farm_against_trl.py \
		tests/examples/test_mini_farm_plots.py tests/examples/test_mini_farm_sampling.py \
		tests/examples/test_mini_farm_stages.py tests/examples/test_mini_farm_world.py \
		tests/trainer/test_accepted_options.py)

# A real vLLM on the CPU, in an environment that takes two minutes to make; VLLM_TEST='-m "not proof"' for one family.
VLLM_TEST ?= -m "proof or not proof"
vllm-test: $(INSTALLED_FOR_TESTS) $(VENV)-vllm/.installed
	$(call timed,vllm-test,VLLM_PYTHON=$(VENV)-vllm/bin/python $(BIN)/python -m pytest $(VLLM_TEST) --durations 5 tests/integration/vllm_checks.py)

# The model of `make real`, which is fetched unless it is there (93 MB): samplers, layouts, resuming, export. Its
# checkpoints are too large for a folder in memory. REAL_TEST='-m "not proof"' for less than half of the minutes.
REAL_TEST ?= -m "proof or not proof"
real-test: $(VENV)/.installed_for_real $(INSTALLED_FOR_TESTS) $(VENV)-vllm/.installed
	$(BIN)/python -m examples.sentences.model outputs/sentences/SmolLM2-135M-Instruct
	$(call timed,real-test,PYTEST_DEBUG_TEMPROOT=/tmp VLLM_PYTHON=$(VENV)-vllm/bin/python $(BIN)/python -m pytest -n 2 $(REAL_TEST) --durations 5 tests/integration/real_checks.py)

$(VENV)-vllm/.installed: alpaca_ppo/cli/vllm_environment.py | $(INSTALLED)
	$(BIN)/alpaca-ppo vllm-env $(VENV)-vllm --device cpu
	touch $@

# The pages as a site, in site/; REPOSITORY is the address that links to code lead to. To read it with its search:
# python -m http.server --directory site
docs: $(VENV)/.installed_for_docs
	$(call timed,docs,NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build)

# Report and site in a headless Chromium, which must be installed; SCREENSHOTS=<folder> keeps what they looked like.
browser-test: $(INSTALLED_FOR_TESTS) docs
	$(BIN)/python -m pip install -q -c constraints.txt playwright
	$(call timed,browser,$(BIN)/python -m pytest tests/report/browser_checks.py tests/docs/site_checks.py)

check: $(INSTALLED_FOR_TESTS)
	$(call timed,check,$(BIN)/python -m ruff check . && $(BIN)/python -m ruff format --check . && $(BIN)/python -m mypy)

# setuptools goes in first, under the same constraints, and builds the package without a second, unconstrained environment.
$(INSTALLED): setup.cfg constraints.txt
	$(if $(usable),,$(PYTHON) -m venv --clear $(VENV))
	rm -f $@
	$(BIN)/python -m pip install -c constraints.txt setuptools
	$(BIN)/python -m pip install -c constraints.txt --no-build-isolation -e .
	echo "$(CURDIR)" > $@

# The extra of that name.
$(VENV)/.installed_for_%: $(INSTALLED)
	rm -f $@
	$(BIN)/python -m pip install -c constraints.txt --no-build-isolation -e '.[$*]'
	touch $@
