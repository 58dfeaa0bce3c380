// Package bpf is the room of what the agent asks of the kernel: identity (who
// is at the other end of the ADS socket), path (what netlink says about the way
// to a pod), observe (connects and retransmits per destination) and redirect
// (sending a pod's plain gRPC connections to its sidecar). All of it is optional
// on a node, each part available or off with a named reason; ADS never depends
// on it.
package bpf
