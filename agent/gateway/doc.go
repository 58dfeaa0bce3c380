// Package gateway reads objects of the Gateway API and keeps what they say:
// HTTPRoutes, GRPCRoutes and ReferenceGrants, in any version of which the form
// is that of v1.
//
//	JSON ─Decode─▶ Object ─▶ Table ─▶ nodecache.Directory
//	                          (routes, resolved by the grants of the moment)
//
// Decode fills in what an object leaves to the API's defaults and says of each
// rule whether it can be served. The [Table] alone writes routes into the
// directory. Where objects come from is of no interest here.
package gateway
