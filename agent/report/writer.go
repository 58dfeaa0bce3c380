package report

import (
	"context"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"k8s.io/client-go/rest"
)

const (
	// DefaultLease is how long a Lease lasts that nobody renews. An agent asks
	// the API server once in that time, so that 1,500 of them are 25 requests a
	// second. Nobody waits for an Event.
	DefaultLease = time.Minute

	// remembered and replay bound what an agent that is elected writes of what
	// it heard before: a number of Events, and a time that is longer than nobody
	// may be elected.
	remembered = 512
	replay     = 10 * time.Minute

	// Events a second, and how many at once.
	eventRate, eventBurst = 5, 50

	releaseBound = time.Second
)

// WriterOptions configures a [Writer].
type WriterOptions struct {
	// Namespace and Name are those of the Lease.
	Namespace, Name string
	Node            string        // of this agent; part of the holder's identity
	Lease           time.Duration // in whole seconds; 0 is DefaultLease
	State           func(string)  // hears "on: ..." or "off: reason", in order; nil: nobody
	Logger          *slog.Logger
	Metrics         prometheus.Registerer // nil: none
}

// Writer writes Events: as long as it is elected those that every agent knows
// of, and its own always. Its methods are safe for concurrent use.
type Writer struct {
	o        WriterOptions
	election *election      // of Run alone
	events   rest.Interface // limited to eventRate
	writes   *prometheus.CounterVec
	wake     chan struct{} // capacity 1: there may be something to write
	taken    chan struct{} // capacity 1: this agent was elected

	// mu guards what follows. Options.State is called under it.
	mu       sync.Mutex
	until    time.Time // elected before it
	holder   string    // of the Lease, when it was last looked at
	recent   []said    // the oldest first
	trouble  string    // why Events cannot be written; empty while they can
	statuses string    // why statuses of routes cannot; empty while they can
	state    string
}

// said is an Event that was said.
type said struct {
	Event
	name  string // in the API
	at    time.Time
	tried time.Time // when it failed last; zero: never
	done  bool      // the API server has it, or never will
}

// NewWriter returns a writer for the API server of the config. It makes no
// connection before [Writer.Run].
func NewWriter(config *rest.Config, o WriterOptions) (*Writer, error) {
	if o.Lease == 0 {
		o.Lease = DefaultLease
	}
	leases, err := client(config, "/apis", coordinationv1.SchemeGroupVersion, coordinationv1.AddToScheme)
	if err != nil {
		return nil, err
	}
	limited := rest.CopyConfig(config)
	limited.QPS, limited.Burst = eventRate, eventBurst
	events, err := client(limited, "/api", corev1.SchemeGroupVersion, corev1.AddToScheme)
	if err != nil {
		return nil, err
	}
	w := &Writer{
		o: o, events: events, wake: make(chan struct{}, 1), taken: make(chan struct{}, 1),
		election: &election{
			leases: leases, namespace: o.Namespace, name: o.Name, duration: o.Lease.Truncate(time.Second),
			// Two agents of one node are two while one takes over from the other.
			identity: fmt.Sprintf("%s-%08x", o.Node, rand.Uint32()),
		},
		writes: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "fingerpost_events_total", Help: "Events that this agent had to write, by result: written, known (the API server had it), failed, or dropped (too many).",
		}, []string{"result"}),
	}
	for _, result := range []string{"written", "known", "failed", "dropped"} {
		w.writes.WithLabelValues(result)
	}
	if o.Metrics != nil {
		o.Metrics.MustRegister(w.writes)
	}
	return w, nil
}

func client(config *rest.Config, path string, version schema.GroupVersion, add func(*runtime.Scheme) error) (rest.Interface, error) {
	scheme := runtime.NewScheme()
	if err := add(scheme); err != nil {
		return nil, err
	}
	config = rest.CopyConfig(config)
	config.APIPath, config.GroupVersion = path, &version
	config.NegotiatedSerializer = serializer.NewCodecFactory(scheme).WithoutConversion()
	config.WarningHandler = rest.NoWarnings{}
	c, err := rest.RESTClientFor(config)
	if err != nil {
		return nil, fmt.Errorf("API server: %w", err)
	}
	return c, nil
}

// Say makes an Event of e if this agent is elected, or is within minutes. It
// never blocks; the same within minutes is once.
func (w *Writer) Say(e Event) {
	name, now := eventName(&e.Object, e.Reason, e.Message), time.Now()
	w.mu.Lock()
	defer w.mu.Unlock()
	for i, s := range w.recent {
		if s.name == name && s.Object.Namespace == e.Object.Namespace {
			if now.Sub(s.at) < replay {
				return
			}
			w.recent = append(w.recent[:i], w.recent[i+1:]...)
			break
		}
	}
	if len(w.recent) == remembered {
		if !w.recent[0].done && (w.recent[0].Own || w.elected()) {
			w.writes.WithLabelValues("dropped").Inc()
		}
		w.recent = append(w.recent[:0], w.recent[1:]...)
	}
	w.recent = append(w.recent, said{Event: e, name: name, at: now})
	w.rouse()
}

func (w *Writer) rouse() {
	select {
	case w.wake <- struct{}{}:
	default:
	}
}

// elected needs mu.
func (w *Writer) elected() bool { return time.Now().Before(w.until) }

func (w *Writer) isElected() bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.elected()
}

// statusTrouble hears why the statuses of routes cannot be written; with an
// empty text, that they can.
func (w *Writer) statusTrouble(why string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.statuses != why {
		w.statuses = why
		w.show()
	}
}

// Run takes part in the election and writes until ctx ends, and then lets
// another be elected. It is called once.
func (w *Writer) Run(ctx context.Context) {
	var writing sync.WaitGroup
	writing.Go(func() { w.write(ctx) })
	timer := time.NewTimer(0)
	defer timer.Stop()
	for ctx.Err() == nil {
		select {
		case <-timer.C:
			timer.Reset(w.attempt(ctx))
		case <-ctx.Done():
		}
	}
	writing.Wait()
	w.resign(context.WithoutCancel(ctx))
}

// attempt returns after what time to make the next.
func (w *Writer) attempt(ctx context.Context) time.Duration {
	begun := time.Now()
	holder, err := w.election.attempt(ctx)
	w.mu.Lock()
	defer w.mu.Unlock()
	defer w.rouse()
	switch {
	case ctx.Err() != nil || err != nil && w.elected():
		return w.o.Lease / 6
	case err != nil:
		w.holder = ""
		w.tell("off: " + oneLine(err))
		return jittered(w.o.Lease)
	}
	next := jittered(w.o.Lease)
	if w.holder = holder; holder == w.election.identity {
		if !w.elected() {
			select {
			case w.taken <- struct{}{}:
			default:
			}
		}
		w.until, next = begun.Add(w.o.Lease*2/3), w.o.Lease/3
	} else {
		w.until = time.Time{}
	}
	if len(w.due()) == 0 {
		w.trouble = "" // it holds nothing up
	}
	w.show()
	return next
}

// resign releases the Lease.
func (w *Writer) resign(ctx context.Context) {
	w.mu.Lock()
	was := w.elected()
	w.until = time.Time{}
	w.mu.Unlock()
	if !was {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, releaseBound)
	defer cancel()
	if err := w.election.release(ctx); err != nil {
		w.o.Logger.Debug("the lease is not released", "error", err)
	}
}

// write writes what is due. After a failure it goes on with the next look at the
// Lease.
func (w *Writer) write(ctx context.Context) {
	for {
		select {
		case <-w.wake:
		case <-ctx.Done():
			return
		}
		for {
			s, ok := w.next()
			if !ok {
				break
			}
			err := w.post(ctx, &s)
			if ctx.Err() != nil {
				return
			}
			if w.posted(&s, err); err != nil {
				break
			}
		}
	}
}

// next returns the Event that has to be written now: the oldest of those that
// were tried longest ago, so that one that fails keeps no other waiting.
func (w *Writer) next() (said, bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if due := w.due(); len(due) > 0 {
		return slices.MinFunc(due, func(a, b said) int { return a.tried.Compare(b.tried) }), true
	}
	return said{}, false
}

// due needs mu. It returns what has to be written, the oldest first.
func (w *Writer) due() []said {
	return slices.DeleteFunc(slices.Clone(w.recent), func(s said) bool {
		return s.done || !s.Own && !w.elected() || time.Since(s.at) >= replay
	})
}

// post returns nil also where the API server has the Event.
func (w *Writer) post(ctx context.Context, s *said) error {
	ctx, cancel := context.WithTimeout(ctx, w.o.Lease/6)
	defer cancel()
	kind, at := corev1.EventTypeNormal, metav1.NewTime(s.at)
	if s.Warning {
		kind = corev1.EventTypeWarning
	}
	err := w.events.Post().Namespace(s.Object.Namespace).Resource("events").Body(&corev1.Event{
		ObjectMeta:     metav1.ObjectMeta{Namespace: s.Object.Namespace, Name: s.name},
		InvolvedObject: s.Object, Type: kind, Reason: s.Reason, Message: s.Message,
		FirstTimestamp: at, LastTimestamp: at, Count: 1,
		Source: corev1.EventSource{Component: "fingerpost"}, ReportingController: "fingerpost.dev/agent",
	}).Do(ctx).Error()
	switch {
	case err == nil:
		w.writes.WithLabelValues("written").Inc()
	case apierrors.IsAlreadyExists(err):
		w.writes.WithLabelValues("known").Inc()
		return nil
	default:
		w.writes.WithLabelValues("failed").Inc()
	}
	return err
}

func (w *Writer) posted(s *said, err error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	// What no other try could change is over: the Event itself, or a namespace
	// that ends. That it may not be written is for somebody to change.
	over := err == nil || apierrors.IsInvalid(err) || apierrors.IsNotFound(err) || apierrors.HasStatusCause(err, corev1.NamespaceTerminatingCause)
	for i := range w.recent {
		if r := &w.recent[i]; r.name == s.name && r.Object.Namespace == s.Object.Namespace {
			r.done, r.tried = over, time.Now()
		}
	}
	w.trouble = ""
	if !over {
		w.trouble = oneLine(err)
	} else if err != nil {
		w.rouse()
	}
	w.show()
}

// show needs mu. What is the matter with the Lease is told by attempt.
func (w *Writer) show() {
	switch {
	case w.trouble != "":
		w.tell("off: Events cannot be written: " + w.trouble)
	case w.statuses != "":
		w.tell("off: statuses of routes cannot be written: " + w.statuses)
	case w.elected():
		w.tell("on: writer")
	case w.holder != "" && w.holder != w.election.identity:
		w.tell("on: follower of " + w.holder)
	}
}

// tell needs mu. The log hears of the beginning and the end of trouble, and
// that this agent writes from now on.
func (w *Writer) tell(state string) {
	if state == w.state {
		return
	}
	well := strings.HasPrefix(state, "on: ")
	was := w.state == "" || strings.HasPrefix(w.state, "on: ")
	switch {
	case !well && was:
		w.o.Logger.Warn("reports are not written", "part", "reports", "state", state)
	case well && (!was || state == "on: writer"):
		w.o.Logger.Info("reports are written", "part", "reports", "state", state)
	}
	w.state = state
	if w.o.State != nil {
		w.o.State(state)
	}
}

func oneLine(err error) string { return strings.Join(strings.Fields(err.Error()), " ") }
