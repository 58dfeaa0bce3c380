// Package resources compiles what the owner directory knows into xDS
// resources. It reads views and returns [xds.Update] values; it starts no
// goroutine, opens no connection and reads no clock.
//
// # What depends on what
//
//	owner views ──▶ Cluster   ns/pkg.Service   scope ns/…   its name alone
//	            ├─▶ CLA       ns/pkg.Service   scope ns/…   the provider's pods
//	            └─▶ Listener  pkg.Service      scope api/…  its name alone (gRPC clients)
//	Services    ──▶ Cluster   backend/…        scope ns/…   its name, the Service's port
//	 and routes ├─▶ CLA       backend/…        scope ns/…   the pods behind that port
//	            └─▶ Route     egress           scope ns/…   routes, Services, descriptors,
//	namespace   ──▶                                         and the namespace
//	options     ──▶ Listener  egress, egress6; Cluster fingerpost-tracing
//
// The endpoints of a CLA are in the order in which the clients of this node are to
// call them, by the policies and places of their pods and the place of the node:
// package nodecache, Locality.
//
// What routes say of calls to a Service is decided by package routetable. A
// backend is compiled once for all namespaces; those with clients whose tables
// name it have it.
//
// A name that a namespace lacks, and that another exports to it, is compiled for
// it from the other's owners.
//
// A pod that comes or goes changes a CLA and no other byte: Envoy builds a
// cluster anew, with new connections, for every changed Cluster, and drains a
// listener for every changed Listener. The last route computes the name of the
// cluster from the call, so that a new service does not change it either.
//
// The form of all these is a numbered [Shape].
package resources
