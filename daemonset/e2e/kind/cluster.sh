#!/bin/bash
# A kind cluster for the tests of daemonset/e2e: one control plane, two workers.
#
#	cluster.sh prepare            build what a cluster needs; what is there stays (the first time 20 minutes or more)
#	cluster.sh up                 prepare, and start the cluster (under a minute)
#	cluster.sh env                print what to set to use it:  eval "$(cluster.sh env)"
#	cluster.sh load ARCHIVE...    bring container images into the nodes
#	cluster.sh down               end everything that up has started
#
# KIND_NAME            name of the cluster (fingerpost); another name is another cluster
# KIND_SUBNET          addresses of the nodes (172.29.0.0/16)
# KIND_POD_SUBNET      addresses of pods (10.244.0.0/16)
# KIND_SERVICE_SUBNET  addresses of Services (10.96.0.0/16)
# KIND_DIR             where all of it is kept (${XDG_CACHE_HOME:-~/.cache}/fingerpost/kind)
# KIND_NODE_IMAGE      a stock node image, as kindest/node:v1.37.2, where a registry can be
#                      reached; the Docker of the environment runs it. Without it the image is
#                      made here, and a dockerd of its own runs it, which needs root.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
repository=$(cd "$here/../../.." && pwd)

export KIND_NAME=${KIND_NAME:-fingerpost} KIND_DIR=${KIND_DIR:-${XDG_CACHE_HOME:-$HOME/.cache}/fingerpost/kind}
subnet=${KIND_SUBNET:-172.29.0.0/16} pods=${KIND_POD_SUBNET:-10.244.0.0/16} services=${KIND_SERVICE_SUBNET:-10.96.0.0/16}
bridge=br-${KIND_NAME:0:12} # names of interfaces have 15 bytes
dockerd=$KIND_DIR/dockerd
mkdir -p "$KIND_DIR"
export KUBECONFIG=$KIND_DIR/$KIND_NAME.kubeconfig KIND_EXPERIMENTAL_DOCKER_NETWORK=kind-$KIND_NAME
[ -n "${KIND_NODE_IMAGE:-}" ] || export DOCKER_HOST=unix://$dockerd/docker.sock

say() { printf '%s kind: %s\n' "$(date +%T)" "$*" >&2; }
die() { echo "cluster.sh: $*" >&2; exit 1; }
# tool NAME: where tools/bring has put it
tool() { (cd "$repository" && go run ./tools/bring -path "$1"); }
bring() { (cd "$repository" && go run ./tools/bring "$@"); }
kind() { "$(tool kind)" "$@"; }
kubectl() { "$(tool kubectl)" "$@"; }
running() { local pid; pid=$(cat "$dockerd/pid" 2>/dev/null) && [ "$(cat "/proc/$pid/comm" 2>/dev/null)" = dockerd ]; }

packages() {
	local p need=()
	for p in docker.io debootstrap libseccomp-dev iptables iproute2 jq gcc pkg-config; do
		dpkg -s "$p" >/dev/null 2>&1 || need+=("$p")
	done
	[ ${#need[@]} = 0 ] && return
	[ "$(id -u)" = 0 ] || die "install Debian's packages: ${need[*]}"
	say "installing ${need[*]}"
	apt-get update -q >&2
	DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends "${need[@]}" >&2
}

# The dockerd has data, socket and runtime of its own and no bridge but the
# cluster's, so that nothing of the host's Docker is touched.
start_dockerd() {
	running && return
	local d=$dockerd i
	mkdir -p "$d"
	rm -f "$d/pid"
	(cd "$repository" && CGO_ENABLED=0 go build -trimpath -o "$d/runtime" ./daemonset/e2e/kind/runtime)
	cat >"$d/daemon.json" <<-JSON
		{"data-root": "$d/data", "exec-root": "$d/exec", "pidfile": "$d/pid", "hosts": ["$DOCKER_HOST"], "bridge": "none",
		 "storage-driver": "overlay2", "default-runtime": "here", "runtimes": {"here": {"path": "$d/runtime"}}}
	JSON
	say "starting dockerd; its log is $d/log"
	# Debian's runc does not know CAP_BPF, and so takes it from the nodes.
	RUNC=$(tool runc) setsid nohup dockerd --config-file "$d/daemon.json" >"$d/log" 2>&1 </dev/null &
	for ((i = 0; i < 150; i++)); do
		docker info >/dev/null 2>&1 && return
		sleep 0.2
	done
	die "dockerd does not answer: $(tail -n 1 "$d/log")"
}

# image prints the name of the node image that fits what it is made of.
image() {
	local sum
	sum=$(cd "$here" && cat node-image.sh cni.yaml storage.yaml */main.go ../../../tools/tools.go | sha256sum)
	echo "fingerpost/node:${sum:0:16}"
}

prepare() {
	if [ -n "${KIND_NODE_IMAGE:-}" ]; then
		bring cluster
		return
	fi
	packages
	bring cluster etcd kube-apiserver node envoy
	start_dockerd
	docker image inspect "$(image)" >/dev/null 2>&1 || "$here/node-image.sh" "$(image)"
}

config() {
	cat <<-YAML
		kind: Cluster
		apiVersion: kind.x-k8s.io/v1alpha4
		networking:
		  apiServerAddress: 127.0.0.1
		  ipFamily: ipv4
		  podSubnet: $pods
		  serviceSubnet: $services
		kubeadmConfigPatches:
		- |
		  kind: KubeletConfiguration
		  apiVersion: kubelet.config.k8s.io/v1beta1
		  failCgroupV1: false
		nodes:
		- role: control-plane
		- role: worker
		- role: worker
	YAML
}

# Pods and Services have addresses that mean something in the nodes alone. From
# the host they go nowhere, and nothing leaves the cluster's bridge: a request
# to an address that the cluster does not know ends here, not in the network
# that the host is part of.
shut() {
	docker network inspect "$KIND_EXPERIMENTAL_DOCKER_NETWORK" >/dev/null 2>&1 ||
		docker network create -d bridge --subnet "$subnet" -o com.docker.network.bridge.name="$bridge" \
			-o com.docker.network.bridge.enable_ip_masquerade=true "$KIND_EXPERIMENTAL_DOCKER_NETWORK" >/dev/null
	iptables -C DOCKER-USER -i "$bridge" ! -o "$bridge" -j REJECT 2>/dev/null ||
		iptables -I DOCKER-USER -i "$bridge" ! -o "$bridge" -j REJECT
	ip route replace blackhole "$pods"
	ip route replace blackhole "$services"
}

up() {
	prepare
	if kind get clusters 2>/dev/null | grep -qx "$KIND_NAME"; then
		say "the cluster $KIND_NAME is there"
		return
	fi
	[ -n "${KIND_NODE_IMAGE:-}" ] || shut
	config | kind create cluster --name "$KIND_NAME" --config - --image "${KIND_NODE_IMAGE:-$(image)}" --retain --wait 180s >&2
	kubectl -n kube-system rollout status ds/kindnet ds/kube-proxy deploy/coredns --timeout 120s >&2
}

print_env() {
	echo "export KUBECONFIG='$KUBECONFIG' KIND_NAME='$KIND_NAME' KIND_DIR='$KIND_DIR' PATH='$(dirname "$(tool kubectl)"):$(dirname "$(tool kind)")':\$PATH"
	[ -n "${KIND_NODE_IMAGE:-}" ] && echo "export KIND_NODE_IMAGE='$KIND_NODE_IMAGE'" || echo "export DOCKER_HOST='$DOCKER_HOST'"
}

load() {
	local archive
	for archive; do kind load image-archive "$archive" --name "$KIND_NAME" >&2; done
}

down() {
	local pid
	if [ -n "${KIND_NODE_IMAGE:-}" ] || running; then
		kind delete cluster --name "$KIND_NAME" >&2
	fi
	[ -z "${KIND_NODE_IMAGE:-}" ] || return 0
	if running; then
		docker network rm "$KIND_EXPERIMENTAL_DOCKER_NETWORK" >/dev/null 2>&1 || true
		iptables -D DOCKER-USER -i "$bridge" ! -o "$bridge" -j REJECT 2>/dev/null || true
	fi
	ip route del blackhole "$pods" 2>/dev/null || true
	ip route del blackhole "$services" 2>/dev/null || true
	# Another cluster of this directory may still need the dockerd.
	if running && [ -z "$(docker ps -aq)" ]; then
		pid=$(cat "$dockerd/pid")
		kill "$pid"
		while kill -0 "$pid" 2>/dev/null; do sleep 0.2; done
	fi
}

case ${1:-} in
prepare | up | down) "$1" ;;
env) print_env ;;
load) shift; load "$@" ;;
*) die "say prepare, up, env, load or down" ;;
esac
