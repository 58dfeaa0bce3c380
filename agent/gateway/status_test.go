package gateway_test

import (
	"fmt"
	"slices"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/fingerpost/fingerpost/agent/gateway"
	"github.com/fingerpost/fingerpost/nodecache"
)

// said decodes a route of which the status has the entries.
func said(t *testing.T, version, entries string) *gateway.Object {
	t.Helper()
	o, err := gateway.Decode("HTTPRoute", []byte(fmt.Sprintf(`{"apiVersion":%q,"kind":"HTTPRoute",
		"metadata":{"namespace":"prod","name":"r","uid":"r","generation":1},"spec":{},"status":{"parents":[%s]}}`, version, entries)))
	if err != nil || o.Err != nil {
		t.Fatal(err, o.Err)
	}
	return o
}

const (
	v1        = "gateway.networking.k8s.io/v1"
	condition = `{"type":"Accepted","status":"True","reason":"Accepted","message":"m","observedGeneration":2,"lastTransitionTime":"2026-01-02T03:04:05Z"}`
	own       = `{"controllerName":"fingerpost.dev/agent","parentRef":{"group":"","kind":"Service","name":"web"},"conditions":[` + condition + `]}`
	foreign   = `{"controllerName":"example.org/gateway","parentRef":{"name":"gw"},"conditions":[` + condition + `]}`
)

func TestDigestTellsWhatAgentsSaid(t *testing.T) {
	statement := func() gateway.ParentStatus {
		return gateway.ParentStatus{
			Parent:     nodecache.RouteParent{Kind: "Service", Name: nodecache.Name{Namespace: "prod", Name: "web"}},
			Conditions: []metav1.Condition{{Type: "Accepted", Status: "True", Reason: "Accepted", Message: "m", ObservedGeneration: 2}},
		}
	}
	digest := gateway.StatusDigest([]gateway.ParentStatus{statement()})
	for _, entries := range []string{own, own + "," + foreign, foreign + "," + own} {
		if got := said(t, v1, entries).Said; got != digest {
			t.Errorf("digest of %s is %q, want %q", entries, got, digest)
		}
	}
	for _, entries := range []string{"", foreign} {
		if got := said(t, v1, entries).Said; got != "" {
			t.Errorf("digest of %s is %q, want none", entries, got)
		}
	}
	if got := said(t, v1, `{"controllerName":7}`).Said; got == "" || got == digest {
		t.Errorf("digest of a broken status is %q", got)
	}

	other := statement()
	other.Conditions = append(other.Conditions, metav1.Condition{Type: "example.org/Special", Status: "True"})
	other.Conditions[0].LastTransitionTime = metav1.Now()
	if gateway.StatusDigest([]gateway.ParentStatus{other}) != digest {
		t.Error("times, or what others say, count")
	}
	for name, change := range map[string]func(*gateway.ParentStatus){
		"section":    func(s *gateway.ParentStatus) { s.Parent.Section = "x" },
		"port":       func(s *gateway.ParentStatus) { s.Parent.Port = 1 },
		"namespace":  func(s *gateway.ParentStatus) { s.Parent.Name.Namespace = "x" },
		"kind":       func(s *gateway.ParentStatus) { s.Parent.Kind = "Gateway" },
		"status":     func(s *gateway.ParentStatus) { s.Conditions[0].Status = "False" },
		"reason":     func(s *gateway.ParentStatus) { s.Conditions[0].Reason = "x" },
		"message":    func(s *gateway.ParentStatus) { s.Conditions[0].Message = "x" },
		"generation": func(s *gateway.ParentStatus) { s.Conditions[0].ObservedGeneration++ },
		"conditions": func(s *gateway.ParentStatus) { s.Conditions = nil },
	} {
		s := statement()
		if change(&s); gateway.StatusDigest([]gateway.ParentStatus{s}) == digest {
			t.Errorf("another %s gives the same digest", name)
		}
	}
	two := []gateway.ParentStatus{statement(), other}
	two[1].Parent.Port = 1
	if slices.Reverse(two); gateway.StatusDigest(two) != gateway.StatusDigest([]gateway.ParentStatus{two[1], two[0]}) {
		t.Error("the order counts")
	}
}

// Who writes statuses hears of what concerns them, and not of what other
// controllers write.
func TestTableTellsWhatConcernsTheStatus(t *testing.T) {
	x := newFixture(t)
	var heard []string
	x.table.OnStatus(func(uid string) { heard = append(heard, uid) })
	hears := func(what string, want ...string) {
		t.Helper()
		if !slices.Equal(heard, want) {
			t.Errorf("%s: heard of %q, want %q", what, heard, want)
		}
		heard = nil
	}
	x.table.Upsert(said(t, v1, ""))
	hears("new", "r")
	x.table.Upsert(said(t, v1, foreign))
	hears("written by another")
	x.table.Upsert(said(t, v1, own+","+foreign))
	hears("written by an agent", "r")
	r := x.dir.Route("r")
	if st, ok := x.table.Status(r); !ok || st.APIVersion != "v1" || st.Said == "" {
		t.Errorf("status %+v, %t", st, ok)
	}
	x.table.Upsert(said(t, "gateway.networking.k8s.io/v1beta1", own))
	hears("read in another version", "r")
	if st, _ := x.table.Status(r); st.APIVersion != "v1beta1" {
		t.Errorf("status %+v", st)
	}
	o := said(t, v1, own)
	o.Route.Generation++
	x.table.Upsert(o)
	hears("a new generation", "r")
	o = said(t, v1, own)
	o.UID, o.Route.UID = "again", "again"
	x.table.Upsert(o)
	hears("created anew", "again")
	if st, ok := x.table.Status(r); ok {
		t.Errorf("a route that is gone has the status %+v", st)
	}
}
