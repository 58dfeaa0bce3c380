# One way to build, one way to test. `make` lists what there is.
GO      ?= go
VERSION ?= $(shell git describe --tags --always --dirty 2>/dev/null || echo unknown)
LDFLAGS  = -s -w -X main.version=$(VERSION)
# Without grpc's hook for golang.org/x/net/trace no template is linked, which
# finds methods by name and makes the linker keep every one there is: 7 MB.
TAGS     = grpcnotrace
IMAGE   ?= fingerpost:$(VERSION)
BRING    = $(GO) run ./tools/bring
PKG     ?= ./...
ONLY    ?=

# Where test results go as `go test -json` writes them; for machines.
TEST_JSON ?= bin/test.json

.DEFAULT_GOAL := help
.PHONY: help build demo test test-short test-kind bench bench-short lint generate-check image clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-16s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

build: ## bin/fingerpost, one static binary
	CGO_ENABLED=0 $(GO) build -trimpath -tags $(TAGS) -ldflags '$(LDFLAGS)' -o bin/fingerpost ./cmd/fingerpost

demo: build ## the whole on loopback, no cluster needed; ends by itself
	@$(BRING) envoy || echo "going on without Envoy" >&2
	@envoy=$$($(BRING) -path envoy); if [ -x "$$envoy" ]; then export ENVOY="$$envoy"; fi; exec bin/fingerpost demo

test: ## every test, on real parts; PKG=./xds/... for some (first run: builds kube-apiserver, minutes)
	@mkdir -p bin
	@$(BRING) test
	FINGERPOST_REQUIRE_TOOLS=1 "$$($(BRING) -path gotestsum)" --format pkgname --jsonfile $(TEST_JSON) -- \
		-race -count 1 -timeout 20m $(PKG)

test-short: ## the tests that start no program, a minute or so
	$(GO) test -short $(PKG)

test-kind: ## tests on a real cluster
	@if grep -rlsq '^//go:build kind' daemonset --include='*_test.go'; then \
		$(BRING) test cluster && FINGERPOST_REQUIRE_TOOLS=1 $(GO) test -tags kind -timeout 60m -count 1 ./daemonset/...; \
	else \
		echo "make test-kind: there are no cluster tests yet" >&2; exit 1; \
	fi

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

image: ## the container image; BUILDER=image to build in another one
	docker build --build-arg VERSION=$(VERSION) $(if $(BUILDER),--build-arg BUILDER=$(BUILDER)) -t $(IMAGE) .

clean: ## remove what was built here; the tools' cache stays
	rm -rf bin bench.json
