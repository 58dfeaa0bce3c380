# One way to build, one way to test. `make` lists what there is.
GO      ?= go
VERSION ?= $(shell git describe --tags --always --dirty 2>/dev/null || echo unknown)
LDFLAGS  = -s -w -X main.version=$(VERSION)
# Without grpc's hook for golang.org/x/net/trace no template is linked, which
# finds methods by name and makes the linker keep every one there is: 7 MB.
TAGS     = grpcnotrace
IMAGE   ?= fingerpost:$(VERSION)
ENVOY_IMAGE ?= envoy:local
BRING    = $(GO) run ./tools/bring
PKG     ?= ./...
ONLY    ?=
KEEP    ?=
NODES   ?=

# Where test results go as `go test -json` writes them; for machines.
TEST_JSON ?= bin/test.json

.DEFAULT_GOAL := help
.PHONY: help build demo test test-short test-kind sim bench bench-short lint generate-check image image-envoy image-docker clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-16s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

build: ## bin/fingerpost, one static binary
	CGO_ENABLED=0 $(GO) build -trimpath -buildvcs=false -tags $(TAGS) -ldflags '$(LDFLAGS)' -o bin/fingerpost ./cmd/fingerpost

demo: build ## the whole on loopback, no cluster needed; ends by itself
	@$(BRING) envoy || echo "going on without Envoy" >&2
	@envoy=$$($(BRING) -path envoy); if [ -x "$$envoy" ]; then export ENVOY="$$envoy"; fi; exec bin/fingerpost demo

test: ## every test, on real parts; PKG=./xds/... for some (first run: builds kube-apiserver, minutes)
	@mkdir -p bin
	@$(BRING) test
	FINGERPOST_REQUIRE_TOOLS=1 "$$($(BRING) -path gotestsum)" --format pkgname --jsonfile $(TEST_JSON) -- \
		-race -count 1 -timeout 30m $(PKG)

test-short: ## the tests that start no program, a minute or so
	$(GO) test -short $(PKG)

test-kind: ## rollouts, drains and lost nodes on a kind cluster, half an hour; ONLY=TestDrain for some, MODE=on-demand or redirect for what asks the kernel, KEEP=1 keeps the cluster
	@KEEP="$(KEEP)" ONLY="$(ONLY)" MODE="$(MODE)" daemonset/e2e/run.sh

sim: ## peers of 100, 1,000 and 5,000 nodes in simulated time: the table of docs/scale.md; NODES=1000 OWNERS=2000 for less
	NODES="$(NODES)" OWNERS="$(OWNERS)" GOGC=50 $(GO) test -tags sim -count 1 -timeout 4h -run TestSimulation ./agent/peer -v

bench: ## benchmarks into bench.json, half an hour or more; ONLY=prefix for some
bench-short: ## a rough picture of them in two minutes
bench-short: BENCH_FLAGS = -short
bench bench-short:
	@$(BRING) etcd kube-apiserver
	@mkdir -p bin
	$(GO) build -o bin/bench ./test/bench
	exec bin/bench $(BENCH_FLAGS) -only "$(ONLY)" -o bench.json

lint: ## the linters of .golangci.yml
	@$(BRING) lint
	"$$($(BRING) -path golangci-lint)" run --allow-parallel-runners ./...

generate-check: ## fails if generated code, formatting or go.mod would change
	@tools/generate-check.sh

image: build bin/image ## bin/fingerpost-image.tar, for docker load, ctr import, skopeo; needs no Docker; IMAGE=name:tag
	bin/image -o bin/fingerpost-image.tar -name $(IMAGE) -arch $$($(GO) env GOARCH) -entrypoint /fingerpost -arg agent \
		-label org.opencontainers.image.title=fingerpost -label org.opencontainers.image.version=$(VERSION) bin/fingerpost=/fingerpost

image-envoy: bin/image ## bin/envoy-image.tar, the pinned Envoy with this machine's glibc, for tests; ENVOY_IMAGE=name:tag
	@$(BRING) envoy
	bin/image -o bin/envoy-image.tar -name $(ENVOY_IMAGE) -arch $$($(GO) env GOARCH) -entrypoint /usr/local/bin/envoy -libs -dir /tmp \
		"$$($(BRING) -path envoy)=/usr/local/bin/envoy"

image-docker: ## the same by the Dockerfile; BUILDER=image to build in another one
	SOURCE_DATE_EPOCH=0 docker build --build-arg SOURCE_DATE_EPOCH=0 --build-arg VERSION=$(VERSION) $(if $(BUILDER),--build-arg BUILDER=$(BUILDER)) -t $(IMAGE) .

# What turns files into an image; it has a module of its own.
.PHONY: bin/image
bin/image:
	@mkdir -p bin
	$(GO) build -C tools/image -o ../../bin/image .

clean: ## remove what was built here; the tools' cache stays
	rm -rf bin bench.json
