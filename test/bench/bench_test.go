package main

import (
	"net/netip"
	"slices"
	"testing"

	discovery "github.com/envoyproxy/go-control-plane/envoy/service/discovery/v3"
	"google.golang.org/protobuf/proto"

	"github.com/fingerpost/fingerpost/xds"
)

// A change counts from its acknowledgement to the first CLA of each client that
// shows it, or a later state; one that never comes counts as the limit.
func TestChangesAreMatchedWithTheFirstCLAThatCoversThem(t *testing.T) {
	const ms = 1_000_000
	flips := []flip{
		{pod: 3, up: false, due: 100 * ms, acked: 108 * ms, watched: 107 * ms},
		{pod: 14, up: true, due: 200 * ms, acked: 210 * ms},
	}
	events := []event{
		{Client: 0, Service: 0, At: 90 * ms, Members: 0b0111},  // before the change
		{Client: 0, Service: 0, At: 105 * ms, Members: 0b1111}, // another pod's
		{Client: 0, Service: 0, At: 109 * ms, Members: 0b0111},
		{Client: 0, Service: 0, At: 120 * ms, Members: 0b0011}, // covers it again
		{Client: 1, Service: 0, At: 112 * ms, Members: 0b0011}, // with a later one
		{Client: 0, Service: 1, At: 209 * ms, Members: 0b10000},
	}
	l := match(flips, events, 2, 10)
	for what, row := range map[string]struct{ got, want []float64 }{
		"from ack":     {l.fromAck, []float64{1, 4, -1, 5000}},
		"from due":     {l.fromDue, []float64{9, 12, 9, 5010}},
		"from watcher": {l.fromWatch, []float64{2, 5}},
		"last":         {l.last, []float64{4, 5000}},
	} {
		if !slices.Equal(row.got, row.want) {
			t.Errorf("%s: got %v, want %v", what, row.got, row.want)
		}
	}
	if l.late != 1 || l.total != 4 {
		t.Errorf("%d of %d late, want 1 of 4", l.late, l.total)
	}
}

func TestServiceChangesAgainOnlyAfterAllOthers(t *testing.T) {
	wr := &writer{w: &world{services: 3, each: 2}, order: []int{2, 0, 1}}
	var got []flip
	for range 12 {
		got = append(got, wr.take())
	}
	var want []flip
	for place := range 2 {
		for _, up := range []bool{false, true} {
			for _, service := range wr.order {
				want = append(want, flip{pod: service*2 + place, up: up})
			}
		}
	}
	if !slices.Equal(got, want) {
		t.Fatalf("got %v, want %v", got, want)
	}
}

func TestResponseIsReadWithoutDecodingIt(t *testing.T) {
	addrs := []netip.AddrPort{netip.MustParseAddrPort("10.0.1.4:8080"), netip.MustParseAddrPort("10.0.1.6:8080")} // pods 260 and 262
	r, err := xds.NewResource(xds.ID{Type: xds.Endpoint, Name: declaredName(26)}, claOfAddrs(declaredName(26), addrs))
	if err != nil {
		t.Fatal(err)
	}
	raw, err := proto.Marshal(&discovery.DeltaDiscoveryResponse{
		SystemVersionInfo: "v", TypeUrl: xds.Endpoint.URL(), Nonce: "7",
		Resources: []*discovery.Resource{{Name: r.Name, Version: r.Version, Resource: r.Body}}, RemovedResources: []string{"a"},
	})
	if err != nil {
		t.Fatal(err)
	}
	got, err := readResponse(raw)
	if err != nil || got.url != xds.Endpoint.URL() || got.nonce != "7" || len(got.bodies) != 1 {
		t.Fatalf("got %+v, %v", got, err)
	}
	a, err := decodeAssignment(got.bodies[0], 10)
	if err != nil || a.service != 26 || a.members != 0b101 {
		t.Fatalf("got %+v, %v", a, err)
	}
	if _, err := readResponse(raw[:len(raw)-1]); err == nil {
		t.Fatal("half a response is read")
	}
}

func TestQuantile(t *testing.T) {
	d := []float64{5, 1, 4, 2, 3}
	if a, b := quantile(d, 0.5), quantile(d, 0.99); a != 3 || b != 5 || d[0] != 5 {
		t.Fatalf("got %v and %v of %v", a, b, d)
	}
}
