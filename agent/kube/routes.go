package kube

import (
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"k8s.io/client-go/rest"

	"github.com/fingerpost/fingerpost/agent/gateway"
)

const (
	// discoverEvery is how often it is asked which kinds the cluster has. It
	// varies by a half, so that the agents of many nodes do not ask together.
	discoverEvery = 30 * time.Second
	// discoverAgain is the first pause after a failure, and after a kind that
	// was there is not any more.
	discoverAgain = time.Second
	// routesWait bounds how long the rest, once it is synced, waits for routes.
	routesWait = 3 * time.Second
)

// routeWatch follows the kinds of the Gateway API, each while the cluster has
// it, in the first of the versions that are read. What goes wrong here is told,
// and holds up nothing else.
type routeWatch struct {
	c       *Cluster
	clients map[string]*rest.RESTClient // by version
	kinds   []*routeKind
	every   time.Duration
	// wake has it asked at once which kinds there are. Capacity 1.
	wake chan struct{}

	// mu guards what follows.
	mu sync.Mutex
	// found is what the cluster serves, as was heard last; nil before the first
	// answer.
	found map[string][]string // versions, by resource
	err   string              // of the last time it was asked; empty if it went well
}

// routeKind is a lane that has a watch only now and then.
type routeKind struct {
	*lane
	kind string

	// Of the goroutine in routeWatch.run.
	version string // that is watched; empty for none
	missed  bool   // the cluster had it no more when it was asked last
	stop    func() // ends the watch
}

func (c *Cluster) newRouteWatch(config *rest.Config) (*routeWatch, error) {
	w := &routeWatch{c: c, clients: map[string]*rest.RESTClient{}, every: discoverEvery, wake: make(chan struct{}, 1)}
	scheme := runtime.NewScheme()
	metav1.AddToGroupVersion(scheme, schema.GroupVersion{Version: "v1"})
	codecs := gatewayCodecs{serializer.NewCodecFactory(scheme).WithoutConversion()}
	for _, version := range gateway.Versions {
		config = rest.CopyConfig(config)
		config.APIPath, config.GroupVersion = "/apis", &schema.GroupVersion{Group: gateway.Group, Version: version}
		config.NegotiatedSerializer = codecs
		config.ContentType, config.AcceptContentTypes = runtime.ContentTypeJSON, runtime.ContentTypeJSON
		client, err := rest.RESTClientFor(config)
		if err != nil {
			return nil, fmt.Errorf("API server: %w", err)
		}
		w.clients[version] = client
	}
	for _, kind := range gateway.Kinds {
		resource := gateway.Resource(kind)
		w.kinds = append(w.kinds, &routeKind{kind: kind, lane: newLane(resource, &gatewayObject{}, nil, &health{what: resource, log: c.log},
			c.store.gatewayNames(kind), c.store.applyGateway(kind))})
	}
	return w, nil
}

// run follows the cluster until ctx ends.
func (w *routeWatch) run(ctx context.Context) {
	defer func() {
		for _, k := range w.kinds {
			k.end()
		}
	}()
	again, told := discoverAgain, ""
	for {
		found, err := w.discover(ctx)
		pause := w.every
		switch {
		case ctx.Err() != nil:
			return
		case err != nil:
			pause, again = min(again, w.every), min(again*2, w.every)
		default:
			again = discoverAgain
			if !w.follow(ctx, found) {
				pause = min(discoverAgain, w.every)
			}
		}
		w.mu.Lock()
		w.err = ""
		if err != nil {
			w.err = oneLine(err)
		} else {
			w.found = found
		}
		w.mu.Unlock()
		if on, notes := w.describe(); told != notes && err == nil {
			told = notes
			w.c.log.Info("routes of the Gateway API", "state", part(on, notes))
		}
		timer := time.NewTimer(pause/2 + rand.N(pause))
		select {
		case <-timer.C:
		case <-w.wake:
		case <-ctx.Done():
		}
		timer.Stop()
	}
}

// discover asks which of the resources the cluster has, and in which versions.
func (w *routeWatch) discover(ctx context.Context) (map[string][]string, error) {
	found := map[string][]string{}
	client := w.clients[gateway.Versions[0]]
	var group metav1.APIGroup
	if err := w.get(ctx, client, &group, "/apis", gateway.Group); apierrors.IsNotFound(err) {
		return found, nil
	} else if err != nil {
		return nil, err
	}
	for _, v := range group.Versions {
		var list metav1.APIResourceList
		if err := w.get(ctx, client, &list, "/apis", gateway.Group, v.Version); apierrors.IsNotFound(err) {
			continue // gone in between
		} else if err != nil {
			return nil, err
		}
		for _, r := range list.APIResources {
			found[r.Name] = append(found[r.Name], v.Version)
		}
	}
	return found, nil
}

func (w *routeWatch) get(ctx context.Context, client *rest.RESTClient, into runtime.Object, path ...string) error {
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	return client.Get().AbsPath(path...).Do(ctx).Into(into)
}

// follow begins and ends watches as the cluster has it. It returns false where
// it wants to hear again first.
func (w *routeWatch) follow(ctx context.Context, found map[string][]string) bool {
	settled := true
	for _, k := range w.kinds {
		version := preferred(found[k.resource])
		switch {
		case version == k.version:
			k.missed = false
		case version == "" && !k.missed:
			// What was there goes only when that was said twice.
			k.missed, settled = true, false
			continue
		default:
			k.end()
			k.missed, k.version = false, version
			if version == "" {
				k.health.idle()
				k.replaced(nil)
			} else {
				w.begin(ctx, k)
			}
		}
		if version == "" {
			k.ready()
		}
	}
	return settled
}

// preferred returns the version to read, empty where there is none.
func preferred(served []string) string {
	for _, v := range gateway.Versions {
		if slices.Contains(served, v) {
			return v
		}
	}
	return ""
}

// begin watches the kind in its version.
func (w *routeWatch) begin(ctx context.Context, k *routeKind) {
	ctx, cancel := context.WithCancel(ctx)
	done := make(chan struct{})
	k.stop = func() { cancel(); <-done }
	k.health.listing()
	refused := func(err error) {
		k.refused(err)
		if apierrors.IsNotFound(err) {
			select {
			case w.wake <- struct{}{}:
			default:
			}
		}
	}
	go func() {
		defer close(done)
		w.c.reflect(ctx, k.resource, k.lane.kind, k.sink(), w.c.listWatch(w.clients[k.version], k.resource, k.health, refused, nil))
	}()
}

// end ends the kind's watch, if there is one. What it said is in the queue.
func (k *routeKind) end() {
	if k.stop != nil {
		k.stop()
		k.stop = nil
	}
}

// wait waits until the first list of every kind that the cluster has was
// applied, or refused, and no longer than routesWait.
func (w *routeWatch) wait(ctx context.Context) {
	bound := time.NewTimer(routesWait)
	defer bound.Stop()
	for _, k := range w.kinds {
		select {
		case <-k.synced:
		case <-bound.C:
			w.c.log.Warn("synced without waiting further for routes of the Gateway API", "state", w.state())
			return
		case <-ctx.Done():
			return
		}
	}
}

func (w *routeWatch) pending() int {
	n := 0
	for _, k := range w.kinds {
		n += k.queue.len()
	}
	return n
}

// current tells whether routes are up to date, those of the kinds that there
// are.
func (w *routeWatch) current() bool {
	w.mu.Lock()
	asked := w.found != nil
	w.mu.Unlock()
	return asked && !slices.ContainsFunc(w.kinds, func(k *routeKind) bool {
		since, _ := k.health.trouble()
		return k.kind != gateway.ReferenceGrant && !since.IsZero()
	})
}

// state says in one line how the watches stand.
func (w *routeWatch) state() string {
	on, notes := w.describe()
	for _, k := range w.kinds {
		if since, err := k.health.trouble(); !since.IsZero() {
			notes = join(notes, err)
		}
	}
	return part(on, notes)
}

// describe says whether routes are read, and what is not as one would expect.
func (w *routeWatch) describe() (on bool, notes string) {
	w.mu.Lock()
	found, err := w.found, w.err
	w.mu.Unlock()
	if found == nil {
		if err == "" {
			err = "the cluster was not asked yet"
		}
		return false, err
	}
	var missing []string
	for _, k := range w.kinds {
		served := found[k.resource]
		switch v := preferred(served); {
		case len(served) == 0:
			missing = append(missing, k.kind)
		case v == "":
			notes = join(notes, fmt.Sprintf("%s only in version %s", k.kind, strings.Join(served, " and ")))
		default:
			on = on || k.kind != gateway.ReferenceGrant
			if v != gateway.Versions[0] {
				notes = join(notes, fmt.Sprintf("%s in the older version %s", k.kind, v))
			}
		}
	}
	if len(missing) > 0 {
		notes = join(notes, "the cluster has no "+strings.Join(missing, ", no "))
	}
	return on, notes
}

func join(notes, more string) string {
	if notes == "" {
		return more
	}
	return notes + "; " + more
}

func part(on bool, notes string) string {
	switch {
	case !on:
		return "off: " + notes
	case notes == "":
		return "on"
	}
	return "on: " + notes
}
