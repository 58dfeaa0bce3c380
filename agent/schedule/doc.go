// Package schedule decides which piece of work may run now.
//
// There is one coordinator for all work of the agent: [Scheduler]. Work is
// handed in with a group, a priority and a namespace, and starts when three
// things allow it: the global ceiling, the maximum of its group, and its turn.
//
//	Submit ──▶ queue of its group ──admitted by the coordinator──▶ runs ──▶ Done
//	             │        ▲
//	             │        └── Raise: a caller waits for it
//	             └── Cancel, overflow or stop: Done with an error, never run
//
// Turns go round-robin over the groups that have something ready and room for
// it; inside a group the higher priority is first; inside a priority the
// namespaces take turns, and the work of one namespace is first in, first out.
// So a group that always has work ready cannot starve another, nor can a
// namespace with many owners.
//
// Limits are enforced before work is dispatched: a goroutine exists only for
// work that may run, and never waits for capacity. Limits are maxima, nothing
// is reserved. What runs is not pre-empted.
package schedule
