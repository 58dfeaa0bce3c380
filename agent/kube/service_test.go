package kube_test

import (
	"fmt"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/fingerpost/fingerpost/agent/kube"
	"github.com/fingerpost/fingerpost/nodecache"
)

func TestServicesAreKeptSmall(t *testing.T) {
	h2c := "kubernetes.io/h2c"
	for _, c := range []struct {
		name string
		spec corev1.ServiceSpec
		want nodecache.Front
	}{
		{"no type", corev1.ServiceSpec{ClusterIP: "10.0.0.1"}, nodecache.Front{Type: "ClusterIP"}},
		{"headless", corev1.ServiceSpec{ClusterIP: "None", Type: "ClusterIP", PublishNotReadyAddresses: true}, nodecache.Front{Type: "ClusterIP", Headless: true, NotReady: true}},
		{"external", corev1.ServiceSpec{Type: "ExternalName", ExternalName: "bank.example.com"}, nodecache.Front{Type: "ExternalName", External: "bank.example.com"}},
		{"selector", corev1.ServiceSpec{Selector: map[string]string{"a": "b"}}, nodecache.Front{Type: "ClusterIP", Selects: true}},
		{"ports", corev1.ServiceSpec{Ports: []corev1.ServicePort{
			{Name: "dns", Port: 53, Protocol: "UDP"}, {Name: "web", Port: 80, AppProtocol: &h2c}, {Name: "odd", Port: 70000},
		}}, nodecache.Front{Type: "ClusterIP", Ports: []nodecache.FrontPort{{Name: "web", AppProtocol: h2c, Port: 80}}}},
	} {
		t.Run(c.name, func(t *testing.T) {
			got := kube.ConvertService(&corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: "prod", Name: "web", UID: "u"}, Spec: c.spec})
			c.want.UID, c.want.Namespace, c.want.Name = "u", "prod", "web"
			got.ClusterIPs = nil
			if !got.Equal(&c.want) {
				t.Errorf("got %+v, want %+v", got, c.want)
			}
		})
	}
	dual := kube.ConvertService(&corev1.Service{Spec: corev1.ServiceSpec{ClusterIP: "10.0.0.1", ClusterIPs: []string{"10.0.0.1", "fd00::1"}}})
	if fmt.Sprint(dual.ClusterIPs) != "[10.0.0.1 fd00::1]" {
		t.Errorf("cluster IPs %v", dual.ClusterIPs)
	}
}

func external(host string, ports ...int32) corev1.ServiceSpec {
	s := corev1.ServiceSpec{Type: corev1.ServiceTypeExternalName, ExternalName: host}
	for _, p := range ports {
		s.Ports = append(s.Ports, corev1.ServicePort{Port: p})
	}
	return s
}

func TestServiceSaysToWhomItsDeclarationIsExported(t *testing.T) {
	for _, c := range []struct{ services, export, want, ignored string }{
		{"1=bank.A", "web,ops", "ops,web", ""},
		{"1=bank.A", "*", "*", ""},
		{"1=bank.A", "", "-", ""},
		{"1=bank.A", "web,No/One", "web", `"No/One" is not a namespace`},
		{"bank A", "web", "", "is not the full name"}, // there is nothing to export
	} {
		f := kube.ConvertService(&corev1.Service{ObjectMeta: metav1.ObjectMeta{Annotations: map[string]string{
			kube.ServicesAnnotation: c.services, kube.ExportAnnotation: c.export,
		}}, Spec: external("bank.example.com")})
		if f.Export != c.want || !strings.Contains(f.Ignored, c.ignored) || (c.ignored == "") != (f.Ignored == "") {
			t.Errorf("%+v: export %q, ignored %q", c, f.Export, f.Ignored)
		}
	}
}

func TestServiceWithoutASelectorDeclaresWhatIsBehindIt(t *testing.T) {
	for _, c := range []struct {
		text    string
		spec    corev1.ServiceSpec
		want    []nodecache.Declared
		ignored string
	}{
		{"bank.B,bank.A", corev1.ServiceSpec{}, []nodecache.Declared{{Services: []string{"bank.A", "bank.B"}}}, ""},
		{"9000=bank.A", corev1.ServiceSpec{}, []nodecache.Declared{{Port: 9000, Services: []string{"bank.A"}}}, ""},
		{"0=bank.A", corev1.ServiceSpec{}, nil, "is not a port"},
		{"", corev1.ServiceSpec{}, nil, "is not the full name"},
		{"bank.A", corev1.ServiceSpec{Selector: map[string]string{"a": "b"}}, nil, "pods say themselves"},
		{"bank.A", corev1.ServiceSpec{Type: "ExternalName", ExternalName: "bank.example.com"}, nil, "has no port, and there are 0"},
		{"bank.A", external("bank.example.com", 443, 80), nil, "has no port, and there are 2"},
		{"bank.A", external("bank.example.com", 443), []nodecache.Declared{{Port: 443, Services: []string{"bank.A"}}}, ""},
		{"9000=bank.A", external("bank.example.com.", 443), []nodecache.Declared{{Port: 9000, Services: []string{"bank.A"}}}, ""},
		{"9000=bank.A", external("localhost"), []nodecache.Declared{{Port: 9000, Services: []string{"bank.A"}}}, ""},
		{"9000=bank.A", external("192.0.2.1"), nil, "is an address, not a DNS name"},
		{"9000=bank.A", external("127.1"), nil, "is an address, not a DNS name"},
		{"9000=bank.A", external("2130706433"), nil, "is an address, not a DNS name"},
		{"9000=bank.A", external("127.0x1"), nil, "is an address, not a DNS name"},
		{"9000=bank.A", external("fd00::1"), nil, "is not a DNS name"},
		{"9000=bank.A", external("bank..com"), nil, "is not a DNS name"},
		{"9000=bank.A", external("bank.example.com:443"), nil, "is not a DNS name"},
		{"9000=bank.A", external("unix:/run/ads.sock"), nil, "is not a DNS name"},
		{"9000=bank.A", external(strings.Repeat("a.", 127) + "bank"), nil, "is not a DNS name"},
	} {
		f := kube.ConvertService(&corev1.Service{ObjectMeta: metav1.ObjectMeta{Annotations: map[string]string{kube.ServicesAnnotation: c.text}}, Spec: c.spec})
		if !reflect.DeepEqual(f.Declared, c.want) || !strings.Contains(f.Ignored, c.ignored) || (c.ignored == "") != (f.Ignored == "") {
			t.Errorf("%q: %+v, ignored %q", c.text, f.Declared, f.Ignored)
		}
	}
}

func TestMissingConditionsOfAnEndpointMeanWhatKubernetesSays(t *testing.T) {
	yes, no := true, false
	for _, c := range []struct {
		ready, serving, terminating *bool
		want                        string // ready, serving, terminating
	}{
		{nil, nil, nil, "true true false"},
		{&no, nil, nil, "false false false"},
		{&yes, nil, nil, "true true false"},
		{&no, &yes, &yes, "false true true"},
		{nil, &no, nil, "true false false"},
	} {
		s := kube.ConvertSlice(&discoveryv1.EndpointSlice{Endpoints: []discoveryv1.Endpoint{{
			Addresses:  []string{"10.0.0.1"},
			Conditions: discoveryv1.EndpointConditions{Ready: c.ready, Serving: c.serving, Terminating: c.terminating},
		}}})
		e := s.Endpoints[0]
		if got := fmt.Sprint(e.Ready, e.Serving, e.Terminating); got != c.want {
			t.Errorf("got %s, want %s", got, c.want)
		}
	}
}

func TestSliceMembersArePodsOrAddresses(t *testing.T) {
	udp, port, name, zone := corev1.ProtocolUDP, int32(50051), "grpc", "z1"
	s := kube.ConvertSlice(&discoveryv1.EndpointSlice{
		ObjectMeta: metav1.ObjectMeta{Namespace: "prod", Name: "web-1", Labels: map[string]string{"kubernetes.io/service-name": "web"}},
		Ports:      []discoveryv1.EndpointPort{{Name: &name, Port: &port}, {Port: &port, Protocol: &udp}},
		Endpoints: []discoveryv1.Endpoint{
			{Addresses: []string{"10.0.0.1"}, TargetRef: &corev1.ObjectReference{Kind: "Pod", Name: "a", UID: "a"}, Zone: &zone},
			{Addresses: []string{"192.0.2.1", "::ffff:192.0.2.2"}},
			{Addresses: []string{"192.0.2.3"}, TargetRef: &corev1.ObjectReference{Kind: "Node", UID: "n"}},
			{Addresses: []string{"db.example.com"}},
		},
	})
	if s.Service != "web" || s.AnyPort || !slices.Equal(s.Ports, []nodecache.SlicePort{{Name: "grpc", Port: 50051}}) {
		t.Errorf("slice %+v", s)
	}
	var got []string
	for _, e := range s.Endpoints {
		got = append(got, e.Pod+e.Zone+fmt.Sprint(e.Addrs))
	}
	if want := []string{"az1[]", "[192.0.2.1 192.0.2.2]", "[192.0.2.3]"}; !slices.Equal(got, want) {
		t.Errorf("endpoints %q, want %q", got, want)
	}
	if !kube.ConvertSlice(&discoveryv1.EndpointSlice{}).AnyPort || !kube.ConvertSlice(&discoveryv1.EndpointSlice{Ports: []discoveryv1.EndpointPort{{}}}).AnyPort {
		t.Error("a slice that restricts no port does not lead to every port")
	}
}

// The dumps are of a real cluster.
func TestServicesOfARealCluster(t *testing.T) {
	for dump, want := range map[string]map[string]string{
		"steady": {
			"shop/cart":            "ClusterIP selects 4 pods at 50051, hints 50051",
			"shop/ledger":          "headless selects notready 3 pods at 50051, hints 50051",
			"shop/stock":           "ClusterIP selects 2 pods at 9090 9102",
			"pay/api":              "ClusterIP selects 2 pods at 8443, hints 8443",
			"pay/mainframe":        "ClusterIP 0 pods; 192.0.2.10 at 7000",
			"pay/bank":             "ExternalName bank.example.com 0 pods",
			"kube-system/kube-dns": "ClusterIP selects 2 pods at 53 9153",
			"default/kubernetes":   "ClusterIP 0 pods; 172.29.0.2 at 6443",
		},
	} {
		x := newFile(filepath.Join("testdata/cluster-dumps", dump+".yaml"))
		run(t, x.src)
		waitSynced(t, x.src)
		got := map[string]string{}
		for _, n := range x.dir.FrontNames() {
			got[n.String()] = describe(x.dir, n)
		}
		for name, says := range want {
			if got[name] != says {
				t.Errorf("%s: %s is %q, want %q", dump, name, got[name], says)
			}
		}
		if len(got) != len(want) {
			t.Errorf("%s: services %v", dump, got)
		}
	}
}

// describe says what the directory knows of a Service, and of the pods that it
// leads to by their own views.
func describe(d *nodecache.Directory, n nodecache.Name) string {
	v := d.Front(n)
	kind := v.Type
	if v.Headless {
		kind = "headless"
	}
	if v.External != "" {
		kind += " " + v.External
	}
	if v.Selects {
		kind += " selects"
	}
	if v.NotReady {
		kind += " notready"
	}
	pods, ports, hints, bare := 0, []string{}, "", ""
	for _, m := range v.Members() {
		if m.Pod == "" {
			bare += fmt.Sprintf("; %s at %d", m.Addrs[0], m.Ports[0].Port)
			continue
		}
		pods++
		member, ok := d.Member(m.Pod)
		if !ok {
			continue
		}
		for _, st := range member.Behind {
			if st.Key() != n {
				continue
			}
			for _, p := range st.Ports {
				if s := fmt.Sprint(p); !slices.Contains(ports, s) {
					ports = append(ports, s)
				}
			}
			for _, h := range st.Hints {
				hints = fmt.Sprintf(", hints %d", h.Port)
			}
		}
	}
	at := ""
	if len(ports) > 0 {
		at = " at " + strings.Join(ports, " ")
	}
	return fmt.Sprintf("%s %d pods%s%s%s", kind, pods, at, hints, bare)
}

func service(name, uid string) *corev1.Service {
	return &corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: "prod", Name: name, UID: types.UID(uid)}}
}

func endpointSlice(name, service string, pods ...string) *discoveryv1.EndpointSlice {
	port := int32(50051)
	s := &discoveryv1.EndpointSlice{
		ObjectMeta: metav1.ObjectMeta{Namespace: "prod", Name: name, UID: types.UID("uid-" + name), Labels: map[string]string{discoveryv1.LabelServiceName: service}},
		Ports:      []discoveryv1.EndpointPort{{Port: &port}},
	}
	for _, uid := range pods {
		s.Endpoints = append(s.Endpoints, discoveryv1.Endpoint{Addresses: []string{"192.0.2.1"}, TargetRef: &corev1.ObjectReference{Kind: "Pod", UID: types.UID(uid)}})
	}
	return s
}

func TestServicesAreWatched(t *testing.T) {
	s := newAPIServer(t)
	s.set(true, "ADDED", service("web", "u1"))
	s.set(true, "ADDED", endpointSlice("web-1", "web", "a"))
	x := newCluster(t, s.URL)
	run(t, x.src)
	waitSynced(t, x.src)
	web := nodecache.Name{Namespace: "prod", Name: "web"}
	members := func() string {
		v := x.dir.Front(web)
		if v == nil {
			return "gone"
		}
		out := v.UID
		for _, m := range v.Members() {
			out += " " + m.Pod
		}
		return out
	}
	is := func(want string) {
		t.Helper()
		eventually(t, func() string {
			if got := members(); got != want {
				return fmt.Sprintf("%q, want %q; %+v", got, want, x.src.Status())
			}
			return ""
		})
	}
	// What was listed is there once the source has synced.
	if got := members(); got != "u1 a" {
		t.Errorf("after the sync: %q", got)
	}
	s.set(false, "MODIFIED", endpointSlice("web-1", "web", "a", "b"))
	is("u1 a b")
	s.set(false, "ADDED", endpointSlice("web-2", "web", "b", "c"))
	is("u1 a b c")
	// The late end of a predecessor is not that of its successor.
	s.set(false, "MODIFIED", service("web", "u2"))
	is("u2 a b c")
	s.say("services", event("DELETED", typed(service("web", "u1"))))
	s.set(false, "DELETED", endpointSlice("web-1", "web", "a", "b"))
	is("u2 b c")
	s.set(false, "DELETED", service("web", "u2"))
	is("gone")
	// What went unseen is missing from the next list.
	s.set(false, "ADDED", service("web", "u3"))
	is("u3 b c")
	s.set(true, "DELETED", endpointSlice("web-2", "web", "b", "c"))
	s.say("endpointslices", `{"type":"ERROR","object":{"apiVersion":"v1","kind":"Status","status":"Failure","code":410,"reason":"Expired","message":"too old"}}`)
	is("u3")
}

func typed(s *corev1.Service) *corev1.Service {
	s.TypeMeta = metav1.TypeMeta{APIVersion: "v1", Kind: "Service"}
	return s
}

func TestServicesThatMayNotBeReadDoNotStopThePods(t *testing.T) {
	s := newAPIServer(t)
	s.do(func() { delete(s.objects, "services") })
	x := newCluster(t, s.URL)
	run(t, x.src)
	waitSynced(t, x.src)
	x.waitError(t, "services: ")
}

// A pod that is not Ready serves where each Service in front of it says so,
// whatever came first.
func TestPublishedPodServesThoughItIsNotReady(t *testing.T) {
	dir := nodecache.New(nodecache.Options{})
	store := kube.NewStore(dir, nil)
	front := func(name string, publishes bool) *nodecache.Front {
		return &nodecache.Front{UID: name, Namespace: "prod", Name: name, NotReady: publishes}
	}
	slice := func(service string, pods ...string) *nodecache.Slice {
		return kube.ConvertSlice(endpointSlice(service+"-1", service, pods...))
	}
	pod := func(ready bool) *kube.Record {
		p := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "prod", Name: "a", UID: "a"}}
		p.Status.PodIP = "192.0.2.1"
		if ready {
			p.Status.Conditions = []corev1.PodCondition{{Type: corev1.PodReady, Status: corev1.ConditionTrue}}
		}
		return kube.Convert(p)
	}
	is := func(when, want string) {
		t.Helper()
		got := "absent"
		if p := dir.Pod("a"); p != nil {
			got = fmt.Sprint(p.State, " ", map[bool]string{true: "unready", false: "ready"}[p.Unready])
		}
		if got != want {
			t.Errorf("%s: %s, want %s", when, got, want)
		}
		if r := store.Pod("prod", "a"); (r.State == nodecache.Absent) != (want == "absent") {
			t.Errorf("%s: the record is %s", when, r.State)
		}
	}
	store.Upsert(pod(false))
	store.UpsertSlice(slice("peers", "a"))
	is("no Service", "absent")
	store.UpsertService(front("peers", true))
	is("published", "serving unready")
	m, _ := dir.Member("a")
	if ports := m.DialPorts(); len(ports) != 0 {
		t.Errorf("a pod that is not ready would be asked at %v", ports)
	}
	store.Upsert(pod(true))
	is("ready", "serving ready")
	store.Upsert(pod(false))
	is("not ready again", "serving unready")
	store.UpsertService(front("web", false))
	store.UpsertSlice(slice("web", "a"))
	is("behind one that does not publish", "absent")
	store.RemoveSlice("prod", "web-1")
	is("without it", "serving unready")
	store.UpsertService(front("peers", false))
	is("no longer published", "absent")
	store.UpsertService(front("peers", true))
	store.RemoveSlice("prod", "peers-1")
	is("out of the slice", "absent")
	store.UpsertSlice(slice("peers", "a"))
	is("back in it", "serving unready")
	store.Remove("prod", "a", "a")
	if p := dir.Pod("a"); p != nil {
		t.Errorf("removed, and %s", p.State)
	}
}

func TestExportAnnotation(t *testing.T) {
	for value, want := range map[string]string{
		"web":         `web 0 notes`,
		" b , a,b,":   `a,b 0 notes`,
		"a, *":        `* 0 notes`,
		"":            `- 0 notes`,
		"No Such/One": `- 1 notes`,
		"a,B":         `a 1 notes`,
	} {
		p := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Annotations: map[string]string{kube.ExportAnnotation: value}}}
		r := kube.Convert(p)
		if got := fmt.Sprintf("%s %d notes", r.Export, len(r.Notes())); got != want {
			t.Errorf("%q: %s, want %s", value, got, want)
		}
	}
	if r := kube.Convert(&corev1.Pod{}); r.Export != "" {
		t.Errorf("without the annotation: %q", r.Export)
	}
}
