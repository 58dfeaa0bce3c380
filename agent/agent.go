// Package agent runs the agent of a node: it connects the rooms, in the
// direction in which data flows, and answers for the whole.
package agent

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc"

	"github.com/fingerpost/fingerpost/agent/collect"
	"github.com/fingerpost/fingerpost/agent/kube"
	"github.com/fingerpost/fingerpost/agent/schedule"
	"github.com/fingerpost/fingerpost/nodecache"
	"github.com/fingerpost/fingerpost/xds"
	"github.com/fingerpost/fingerpost/xds/ads"
	"github.com/fingerpost/fingerpost/xds/ads/socket"
	"github.com/fingerpost/fingerpost/xds/resources"
	"github.com/fingerpost/fingerpost/xds/unknown"
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
	compiler  *resources.Compiler
	feed      *feed
	server    *ads.Server
	gate      gate
	// checkpoint belongs to newAgent, then to keepCheckpoint.
	checkpoint *checkpoint
	invalid    prometheus.Counter

	adsSocket, unknownSocket, adminSocket *socket.Socket

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
	a := &Agent{config: c, log: c.Logger(), registry: prometheus.NewRegistry(), dir: nodecache.New(nodecache.Options{}), invalid: newInvalid()}
	a.registry.MustRegister(collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	a.store = kube.NewStore(a.dir, a.log)
	if err := a.openSource(); err != nil {
		return nil, err
	}
	if err := a.openSockets(); err != nil {
		a.close()
		return nil, err
	}
	for _, w := range warnings {
		a.log.Warn(w)
	}
	a.parts = map[string]string{
		"identity":  "off: not built yet",
		"kernel":    "off: not built yet",
		"on-demand": "off: not built yet",
		"peers":     "off: not built yet",
		"routes":    "off: not built yet",
		"takeover":  "off: not built yet",
		"http":      "off: no address",
		"tracing":   "off: no address",
		"locality":  "even",
		"export":    c.ExportDefault,
	}
	if c.Takeover {
		a.parts["takeover"] = "off: not built yet; --takeover changes nothing"
	}
	if c.RequireIdentity {
		a.parts["identity"] = "off: not built yet; --require-identity refuses nobody"
	}
	if c.Tracing != "" {
		a.parts["tracing"] = "on"
	}
	if c.Locality != "even" {
		a.parts["locality"] = fmt.Sprintf("even: %s is not built yet", c.Locality)
	}
	a.restore()
	a.scheduler = schedule.New(schedule.Options{Limits: limits, Metrics: a.registry})
	a.collector = collect.New(collect.Options{
		Directory: a.dir, Scheduler: a.scheduler, Node: c.nodeName(), Scope: collect.Scope(c.CollectScope), Logger: a.log, Metrics: a.registry,
	})
	a.server = ads.New(ads.Options{
		Scopes:     a.scopes,
		Pod:        a.podOf,
		Identifier: "fingerpost/" + c.Version + " " + c.nodeName(),
		Logger:     a.log,
		Registerer: a.registry,
	})
	a.compiler, err = resources.New(resources.Options{
		EgressPort: uint16(c.EgressPort), Tracing: c.Tracing, Locality: c.Locality, ExportAll: c.ExportDefault == "all", Report: a.refused,
	})
	if err != nil {
		a.close()
		return nil, err
	}
	a.feed = newFeed(a.dir, a.compiler, a.server)
	a.registry.MustRegister(&gauges{a}, a.invalid)
	return a, nil
}

// openSource makes the source, and reads a file for the first time.
func (a *Agent) openSource() error {
	if path, ok := a.config.filePath(); ok {
		f := kube.NewFile(path, a.store, a.log)
		a.source = f
		return f.Load()
	}
	kube.BridgeKlog(a.log)
	config, err := kube.Config(a.config.Kubeconfig)
	if err != nil {
		return err
	}
	a.source, err = kube.NewCluster(config, a.config.Version, a.store, a.log)
	return err
}

// openSockets takes the sockets, or says who has them.
func (a *Agent) openSockets() error {
	c, err := &a.config, error(nil)
	// The locks lie beside the admin socket, where no pod can hold them.
	lock := func(path string) string {
		sum := sha256.Sum256([]byte(filepath.Clean(path)))
		return filepath.Join(filepath.Dir(c.AdminSocket), fmt.Sprintf("%s.%x.lock", filepath.Base(path), sum[:4]))
	}
	if a.adsSocket, err = socket.Listen(socket.Options{Path: c.ADSSocket, Lock: lock(c.ADSSocket)}); err != nil {
		return err
	}
	// Who has the lock of the ADS socket has this one too.
	if a.unknownSocket, err = socket.Listen(socket.Options{Path: UnknownSocket(c.ADSSocket)}); err != nil {
		return err
	}
	a.adminSocket, err = socket.Listen(socket.Options{Path: c.AdminSocket, Lock: lock(c.AdminSocket), Mode: 0o600})
	return err
}

func (a *Agent) close() {
	for _, s := range []*socket.Socket{a.adsSocket, a.unknownSocket, a.adminSocket} {
		if s != nil {
			_ = s.Close()
		}
	}
}

func (a *Agent) run(ctx context.Context) error {
	a.log.Info("agent starts", "node", a.config.nodeName(), "version", a.config.Version, "source", a.config.Source, "socket", a.config.ADSSocket)
	if filepath.Dir(a.adsSocket.Path()) == filepath.Dir(a.adminSocket.Path()) {
		a.log.Warn("the admin socket lies in the directory that pods mount to reach the ADS socket; give it one of its own", "socket", a.config.AdminSocket)
	}
	for _, name := range []string{"takeover", "identity"} {
		if state := a.partStates()[name]; strings.Contains(state, ";") {
			a.log.Warn("flag without effect", "part", name, "state", state)
		}
	}
	adsServer := ads.NewGRPCServer(a.server)
	unknownServer := unknown.New(a.compiler, unknown.Options{Synced: a.complete, Hurry: a.hurry})
	g, ctx := errgroup.WithContext(ctx)
	g.Go(func() error { return a.source.Run(ctx) })
	g.Go(func() error { a.scheduler.Run(ctx); return nil })
	g.Go(func() error { a.collector.Run(ctx); return nil })
	g.Go(func() error { return a.feed.run(ctx) })
	g.Go(func() error { return a.openGate(ctx) })
	g.Go(func() error { return serveGRPC(adsServer, a.adsSocket) })
	g.Go(func() error { return unknownServer.Serve(a.unknownSocket) })
	g.Go(func() error { return serveHTTP(ctx, a.adminSocket, a.admin()) })
	g.Go(func() error { return a.expire(ctx) })
	g.Go(func() error { return a.keepCheckpoint(ctx) })
	if a.config.HTTPAddress != "" {
		g.Go(func() error { return a.serveHealth(ctx) })
	}
	g.Go(func() error {
		<-ctx.Done()
		a.log.Info("agent stops")
		bound, cancel := context.WithTimeout(context.WithoutCancel(ctx), 2*stopSpread)
		defer cancel()
		err := a.server.Shutdown(bound, stopSpread)
		adsServer.Stop()
		unknownServer.Stop()
		if errors.Is(err, context.DeadlineExceeded) {
			return nil // the clients that were left are cut off
		}
		return err
	})
	return g.Wait()
}

func serveGRPC(s *grpc.Server, lis net.Listener) error {
	if err := s.Serve(lis); !errors.Is(err, grpc.ErrServerStopped) {
		return err
	}
	return nil
}

// expire forgets what was learned of owners whose pods went long ago.
func (a *Agent) expire(ctx context.Context) error {
	tick := time.NewTicker(expireEvery)
	defer tick.Stop()
	for {
		select {
		case now := <-tick.C:
			a.dir.Expire(now)
		case <-ctx.Done():
			return nil
		}
	}
}

// scopes says what a client may see, and makes sure that it is there.
func (a *Agent) scopes(node *corev3.Node) ([]xds.Scope, error) {
	client, err := resources.ParseClient(node)
	if err != nil {
		return nil, err
	}
	for _, w := range client.Warnings {
		a.log.Warn("client asks for what it cannot have", "client", node.GetId(), "warning", w)
	}
	if err := a.feed.namespace(client.Namespace); err != nil {
		return nil, err
	}
	return client.Scopes(), nil
}

// podOf is the pod that a client claims to be, if there is one.
func (a *Agent) podOf(node *corev3.Node) string {
	client, err := resources.ParseClient(node)
	if err != nil || a.store.Pod(client.Namespace, client.Pod) == nil {
		return ""
	}
	return client.Namespace + "/" + client.Pod
}

// Ready returns nil if the gate is open and whoever dials the ADS socket
// reaches this process, else what is missing.
func (a *Agent) Ready(ctx context.Context) error {
	if state, reason := a.gateState(); state != gateOpen {
		return fmt.Errorf("the gate is closed: %s", reason)
	}
	conn, err := (&net.Dialer{}).DialContext(ctx, "unix", a.config.ADSSocket)
	if err != nil {
		return fmt.Errorf("the ADS socket cannot be reached: %w", err)
	}
	defer conn.Close()
	raw, err := conn.(*net.UnixConn).SyscallConn()
	if err != nil {
		return err
	}
	// The kernel says who listens, in terms of our pid namespace (unix(7),
	// SO_PEERCRED): an agent in another container is never our own pid.
	var cred *unix.Ucred
	var credErr error
	if err := raw.Control(func(fd uintptr) {
		cred, credErr = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED)
	}); err != nil {
		return err
	}
	if credErr != nil {
		return credErr
	}
	if int(cred.Pid) != unix.Getpid() {
		return fmt.Errorf("the ADS socket leads to another process (pid %d)", cred.Pid)
	}
	return nil
}

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
	a.partsMu.Lock()
	defer a.partsMu.Unlock()
	return maps.Clone(a.parts)
}
