package kube

import (
	"context"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"github.com/go-logr/logr"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	utilnet "k8s.io/apimachinery/pkg/util/net"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/cache"
	"k8s.io/klog/v2"

	"github.com/fingerpost/fingerpost/nodecache"
)

// Namespaces are listed before pods, so that no pod of one that opted out is
// asked; but pods wait no longer than namespaceHead for them.
const namespaceHead = 3 * time.Second

// stopWait bounds how long Run waits for reflectors after its context ended:
// some of client-go's backoffs do not hear of it.
const stopWait = time.Second

// Cluster is the source that watches the API server.
type Cluster struct {
	client rest.Interface
	store  *Store
	log    *slog.Logger
	queue  *queue

	synced, current chan struct{}
	program         string // and its version

	// Closed once the pods are; synced and current wait for the lanes as well.
	podsSynced, podsCurrent chan struct{}

	pods, namespaces *health
	lanes            []*lane // Services and their slices
	routes           *routeWatch
	// namespacesTried is closed after the first list of namespaces, complete
	// or failed.
	namespacesTried func()
	tried           <-chan struct{}

	// mu guards what follows.
	mu        sync.Mutex
	clusterID string // the UID of kube-system; empty before it was seen
	version   uint64 // to which the watch of pods has come; 0 before its list
	// target is a version that the API server had reached after the start.
	target  uint64
	stored  nodecache.Unit // the checkpoint; see Resume
	resumed bool           // its pods were taken over

	syncReached, currentReached bool
}

// discovery is the API group of EndpointSlices.
var discovery = discoveryv1.SchemeGroupVersion

// NewCluster returns a source that watches the API server of the config, as
// "fingerpost/<version>". It makes no connection yet, and a server that cannot
// be reached is no error: it is tried again and shown by Status. A nil log
// discards.
func NewCluster(config *rest.Config, version string, store *Store, log *slog.Logger) (*Cluster, error) {
	if log == nil {
		log = slog.New(slog.DiscardHandler)
	}
	scheme := runtime.NewScheme()
	for _, add := range []func(*runtime.Scheme) error{corev1.AddToScheme, discoveryv1.AddToScheme} {
		if err := add(scheme); err != nil {
			return nil, err
		}
	}
	config = rest.CopyConfig(config)
	config.APIPath = "/api"
	config.GroupVersion = &corev1.SchemeGroupVersion
	config.NegotiatedSerializer = slimCodecs{serializer.NewCodecFactory(scheme).WithoutConversion()}
	config.ContentType = runtime.ContentTypeProtobuf
	config.AcceptContentTypes = runtime.ContentTypeProtobuf + "," + runtime.ContentTypeJSON
	config.UserAgent = "fingerpost/" + version
	config.QPS = -1 // a few watches need no limit
	config.WarningHandler = rest.NoWarnings{}
	client, err := rest.RESTClientFor(config)
	if err != nil {
		return nil, fmt.Errorf("API server: %w", err)
	}
	config = rest.CopyConfig(config)
	config.APIPath, config.GroupVersion = "/apis", &discovery
	slices, err := rest.RESTClientFor(config)
	if err != nil {
		return nil, fmt.Errorf("API server: %w", err)
	}
	tried := make(chan struct{})
	c := &Cluster{
		client:          client,
		store:           store,
		log:             log,
		queue:           newQueue(),
		synced:          make(chan struct{}),
		podsSynced:      make(chan struct{}),
		podsCurrent:     make(chan struct{}),
		current:         make(chan struct{}),
		program:         config.UserAgent,
		pods:            &health{what: "pods", log: log},
		namespaces:      &health{what: "namespaces", log: log},
		namespacesTried: sync.OnceFunc(func() { close(tried) }),
		tried:           tried,
	}
	c.lanes = []*lane{
		newLane("services", &corev1.Service{}, client, &health{what: "services", log: log}, store.serviceNames, c.applyService),
		newLane("endpointslices", &discoveryv1.EndpointSlice{}, slices, &health{what: "endpointslices", log: log}, store.sliceNames, c.applySlice),
	}
	c.routes, err = c.newRouteWatch(config)
	return c, err
}

// Synced implements [Source].
func (c *Cluster) Synced() <-chan struct{} { return c.synced }

// Current implements [Source].
func (c *Cluster) Current() <-chan struct{} { return c.current }

// Status implements [Source]. Pods are what counts; trouble with another
// resource is shown where pods have none.
func (c *Cluster) Status() Status {
	st := Status{Kind: "kube", Pods: c.store.Len(), Pending: c.queue.len()}
	others := []*health{c.namespaces}
	for _, l := range c.lanes {
		st.Pending += l.queue.len()
		others = append(others, l.health)
	}
	select {
	case <-c.synced:
		st.Synced = true
	default:
	}
	since, err := c.pods.trouble()
	for _, h := range others {
		if since.IsZero() {
			since, err = h.trouble()
		}
	}
	if !since.IsZero() {
		st.stale(since, err)
	}
	since, _ = c.lanes[0].health.trouble()
	st.RoutesCurrent = since.IsZero() && c.routes.current()
	st.Pending += c.routes.pending()
	st.Routes = c.routes.state()
	return st
}

// Run implements [Source].
func (c *Cluster) Run(ctx context.Context) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	// What the reflectors' errors mean is told by health, once.
	ctx = klog.NewContext(ctx, logr.FromSlogHandler(klogHandler{c.log.Handler(), slog.LevelDebug}))
	c.pods.listing()
	var worker, reflectors sync.WaitGroup
	worker.Go(func() { c.queue.work(ctx, c.applyChange) })
	worker.Go(func() { c.sync(ctx) })
	for _, l := range c.lanes {
		worker.Go(func() { l.queue.work(ctx, l.apply) })
		reflectors.Go(func() {
			c.reflect(ctx, l.resource, l.kind, l.sink(), c.listWatch(l.client, l.resource, l.health, l.refused, nil))
		})
	}
	for _, k := range c.routes.kinds {
		worker.Go(func() { k.queue.work(ctx, k.apply) })
	}
	reflectors.Go(func() { c.routes.run(ctx) })
	refused := func(error) { c.namespacesTried() }
	reflectors.Go(func() {
		c.reflect(ctx, "namespaces", &corev1.Namespace{}, c.sink(c.namespaces, nil), c.listWatch(c.client, "namespaces", c.namespaces, refused, nil))
	})
	stored := make(chan *resumption, 1)
	reflectors.Go(func() { stored <- c.readStored() })
	head := time.NewTimer(namespaceHead)
	defer head.Stop()
	select {
	case <-c.tried:
	case <-head.C:
	case <-ctx.Done():
	}
	reflectors.Go(func() {
		resume := c.resumable(<-stored)
		if resume != nil {
			reflectors.Go(func() { resume.advance(ctx) })
		}
		c.reflect(ctx, "pods", &slimPod{}, c.sink(c.pods, resume), c.listWatch(c.client, "pods", c.pods, func(error) {}, resume))
	})
	<-ctx.Done()
	worker.Wait()
	stopped := make(chan struct{})
	go func() { reflectors.Wait(); close(stopped) }()
	select {
	case <-stopped:
	case <-time.After(stopWait):
	}
	return nil
}

// reflect lists and watches one resource until ctx ends.
func (c *Cluster) reflect(ctx context.Context, resource string, kind runtime.Object, into cache.ReflectorStore, from cache.ListerWatcher) {
	logger := klog.FromContext(ctx)
	r := cache.NewReflectorWithOptions(from, kind, into, cache.ReflectorOptions{
		Name:            resource,
		TypeDescription: resource,
		Logger:          &logger,
		// Doubling, with as much again of jitter. The first step is short: an
		// agent and its API server often start together. So is the longest: what
		// happens between the server's return and ours nobody here knows, and a
		// try that is refused costs little.
		Backoff: &wait.Backoff{Duration: 500 * time.Millisecond, Cap: 5 * time.Second, Steps: 30, Factor: 2, Jitter: 1},
	})
	r.RunWithContext(ctx)
}

// listWatch tells health what the reflector keeps to itself, and refused of
// each list that failed. It begins with resume, if that is not nil.
func (c *Cluster) listWatch(client rest.Interface, resource string, h *health, refused func(error), resume *resumption) cache.ListerWatcher {
	failed := func(ctx context.Context, err error) {
		if ctx.Err() == nil {
			h.failed(err)
		}
	}
	var turn turn
	listing := func(ctx context.Context) error {
		h.listing()
		if resume.behind() {
			return nil
		}
		return turn.wait(ctx, h, relistSpread(c.store.Len()))
	}
	return cache.ToListWatcherWithWatchListSemantics(&cache.ListWatch{
		ListWithContextFunc: func(ctx context.Context, o metav1.ListOptions) (runtime.Object, error) {
			if list := resume.list(); list != nil {
				return list, nil
			}
			if err := listing(ctx); err != nil {
				return nil, err
			}
			list, err := client.Get().Resource(resource).VersionedParams(&o, metav1.ParameterCodec).Do(ctx).Get()
			if err != nil {
				failed(ctx, err)
				refused(err)
			}
			return list, err
		},
		WatchFuncWithContext: func(ctx context.Context, o metav1.ListOptions) (watch.Interface, error) {
			o.Watch = true
			lists := o.SendInitialEvents != nil && *o.SendInitialEvents
			if lists && resume.offered() {
				return nil, errResumes
			}
			if !lists {
				resume.shorten(&o)
			}
			if lists {
				if err := listing(ctx); err != nil {
					return nil, err
				}
			}
			w, err := client.Get().Resource(resource).VersionedParams(&o, metav1.ParameterCodec).Watch(ctx)
			switch {
			case err == nil && !lists && resume.pending():
				w = resume.guard(w)
			case err == nil && lists:
				h.connected()
			case err == nil:
				h.current(false)
			case !lists || apierrors.IsTooManyRequests(err) || apierrors.IsInternalError(err):
				failed(ctx, err)
			case utilnet.IsConnectionRefused(err):
				// The reflector would sleep on this one, deaf to ctx. As
				// after any other error, a plain list comes next, and tells.
				err = fmt.Errorf("API server: %s", oneLine(err))
			}
			if err != nil && ctx.Err() == nil && !lists && !utilnet.IsConnectionRefused(err) && !apierrors.IsTooManyRequests(err) {
				resume.refuse(oneLine(err))
			}
			return w, err
		},
	}, client)
}

// sync closes synced once the first list of everything was applied, and then
// current once the pods are.
func (c *Cluster) sync(ctx context.Context) {
	all := []<-chan struct{}{c.podsSynced}
	for _, l := range c.lanes {
		all = append(all, l.synced)
	}
	for _, one := range all {
		select {
		case <-one:
		case <-ctx.Done():
			return
		}
	}
	c.routes.wait(ctx)
	close(c.synced)
	select {
	case <-c.podsCurrent:
		close(c.current)
	case <-ctx.Done():
	}
}

func (c *Cluster) applyChange(key name, ch change) {
	switch o := ch.object.(type) {
	case *Record:
		c.store.Upsert(o)
	case *namespace:
		c.store.SetNamespace(o.name, o.optedOut)
	default:
		if key.namespace == "" {
			c.store.SetNamespace(key.name, false)
		} else {
			c.store.Remove(key.namespace, key.name, ch.gone...)
		}
	}
}

// replaced takes over a complete list.
func (c *Cluster) replaced(objects []object, version string, h *health) {
	if h == c.namespaces {
		c.queue.replace(objects, c.namespaceNames, func(key name) bool { return key.namespace == "" })
		c.identify(objects, version)
		c.namespacesTried()
		return
	}
	c.listed(objects)
	c.heard(version)
	c.reached(true)
}

// listed takes over all pods there are. The first of them go past the queue:
// there is nothing that they could overtake or end, and it would cost as much
// as applying them.
func (c *Cluster) listed(objects []object) {
	if c.store.Len() > 0 || !c.queue.idle() {
		c.queue.replace(objects, c.store.names, func(key name) bool { return key.namespace != "" })
		return
	}
	records := make([]*Record, len(objects))
	for i, o := range objects {
		records[i] = o.(*Record)
	}
	owners, of := byOwner(records)
	records = records[:0]
	for _, t := range owners {
		records = append(records, of[t]...)
	}
	c.store.expect(len(records))
	c.store.UpsertAll(records)
}

func (c *Cluster) namespaceNames() []name {
	var names []name
	for _, ns := range c.store.namespacesOptedOut() {
		names = append(names, name{name: ns})
	}
	return names
}
