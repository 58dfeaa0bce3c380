// Package agent runs the agent of a node: it connects the rooms, in the
// direction in which data flows, and answers for the whole.
package agent

import (
	"cmp"
	"context"
	"errors"
	"log/slog"
	"maps"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"golang.org/x/sync/errgroup"
	"k8s.io/client-go/rest"

	"github.com/fingerpost/fingerpost/agent/collect"
	"github.com/fingerpost/fingerpost/agent/journal"
	"github.com/fingerpost/fingerpost/agent/kube"
	"github.com/fingerpost/fingerpost/agent/learn"
	"github.com/fingerpost/fingerpost/agent/report"
	"github.com/fingerpost/fingerpost/agent/schedule"
	"github.com/fingerpost/fingerpost/nodecache"
	"github.com/fingerpost/fingerpost/xds"
	"github.com/fingerpost/fingerpost/xds/ads"
	"github.com/fingerpost/fingerpost/xds/ads/socket"
	"github.com/fingerpost/fingerpost/xds/resources"
)

const (
	// expireEvery is how often what was learned of owners without pods is
	// looked through.
	expireEvery = 30 * time.Second

	// stopSpread is the time over which the streams are closed on stop, so
	// that not all sidecars come back in the same moment.
	stopSpread = time.Second
)

// Agent is a running agent. Its fields are set by newAgent and read-only, but
// for what says otherwise.
type Agent struct {
	config   Config
	log      *slog.Logger
	registry *prometheus.Registry

	source    kube.Source
	store     *kube.Store
	dir       *nodecache.Directory
	scheduler *schedule.Scheduler
	collector *collect.Collector
	peers     *peers // nil: nothing is shared; see peersOff
	peersOff  error  // why
	// only is the one node whose pods this agent can know of; empty: all.
	only      string
	compiler  *resources.Compiler
	feed      *feed
	upstreams *learn.Upstreams // of workloads
	callers   *callers
	redirect  *redirection // nil: not asked for
	paths     *paths
	server    *ads.Server
	follower  *report.Follower
	writer    *report.Writer   // nil: there is no API server
	statuses  *report.Statuses // nil with it
	gate      gate
	journal   *journal.Journal
	// checkpoint belongs to newAgent, then to keepCheckpoint.
	checkpoint *checkpoint
	// collectorSpared ends what spareCollector began.
	collectorSpared func()
	invalid         prometheus.Counter

	instance *socket.Socket // this process's own admin socket
	// front is what holds the names, or held them last; nil while another agent
	// has held them since the start. Set by newAgent, then by the keeper.
	front atomic.Pointer[front]
	// predecessor is who gave the names. Of the keeper alone, while it runs.
	predecessor *socket.Predecessor

	// partsMu guards parts.
	partsMu sync.Mutex
	parts   map[string]string
}

// Run runs an agent until ctx ends. What the configuration names is checked
// before the first line of log; an error then is of one line. It returns nil
// if the agent ended because ctx did.
func Run(ctx context.Context, c Config) error {
	a, err := newAgent(c)
	if err != nil {
		return err
	}
	defer a.close()
	return a.run(ctx)
}

func newAgent(c Config) (_ *Agent, err error) {
	if err := c.Check(); err != nil {
		return nil, err
	}
	limits, warnings, err := schedule.ResolveLimits(c.Limits, os.LookupEnv)
	if err != nil {
		return nil, &UsageError{Err: err}
	}
	a := &Agent{config: c, log: c.Logger(), registry: prometheus.NewRegistry(), dir: nodecache.New(nodecache.Options{}), gate: gate{opened: make(chan struct{})}, invalid: newInvalid(), journal: journal.New(0), collectorSpared: func() {}}
	told := witness{a.journal}
	a.registry.MustRegister(collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	a.store = kube.NewStore(a.dir, a.log)
	a.store.Local(c.nodeName())
	config, err := a.openSource()
	if err != nil {
		return nil, err
	}
	f, err := a.openFront(false, nil)
	var held *socket.HeldError
	if err != nil && (!c.Takeover || !errors.As(err, &held)) {
		return nil, err
	}
	a.front.Store(f)
	if err := a.openInstance(); err != nil {
		a.close()
		return nil, err
	}
	for _, w := range warnings {
		a.log.Warn(w)
	}
	a.callers = newCallers(a.store)
	a.paths = newPaths(a)
	a.parts = map[string]string{
		"on-demand": "on",
		"takeover":  "off: no --takeover; a successor can have the sockets all the same",
		"http":      "off: no address",
		"tracing":   "off: no address",
		partReports: "off: not elected yet",
		"export":    c.ExportDefault,
	}
	if c.Takeover {
		a.parts["takeover"] = "on"
	}
	if a.writer == nil {
		a.parts[partReports] = "off: a file source has no API server"
	}
	a.parts["identity"] = a.callers.state(c.RequireIdentity)
	a.parts[partRedirect] = "off: not asked for (--redirect)"
	var destination func(netip.Addr) (netip.AddrPort, bool)
	var joined func(*corev3.Node, ads.Caller)
	if c.Redirect {
		a.redirect = newRedirection(a)
		a.parts[partRedirect] = a.redirect.state
		destination, joined = a.redirect.destination, a.redirect.joined
		a.registry.MustRegister(a.redirect)
	}
	if c.Tracing != "" {
		a.parts["tracing"] = "on"
	}
	past := a.restore()
	a.scheduler = schedule.New(schedule.Options{Limits: limits, Metrics: a.registry})
	asks := collect.Options{
		Directory: a.dir, Scheduler: a.scheduler, Node: c.nodeName(), Scope: collect.ScopeCluster, Past: past,
		Logger: a.log, Metrics: a.registry, Witness: told, Cost: a.paths.podCost,
	}
	if err := a.share(config, &asks); err != nil {
		a.close()
		return nil, err
	}
	if c.tune != nil {
		c.tune(&asks)
	}
	a.collector = collect.New(asks)
	if a.peers != nil {
		a.peers.collector = a.collector
		a.peers.exchange.Attach(a.collector)
	}
	rejected := a.newRejected()
	a.server = ads.New(ads.Options{
		View: a.view,

		RequireIdentity: c.RequireIdentity,
		Joined:          joined,

		Pod:        a.podOf,
		Refused:    func(r ads.Refusal) { told.refused(r); rejected(r) },
		Identifier: "fingerpost/" + c.Version + " " + c.nodeName(),
		Logger:     a.log,
		Registerer: a.registry,
	})
	a.compiler, err = resources.New(resources.Options{
		EgressPort: uint16(c.EgressPort), Tracing: c.Tracing, Locality: c.Locality, Here: c.nodeName(), Node: a.only, ExportAll: c.ExportDefault == "all", Report: a.refused, Witness: told,
		Destination: destination,
	})
	if err != nil {
		a.close()
		return nil, err
	}
	a.feed = newFeed(a)
	if a.redirect != nil {
		// What a sidecar brings stays until it is known what the numbers mean.
		a.server.Publish(xds.Update{Evidence: map[xds.Scope]xds.Evidence{resources.ScopeCapture: xds.Failed}})
	}
	a.follower = a.newFollower()
	a.registry.MustRegister(&gauges{a}, a.invalid, pathMetrics{a.paths})
	return a, nil
}

// openSource makes the source, and what writes to it, and reads a file for the
// first time. It returns the config of the API server, nil where there is none.
func (a *Agent) openSource() (*rest.Config, error) {
	if path, ok := a.config.filePath(); ok {
		f := kube.NewFile(path, a.store, a.log)
		a.source = f
		return nil, f.Load()
	}
	kube.BridgeKlog(a.log)
	config, err := kube.Config(a.config.Kubeconfig)
	if err != nil {
		return nil, err
	}
	if a.source, err = kube.NewCluster(config, a.config.Version, a.store, a.log); err != nil {
		return nil, err
	}
	return config, a.newWriter(config)
}

func (a *Agent) close() {
	if f := a.front.Load(); f != nil {
		f.close()
	}
	if a.callers != nil {
		a.callers.close()
	}
	if a.paths != nil {
		a.paths.close()
	}
	if a.instance != nil {
		_ = a.instance.Close()
	}
	// The predecessor, if it is there still, takes the names back now.
	if a.predecessor != nil {
		_ = a.predecessor.Close()
	}
}

func (a *Agent) run(ctx context.Context) error {
	a.log.Info("agent starts", "node", a.config.nodeName(), "version", a.config.Version, "source", a.config.Source, "socket", a.config.ADSSocket)
	if filepath.Dir(a.config.ADSSocket) == filepath.Dir(a.config.AdminSocket) {
		a.log.Warn("the admin socket lies in the directory that pods mount to reach the ADS socket; give it one of its own", "socket", a.config.AdminSocket)
	}
	a.callers.log(a.log, a.config.RequireIdentity)
	g, ctx := errgroup.WithContext(ctx)
	g.Go(func() error { return a.source.Run(ctx) })
	g.Go(func() error { return a.paths.run(ctx) })
	g.Go(func() error { a.scheduler.Run(ctx); return nil })
	g.Go(func() error { a.collector.Run(ctx); return nil })
	g.Go(func() error { return a.feed.run(ctx, a.source.Synced()) })
	g.Go(func() error { return a.openGate(ctx) })
	g.Go(func() error { return a.afterGate(ctx, a.follower.Run) })
	if a.writer != nil {
		g.Go(func() error { return a.afterGate(ctx, a.statuses.Run) })
		g.Go(func() error { a.writer.Run(ctx); return nil })
	}
	if a.config.LiftTaint {
		g.Go(func() error { return a.liftTaint(ctx) })
	}
	g.Go(func() error { return a.keep(ctx, g, a.front.Load()) })
	g.Go(func() error { return serveHTTP(ctx, a.instance, a.admin()) })
	g.Go(func() error { return a.expire(ctx) })
	if a.redirect != nil {
		g.Go(func() error { return a.redirect.run(ctx) })
	}
	if a.peers != nil {
		g.Go(func() error { return a.peers.run(ctx) })
	}
	g.Go(func() error { return a.keepCheckpoint(ctx) })
	if a.config.HTTPAddress != "" {
		g.Go(func() error { return a.serveHealth(ctx) })
	}
	return g.Wait()
}

// expire forgets what was learned of owners whose pods went long ago, and notes
// what workloads call.
func (a *Agent) expire(ctx context.Context) error {
	tick := time.NewTicker(expireEvery)
	defer tick.Stop()
	for {
		select {
		case now := <-tick.C:
			a.dir.Expire(now)
			a.feed.learn(now)
		case <-ctx.Done():
			return nil
		}
	}
}

// podOf is the pod that a client claims to be, if there is one.
func (a *Agent) podOf(node *corev3.Node) string {
	client, err := resources.ParseClient(node)
	if err != nil || a.store.Pod(client.Namespace, client.Pod) == nil {
		return ""
	}
	return client.Namespace + "/" + client.Pod
}

// formOf is that of the route table by which a call came to unknown.sock, by the
// node id that the sidecar says and the pod that is proved: one with clusters on
// demand says its id itself only where it does not ask for the cluster.
func (a *Agent) formOf(says, pod string) resources.Form {
	if strings.HasSuffix(says, "/"+resources.Anybody) {
		return resources.OnDemand
	}
	client, err := resources.ParseClient(a.server.Node(cmp.Or(pod, says)))
	if err != nil {
		return resources.AllClusters // it is not connected
	}
	if form := client.Form(); form != resources.OnDemand {
		return form
	}
	return resources.Asking
}

// deliver lets a sidecar have a cluster that a call of it needed.
func (a *Agent) deliver(node, cluster string) { a.server.Want(node, cluster) }

func (a *Agent) know() knowledge { return knowledge{a.compiler, a.dir} }

// hurry lets owners be collected before others: a call waits for them.
func (a *Agent) hurry(keys []nodecache.OwnerKey) {
	for _, key := range keys {
		a.collector.Want(key)
	}
}

// refused hears of a resource that is left out, since it breaks its own rules.
func (a *Agent) refused(id xds.ID, err error) {
	a.log.Error("resource is left out", "type", id.Type.String(), "name", id.Name, "error", err)
	a.invalid.Inc()
}

func (a *Agent) setPart(name, state string) {
	a.partsMu.Lock()
	a.parts[name] = state
	a.partsMu.Unlock()
}

func (a *Agent) partStates() map[string]string {
	locality := a.localityState()
	a.partsMu.Lock()
	defer a.partsMu.Unlock()
	parts := maps.Clone(a.parts)
	parts["locality"] = locality
	return parts
}
