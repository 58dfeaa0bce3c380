package agent

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net/netip"
	"slices"
	"sync"
	"time"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/fingerpost/fingerpost/bpf/redirect"
	"github.com/fingerpost/fingerpost/xds"
	"github.com/fingerpost/fingerpost/xds/ads"
	"github.com/fingerpost/fingerpost/xds/resources"
)

const (
	partRedirect = "redirect"

	// settleFor is how long changes gather before the kernel is told of them.
	settleFor = 100 * time.Millisecond
	// sweepEvery is how often pods that have gone are looked for.
	sweepEvery = 10 * time.Second
	// attachEvery is how often what the node lacks is looked for again.
	attachEvery = 30 * time.Second
	// yieldWithin is how long an agent that has handed its sockets over may have
	// the kernel's part still. It lets go within settleFor.
	yieldWithin = 10 * time.Second
	// sweepAfter is how long after its start an agent leaves the pods alone that
	// one before it chose: their sidecars come back within that time.
	sweepAfter = 2 * time.Minute
)

// redirection tells the kernel which connections go to a sidecar, as long as this
// agent holds the sockets: of which pods, by what their sidecars say, and to which
// addresses, by what the directory knows.
type redirection struct {
	// Set at creation, read-only.
	agent   *Agent
	log     *slog.Logger
	options redirect.Options
	begun   time.Time

	// mu protects all below. The compiler takes it, to ask for numbers.
	mu    sync.RWMutex
	r     *redirect.Redirector // nil: nothing is redirected by this process
	state string               // of the part
	why   string               // the reason in the metric; empty if it is on
	// pods are those whose sidecars listen, by "namespace/name".
	pods  map[string]chosen
	count redirect.Destinations
}

// chosen is a pod whose connections may be redirected.
type chosen struct {
	uid     string
	network uint64 // cookie of its network namespace
	user    uint32 // its sidecar's
}

func newRedirection(a *Agent) *redirection {
	return &redirection{
		agent: a, log: a.log.With("part", partRedirect), begun: time.Now(),
		options: redirect.Options{Cgroup: a.config.RedirectCgroup, Dir: a.config.RedirectDir, Log: a.log.With("part", partRedirect)},
		state:   "off: starting", why: "starting", pods: map[string]chosen{},
	}
}

// destination is what a number stands for.
func (d *redirection) destination(number netip.Addr) (netip.AddrPort, bool) {
	d.mu.RLock()
	defer d.mu.RUnlock()
	if d.r == nil {
		return netip.AddrPort{}, false
	}
	return d.r.Destination(number)
}

// joined hears of each stream's client. One whose pod is proved, and that says that
// it listens for redirected connections, has its pod chosen.
func (d *redirection) joined(node *corev3.Node, who ads.Caller) {
	client, err := resources.ParseClient(node)
	if err != nil || !client.Redirect || who.Pod == "" || who.Network == 0 {
		return
	}
	r := d.agent.store.Pod(client.Namespace, client.Pod)
	if r == nil || r.HostNetwork {
		return
	}
	c := chosen{uid: r.UID, network: who.Network, user: who.User}
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.pods[who.Pod] == c {
		return
	}
	d.pods[who.Pod] = c
	d.allow(who.Pod, c)
}

// allow needs mu.
func (d *redirection) allow(pod string, c chosen) {
	if d.r == nil {
		return
	}
	if err := d.r.Allow(c.network, c.user); err != nil {
		d.log.Warn("connections of a pod are not redirected", "pod", pod, "error", err)
		delete(d.pods, pod)
	}
}

// run redirects whenever it is this agent's turn, until ctx ends.
func (d *redirection) run(ctx context.Context) error {
	a := d.agent
	sub := a.dir.SubscribeFronts()
	defer sub.Close()
	defer d.close()
	known := resources.NewDestinations(a.dir)
	var turn, tried, swept time.Time
	changed := true
	tick := time.NewTicker(settleFor)
	defer tick.Stop()
	for {
		select {
		case <-tick.C:
		case <-ctx.Done():
			return nil
		}
		if known.Apply(sub.Poll(), sub.PollFronts()) {
			changed = true
		}
		f := a.front.Load()
		if f == nil || f.ads.Given() {
			// Whoever holds the sockets is to have the kernel as well.
			d.close()
			turn, tried = time.Time{}, time.Time{}
			continue
		}
		if turn.IsZero() {
			turn = time.Now()
		}
		if !d.isOpen() && time.Since(tried) > attachEvery {
			switch done, yielding := d.open(time.Since(turn) < yieldWithin); {
			case done:
				changed = true
			case !yielding:
				tried = time.Now()
			}
		}
		// What an agent knows before its gate is open is less than the one before
		// it knew.
		if !d.isOpen() || !a.gate.open.Load() {
			continue
		}
		if changed {
			changed = !d.set(known.List())
		}
		if time.Since(swept) > sweepEvery {
			swept = time.Now()
			d.sweep()
		}
	}
}

func (d *redirection) isOpen() bool {
	d.mu.RLock()
	defer d.mu.RUnlock()
	return d.r != nil
}

// open attaches, and lets sidecars listen once it is known what the numbers mean.
// Where it cannot, they do not, and connections go where they were dialled, also
// where a program of before redirects still.
//
// With patience an agent that has it still is about to let go: that is no failure.
func (d *redirection) open(patience bool) (done, yielding bool) {
	r, err := redirect.Open(d.options)
	var u *redirect.Unavailable
	if errors.As(err, &u) && u.Reason == redirect.Busy && patience {
		return false, true
	}
	d.mu.Lock()
	d.r = r
	was := d.state
	if err != nil {
		d.state, d.why = "off: "+err.Error(), "error"
		if u != nil {
			d.why = string(u.Reason)
		}
	} else {
		d.state, d.why = "on", ""
		for pod, c := range d.pods {
			d.allow(pod, c)
		}
	}
	state := d.state
	d.mu.Unlock()
	d.agent.setPart(partRedirect, state)
	if err != nil {
		if state != was {
			d.log.Warn("connections are not redirected", "reason", d.why, "error", err)
		}
	} else {
		d.log.Info("connections of pods with a sidecar are redirected", "cgroup", d.options.Cgroup, "pins", cmp.Or(d.options.Dir, redirect.DefaultDir), "made_anew", r.Recreated(), "maps_replaced", r.Replaced())
	}
	series := uint32(0)
	if err == nil {
		series = r.Series()
	}
	d.agent.feed.capture(series)
	return err == nil, false
}

// set tells the kernel what the destinations are, and the sidecars what the numbers
// mean by now.
func (d *redirection) set(list []netip.AddrPort) bool {
	d.mu.RLock()
	r := d.r
	d.mu.RUnlock()
	done, err := r.SetDestinations(list) // run alone closes it
	if err != nil {
		d.log.Error("the kernel does not take the destinations of redirection", "error", err)
		return false
	}
	d.mu.Lock()
	if done.Left > 0 && d.count.Left == 0 {
		d.log.Warn("there are more destinations than numbers for them; the rest is called directly", "redirected", done.Redirected, "left", done.Left)
	}
	d.count = done
	d.state = "on"
	if done.Left > 0 {
		d.state = fmt.Sprintf("on: %d destinations, and %d more that are called directly", done.Redirected, done.Left)
	}
	state := d.state
	d.mu.Unlock()
	d.agent.setPart(partRedirect, state)
	d.agent.feed.renumbered()
	return true
}

// sweep ends what belongs to pods that have gone.
func (d *redirection) sweep() {
	d.mu.RLock()
	pods := maps.Clone(d.pods)
	d.mu.RUnlock()
	gone := map[string]chosen{}
	for pod, c := range pods {
		if r := d.agent.store.WithUID(c.uid); r == nil || r.String() != pod {
			gone[pod] = c
		}
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	live := map[uint64]bool{}
	for pod, c := range d.pods {
		if gone[pod] != c {
			live[c.network] = true
			continue
		}
		delete(d.pods, pod)
		d.forget(c.network)
	}
	if time.Since(d.begun) < sweepAfter {
		return
	}
	// Those of an agent before this one, whose sidecars have not come back.
	allowed, err := d.r.Allowed()
	if err != nil {
		d.log.Warn("chosen pods", "error", err)
		return
	}
	for network := range allowed {
		if !live[network] {
			d.forget(network)
		}
	}
}

// forget needs mu.
func (d *redirection) forget(network uint64) {
	if err := d.r.Forget(network); err != nil {
		d.log.Warn("connections of a pod that has gone", "error", err)
	}
}

// close lets go of the kernel, which goes on as it is.
func (d *redirection) close() {
	d.mu.Lock()
	r := d.r
	d.r = nil
	d.mu.Unlock()
	if r == nil {
		return
	}
	r.Close()
	d.agent.setPart(partRedirect, "on: by another agent")
}

// capture lets sidecars listen for connections that are redirected by numbers of
// the series, or, with 0, no longer.
func (f *feed) capture(series uint32) {
	f.mu.Lock()
	defer f.mu.Unlock()
	u := f.compiler.Renumbered(f.dir)
	u.Evidence = map[xds.Scope]xds.Evidence{resources.ScopeCapture: xds.Complete}
	if series == 0 {
		u.Remove = append(u.Remove, resources.CaptureID)
	} else if l, err := f.compiler.Capture(series); err != nil {
		f.log.Error("sidecars do not listen for redirected connections", "error", err)
	} else {
		u.Set = append(u.Set, l)
	}
	f.publish(u)
}

// renumbered publishes what other numbers change.
func (f *feed) renumbered() {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.publish(f.compiler.Renumbered(f.dir))
}

var (
	descRedirected   = prometheus.NewDesc("fingerpost_redirect_connections_total", "Connections of chosen pods to destinations of redirection since the programs were attached, by what became of them.", []string{"outcome"}, nil)
	descRedirectable = prometheus.NewDesc("fingerpost_redirect_destinations", "Addresses that can be redirected, by whether they are; those that are not found no room.", []string{"redirected"}, nil)
	descChosen       = prometheus.NewDesc("fingerpost_redirect_pods", "Pods whose connections are redirected.", nil, nil)
)

// Describe implements [prometheus.Collector].
func (*redirection) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{descRedirected, descRedirectable, descChosen} {
		ch <- d
	}
}

// Collect implements [prometheus.Collector].
func (d *redirection) Collect(ch chan<- prometheus.Metric) {
	d.mu.RLock()
	defer d.mu.RUnlock()
	gauge := func(desc *prometheus.Desc, v float64, labels ...string) {
		ch <- prometheus.MustNewConstMetric(desc, prometheus.GaugeValue, v, labels...)
	}
	if d.r == nil {
		return
	}
	gauge(descRedirectable, float64(d.count.Redirected), "true")
	gauge(descRedirectable, float64(d.count.Left), "false")
	gauge(descChosen, float64(len(d.pods)))
	counters, err := d.r.Counters()
	if err != nil {
		return
	}
	for _, name := range slices.Sorted(maps.Keys(counters)) {
		ch <- prometheus.MustNewConstMetric(descRedirected, prometheus.CounterValue, float64(counters[name]), name)
	}
}

// reason says why nothing is redirected by this agent; empty if it is.
func (d *redirection) reason() string {
	if d == nil {
		return "not asked for"
	}
	d.mu.RLock()
	defer d.mu.RUnlock()
	if d.r == nil {
		return cmp.Or(d.why, "another agent")
	}
	return ""
}
