// Package report says to a cluster's people what its directory shows: that a
// workload claims a service which another one provides, and that a new revision
// of a workload serves other services than the one before, and how routes stand
// under their Services.
//
//	directory ──changes──▶ Follower ──Event──▶ Writer ──if elected──▶ API server
//	    │     what one agent alone knows ──▶ ┘ │      ──always──▶
//	    │                               elected, Event
//	    └─────────routes, Services──▶ Statuses ┴─status.parents──▶
//
// Every agent follows its own directory, and so knows, logs and counts the
// same. One of them, elected by a Lease, writes: each Event has a name that
// follows from its content, so that a second one of the same is refused by the
// API server, whoever sends it, as long as it remembers the first (an hour by
// default). A [Writer] remembers what was said in the last minutes, and writes
// it when it is elected: what fell into the gap between two writers is not lost,
// what is older is not repeated.
//
// Statuses of routes are different: they last, and each can be compared with
// what is to be said. So [Statuses] remembers nothing. As long as its agent is
// elected it looks at each route when something has changed that concerns it,
// and at all of them at first.
package report
