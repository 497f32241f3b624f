# The commands of the repository. Each runs a script under .ci/, which can be run by itself; `make help` lists them.

# The torch to build against and to run with: a minor (2.15) or a version (2.15.0).
TORCH ?= 2.15.0
# The interpreter from which .venv is created.
PYTHON ?= python3
# Hours that fuzz-world searches.
HOURS ?= 1
# Passed on by the targets that take arguments, for example: make bench ARGS='all_reduce/ring'
ARGS ?=
export TORCH PYTHON

.DEFAULT_GOAL := help
.PHONY: help aarch64 mpi test-mpi demo demo-device study study-layers codec-errors test test-quick test-all wheel sdist test-torch test-peers test-elastic test-device test-accelerator gpu-bundle test-gpu bench-gpu fuzz-world mutants bench bench-against scaling layer-plans bench-peers bench-lanes clean

help: ## list the targets
	@echo "make TARGET [TORCH=2.15.0] [PYTHON=python3] [ARGS='...']"
	@sed -nE 's/^([a-z-]+):.*## (.*)/  \1\t\2/p' Makefile | expand -t 16

demo: ## train on digits over accl and over gloo, in two processes, and compare
	@.ci/demo $(ARGS)

demo-device: ## train on digits on emulated collective engines (CCLO) behind ZeroMQ sockets and on the host, and compare
	@.ci/demo_device $(ARGS)

study: ## train small models with compressed gradients, and compare their losses with float32's; ARGS='--quick'
	@.ci/study $(ARGS)

study-layers: ## train nets layer-parallel, exactly and by multigrid, and compare the results; ARGS='--quick', ARGS='--study digits'
	@.ci/study_layers $(ARGS)

codec-errors: ## compare the errors of each codec, alone and in sums, with reference values
	@.ci/codec_errors $(ARGS)

test: ## all checks and tests, cheap ones first; large matrices and slow tests only in part
	@.ci/test

test-quick: ## test a change: gates, Rust tests of changed crates, part of the tests through torch
	@.ci/quick

test-all: ## all cases of all tests through torch
	@.ci/tools
	@.ci/venv build test
	@.ci/install
	@ACCL_TEST_COVER=all .ci/pytest $(ARGS)

wheel: ## build the release wheel for TORCH into dist/
	@.ci/tools
	@.ci/wheel

sdist: ## create the source distribution, and build, install and use a wheel from it elsewhere
	@.ci/tools
	@.ci/sdist --whole

test-torch: ## build the wheel, and run the tests and the peers suite, on each supported torch; ARGS='2.13.0' for one
	@.ci/test_torch $(ARGS)

test-peers: ## run PyTorch's own distributed suite at worlds 2, 3 and 4, next to a fresh gloo run
	@.ci/tools
	@.ci/venv build test
	@.ci/install
	@.ci/peers --world 2,3,4 --baseline run $(ARGS)

test-elastic: ## kill ranks at every step of creating groups, over every store and kind of launcher
	@.ci/tools
	@.ci/venv build test
	@.ci/install
	@ACCL_TEST_ELASTIC=all .ci/pytest tests/test_elastic.py $(ARGS)

mpi: ## build the package with the transport `mpi` against MPICC=mpicc, and install it next to torch-accl
	@.ci/tools
	@.ci/venv build
	@.ci/mpi $(ARGS)

test-mpi: ## test the transport `mpi` under Open MPI and MPICH; ARGS='mpich' for one
	@.ci/tools
	@.ci/venv build test
	@.ci/install
	@.ci/test_mpi $(ARGS)

test-device: ## test groups with a device, through torch and below: all world sizes, designs, roots and counts; takes about 20 minutes
	@.ci/test_device $(ARGS)

test-accelerator: ## test calls on tensors of an accelerator, on a stand-in, with its streams early, late and at random
	@.ci/test_accelerator $(ARGS)

gpu-bundle: ## pack wheel, tests and runner for a machine with a GPU that has torch 2.11 and CPython 3.12, but neither network nor Rust
	@.ci/tools
	@.ci/gpu_bundle $(ARGS)

test-gpu: ## test calls on tensors of this machine's GPU; says "no GPU" without one; ARGS='--device standin --tiny'
	@.ci/gpu --part order,peer,codecs,end,jobs,suite $(ARGS)

bench-gpu: ## measure calls on tensors of this machine's GPU, next to copies and gloo: docs/performance/accelerators.md
	@.ci/gpu --part bench,peer,codecs,stream $(ARGS)

fuzz-world: ## run simulated worlds with random seeds for HOURS=1, on every core
	@HOURS=$(HOURS) .ci/fuzz_world

mutants: ## plant defects in the engine, and check that the simulated world finds each of them; ARGS='--list'
	@.ci/mutants $(ARGS)

aarch64: ## check the crates below Python for Arm, and run rings and kernels under qemu
	@.ci/aarch64

bench: ## run the microbenchmarks
	@.ci/tools
	@.ci/bench $(ARGS)

bench-against: ## compare all_reduce and import of this tree with another commit, alternately; ARGS='COMMIT --pairs 31'
	@.ci/bench_against $(ARGS)

scaling: ## measure the cost of one more rank and one more group; ARGS=--write-docs for docs/scaling.md
	@.ci/scaling $(ARGS)

layer-plans: ## predict gains of layer-parallel training on up to 4,096 ranks; ARGS=--write-docs for docs/layer-parallel/tuning.md
	@.ci/layer_plans $(ARGS)

bench-peers: ## compare speed with gloo, MPI, oneCCL and DeepSpeed: docs/performance.md; ARGS='--quick --sections all_reduce'
	@.ci/bench_peers $(ARGS)

bench-lanes: ## several cores per rank: worker threads, compared with other libraries; a section of docs/performance.md
	@.ci/bench_peers --sections lanes,lanes_crowded $(ARGS)

clean: ## remove everything that was built, .venv included
	rm -rf target dist build demo-output .venv .make
