// Package peer shares what the agents of a cluster collect, so that each owner is
// collected once, by one of them.
//
//	       Place: am I in charge?           Hosts, Learned
//	agent/collect ──────────▶ Exchange ◀──────────────────── nodecache
//	      ▲                    │  ▲  │  Learn, LearnFailure      ▲
//	      └───── Consider ─────┘  │  └───────────────────────────┘
//	                              │ records, signed
//	                              ▼
//	            Network: a few Sync streams, and Fetch, to other agents
//
// # Who collects
//
// Everybody computes it from what all of them see: of the nodes that have a pod of
// the owner that may be asked, and an agent, the first by rendezvous hashing
// (placement.go). If that one does not answer a Fetch within a second it is passed
// over for a while, and whoever finds itself the first of the rest collects. An
// agent that starts first hears what others know; and while nodes come and go
// nobody collects, since each would place owners by another list. Pods whose
// images nobody has asked are the business of the first of the nodes that have
// such a pod. Where no node has an agent, pods are asked from other nodes only if
// [Options.Remote] allows it and a caller waits.
//
// # What they tell one another
//
// A record is a statement of what an owner serves, or why asking it failed, signed
// with the TLS key of an agent. It counts only if that agent speaks for a node on
// which our own directory sees a pod of the owner that may be asked; so it does
// not matter who brings it. Of two records of one owner the one that was collected
// later counts, and what this agent itself has collected later is never replaced.
// The agent in charge vouches for what it knows: it signs anew what nobody's
// word stands for any more, because the pods on the collector's node went or its
// agent started again with another key. What was asked again and is the same is
// not told again. Descriptor files go by their hash, and only to those who lack
// them; a record counts when its files are there.
//
// # How it gets around
//
// Each agent has a Sync stream from four others: its two neighbours on a ring of
// all (sorted by zone), and two more by rendezvous. First comes what differs, by
// sums over 1,024 buckets of owners; then, as long as the stream is open, what the
// other has got since, gathered for 200 ms. So what one agent learns reaches
// thousands in a few hops and without a request. After some minutes a stream is
// opened again, and its sums find what was lost. Whoever still knows nothing of an
// owner after some seconds, or has a caller that waits, asks the agent in charge:
// Fetch, for many owners at once, which answers with a record, that it is at it
// (after half a second at most), or that it is not in charge. Fetches have a
// budget.
//
// # Whom to believe
//
// The annotation of an agent's pod holds the fingerprint of its key; the API server
// says on which node that pod stands. Both ends of a connection present such a key
// (mutual TLS, no authority), or the certificate of an authority that [Trust]
// knows. All that comes in has a bound: a message, a record, a file, a stream. What
// breaks a rule changes nothing and is counted by its reason; an agent that sends
// what no agent sends is left alone for a minute or more. What may be right soon (a
// pod or key of which our watch has not told yet) is kept for a minute and looked
// at again. Nothing that a peer does, or leaves undone, holds up another.
package peer
