// Package nodecache is the owner directory: what the agent knows of every
// owner of pods in the cluster. It holds no Kubernetes, gRPC or xDS types.
//
// # The life of an owner
//
//	UpsertPod ──▶ reserved ──Begin──▶ collecting ──Commit──▶ known | none
//	               ▲  ▲                    │
//	               │  │                    ├──Fail──────▶ failed (Begin again later)
//	               │  └─────Abandon────────┘
//	               │
//	 next UpsertPod│          RemovePod of the last pod ends the generation:
//	 (generation+1)└───────── what was learned stays for Options.Keep
//
// The first pod of an owner reserves a record: in one critical section the
// directory decides that the owner is new, adds the pod's address and gives
// the record a new generation. The address is visible from then on; nobody
// waits for what the owner serves. Whoever collects takes a [Reservation] by
// [Directory.Begin], works without any lock, and commits against it. A commit
// lands only in the generation it was made for; else it gets [ErrStale].
//
// What was learned outlives the pods. [Info] stands in a table by owner key,
// routes in a table by route UID; an owner's view joins them. A pod that flaps
// or a workload that scales to zero and back therefore costs no second
// collect, and its services keep their cluster meanwhile.
//
// What was learned outlives the process, too: a [Checkpoint] keeps what
// [Directory.Snapshot] returns, and [Directory.Restore] makes it known again.
//
// # Services
//
// A [Front] is a Service, a [Slice] one of its EndpointSlices; either may come
// first. Where both are there, the slice's pods stand behind the Service, which
// their owner's view says: a [Standing] names the ports to which the Service
// leads and those that it hints at. Where an owner stood last outlives its pods
// as what was learned of it does. Addresses that are nobody's pod are an owner,
// too, where their Service declares what they serve.
//
// Subscribers are told which owners changed, at least once for every change
// and coalesced by owner, and read the current view themselves.
package nodecache
