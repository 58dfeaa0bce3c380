package report_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"

	"github.com/fingerpost/fingerpost/agent/report"
	"github.com/fingerpost/fingerpost/test/harness"
)

const (
	leaseName = "reports"
	lease     = 3 * time.Second // no request of a busy machine is cut off
	soon      = 60 * time.Second
)

// writer is a running writer of one namespace of the API server.
type writer struct {
	*report.Writer
	t    *testing.T
	log  *bytes.Buffer // whole once it has stopped
	stop func()

	// net is what the writer's requests go through.
	net *network

	mu    sync.Mutex
	state string
}

// network lets requests through, or breaks or refuses them.
type network struct {
	down    atomic.Bool
	refuses atomic.Value // string: a resource of which the server says 403
	refused atomic.Int32 // times that it said so
	tries   atomic.Int32 // to create an Event
	posts   atomic.Int32 // that did
}

// through is a transport behind a network.
type through struct {
	*network
	next http.RoundTripper
}

func (n through) RoundTrip(r *http.Request) (*http.Response, error) {
	if n.down.Load() {
		return nil, errors.New("network is unreachable")
	}
	if res, _ := n.refuses.Load().(string); res != "" && strings.Contains(r.URL.Path, "/"+res) {
		n.refused.Add(1)
		text := `{"kind":"Status","apiVersion":"v1","status":"Failure","message":"` + res + ` is forbidden","reason":"Forbidden","code":403}`
		return &http.Response{
			StatusCode: http.StatusForbidden, Header: http.Header{"Content-Type": {"application/json"}},
			Body: io.NopCloser(strings.NewReader(text)), Request: r,
		}, nil
	}
	resp, err := n.next.RoundTrip(r)
	if r.Method == http.MethodPost && strings.HasSuffix(r.URL.Path, "/events") {
		n.tries.Add(1)
		if err == nil && resp.StatusCode == http.StatusCreated {
			n.posts.Add(1)
		}
	}
	return resp, err
}

func start(t *testing.T, api *harness.APIServer, namespace, node string) *writer {
	w := &writer{t: t, log: &bytes.Buffer{}, net: &network{}}
	config := rest.CopyConfig(api.Config)
	config.Wrap(func(next http.RoundTripper) http.RoundTripper { return through{w.net, next} })
	t.Cleanup(func() { harness.CloseIdleConnections(config) })
	var err error
	w.Writer, err = report.NewWriter(config, report.WriterOptions{
		Namespace: namespace, Name: leaseName, Node: node, Lease: lease,
		Logger: slog.New(slog.NewTextHandler(w.log, nil)),
		State: func(s string) {
			w.mu.Lock()
			defer w.mu.Unlock()
			w.state = s
		},
	})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() { w.Run(ctx); close(done) }()
	w.stop = func() { cancel(); <-done }
	t.Cleanup(w.stop)
	return w
}

func (w *writer) is(prefix string) *writer {
	w.t.Helper()
	harness.Eventually(w.t, soon, func() error {
		w.mu.Lock()
		defer w.mu.Unlock()
		if !strings.HasPrefix(w.state, prefix) {
			return fmt.Errorf("state %q, want %q", w.state, prefix)
		}
		return nil
	})
	return w
}

// wrote waits until it has heard that n Events are created: the API server shows
// an Event before the one who wrote it has the answer.
func (w *writer) wrote(n int32) {
	w.t.Helper()
	harness.Eventually(w.t, soon, func() error {
		if got := w.net.posts.Load(); got != n {
			return fmt.Errorf("wrote %d Events, want %d", got, n)
		}
		return nil
	})
}

func event(namespace, message string) report.Event {
	return report.Event{
		Object: corev1.ObjectReference{APIVersion: "apps/v1", Kind: "ReplicaSet", Namespace: namespace, Name: "web-5d9", UID: "rs"},
		Reason: report.ReasonDropped, Warning: true, Message: message,
	}
}

// events waits until the namespace has Events of exactly these messages.
func events(t *testing.T, api *harness.APIServer, namespace string, want ...string) {
	t.Helper()
	slices.Sort(want)
	harness.Eventually(t, soon, func() error {
		l, err := api.Client.CoreV1().Events(namespace).List(t.Context(), metav1.ListOptions{FieldSelector: "source=fingerpost"})
		if err != nil {
			return err
		}
		var got []string
		for _, e := range l.Items {
			got = append(got, e.Message)
			if e.Count != 1 || e.Type != corev1.EventTypeWarning || e.InvolvedObject.Kind != "ReplicaSet" || e.InvolvedObject.UID != "rs" {
				t.Errorf("event %+v", e)
			}
		}
		if slices.Sort(got); !slices.Equal(got, want) {
			return fmt.Errorf("events %q, want %q", got, want)
		}
		return nil
	})
}

func TestOneOfTwoWrites(t *testing.T) {
	api := harness.SharedAPIServer(t)
	ns := api.Namespace(t)
	a := start(t, api, ns, "n1").is("on: writer")
	b := start(t, api, ns, "n2").is("on: follower of n1-")
	for _, message := range []string{"first", "second", "third"} {
		for _, w := range []*writer{a, b} {
			w.Say(event(ns, message))
			w.Say(event(ns, message))
		}
	}
	events(t, api, ns, "first", "second", "third")
	a.wrote(3)
	b.wrote(0)
	// One that is stopped lets the next be elected, which repeats nothing, and
	// writes what nobody had written.
	a.stop()
	b.Say(event(ns, "fourth"))
	b.is("on: writer")
	events(t, api, ns, "first", "second", "third", "fourth")
	b.wrote(1)
	l, err := api.Client.CoordinationV1().Leases(ns).Get(t.Context(), leaseName, metav1.GetOptions{})
	if err != nil || !strings.HasPrefix(*l.Spec.HolderIdentity, "n2-") || *l.Spec.LeaseTransitions != 1 {
		t.Errorf("lease %+v, %v", l.Spec, err)
	}
	b.stop()
	if n, m := a.net.tries.Load(), b.net.tries.Load(); n != 3 || m != 4 {
		t.Errorf("tried %d and %d times to write, want 3 and 4", n, m)
	}
}

// A writer that is cut off, as one that was killed is, is replaced once its
// Lease has run out; what happened meanwhile is written by its successor. When
// it comes back it follows.
func TestWriterThatIsGoneIsReplaced(t *testing.T) {
	api := harness.SharedAPIServer(t)
	ns := api.Namespace(t)
	a := start(t, api, ns, "n1").is("on: writer")
	b := start(t, api, ns, "n2").is("on: follower of n1-")
	a.net.down.Store(true)
	for _, w := range []*writer{a, b} {
		w.Say(event(ns, "in the gap"))
	}
	b.is("on: writer")
	a.is("off: lease " + ns + "/" + leaseName + ": ")
	events(t, api, ns, "in the gap")
	a.net.down.Store(false)
	a.is("on: follower of n2-")
	a.stop()
	b.is("on: writer")
	if n := strings.Count(a.log.String(), "level=WARN"); n != 1 {
		t.Errorf("the log has %d warnings, want 1:\n%s", n, a.log)
	}
	a.wrote(0)
}

func TestRightsThatAreMissingAreNamed(t *testing.T) {
	api := harness.SharedAPIServer(t)
	ns := api.Namespace(t)
	a := start(t, api, ns, "n1").is("on: writer")
	a.net.refuses.Store("events")
	a.Say(event(ns, "one"))
	a.is("off: Events cannot be written: events is forbidden")
	a.net.refuses.Store("")
	a.is("on: writer") // with what could not be written
	events(t, api, ns, "one")
	a.net.refuses.Store("leases")
	a.is("off: lease " + ns + "/" + leaseName + ": leases is forbidden")
	a.stop()
	if n := strings.Count(a.log.String(), "level=WARN"); n != 2 {
		t.Errorf("the log has %d warnings, want 2:\n%s", n, a.log)
	}
}

// What an agent alone knows it writes itself, elected or not, and with the API
// server away as soon as it is back.
func TestFollowerWritesWhatItAloneKnows(t *testing.T) {
	api := harness.SharedAPIServer(t)
	ns := api.Namespace(t)
	a := start(t, api, ns, "n1").is("on: writer")
	b := start(t, api, ns, "n2").is("on: follower of n1-")
	own := event(ns, "own")
	own.Own = true
	b.net.refuses.Store("events")
	b.Say(own)
	b.is("off: Events cannot be written: ")
	b.net.refuses.Store("")
	b.Say(event(ns, "of all"))
	events(t, api, ns, "own")
	b.is("on: follower of n1-")
	a.wrote(0)
	b.wrote(1)
}

// An Event that cannot be written keeps no other waiting.
func TestOneEventThatFailsKeepsNoOtherWaiting(t *testing.T) {
	api := harness.SharedAPIServer(t)
	ns, full := api.Namespace(t), api.Namespace(t)
	a := start(t, api, ns, "n1").is("on: writer")
	a.net.refuses.Store(full) // as where a quota is used up
	a.Say(event(full, "nowhere"))
	a.is("off: Events cannot be written: " + full)
	for i := range 3 {
		a.Say(event(ns, fmt.Sprint(i)))
	}
	events(t, api, ns, "0", "1", "2")
	events(t, api, full)
}

// Many that begin together agree on one, also where they are of one node.
func TestManyAgreeOnOne(t *testing.T) {
	api := harness.SharedAPIServer(t)
	ns := api.Namespace(t)
	var all []*writer
	for range 8 {
		all = append(all, start(t, api, ns, "n1"))
	}
	for _, w := range all {
		w.is("on: ")
		w.Say(event(ns, "said by all"))
	}
	events(t, api, ns, "said by all")
	writers := 0
	for _, w := range all {
		w.mu.Lock()
		writing := w.state == "on: writer"
		w.mu.Unlock()
		if writing {
			writers++
			w.wrote(1)
		} else {
			w.wrote(0)
		}
	}
	if writers != 1 {
		t.Errorf("%d writers, want one", writers)
	}
}

// A Lease that nobody renews is taken only after as long as its holder said,
// whatever times stand in it.
func TestLeaseIsNotTakenByItsTimes(t *testing.T) {
	api := harness.SharedAPIServer(t)
	ns := api.Namespace(t)
	holder, seconds, ago := "another", int32(3600), metav1.NewMicroTime(time.Now().Add(-48*time.Hour))
	held := &coordinationv1.Lease{
		ObjectMeta: metav1.ObjectMeta{Name: leaseName},
		Spec:       coordinationv1.LeaseSpec{HolderIdentity: &holder, LeaseDurationSeconds: &seconds, AcquireTime: &ago, RenewTime: &ago},
	}
	held, err := api.Client.CoordinationV1().Leases(ns).Create(t.Context(), held, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	w := start(t, api, ns, "n1").is("on: follower of another")
	*held.Spec.LeaseDurationSeconds = 1
	if _, err := api.Client.CoordinationV1().Leases(ns).Update(t.Context(), held, metav1.UpdateOptions{}); err != nil {
		t.Fatal(err)
	}
	w.is("on: writer")
}
