# `make demo` and `make test` do all set-up in .venv; everything else builds on the same set-up.
#   PYTHON=python3.12     interpreter of a new .venv
#   TORCH=torch==2.13.0   another torch; remembered, so it need not be repeated
#   TORCH_INDEX=URL       an extra package index to take torch from, for example of CPU-only wheels
#   MODEL=smollm2         of `make demo`: another model than the bundled pair, answering questions

PYTHON ?= python3
TORCH ?= $(or $(shell cat .venv/.torch 2>/dev/null),torch==2.13.0)
TORCH_INDEX ?=
BIN := .venv/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
CPP_FILES := $(shell find csrc -name '*.cpp' -o -name '*.cu' -o -name '*.h' -o -name '*.inl' -o -name '*.cuh')

# Of `make gpu`, which takes .venv where there is one and needs no network:
OUT ?= build/gpu
MINUTES ?= 8

.PHONY: demo test check sanitize bench docs gpu lint types format clean force

demo: build/.built
	$(BIN)/fastspec demo $(if $(MODEL),--target $(MODEL) --chat)

# One process for each core, but not more than pay for their imports; the files that take longest
# come first.
PYTEST := $(BIN)/python -m pytest --numprocesses auto --maxprocesses 4 --no-loadscope-reorder

# A file's tests stay together, for what they share.
test: build/.built
	$(PYTEST) --dist loadfile

# What needs longer than a test should, once for a commit: compilation for every GPU architecture,
# long tests of processes and of interpreted kernels, the pages of docs/ in strict mode, and malformed
# calls of the sanitized CPU kernels.
check: lint types build/.built
	$(PYTEST) --dist load --maxschedchunk 1 -m check
	@test -e "$(LIBASAN)" || echo "no $(LIBASAN) of GCC: the sanitized kernels are not tested"
	@! test -e "$(LIBASAN)" || $(MAKE) sanitize SANITIZED_TESTS="error or border"

# Tests of the CPU kernels under AddressSanitizer and UBSan, in a copy of the sources, with GCC; all
# of them before a release.
SANITIZED_TESTS ?= cpu or error or border
LIBASAN = $(shell $(CXX) -print-file-name=libasan.so)
SANITIZED := build/sanitized
SANITIZERS := -fsanitize=address,undefined
sanitize: build/.built
	rm -rf $(SANITIZED)
	mkdir -p $(SANITIZED)
	cp -r setup.py pyproject.toml README.md LICENSE csrc kernels fastspec tests $(SANITIZED)
	rm -f $(SANITIZED)/kernels/fastspec_kernels/*.so
	cd $(SANITIZED) && CXX="$(CXX) $(SANITIZERS)" LDFLAGS="$(SANITIZERS)" \
	    ../../$(BIN)/python setup.py --quiet build_ext --inplace
	cd $(SANITIZED) && PYTHONPATH=.:kernels ASAN_OPTIONS=detect_leaks=0 \
	    UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1 \
	    LD_PRELOAD="$(LIBASAN) $$($(CXX) -print-file-name=libstdc++.so.6)" \
	    ../../$(BIN)/python -m pytest tests/kernels -p no:cacheprovider \
	    -k "($(SANITIZED_TESTS)) and not triton and not large"

bench: build/.built
	$(BIN)/python -m pytest benchmarks --benchmark-only $(if $(RECORD),--record $(RECORD)) $(if $(FULL),--full)

# The site, in build/site; needs Python 3.11.
docs: .venv/.installed
	$(BIN)/python -m mkdocs build --strict

gpu:
	$(or $(wildcard $(BIN)/python),$(PYTHON)) -m benchmarks.gpu --out $(OUT) --minutes $(MINUTES) $(ARGS)

lint: .venv/.installed
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/clang-format --dry-run -Werror $(CPP_FILES)

types: .venv/.installed
	$(BIN)/pyright

format: .venv/.installed
	$(BIN)/ruff check --fix
	$(BIN)/ruff format
	$(BIN)/clang-format -i $(CPP_FILES)

# Removes what was built, not .venv.
clean:
	rm -rf build dist *.egg-info kernels/fastspec_kernels/*.so .pytest_cache .ruff_cache .benchmarks

build/.built: .venv/.installed setup.py $(CPP_FILES)
	$(BIN)/python setup.py --quiet build_ext --inplace
	@mkdir -p build
	@touch $@

.venv/.installed: .venv/.torch requirements-dev.txt pyproject.toml
	$(PIP) install --quiet --constraint requirements-dev.txt setuptools wheel
	$(PIP) install --quiet --no-deps --retries 1 $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) '$(TORCH)'
	$(PIP) install --quiet --constraint requirements-dev.txt --no-build-isolation --editable '.[test,dev]'
	@touch $@

# Rewritten only when another torch is asked for.
.venv/.torch: force
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@test "`cat $@ 2>/dev/null`" = '$(TORCH)' || echo '$(TORCH)' > $@
