package ads_test

import (
	"testing"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	discovery "github.com/envoyproxy/go-control-plane/envoy/service/discovery/v3"

	"github.com/fingerpost/fingerpost/xds"
	"github.com/fingerpost/fingerpost/xds/ads"
	"github.com/fingerpost/fingerpost/xds/client"
)

// step is one request and what it is answered with; a nil answer is silence.
type step struct {
	names  []string // SotW: the whole list
	sub    []string
	unsub  []string
	answer []string
}

// The examples of the xDS protocol document, "How the client specifies what
// resources to return". A and B exist, C does not; B is known by the wildcard.
var deltaExamples = map[string][]step{
	"legacy wildcard, then a name keeps the wildcard": {
		{answer: []string{"A", "B"}},
		{sub: []string{"A"}, answer: []string{"A"}},
		{unsub: []string{"A"}, answer: []string{"A"}},
	},
	"legacy wildcard, then it is left for a name": {
		{answer: []string{"A", "B"}},
		{sub: []string{"A"}, unsub: []string{"*"}, answer: []string{"A"}},
		{unsub: []string{"A"}},
	},
	"legacy wildcard, then left": {
		{answer: []string{"A", "B"}},
		{unsub: []string{"*"}},
	},
	"explicit wildcard from the first": {
		{sub: []string{"*"}, answer: []string{"A", "B"}},
		{unsub: []string{"*"}},
		{sub: []string{"*"}, answer: []string{"A", "B"}},
	},
	"a name, then the wildcard brings the rest": {
		{sub: []string{"A"}, answer: []string{"A"}},
		{sub: []string{"*"}, answer: []string{"B"}},
		{unsub: []string{"*"}},
		{sub: []string{"B"}, answer: []string{"B"}},
	},
	"wildcard and an absent name": {
		{sub: []string{"*", "C"}, answer: []string{"A", "B", "-C"}},
		{unsub: []string{"C"}, answer: []string{"-C"}},
	},
	"a name given back leaves nothing, not everything": {
		{sub: []string{"A"}, answer: []string{"A"}},
		{unsub: []string{"A"}},
		{},
	},
	"given back and named again": {
		{sub: []string{"A"}, answer: []string{"A"}},
		{unsub: []string{"A"}},
		{sub: []string{"A"}, answer: []string{"A"}},
	},
	"unknown names given back": {
		{sub: []string{"A"}, answer: []string{"A"}},
		{unsub: []string{"Z", "B"}},
	},
}

func TestDeltaWildcardExamples(t *testing.T) {
	for _, typ := range []xds.Type{cds, lds} {
		for name, steps := range deltaExamples {
			t.Run(typ.String()+"/"+name, func(t *testing.T) {
				s := openWorld(t, of(typ, "A", 1), of(typ, "B", 1)).delta()
				for _, st := range steps {
					if err := s.Send(typ, &discovery.DeltaDiscoveryRequest{
						ResourceNamesSubscribe: st.sub, ResourceNamesUnsubscribe: st.unsub}); err != nil {
						t.Fatal(err)
					}
					if st.answer != nil {
						s.want(typ, st.answer...)
					}
					s.quiet()
				}
			})
		}
	}
}

var sotwExamples = map[string][]step{
	"legacy wildcard, wildcard and a name, wildcard": {
		{answer: []string{"A", "B"}},
		{names: []string{"*", "A"}, answer: []string{"A", "B"}},
		{names: []string{"*"}},
	},
	"legacy wildcard is left by a name; then nothing means nothing": {
		{answer: []string{"A", "B"}},
		{names: []string{"A"}, answer: []string{"A"}},
		{},
	},
	"a name, then nothing means nothing": {
		{names: []string{"A"}, answer: []string{"A"}},
		{},
	},
	"a name, then the wildcard too, then the name alone": {
		{names: []string{"A"}, answer: []string{"A"}},
		{names: []string{"*", "A"}, answer: []string{"A", "B"}},
		{names: []string{"A"}},
	},
	"an absent name is silence": {
		{names: []string{"C"}},
		{names: []string{"A", "C"}, answer: []string{"A"}},
	},
	"given back and named again": {
		{names: []string{"A", "B"}, answer: []string{"A", "B"}},
		{names: []string{"B"}},
		{names: []string{"A", "B"}, answer: []string{"A", "B"}},
	},
}

func TestSotWWildcardExamples(t *testing.T) {
	for _, typ := range []xds.Type{cds, lds} {
		for name, steps := range sotwExamples {
			t.Run(typ.String()+"/"+name, func(t *testing.T) {
				w := openWorld(t, of(typ, "A", 1), of(typ, "B", 1))
				s := w.connect(client.Options{Reply: func(r client.Response) client.Reply {
					return client.Reply{Silent: r.Type == typ}
				}})
				var last client.Response
				for _, st := range steps {
					if err := s.SendSotW(typ, &discovery.DiscoveryRequest{
						ResourceNames: st.names, VersionInfo: last.Version, ResponseNonce: last.Nonce}); err != nil {
						t.Fatal(err)
					}
					if st.answer != nil {
						last = s.want(typ, st.answer...)
						if err := s.SendSotW(typ, &discovery.DiscoveryRequest{
							ResourceNames: st.names, VersionInfo: last.Version, ResponseNonce: last.Nonce}); err != nil {
							t.Fatal(err)
						}
					}
					s.quiet()
				}
			})
		}
	}
}

func TestFirstWildcardOverAnEmptyTypeIsAnswered(t *testing.T) {
	for _, delta := range []bool{true, false} {
		s := openWorld(t).connect(client.Options{Delta: delta})
		s.sub(cds)
		s.want(cds)
		s.sub(lds)
		s.want(lds)
		s.quiet()
	}
}

func TestEndpointsAndRoutesHaveNoLegacyWildcard(t *testing.T) {
	for _, delta := range []bool{true, false} {
		s := openWorld(t, cla("A", 1), route("R", 1)).connect(client.Options{Delta: delta})
		s.sub(eds)
		s.sub(rds)
		s.quiet()
	}
}

func TestExplicitWildcardWorksForEveryType(t *testing.T) {
	for _, typ := range []xds.Type{cds, eds, lds, rds} {
		for _, delta := range []bool{true, false} {
			w := openWorld(t, of(typ, "A", 1))
			s := w.connect(client.Options{Delta: delta})
			s.sub(typ, "*")
			s.want(typ, "A")
			w.set(of(typ, "B", 1))
			if !delta && typ.HasWildcard() {
				s.want(typ, "A", "B")
			} else {
				s.want(typ, "B")
			}
		}
	}
}

func TestDeltaNameSubscribedAgainIsSentAgain(t *testing.T) {
	s := openWorld(t, cla("A", 1), cla("B", 1)).delta()
	s.sub(eds, "A", "B")
	s.want(eds, "A", "B")
	s.sub(eds, "A")
	s.want(eds, "A")
	s.unsub(eds, "B")
	s.sub(eds, "B")
	s.want(eds, "B")
	s.quiet()
}

func TestDeltaAbsentNameIsAnsweredAndStaysSubscribed(t *testing.T) {
	w := openWorld(t)
	s := w.delta()
	s.sub(cds, "A")
	s.want(cds, "-A")
	w.set(cluster("A", 1))
	s.want(cds, "A")
	w.remove(cluster("A", 1))
	s.want(cds, "-A")
	w.set(cluster("A", 1))
	s.want(cds, "A")
	s.quiet()
}

func TestDeltaNameKnownOfAnotherTypeIsAbsent(t *testing.T) {
	s := openWorld(t, cluster("A", 1)).delta()
	s.sub(eds, "A")
	s.want(eds, "-A")
	s.quiet()
}

func TestDeltaStaleNonceStillSubscribes(t *testing.T) {
	w := openWorld(t, cluster("A", 1), cluster("B", 1))
	s := w.connect(client.Options{Delta: true, Reply: func(r client.Response) client.Reply {
		return client.Reply{Silent: r.Type == cds}
	}})
	s.sub(cds, "A")
	s.want(cds, "A")
	for _, nonce := range []string{"", "no such"} {
		if err := s.Send(cds, &discovery.DeltaDiscoveryRequest{ResponseNonce: nonce, ResourceNamesSubscribe: []string{"B"}}); err != nil {
			t.Fatal(err)
		}
	}
	if got := w.server.Clients()[0].Types["cds"].Acked; got != "" {
		t.Fatalf("a stale nonce counted as ACK of %q", got)
	}
	if err := s.Ack(cds, ""); err != nil {
		t.Fatal(err)
	}
	s.want(cds, "B")
}

func TestSotWStaleNonceChangesNothing(t *testing.T) {
	w := openWorld(t, cla("A", 1), cla("B", 1))
	s := w.sotw()
	s.sub(eds, "A")
	first := s.want(eds, "A")
	w.set(cla("A", 2))
	s.want(eds, "A")
	for _, nonce := range []string{"", first.Nonce} {
		if err := s.SendSotW(eds, &discovery.DiscoveryRequest{ResponseNonce: nonce, ResourceNames: []string{"A", "B"}}); err != nil {
			t.Fatal(err)
		}
	}
	s.quiet()
	w.set(cla("B", 2))
	s.quiet()
	s.sub(eds, "B")
	s.want(eds, "B")
}

func TestSotWEndpointsAndRoutesCarryOnlyWhatChanged(t *testing.T) {
	for _, typ := range []xds.Type{eds, rds} {
		w := openWorld(t, of(typ, "A", 1), of(typ, "B", 1))
		s := w.sotw()
		s.sub(typ, "A", "B")
		s.want(typ, "A", "B")
		w.set(of(typ, "B", 2))
		s.want(typ, "B")
		w.set(of(typ, "C", 1))
		s.sub(typ, "C")
		s.want(typ, "C")
		w.remove(of(typ, "A", 1))
		s.unsub(typ, "B")
		s.sub(typ, "B")
		s.want(typ, "B")
		s.quiet()
	}
}

func TestSotWClustersAndListenersAreWhole(t *testing.T) {
	for _, typ := range []xds.Type{cds, lds} {
		w := openWorld(t, of(typ, "A", 1), of(typ, "B", 1), of(typ, "C", 1))
		s := w.sotw()
		s.sub(typ, "A", "B", "X")
		one := s.want(typ, "A", "B")
		w.set(of(typ, "B", 2))
		two := s.want(typ, "A", "B")
		w.set(of(typ, "C", 2)) // not subscribed
		w.remove(of(typ, "A", 1))
		s.want(typ, "B")
		w.set(of(typ, "A", 1), of(typ, "B", 1))
		three := s.want(typ, "A", "B")
		if one.Version == two.Version || one.Version != three.Version {
			t.Fatalf("versions %q %q %q do not follow the content", one.Version, two.Version, three.Version)
		}
		s.quiet()
	}
}

func TestWildcardLeavesOutWhatIsReachableByNameOnly(t *testing.T) {
	scopes := []xds.Scope{xds.APIScope("prod"), xds.NamespaceScope("prod"), xds.Shared}
	for _, delta := range []bool{true, false} {
		w := newWorld(t, ads.Options{View: func(ads.Introduction) (ads.View, error) { return ads.View{Scopes: scopes}, nil }})
		w.server.OpenGate()
		w.set(in(xds.NamespaceScope("prod"), listener("egress", 1)),
			in(xds.APIScope("prod"), listener("pkg.S", 1)))
		envoy := w.connect(client.Options{Delta: delta})
		envoy.sub(lds)
		envoy.want(lds, "egress")
		w.set(in(xds.APIScope("prod"), listener("pkg.T", 1)))
		envoy.quiet()
		grpc := w.connect(client.Options{Delta: delta})
		grpc.sub(lds, "pkg.S")
		grpc.want(lds, "pkg.S")
	}
}

func TestFirstScopeThatHasANameWins(t *testing.T) {
	ns := xds.NamespaceScope
	w := newWorld(t, ads.Options{View: func(in ads.Introduction) (ads.View, error) {
		n := in.Node
		return ads.View{Scopes: []xds.Scope{ns(n.GetId()), xds.Shared}}, nil
	}})
	w.server.OpenGate()
	shared, own, foreign := cluster("A", 1), in(ns("prod"), cluster("A", 2)), in(ns("test"), cluster("A", 3))
	w.set(shared, foreign)
	s := w.connect(client.Options{Delta: true, Node: &corev3.Node{Id: "prod"}})
	version := func(want *xds.Resource) {
		t.Helper()
		if got := s.want(cds, "A").Resources[0].Version; got != want.Version {
			t.Fatalf("got version %s, want %s", got, want.Version)
		}
	}
	s.sub(cds)
	version(shared)
	w.set(own)
	version(own)
	w.set(cluster("A", 4)) // hidden by the own one
	w.set(in(ns("test"), cluster("A", 5)))
	s.quiet()
	w.remove(own)
	version(cluster("A", 4))
	w.remove(shared)
	s.want(cds, "-A")
}
