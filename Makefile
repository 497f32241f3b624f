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
.PHONY: help aarch64 mpi test-mpi demo demo-device study study-layers codec-errors test test-quick test-all wheel sdist test-torch test-peers test-elastic test-device fuzz-world mutants bench bench-against scaling layer-plans bench-peers bench-lanes clean

help: ## list the targets
	@echo "make TARGET [TORCH=2.15.0] [PYTHON=python3] [ARGS='...']"
	@sed -nE 's/^([a-z-]+):.*## (.*)/  \1\t\2/p' Makefile | expand -t 16

demo: ## train on digits over accl and over gloo, in two processes, and compare
	@.ci/demo $(ARGS)

demo-device: ## train on digits on emulated collective engines (CCLO) behind ZeroMQ sockets, and on the host, and compare
	@.ci/demo_device $(ARGS)

study: ## train small models with compressed gradients, and compare their losses with float32's; ARGS='--quick'
	@.ci/study $(ARGS)

study-layers: ## train nets layer-parallel, exactly and by multigrid, and compare what they learn; ARGS='--quick', ARGS='--study digits'
	@.ci/study_layers $(ARGS)

codec-errors: ## what each codec loses, alone and in sums, beside what it must
	@.ci/codec_errors $(ARGS)

test: ## every check and test, cheap ones first; of large matrices and slow tests a part
	@.ci/test

test-quick: ## for a change in hand: gates, Rust tests of changed crates, a part of the tests through torch
	@.ci/quick

test-all: ## every case of every test through torch
	@.ci/tools
	@.ci/venv build test
	@.ci/install
	@ACCL_TEST_COVER=all .ci/pytest $(ARGS)

wheel: ## build the release wheel for TORCH into dist/
	@.ci/tools
	@.ci/wheel

sdist: ## make the source distribution, build a wheel of it elsewhere, install that and use it
	@.ci/tools
	@.ci/sdist --whole

test-torch: ## wheel, tests and peers suite on each torch that is built for; ARGS='2.13.0' for one
	@.ci/test_torch $(ARGS)

test-peers: ## PyTorch's own distributed suite at worlds 2, 3 and 4, next to a fresh gloo run
	@.ci/tools
	@.ci/venv build test
	@.ci/install
	@.ci/peers --world 2,3,4 --baseline run $(ARGS)

test-elastic: ## ranks that die at every moment of making groups, over every store and kind of launcher
	@.ci/tools
	@.ci/venv build test
	@.ci/install
	@ACCL_TEST_ELASTIC=all .ci/pytest tests/test_elastic.py $(ARGS)

mpi: ## the package with the transport `mpi`, built against MPICC=mpicc and installed beside torch-accl
	@.ci/tools
	@.ci/venv build
	@.ci/mpi $(ARGS)

test-mpi: ## the transport `mpi` under Open MPI and MPICH; ARGS='mpich' for one
	@.ci/tools
	@.ci/venv build test
	@.ci/install
	@.ci/test_mpi $(ARGS)

test-device: ## every world, design, place and count of a group with a device, through torch and below; takes about 20 minutes
	@.ci/test_device $(ARGS)

fuzz-world: ## simulated worlds of random seeds for HOURS=1, on every core
	@HOURS=$(HOURS) .ci/fuzz_world

mutants: ## plant defects in the engine, and show that the simulated world finds each of them; ARGS='--list'
	@.ci/mutants $(ARGS)

aarch64: ## the crates below Python for Arm: checked, and rings and kernels run under qemu
	@.ci/aarch64

bench: ## the microbenchmarks
	@.ci/tools
	@.ci/bench $(ARGS)

bench-against: ## all_reduce of this tree beside that of another commit, by turns; ARGS='COMMIT --pairs 31'
	@.ci/tools
	@$(PYTHON) -m benches.against $(ARGS)

scaling: ## what one more rank and one more group cost; ARGS=--write-docs for docs/scaling.md
	@.ci/scaling $(ARGS)

layer-plans: ## what layer-parallel training could gain on up to 4,096 ranks; ARGS=--write-docs for docs/layer-parallel/tuning.md
	@.ci/layer_plans $(ARGS)

bench-peers: ## speed next to gloo, MPI, oneCCL and DeepSpeed: docs/performance.md; ARGS='--quick --sections all_reduce'
	@.ci/bench_peers $(ARGS)

bench-lanes: ## several cores per rank: worker threads, compared with other libraries; a section of docs/performance.md
	@.ci/bench_peers --sections lanes,lanes_crowded $(ARGS)

clean: ## remove everything that was built, .venv included
	rm -rf target dist build demo-output .venv .make
