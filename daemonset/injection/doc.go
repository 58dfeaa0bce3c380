// Package injection gives pods what they need to reach the agent of their node:
// in mode envoy a sidecar, a native one (an init container that goes on
// running) with a user id of its own, in mode grpc the mount of the agent's
// sockets and the bootstrap of gRPC's own xDS client.
//
// There are two ways to the same pod. [Manifests] changes manifests before they
// are applied; it is fingerpost inject. The policies that [Policies] writes make
// the API server do it, by a label of the pod: a MutatingAdmissionPolicy that
// changes the pod, and a ValidatingAdmissionPolicy that refuses, with the reason,
// what must not be changed. What is added stands in sidecar.go, what is refused
// in rules.go, each once: the policies are generated from there.
//
// A pod has to be told nothing but who it is, which the kubelet does by
// environment variables; so nothing has to be there in the pod's namespace. The
// directory of the sockets is the host's, made by the kubelet where the agent was
// not first (DirectoryOrCreate): a sidecar may start before the agent, and waits.
// While it waits its startup probe fails, and the path of the probe, which
// kubectl describe shows, says for what.
package injection

//go:generate go run ./generate
