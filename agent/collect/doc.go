// Package collect learns by gRPC server reflection what an owner serves.
//
//	directory ──changed──▶ consider ──Submit──▶ scheduler ──▶ flight
//	    ▲                   ▲  ▲                                │ Begin
//	    │                   │  └── due: the wait is over        │ pod: checked again, then
//	    │                   └───── Want, Wait: a caller         │   every hinted port: Reflect
//	    └──────────────── Commit | Fail | Abandon ◀─────────────┘
//
// An owner that nobody has asked yet, and that has an eligible pod, gets one
// flight at a time, on a context of the scheduler's: those who wait for it may
// leave without harm to it. A pod is eligible if it is serving, holds its
// address, has a hinted port that is not declared, and is on this node where
// the scope says so.
//
// # One attempt
//
// The pods of this node are asked first, then those not asked since the last
// success, then by name; at most three, and fewer where connections came about
// and were of no use. All ports of one pod are asked. That a port speaks TLS,
// no gRPC, no reflection, or denies it, is an answer like a list of services.
// A port that gives none sends the attempt to the next pod; if no pod answers
// on all ports, the first that serves something on some port is committed with
// the others left out, since knowledge only narrows and a missing port takes
// nothing away. Else the attempt has failed and is made again after 1 s, 5 s,
// 30 s and then every 5 minutes, or sooner on a pod that is new.
//
// A deadline or a crossed budget ends the attempt at once and is tried again
// after 10 minutes, then 20, and so on up to 160, in whatever generation of the
// owner: some servers go on working for a caller that left.
//
// A connection that is hung up before its first byte looks like TLS. As a proxy
// before an absent application does the same, it has to happen in two attempts
// before it counts.
//
// No (owner, port) gets more than five connections within an hour, and the waits
// after deadlines hold, over restarts of the agent as well, where it has a
// directory for its state: [Collector.Past] goes into the checkpoint.
//
// # Asked again
//
// An answer stands for about an hour, then another pod is asked than last time.
// Pods that run other images than those asked before are asked at once, up to
// eight images of one owner; where they serve something else the owner is
// heterogeneous, and its info has a variant for them. What a pod serves beyond
// what was known counts at once. What it lacks is taken from the owner only if a
// second pod with the same images lacks it too, which is asked in the same
// flight, or if there is none; else it is that pod's own word, a variant for it
// alone. A question that fails, or finds no reflection any more, takes nothing.
// [Collector.Recollect] asks at once.
package collect
