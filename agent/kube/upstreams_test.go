package kube

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/fingerpost/fingerpost/nodecache"
)

func TestUpstreamsAreReadAsCallsAreWritten(t *testing.T) {
	many := make([]string, 70)
	for i := range many {
		many[i] = fmt.Sprintf("pkg.S%d", i)
	}
	for value, c := range map[string]struct {
		want string // the entries, with spaces between
		bad  string // what is said of each bad one
	}{
		"":                                {},
		" , ":                             {},
		"shop.v1.Cart":                    {want: "/shop.v1.Cart"},
		"Greeter":                         {want: "/Greeter"},
		"my_pkg.svc":                      {want: "/my_pkg.svc"},
		"/shop.cart":                      {want: "/shop.cart"},
		"users":                           {want: "users"},
		"users.prod":                      {want: "users.prod"},
		"users.prod:50051":                {want: "users.prod:50051"},
		"Users.PROD.svc.:80":              {want: "users.prod.svc:80"},
		"users.prod:50051/shop.Users":     {want: "users.prod:50051/shop.Users"},
		"users/grpc.health.v1.Health":     {want: "users/grpc.health.v1.Health"},
		"10.96.0.7:80/a.B,[FD00::1]:80":   {want: "10.96.0.7:80/a.B [fd00::1]:80"},
		"a.B, users.prod ,a.B,users:1":    {want: "/a.B users.prod users:1"},
		"users.prod:0,a.B":                {want: "/a.B", bad: `"0" is not a port`},
		"a b,users_1:80,a.B":              {want: "/a.B", bad: `"a b" is ignored: it is no name of a Service|"users_1:80" is ignored: it is no name of a Service`},
		"users/shop.Users/Get,a.B":        {want: "/a.B", bad: "it has no full name of a gRPC service"},
		"users/,a.B":                      {want: "/a.B", bad: "it has no full name of a gRPC service"},
		"/grpc.health.v1.Health,a.B":      {want: "/a.B", bad: "write SERVICE.NAMESPACE:PORT/grpc.health.v1.Health"},
		"127.0.0.1:15001/a.B,[::1]:1,x":   {want: "x", bad: "127.0.0.1 is the sidecar itself|[::1] is the sidecar itself"},
		"localhost:15001,a.B":             {want: "/a.B", bad: "localhost is the sidecar itself"},
		"fd00::1,a.B":                     {want: "/a.B", bad: "it is no name of a Service"},
		strings.Join(many, ",") + ",$":    {want: "/" + strings.Join(many[:64], " /"), bad: "only its first 64 entries count"},
		strings.Repeat("a", 300) + ",a.B": {want: "/a.B", bad: "it is no name of a Service"},
	} {
		pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: "a", Namespace: "prod", UID: "u", Annotations: map[string]string{UpstreamsAnnotation: value}}}
		r := Convert(pod)
		var got []string
		for _, u := range r.Upstreams {
			got = append(got, u.String())
		}
		if strings.Join(got, " ") != c.want {
			t.Errorf("%.80q: got %q, want %q", value, got, c.want)
		}
		notes := r.Notes()
		wants := strings.Split(c.bad, "|")
		if c.bad == "" {
			wants = nil
		}
		if len(notes) != len(wants) {
			t.Errorf("%.80q: notes %q, want %q", value, notes, wants)
			continue
		}
		for i, want := range wants {
			if !strings.Contains(notes[i], want) || !strings.Contains(notes[i], UpstreamsAnnotation) {
				t.Errorf("%.80q: note %q does not say %q", value, notes[i], want)
			}
		}
	}
}

// An annotation has up to 256 KiB, and whoever makes a pod writes it.
func TestNotesOfAPodAreBounded(t *testing.T) {
	bad := strings.Repeat("!,", 1<<16)
	for i := range 1000 {
		bad += fmt.Sprintf("!%d,", i)
	}
	pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: "a", Namespace: "prod", UID: "u", Annotations: map[string]string{CollectAnnotation: "perhaps"}}}
	for _, a := range []string{UpstreamsAnnotation, GRPCPortAnnotation, ExportAnnotation, ServicesAnnotation, RetryOnAnnotation, NumRetriesAnnotation} {
		pod.Annotations[a] = bad
	}
	pod.Annotations[ServicesAnnotation] = strings.ReplaceAll(bad, ",", "")
	notes := Convert(pod).Notes()
	of := map[string]int{}
	size := 0
	for _, n := range notes {
		size += len(n)
		for a := range pod.Annotations {
			if strings.Contains(n, a) {
				of[a]++
			}
		}
	}
	for a := range pod.Annotations {
		if of[a] < 1 || of[a] > maxNotes+1 {
			t.Errorf("%d notes of %s", of[a], a)
		}
	}
	if size > 64<<10 {
		t.Errorf("notes of %d bytes", size)
	}
	if more := "annotation " + UpstreamsAnnotation + ": more of it is ignored"; !slices.Contains(notes, more) {
		t.Errorf("no note %q", more)
	}
}

// A pod whose word changes is another one, also where it comes from the wire or
// a checkpoint.
func TestUpstreamsAreKeptOfAPod(t *testing.T) {
	make := func(value string) *Record {
		return Convert(&corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: "a", Namespace: "prod", UID: "u", Annotations: map[string]string{UpstreamsAnnotation: value}}})
	}
	a, b := make("a.B"), make("a.C")
	if a.equal(b) || !a.equal(make("a.B")) {
		t.Error("two records are told apart by something else than what they say")
	}
	back, err := decodePods(encodePods([]*Record{a, b}))
	if err != nil || len(back) != 2 || !slices.Equal(back[1].Upstreams, []nodecache.Upstream{{Service: "a.C"}}) {
		t.Errorf("%+v, %v", back, err)
	}
}
