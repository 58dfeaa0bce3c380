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
// which an owner's view joins. A pod that flaps
// or a workload that scales to zero and back therefore costs no second
// collect, and its services keep their cluster meanwhile.
//
// What was learned outlives the process, too: a [Checkpoint] keeps what
// [Directory.Snapshot] returns, and [Directory.Restore] makes it known again.
//
// # Revisions
//
// Owners of one [Workload] are its revisions. What a later one's pods have not
// said is presumed from the one before, as [Presumption] tells: it is part of
// the view, never of what is known of the owner. What decides it outlives its
// own pods as long as others need it.
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
// # Routes
//
// A [Route] stands in a table by its UID, found by the Services that it names
// as parents and backends, which need not be there. What leads to an owner is
// not kept with it: its view has the matches of the rules that send calls to
// the Services behind which it stands, so that a route, a Service, a slice and a
// pod may come and go in any order. A GRPCRoute says of its backends' ports that
// they speak gRPC.
//
// Subscribers are told which owners changed, at least once for every change
// and coalesced by owner, and read the current view themselves; those that ask
// for it hear of Services in the same way.
package nodecache
