#!/bin/bash
# Runs the cluster tests: brings a kind cluster up, the images into it, the tests
# through, and the cluster down again. `make test-kind` calls it.
#
# MODE is a directory of modes/: the agents are installed as it says, and without
# ONLY the scenarios run that drain, roll out and exchange agents.
# KEEP=1 leaves the cluster as it is, for another run or to look at it;
# kind/cluster.sh down ends it. ONLY is a pattern of tests, as go test -run takes it.
# The settings of the cluster itself are in kind/cluster.sh.
set -euo pipefail
cd "$(dirname "$0")/../.."
cluster=daemonset/e2e/kind/cluster.sh
if [ -n "${MODE:-}" ]; then
	[ -f "daemonset/e2e/modes/$MODE/kustomization.yaml" ] || {
		echo "MODE=$MODE is none of: $(ls daemonset/e2e/modes | tr '\n' ' ')" >&2
		exit 2
	}
	ONLY=${ONLY:-'^(TestFirstCallOnAFreshCluster|TestDrainOfEachWorker|TestRollingUpdates|TestRollingUpdateOfTheAgents)$'}
fi

make --no-print-directory image IMAGE=fingerpost:kind
# By the name that the injection gives it, so that nothing has to be set.
make --no-print-directory image-envoy ENVOY_IMAGE=docker.io/envoyproxy/envoy:distroless-v1.40.0
CGO_ENABLED=0 go build -trimpath -tags grpcnotrace -ldflags '-s -w' -o bin/workload ./daemonset/e2e/workload
bin/image -o bin/workload-image.tar -name workload:kind -entrypoint /workload bin/workload=/workload

[ -n "${KEEP:-}" ] || trap '$cluster down' EXIT
$cluster up
$cluster load bin/fingerpost-image.tar bin/envoy-image.tar bin/workload-image.tar
eval "$($cluster env)"
go test -tags kind -v -count 1 -timeout 60m ${ONLY:+-run "$ONLY"} ./daemonset/e2e
