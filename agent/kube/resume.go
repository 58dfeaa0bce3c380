package kube

import (
	"context"
	"errors"
	"strconv"
	"strings"
	"sync"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/watch"

	"github.com/fingerpost/fingerpost/nodecache"
)

const (
	// settle is how long a resumed watch has to be silent until what it had to
	// tell of the time before counts as told. An API server that has lost the
	// version says so at once, but in the stream, not in the answer's head.
	settle = 20 * time.Millisecond

	// catchUpSeconds is the timeout of a watch whose bookmark is awaited: the
	// API server sends one 2 s before the end. catchUpWatches bounds how often
	// that is done.
	catchUpSeconds = 3
	catchUpWatches = 20
)

// resumption lets a reflector begin with the pods of a checkpoint:
//
//	offered ──List──▶ listed ──Replace──▶ watching ──▶ accepted
//	   (no pods, the stored version)          └──────▶ refused: lists as ever
//
// The reflector's list is answered here, without any pods. They are taken
// over only when the API server has accepted a watch from their version,
// before the first of its events. A nil resumption is one that was refused.
type resumption struct {
	c       *Cluster
	line    string
	version string
	records []*Record
	// accepted is closed when the pods were taken over.
	accepted chan struct{}

	// mu guards what follows.
	mu    sync.Mutex
	state resumeState
	short int // watches with a short timeout
}

type resumeState int

const (
	resumeOffered resumeState = iota
	resumeListed
	resumeWatching
	resumeAccepted
	resumeRefused
)

// errResumes makes the reflector go on to the plain list.
var errResumes = errors.New("the checkpoint comes first")

// Resume gives the source the pods of a checkpoint, before Run. They are used
// if they are those of this cluster, read by this version of the program, and
// the API server still knows what happened since; else everything is listed as
// without them. It tells whether they were read by this version.
func (c *Cluster) Resume(u nodecache.Unit) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.stored = u
	return c.readable(u)
}

func (c *Cluster) readable(u nodecache.Unit) bool {
	return u.Version != 0 && strings.HasPrefix(u.Line, c.reader())
}

// readStored decodes the checkpoint; nil if there is none of use.
func (c *Cluster) readStored() *resumption {
	c.mu.Lock()
	u := c.stored
	c.stored.Data = nil
	c.mu.Unlock()
	if !c.readable(u) {
		return nil
	}
	records, err := decodePods(u.Data)
	if err != nil {
		c.log.Warn("the pods of the checkpoint cannot be read and are listed", "error", err)
		return nil
	}
	return &resumption{c: c, line: u.Line, version: strconv.FormatUint(u.Version, 10), records: records, accepted: make(chan struct{})}
}

// resumable returns r if it is of the cluster that was found.
func (c *Cluster) resumable(r *resumption) *resumption {
	c.mu.Lock()
	defer c.mu.Unlock()
	if r == nil || c.clusterID == "" || c.target == 0 || r.line != c.line(c.clusterID) {
		c.stored.Version = 0 // says nothing of this cluster's versions
		return nil
	}
	return r
}

// identify takes note of what a list of namespaces says of the cluster.
func (c *Cluster) identify(objects []object, version string) {
	v, err := strconv.ParseUint(version, 10, 64)
	if err != nil {
		v = 0
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.target == 0 {
		c.target = v // all resources of an API server count together
	}
	for _, o := range objects {
		if ns, ok := o.(*namespace); ok && ns.name == metav1.NamespaceSystem {
			c.clusterID = ns.id
		}
	}
}

func (r *resumption) is(s resumeState) bool {
	if r == nil {
		return false
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.state == s
}

// offered tells whether the list is still to be answered.
func (r *resumption) offered() bool { return r.is(resumeOffered) }

// pending tells whether the next watch is that from the checkpoint.
func (r *resumption) pending() bool { return r.is(resumeWatching) }

// move goes from one state to the next, and tells whether it did.
func (r *resumption) move(from, to resumeState) bool {
	if r == nil {
		return false
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.state != from {
		return false
	}
	r.state = to
	return true
}

// behind tells whether the pods may still be those of the checkpoint: a refusal
// that comes late must not leave them for long.
func (r *resumption) behind() bool {
	if !r.is(resumeAccepted) {
		return false
	}
	r.c.mu.Lock()
	defer r.c.mu.Unlock()
	return !r.c.currentReached
}

// list answers the reflector's first list; nil for every other.
func (r *resumption) list() runtime.Object {
	if !r.move(resumeOffered, resumeListed) {
		return nil
	}
	return &slimPodList{ListMeta: metav1.ListMeta{ResourceVersion: r.version}}
}

// listed tells whether what the reflector hands over is that list.
func (r *resumption) listed() bool { return r.move(resumeListed, resumeWatching) }

// shorten makes the API server send a bookmark soon, as long as it is not known
// that everything was heard of.
func (r *resumption) shorten(o *metav1.ListOptions) {
	if r == nil {
		return
	}
	r.c.mu.Lock()
	current := r.c.currentReached
	r.c.mu.Unlock()
	r.mu.Lock()
	defer r.mu.Unlock()
	if current || r.state == resumeRefused || r.short >= catchUpWatches {
		return
	}
	r.short++
	seconds := int64(catchUpSeconds)
	o.TimeoutSeconds = &seconds
}

// refuse ends the resumption before it was accepted: a list comes next.
func (r *resumption) refuse(why string) {
	if r.move(resumeWatching, resumeRefused) {
		r.records = nil
		r.c.log.Info("the API server does not resume from the checkpoint; pods are listed", "reason", why)
	}
}

// accept takes the pods over.
func (r *resumption) accept() {
	if !r.move(resumeWatching, resumeAccepted) {
		return
	}
	objects := make([]object, 0, len(r.records))
	for _, p := range r.records {
		objects = append(objects, p)
	}
	r.records = nil
	r.c.listed(objects)
	r.c.mu.Lock()
	r.c.resumed = true
	r.c.mu.Unlock()
	r.c.heard(r.version)
	r.c.pods.current(true)
	close(r.accepted)
	r.c.log.Info("resumed from the checkpoint", "pods", len(objects), "version", r.version)
}

// nobody selects no pod: no object has a name like this.
const nobody = "metadata.name=-"

// advance makes the API server learn how far its store is, as it does for a
// streamed list: the bookmarks of a resource that rests may lag behind by
// minutes, and tell nothing then. This list has no pod in it.
func (r *resumption) advance(ctx context.Context) {
	select {
	case <-r.accepted:
	case <-r.c.podsCurrent:
		return
	case <-ctx.Done():
		return
	}
	initial, seconds := true, int64(10*catchUpSeconds)
	w, err := r.c.client.Get().Resource("pods").VersionedParams(&metav1.ListOptions{
		Watch: true, FieldSelector: nobody, TimeoutSeconds: &seconds, AllowWatchBookmarks: true,
		SendInitialEvents: &initial, ResourceVersionMatch: metav1.ResourceVersionMatchNotOlderThan,
	}, metav1.ParameterCodec).Watch(ctx)
	if err != nil {
		return // one that knows no streamed lists; a bookmark comes all the same
	}
	defer w.Stop()
	select {
	case <-w.ResultChan(): // the end of the list
	case <-r.c.podsCurrent:
	case <-ctx.Done():
	}
}

// guarded is a watch from the checkpoint's version.
type guarded struct {
	r     *resumption
	inner watch.Interface
	out   chan watch.Event
	stop  chan struct{}
	once  sync.Once
}

func (r *resumption) guard(w watch.Interface) watch.Interface {
	g := &guarded{r: r, inner: w, out: make(chan watch.Event), stop: make(chan struct{})}
	go g.run()
	return g
}

// ResultChan implements [watch.Interface].
func (g *guarded) ResultChan() <-chan watch.Event { return g.out }

// Stop implements [watch.Interface].
func (g *guarded) Stop() {
	g.once.Do(func() { close(g.stop) })
	g.inner.Stop()
}

// run passes events on. The first one tells whether the watch was accepted.
func (g *guarded) run() {
	defer close(g.out)
	timer := time.NewTimer(settle)
	defer timer.Stop()
	silent := timer.C
	for {
		select {
		case e, ok := <-g.inner.ResultChan():
			if !ok {
				g.r.refuse("the watch ended at once")
				return
			}
			if e.Type == watch.Error {
				g.r.refuse("the version is not known any more")
			} else {
				g.r.accept()
			}
			select {
			case g.out <- e:
			case <-g.stop:
				return
			}
			if silent != nil {
				timer.Reset(settle)
			}
		case <-silent:
			silent = nil
			g.r.accept()
			g.r.c.reached(false)
		case <-g.stop:
			return
		}
	}
}
