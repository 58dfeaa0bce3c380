// Package routetable decides which of the routes that are attached to a
// Service takes a call, by the rules of the Gateway API for meshes (GEP-1294).
// It is pure: equal routes, in whatever order, give equal tables.
//
//	routes with the Service as parent ──New──▶ Table of one port ──Match──▶ Entry
package routetable

import (
	"cmp"
	"slices"

	"github.com/fingerpost/fingerpost/nodecache"
)

// Table says what routes make of the calls of one namespace to one port of a
// Service. The zero Table has no entry: no route is attached.
type Table struct {
	// Kind is that of all routes of the table: HTTPRoutes and GRPCRoutes are
	// never merged (GEP-1294).
	Kind nodecache.RouteKind
	// Entries are the matches in the order in which they are tried.
	Entries []Entry
	// Conflicted are the HTTPRoutes that lost the port to a GRPCRoute, in no
	// order.
	Conflicted []*nodecache.Route
}

// Entry is one match of a route.
type Entry struct {
	Route *nodecache.Route
	Rule  int // index in Route.Rules
	Match int // index in the rule's Matches
}

// In returns the rule of the entry.
func (e Entry) In() *nodecache.RouteRule { return &e.Route.Rules[e.Rule] }

// On returns the match of the entry.
func (e Entry) On() *nodecache.RouteMatch { return &e.In().Matches[e.Match] }

// Attached tells whether the route has the port of the Service for a parent.
// Both group and kind of the parent count: a Gateway may have the Service's
// name.
func Attached(r *nodecache.Route, service nodecache.Name, port nodecache.FrontPort) bool {
	return slices.ContainsFunc(r.Parents, func(p nodecache.RouteParent) bool {
		return p.Service() && p.Name == service && (p.Port == 0 || p.Port == port.Port) &&
			(p.Section == "" || p.Section == port.Name)
	})
}

// New returns the table for clients of the namespace. Of the routes those count
// that are attached to the port: consumer routes, which stand in the clients'
// own namespace and not in the Service's, else producer routes, which stand in
// the Service's. Where a GRPCRoute is among these, HTTPRoutes are not. A route
// of which no rule can be served is not accepted and has no say.
func New(namespace string, service nodecache.Name, port nodecache.FrontPort, routes []*nodecache.Route) Table {
	var producers, consumers []*nodecache.Route
	for _, r := range routes {
		if !Attached(r, service, port) || !slices.ContainsFunc(r.Rules, servable) {
			continue
		}
		switch r.Namespace {
		case service.Namespace:
			producers = append(producers, r)
		case namespace:
			consumers = append(consumers, r)
		}
	}
	in := consumers
	if len(in) == 0 {
		in = producers
	}
	var t Table
	if slices.ContainsFunc(in, func(r *nodecache.Route) bool { return r.Kind == nodecache.GRPCRoute }) {
		t.Kind = nodecache.GRPCRoute
	}
	for _, r := range in {
		if r.Kind != t.Kind {
			t.Conflicted = append(t.Conflicted, r)
			continue
		}
		for i := range r.Rules {
			for m := range r.Rules[i].Matches {
				if servable(r.Rules[i]) {
					t.Entries = append(t.Entries, Entry{Route: r, Rule: i, Match: m})
				}
			}
		}
	}
	slices.SortFunc(t.Entries, Entry.compare)
	return t
}

func servable(r nodecache.RouteRule) bool { return r.Refused == "" }

// compare orders entries of one kind. Lower goes first.
func (a Entry) compare(b Entry) int {
	return cmp.Or(
		compareMatches(a.On(), b.On()),
		compareRoutes(a.Route, b.Route),
		cmp.Compare(a.Rule, b.Rule),
		cmp.Compare(a.Match, b.Match),
	)
}
