// Package kube holds the sources: what feeds the directory with the pods and
// Services of the cluster, from the API server or from a file.
//
//	API server ─watch─▶ Cluster ─▶ queue ─▶ worker ─┐
//	                                                ├─▶ Store ─▶ nodecache.Directory
//	file ──────read───▶ File ───────── diff ────────┘
//
// A pod is read where it lies on the wire, field by field that is needed; one
// that comes as JSON is a v1.Pod for as long as it takes to convert it. What is
// kept is a [Record], two hundred bytes: the directory's pod, and what explain
// wants to know beside it. What pods of one owner have in common is made once for
// them, a template. The [Store] holds a record for every pod, also of those that
// get no calls, by name, and is alone in telling the directory. Services and
// EndpointSlices go through it into the directory, which keeps them.
package kube
