package nodecache_test

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/fingerpost/fingerpost/nodecache"
)

// front returns a Service of prod that was created in the minute.
func front(name string, minute int, edits ...func(*nodecache.Front)) *nodecache.Front {
	f := &nodecache.Front{
		UID: "uid-" + name, Namespace: "prod", Name: name, Type: "ClusterIP", Selects: true,
		Ports:   []nodecache.FrontPort{{Name: "api", Port: 80}},
		Created: time.Date(2026, 5, 1, 12, minute, 0, 0, time.UTC),
	}
	for _, edit := range edits {
		edit(f)
	}
	return f
}

// slice returns a slice of the Service that leads to port 50051 of the pods.
func slice(name, service string, pods ...string) *nodecache.Slice {
	s := &nodecache.Slice{
		UID: "uid-" + name, Namespace: "prod", Name: name, Service: service,
		Ports: []nodecache.SlicePort{{Name: "api", Port: 50051}},
	}
	for _, uid := range pods {
		s.Endpoints = append(s.Endpoints, nodecache.Endpoint{Pod: uid, Ready: true, Serving: true})
	}
	return s
}

func at(s *nodecache.Slice, port uint16) *nodecache.Slice {
	s.Ports = []nodecache.SlicePort{{Name: "api", Port: port}}
	return s
}

// behind says which Services the owner is seen behind, and to which ports they
// lead.
func behind(d *nodecache.Directory, key nodecache.OwnerKey) string {
	o := d.Owner(key)
	if o == nil {
		return "gone"
	}
	var out []string
	for _, st := range o.Behind {
		out = append(out, fmt.Sprintf("%s%v", st.Name, st.Ports))
	}
	return strings.Join(out, " ")
}

func wantBehind(t *testing.T, d *nodecache.Directory, want string) {
	t.Helper()
	if got := behind(d, key); got != want {
		t.Errorf("stands behind %q, want %q", got, want)
	}
}

func TestServiceSliceAndPodMeetInEveryOrder(t *testing.T) {
	steps := []func(*nodecache.Directory){
		func(d *nodecache.Directory) { d.UpsertFront(front("web", 1)) },
		func(d *nodecache.Directory) { d.UpsertSlice(slice("web-1", "web", "a")) },
		func(d *nodecache.Directory) { d.UpsertPod(pod("a", "10.0.0.1")) },
	}
	for _, order := range [][]int{{0, 1, 2}, {0, 2, 1}, {1, 0, 2}, {1, 2, 0}, {2, 0, 1}, {2, 1, 0}} {
		d := nodecache.New(nodecache.Options{})
		for _, i := range order {
			steps[i](d)
		}
		if got := behind(d, key); got != "web[50051]" {
			t.Errorf("order %v: %q", order, got)
		}
	}
}

func TestOwnersHearOfTheirServices(t *testing.T) {
	d := nodecache.New(nodecache.Options{})
	d.UpsertPod(pod("a", "10.0.0.1"))
	d.UpsertPod(pod("b", "10.0.0.2", owned(ownerKey("other"))))
	s := subscribe(t, d)
	next(t, s)
	told := func(what string, want ...nodecache.OwnerKey) {
		t.Helper()
		if got := s.Poll(); !slices.Equal(got, want) {
			t.Errorf("%s: told of %v, want %v", what, got, want)
		}
	}
	d.UpsertSlice(slice("web-1", "web", "a"))
	told("a slice without a Service")
	d.UpsertFront(front("web", 1))
	told("its Service", key)
	d.UpsertFront(front("web", 1))
	d.UpsertSlice(slice("web-1", "web", "a"))
	told("nothing new")
	d.UpsertSlice(slice("web-1", "web", "a", "b"))
	told("a new member", ownerKey("other"))
	d.UpsertSlice(at(slice("web-1", "web", "a", "b"), 9090))
	if got := s.Poll(); len(got) != 2 {
		t.Errorf("another port: told of %v", got)
	}
	d.UpsertSlice(slice("web-1", "api", "a", "b"))
	if got := s.Poll(); len(got) != 2 {
		t.Errorf("a slice of another Service: told of %v", got)
	}
	wantBehind(t, d, "")
	d.RemoveFront(nodecache.Name{Namespace: "prod", Name: "web"})
	told("a Service without members")
}

func TestServiceCreatedAgainIsAnother(t *testing.T) {
	d, web := nodecache.New(nodecache.Options{}), nodecache.Name{Namespace: "prod", Name: "web"}
	d.UpsertPod(pod("a", "10.0.0.1"))
	d.UpsertFront(front("web", 1))
	d.UpsertSlice(slice("web-1", "web", "a"))
	d.UpsertFront(front("web", 2, func(f *nodecache.Front) { f.UID = "new" }))
	d.RemoveFront(web, "uid-web") // the late end of the first
	wantBehind(t, d, "web[50051]")
	if o := d.Owner(key); o.Behind[0].Created.Minute() != 2 || o.Behind[0].UID != "new" {
		t.Errorf("behind %+v", o.Behind[0])
	}
	d.RemoveSlice(nodecache.Name{Namespace: "prod", Name: "web-1"}, "older")
	wantBehind(t, d, "web[50051]")
	d.RemoveFront(web, "new")
	wantBehind(t, d, "")
	if v := d.Front(web); v != nil {
		t.Errorf("a view of what is gone: %+v", v)
	}
	d.RemoveSlice(nodecache.Name{Namespace: "prod", Name: "web-1"})
	d.RemovePod("a")
	if s := d.Sizes(); len(s) != 0 {
		t.Errorf("left over: %v", s)
	}
}

// linkerd2 PR#12427: a second slice with the same targetRef.
func TestPodInTwoSlicesIsOneMember(t *testing.T) {
	d, web := nodecache.New(nodecache.Options{}), nodecache.Name{Namespace: "prod", Name: "web"}
	d.UpsertPod(pod("a", "10.0.0.1"))
	d.UpsertFront(front("web", 1))
	d.UpsertSlice(slice("web-v4", "web", "a"))
	v6 := slice("web-v6", "web", "a")
	v6.Endpoints[0].Ready = false
	d.UpsertSlice(v6)
	wantBehind(t, d, "web[50051]")
	ms := d.Front(web).Members()
	if len(ms) != 1 || !ms[0].Ready || len(ms[0].Ports) != 1 {
		t.Errorf("members %+v", ms)
	}
	// While an endpoint moves it stands in both, then in the other alone.
	d.UpsertSlice(slice("web-v4", "web"))
	wantBehind(t, d, "web[50051]")
	d.RemoveSlice(nodecache.Name{Namespace: "prod", Name: "web-v6"})
	wantBehind(t, d, "")
}

func TestAddressesWithoutAPodAreMembers(t *testing.T) {
	d := nodecache.New(nodecache.Options{})
	s := slice("db-1", "db")
	s.Endpoints = []nodecache.Endpoint{{Addrs: []netip.Addr{netip.MustParseAddr("192.0.2.1")}, Ready: true}, {Addrs: []netip.Addr{netip.MustParseAddr("192.0.2.2")}}}
	d.UpsertSlice(s)
	d.UpsertFront(front("db", 1))
	if ms := d.Front(nodecache.Name{Namespace: "prod", Name: "db"}).Members(); len(ms) != 2 || !ms[0].Ready || ms[1].Ready {
		t.Errorf("members %+v", ms)
	}
}

func TestServicesAreSeenOldestFirst(t *testing.T) {
	d := nodecache.New(nodecache.Options{})
	d.UpsertPod(pod("a", "10.0.0.1"))
	d.UpsertPod(pod("b", "10.0.0.2"))
	for name, minute := range map[string]int{"c": 1, "a": 2, "b": 2} {
		d.UpsertFront(front(name, minute))
	}
	d.UpsertFront(front("d", 0, func(f *nodecache.Front) { f.Created = time.Time{} }))
	d.UpsertSlice(slice("1", "a", "a"))
	d.UpsertSlice(at(slice("2", "a", "b"), 9090))
	d.UpsertSlice(slice("3", "b", "b"))
	d.UpsertSlice(slice("4", "c", "a"))
	d.UpsertSlice(slice("5", "d", "a"))
	wantBehind(t, d, "c[50051] a[9090 50051] b[50051] d[50051]")
}

func TestWhereAnOwnerStoodOutlivesItsPods(t *testing.T) {
	start := func() *nodecache.Directory {
		d := nodecache.New(nodecache.Options{})
		r := d.UpsertPod(pod("a", "10.0.0.1"))
		must(t, d.Commit(r, serves("pkg.A")))
		d.UpsertFront(front("web", 1))
		d.UpsertSlice(slice("web-1", "web", "a"))
		return d
	}
	t.Run("the pod goes first", func(t *testing.T) {
		d := start()
		d.RemovePod("a")
		d.UpsertSlice(slice("web-1", "web"))
		wantBehind(t, d, "web[50051]")
	})
	t.Run("a draining pod leaves its slice first", func(t *testing.T) {
		d := start()
		d.UpsertPod(pod("a", "10.0.0.1", in(nodecache.Draining)))
		d.UpsertSlice(slice("web-1", "web"))
		wantBehind(t, d, "web[50051]")
		d.RemovePod("a")
		wantBehind(t, d, "web[50051]")
	})
	t.Run("until the next pod is somewhere", func(t *testing.T) {
		d := start()
		d.RemovePod("a")
		d.UpsertSlice(slice("web-1", "web"))
		d.UpsertPod(pod("b", "10.0.0.2"))
		wantBehind(t, d, "web[50051]")
		d.UpsertFront(front("api", 1))
		d.UpsertSlice(slice("api-1", "api", "b"))
		wantBehind(t, d, "api[50051]")
	})
	t.Run("not where a serving pod leaves the Service", func(t *testing.T) {
		d := start()
		d.UpsertSlice(slice("web-1", "web"))
		wantBehind(t, d, "")
		d.RemovePod("a")
		wantBehind(t, d, "")
	})
	t.Run("as the Service is now", func(t *testing.T) {
		d := start()
		d.RemovePod("a")
		s := subscribe(t, d)
		next(t, s)
		d.UpsertFront(front("web", 5))
		if got := next(t, s); !slices.Equal(got, []nodecache.OwnerKey{key}) {
			t.Errorf("told of %v", got)
		}
		if o := d.Owner(key); o.Behind[0].Created.Minute() != 5 {
			t.Errorf("behind %+v", o.Behind[0])
		}
		d.RemoveFront(nodecache.Name{Namespace: "prod", Name: "web"})
		if got := next(t, s); !slices.Equal(got, []nodecache.OwnerKey{key}) {
			t.Errorf("told of %v", got)
		}
		wantBehind(t, d, "")
	})
	t.Run("and is forgotten with what was learned", func(t *testing.T) {
		d := start()
		d.RemovePod("a")
		d.Expire(time.Now().Add(time.Hour))
		wantBehind(t, d, "gone")
		if s := d.Sizes(); s["rememberers"] != 0 {
			t.Errorf("left over: %v", s)
		}
	})
}

func TestHintOfAServiceIsAPortToAsk(t *testing.T) {
	bare := func(p *nodecache.Pod) { p.Hints = nil }
	named := func(port, protocol string) *nodecache.Slice {
		s := slice("web-1", "web", "a")
		s.Ports[0].Name, s.Ports[0].AppProtocol = port, protocol
		return s
	}
	for _, c := range []struct {
		name  string
		front *nodecache.Front
		slice *nodecache.Slice
		want  string // the port and why
	}{
		{"name", front("web", 1), named("grpc", ""), "50051 port name of Service web"},
		{"name with a suffix", front("web", 1), named("grpc-web", ""), "50051 port name of Service web"},
		{"another name", front("web", 1), named("grpcweb", ""), ""},
		{"appProtocol", front("web", 1), named("api", "kubernetes.io/h2c"), "50051 appProtocol of Service web"},
		{"appProtocol grpc", front("web", 1), named("", "grpc"), "50051 appProtocol of Service web"},
		{"another appProtocol", front("web", 1), named("api", "http"), ""},
		{"appProtocol of the Service alone", front("web", 1, func(f *nodecache.Front) { f.Ports[0].AppProtocol = "grpc" }), named("api", ""), "50051 appProtocol of Service web"},
	} {
		t.Run(c.name, func(t *testing.T) {
			d := nodecache.New(nodecache.Options{})
			d.UpsertPod(pod("a", "10.0.0.1", bare))
			wantKnowledge(t, d, nodecache.None)
			d.UpsertSlice(c.slice)
			wantKnowledge(t, d, nodecache.None) // a slice alone says nothing
			d.UpsertFront(c.front)
			m, _ := d.Member("a")
			got := ""
			for _, h := range m.AllHints() {
				got += fmt.Sprintf("%d %s", h.Port, h.Why)
			}
			if got != c.want || (len(m.DialPorts()) == 1) != (c.want != "") {
				t.Errorf("hints %q, ports %v, want %q", got, m.DialPorts(), c.want)
			}
			if c.want != "" {
				wantKnowledge(t, d, nodecache.Unknown)
				d.UpsertPod(pod("a", "10.0.0.1", bare, func(p *nodecache.Pod) { p.CollectOff = true }))
				wantKnowledge(t, d, nodecache.None)
			}
		})
	}
}

// A Service is often applied after its pods, and its slice comes after both.
func TestPortThatComesUpLaterIsAskedAbout(t *testing.T) {
	hinting := func() *nodecache.Slice {
		s := at(slice("web-1", "web", "a"), 9090)
		s.Ports[0].Name = "grpc"
		return s
	}
	t.Run("after the collect", func(t *testing.T) {
		d := nodecache.New(nodecache.Options{})
		must(t, d.Commit(d.UpsertPod(pod("a", "10.0.0.1")), serves("pkg.A")))
		d.UpsertFront(front("web", 1))
		d.UpsertSlice(hinting())
		wantKnowledge(t, d, nodecache.Unknown)
		if o := d.Owner(key); !slices.Equal(o.Services(), []string{"pkg.A"}) {
			t.Errorf("meanwhile it serves %v", o.Services())
		}
		r, err := d.Begin(key)
		must(t, err)
		info := serves("pkg.A")
		info.Ports = append(info.Ports, nodecache.PortInfo{Port: 9090, State: nodecache.PortEmpty})
		must(t, d.Commit(r, info))
		wantKnowledge(t, d, nodecache.Known)
		d.UpsertSlice(slice("web-2", "web", "a"))
		wantKnowledge(t, d, nodecache.Known)
	})
	t.Run("during the collect", func(t *testing.T) {
		d := nodecache.New(nodecache.Options{})
		d.UpsertPod(pod("a", "10.0.0.1"))
		d.UpsertFront(front("web", 1))
		r, err := d.Begin(key)
		must(t, err)
		d.UpsertSlice(hinting())
		must(t, d.Commit(r, serves("pkg.A")))
		wantKnowledge(t, d, nodecache.Unknown)
		r, err = d.Begin(key)
		must(t, err)
		// A port that gave no answer is not asked about for ever.
		must(t, d.Commit(r, serves("pkg.A")))
		wantKnowledge(t, d, nodecache.Known)
		d.UpsertPod(pod("a", "10.0.0.1", created(1)))
		d.UpsertPod(pod("b", "10.0.0.2"))
		wantKnowledge(t, d, nodecache.Known)
	})
	t.Run("of what is remembered", func(t *testing.T) {
		d := nodecache.New(nodecache.Options{})
		must(t, d.Commit(d.UpsertPod(pod("a", "10.0.0.1")), serves("pkg.A")))
		d.RemovePod("a")
		d.UpsertFront(front("web", 1))
		d.UpsertSlice(hinting())
		d.UpsertPod(pod("a", "10.0.0.1"))
		wantKnowledge(t, d, nodecache.Unknown)
	})
}

func TestWhichOfSeveralPortsIsCalled(t *testing.T) {
	annotated := func(p *nodecache.Pod) {
		p.Hints = []nodecache.Hint{{Port: 3000, Why: nodecache.WhyAnnotation}}
	}
	for _, c := range []struct {
		name   string
		edits  []func(*nodecache.Pod)
		slices []*nodecache.Slice
		want   string
	}{
		{"the lowest", nil, nil, "10.0.0.1:1000"},
		{"one behind a Service", nil, []*nodecache.Slice{at(slice("1", "web", "a"), 2000)}, "10.0.0.1:2000"},
		{"the lowest of those", nil, []*nodecache.Slice{at(slice("1", "web", "a"), 3000), at(slice("2", "api", "a"), 2000)}, "10.0.0.1:2000"},
		{"not one of another pod", nil, []*nodecache.Slice{at(slice("1", "web", "b"), 2000)}, "10.0.0.1:1000"},
		{"not one that does not answer", nil, []*nodecache.Slice{at(slice("1", "web", "a"), 4000)}, "10.0.0.1:1000"},
		{"that of the annotation", []func(*nodecache.Pod){annotated}, []*nodecache.Slice{at(slice("1", "web", "a"), 2000)}, "10.0.0.1:3000"},
		{"a declared one", []func(*nodecache.Pod){declaring(5000, "pkg.A")}, []*nodecache.Slice{at(slice("1", "web", "a"), 2000)}, "10.0.0.1:5000"},
	} {
		t.Run(c.name, func(t *testing.T) {
			d := nodecache.New(nodecache.Options{})
			info := &nodecache.Info{}
			for _, port := range []uint16{1000, 2000, 3000} {
				info.Ports = append(info.Ports, nodecache.PortInfo{Port: port, State: nodecache.PortServes, Services: []nodecache.Service{{Name: "pkg.A"}}})
			}
			must(t, d.Commit(d.UpsertPod(pod("a", "10.0.0.1", c.edits...)), info))
			d.UpsertFront(front("web", 1))
			d.UpsertFront(front("api", 1))
			for _, s := range c.slices {
				d.UpsertSlice(s)
			}
			ts := d.Owner(key).Targets("pkg.A")
			if len(ts) != 1 || ts[0].Addr.String() != c.want {
				t.Errorf("targets %v, want %s", ts, c.want)
			}
		})
	}
}
