// Package ads serves xDS v3 on one aggregated stream for each client, or on one
// for each type, in the state-of-the-world and in the incremental (delta) form,
// from tables that all clients share. Its rules are those of the xDS protocol document; where a real
// client asks for more, the comment names the report.
//
// # The life of a response
//
//	Publish ──▶ tables ──▶ dirty | gone ──▶ collect ──▶ in flight ──▶ ACK ──▶ acked
//	  (any        (type, name,   (a bit for each    │ (one for      │
//	 goroutine)    scope)         stream and id)    │  each type)   └─▶ NACK ─▶ recorded;
//	                                                ▼                  quarantine
//	                                              Send
//
// Publish changes the tables and, for every stream that may see a change, sets
// one bit: dirty if the client shall get the resource, gone if it has it and
// shall lose it. It encodes nothing, sends nothing and waits for nobody, so a
// slow client costs its bitsets and no more. A later change of the same
// resource finds the bit set: what a client gets is always the newest.
//
// The goroutine of a stream collects what may be sent now. Of each type at most
// one response is not acknowledged; what changes meanwhile is summed up. A
// delta response holds at most 1 MiB, and so does a SotW response for EDS and
// RDS: what is left stays dirty and follows, under a nonce of its own, after
// the ACK. SotW responses for CDS and LDS are whole, as the protocol wants.
//
// A resource is encoded when it is made ([xds.NewResource]), once, as responses
// hold it, and all of them share those bytes: a response is a list of them and
// some bytes of its own, which gRPC writes as they are (message.go). A long list
// is put together in one piece, which all responses share that are on their way
// with just these resources (joiner): those to clients that connect at once.
//
// # Order
//
// Additions go out as CDS, EDS, LDS, RDS. A CLA waits for its own cluster and
// for no other; listeners and routes wait while a cluster or a CLA that the
// client asked for cannot be sent yet, and for the CLAs that it will ask for
// once it has their clusters: a second after it took these, at most the grace.
//
// Removed clusters leave when the listeners and routes of that moment are
// accepted, and CLAs after them; until then a SotW set keeps them. A client
// that never accepts has them removed after the grace ([Options.Grace]). One
// that comes back may hold older routes than its clusters: its first removals,
// with the answer that they belong to, wait until it has asked for clusters,
// listeners and routes, at most a second.
//
// A cluster that is sent brings its CLA after it, though unchanged, since Envoy
// warms a cluster until one comes. On SotW that goes for the clusters that
// changed, not for all that a response repeats: Envoy skips equal ones.
//
// # What a client refuses
//
// A NACK concerns the client that sent it, and what its response newly carried.
// The resource that its text names, or that was alone, is withheld from that
// client in that content; what else was in the response is suspect. Other
// content goes out at once. Suspects go out again after the next response that
// the client accepts, or after a while ([Options.Trial]), in sets which are
// halved as long as they are refused, each later than the one before. A delta
// client keeps what it had accepted by itself; in a SotW set the last accepted
// content stands in for what is withheld. Refusals are remembered by client id
// and content over reconnects, for 512 clients and 32 resources of each, and
// tried once on a new stream, since the program behind the id may be another.
//
// # What a name means
//
// A name has one dense id for all types, and under it an entry for each type
// and scope. A stream sees the entry of the first of its scopes that has one.
// Ids of names that nobody has and nobody holds are given again.
//
// The explicit wildcard "*" works for each type; a first request without names
// is a wildcard for CDS and LDS only. Scopes that are reachable by name only
// ([xds.Scope.NamedOnly]) stay outside of both.
//
// # Clusters on demand
//
// Of a client with a [Demand] the wildcard leaves out the clusters and CLAs that
// it asks for by name ([xds.Scope.OnDemand]). Its demand hears of the names of a
// request before the request is applied, with no lock held, and publishes what is
// to be there. The last of its scopes holds what stands in for a cluster that
// nobody has: a real one comes before it and goes back to it in place, as any
// name does that has entries in two scopes. Such a stand-in waits until the
// evidence is complete where the client brought something else under the name.
// [Server.Want] subscribes in a client's place, and a client that comes back is
// subscribed to what it brings. So it is to what its [View] wants for it, which
// comes with the first answer to its wildcard. A demand can exchange the client's route tables,
// by other scopes.
//
// # What a client has
//
// Of each type a stream knows which resources the client has acknowledged in
// some content, as a bitset, and of the latest when ([Server.Holdings]): some
// kilobytes at most, however much there is.
//
// # What absence means
//
// Before the gate opens nothing is answered. After it, a name that nobody has
// is answered on delta with its removal, and the subscription stays; on SotW
// with silence. What a delta client brings from an earlier stream and the
// tables do not have is removed once the evidence for all scopes of the client
// is complete, or at once if this process itself removed it. A SotW client that
// brings a version waits while evidence is pending. Waiting ends after the
// hold limit with UNAVAILABLE, so that no timer of the client decides.
//
// # Slow and hostile clients
//
// A client that does not read or acknowledge is parked with its bitsets and at
// most one response of each type. What it can make the server keep is bounded
// (limits.go); one that goes beyond is ended with a status that says so. A long
// request is applied in portions, between which the tables may change.
//
// # Versions
//
// All versions follow from content alone, so that equal tables in another
// process give equal versions: a SotW version is a hash over the set that the
// stream is subscribed to; a delta system version one over all that the
// stream's scopes hold.
//
// # Locks
//
// Server.mu guards the tables and the set of streams; Publish takes it for
// writing, everything that reads tables for reading. stream.mu guards one
// stream and is taken after Server.mu. memory.mu guards what is remembered of
// refusals, joiner.mu what long responses share; each is taken after both.
// Server.nackMu is taken alone. None is held while something is sent or
// received, nor while a function of Options runs. The sending goroutine of a
// stream is its gRPC handler, which alone calls Send; a second one receives and
// ends when the handler has returned.
package ads
