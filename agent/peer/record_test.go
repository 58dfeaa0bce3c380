package peer

import (
	"bytes"
	"slices"
	"strings"
	"testing"
	"time"
	"unique"

	"google.golang.org/protobuf/proto"

	peerv1 "github.com/fingerpost/fingerpost/agent/peer/fingerpost/peer/v1"
	"github.com/fingerpost/fingerpost/nodecache"
)

func info() *nodecache.Info {
	return &nodecache.Info{
		Origin: nodecache.OriginSelf, Collected: time.UnixMilli(1_700_000_000_123), Pod: "prod/a-1", Images: []string{"sha256:a", "sha256:b"},
		Ports: []nodecache.PortInfo{
			{Port: 50051, State: nodecache.PortServes, Linkable: true, Hash: "h1", Services: []nodecache.Service{
				{Name: "pkg.A", Methods: []string{"Get", "List"}}, {Name: "pkg.B", Undescribed: true},
			}, Files: []unique.Handle[string]{unique.Make("file one"), unique.Make("file two")}},
			{Port: 50052, State: nodecache.PortTLS, Detail: "speaks TLS", Hash: "h2"},
		},
		Variants: []nodecache.Variant{{
			Images: "sha256:c", From: "prod/a-2", Collected: time.UnixMilli(1_700_000_000_456),
			Ports: []nodecache.PortInfo{{Port: 50051, State: nodecache.PortServes, Hash: "h3", Services: []nodecache.Service{{Name: "pkg.C", Undescribed: true}}}},
		}},
	}
}

func identity(t *testing.T) *Identity {
	t.Helper()
	id, err := NewIdentity("n1")
	if err != nil {
		t.Fatal(err)
	}
	return id
}

func signed(t *testing.T, id *Identity, st *peerv1.Statement) *Record {
	t.Helper()
	r, err := sign(id, st)
	if err != nil {
		t.Fatal(err)
	}
	return r
}

// Check 47: equal knowledge is equal bytes, whoever says it and whenever it was
// learned.
func TestEqualKnowledgeIsEqualBytes(t *testing.T) {
	id := identity(t)
	files := newFileStore()
	a, b := signed(t, id, state(owner(1), "n1", info(), files)), signed(t, id, state(owner(1), "n1", info(), newFileStore()))
	if !proto.Equal(a.raw, b.raw) || !bytes.Equal(a.raw.GetStatement(), b.raw.GetStatement()) || a.id != b.id {
		t.Error("one agent says the same in two ways")
	}
	other := info()
	other.Collected, other.Pod, other.Variants[0].From = time.Now(), "prod/a-9", "prod/a-8"
	if content(state(owner(1), "n2", other, newFileStore())) != content(a.statement()) {
		t.Error("two agents say the same in two ways")
	}
	other.Variants[0].Ports[0].Services[0].Name = "pkg.D"
	if content(state(owner(1), "n2", other, newFileStore())) == content(a.statement()) {
		t.Error("what differs is the same")
	}
}

func TestInfoIsTheSameOnTheOtherSide(t *testing.T) {
	files := newFileStore()
	r := signed(t, identity(t), state(owner(1), "n1", info(), files))
	wire, err := proto.Marshal(r.raw)
	if err != nil {
		t.Fatal(err)
	}
	var raw peerv1.Record
	if err := proto.Unmarshal(wire, &raw); err != nil {
		t.Fatal(err)
	}
	got, err := decode(&raw)
	if err != nil || !got.verify() {
		t.Fatalf("%v", err)
	}
	is, want := got.complete(files), info()
	want.Origin = nodecache.OriginPeer
	// The record is as new as the latest word in it.
	want.Collected = want.Variants[0].Collected
	if content(state(owner(1), "n1", is, files)) != content(state(owner(1), "n1", want, files)) || !is.Collected.Equal(want.Collected) ||
		is.Origin != want.Origin || is.Pod != want.Pod || is.Ports[0].Files[1] != want.Ports[0].Files[1] {
		t.Errorf("info %+v, want %+v", is, want)
	}
	raw.Statement = append(raw.Statement, 0x7a, 0) // an unknown field
	if r, err := decode(&raw); err == nil && r.verify() {
		t.Error("a changed statement has a good signature")
	}
}

// An owner with more names than fit is told without its methods.
func TestOwnerBeyondTheBoundIsToldWithoutMethods(t *testing.T) {
	big := info()
	p := &big.Ports[0]
	p.Services = nil
	for s := range 1000 {
		svc := nodecache.Service{Name: "pkg.S" + strings.Repeat("a", s%10) + string(rune('a'+s/676)) + string(rune('a'+s/26%26)) + string(rune('a'+s%26))}
		for m := range 16 {
			svc.Methods = append(svc.Methods, strings.Repeat("M", 100)+string(rune('a'+m)))
		}
		p.Services = append(p.Services, svc)
	}
	sortServices(p.Services)
	r := signed(t, identity(t), state(owner(1), "n1", big, newFileStore()))
	if n := len(r.info.Ports[0].Services); n != 1000 || r.info.Ports[0].Services[0].Methods != nil || r.info.Ports[0].Linkable {
		t.Errorf("%d services, %+v", n, r.info.Ports[0].Services[0])
	}
}

func FuzzDecode(f *testing.F) {
	id, err := NewIdentity("n1")
	if err != nil {
		f.Fatal(err)
	}
	r, err := sign(id, state(owner(1), "n1", info(), newFileStore()))
	if err != nil {
		f.Fatal(err)
	}
	f.Add(r.raw.GetStatement())
	f.Add([]byte{})
	f.Fuzz(func(t *testing.T, statement []byte) {
		raw := proto.CloneOf(r.raw)
		raw.Statement = statement
		got, err := decode(raw)
		if err != nil {
			return
		}
		if got.verify() && !bytes.Equal(statement, r.raw.GetStatement()) {
			t.Error("forged")
		}
		if got.info != nil {
			for p := range got.info.All() {
				if len(p.Services) > maxServices {
					t.Error("beyond the bound")
				}
			}
		}
	})
}

func sortServices(s []nodecache.Service) {
	slices.SortFunc(s, func(a, b nodecache.Service) int { return strings.Compare(a.Name, b.Name) })
}
