package agent

import (
	"cmp"
	"context"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/fingerpost/fingerpost/bpf/observe"
	"github.com/fingerpost/fingerpost/bpf/path"
	"github.com/fingerpost/fingerpost/nodecache"
)

// The parts of Status that say what the kernel tells of ways and connections.
const (
	partPath    = "path"
	partObserve = "observe"
)

// seenLately is how long a round trip that was seen is worth more than what is
// usual.
const seenLately = 10 * time.Minute

// paths is what this node knows of the ways to pods: netlink's word, and what
// became of connections. Each is off where the kernel, or what this agent may do,
// does not allow it; nothing then costs more than anything else.
type paths struct {
	a        *Agent
	ways     *path.Map // nil: it could not be opened
	observer atomic.Pointer[observe.Observer]
	// Why they are off; nil: they are on.
	noPath, noObserve atomic.Pointer[string]
}

func newPaths(a *Agent) *paths {
	p := &paths{a: a}
	p.noObserve.Store(new(errNotYet.Error()))
	ways, err := path.Open(path.Options{})
	if err != nil {
		p.noPath.Store(new(err.Error()))
	} else {
		p.ways = ways
	}
	return p
}

func (p *paths) close() {
	if p.ways != nil {
		p.ways.Close()
	}
}

// run keeps what is known fresh, until ctx ends.
func (p *paths) run(ctx context.Context) error {
	observed := make(chan struct{})
	go func() {
		defer close(observed)
		p.watch(ctx)
	}()
	defer func() { <-observed }()
	if p.ways == nil {
		p.off(&p.noPath, partPath, *p.noPath.Load())
		return nil
	}
	followed := make(chan error, 1)
	go func() { followed <- p.ways.Run(ctx) }()
	select {
	case <-p.a.source.Synced():
		if own := p.a.store.Pod(p.a.config.LeaseNamespace, p.a.config.PodName); own != nil && !own.HostNetwork {
			p.off(&p.noPath, partPath, "the agent's pod has a network of its own, whose routes are not the node's; set hostNetwork: true")
		} else {
			p.a.log.Info("ways to pods are known", "part", partPath)
		}
	case <-ctx.Done():
	}
	if err := <-followed; err != nil {
		p.off(&p.noPath, partPath, "the kernel does not say any more what changes: "+err.Error())
	}
	return nil
}

// watch observes connections until ctx ends. To load the program takes some
// milliseconds, for which nothing waits.
func (p *paths) watch(ctx context.Context) {
	o, err := observe.Open(observe.Options{Logger: p.a.log})
	if err != nil {
		p.off(&p.noObserve, partObserve, err.Error())
		return
	}
	defer o.Close()
	p.observer.Store(o)
	defer p.observer.Store(nil)
	p.noObserve.Store(nil)
	p.a.log.Info("connections are observed", "part", partObserve, "cgroup", o.Cgroup())
	o.Run(ctx)
}

func (p *paths) off(which *atomic.Pointer[string], part, why string) {
	which.Store(&why)
	p.a.log.Info("a part that depends on the node's kernel is off", "part", part, "state", "off: "+why)
}

// why is why a part is off; empty: it is on.
func why(which *atomic.Pointer[string]) string {
	if s := which.Load(); s != nil {
		return *s
	}
	return ""
}

func onOff(why string) string {
	if why == "" {
		return "on"
	}
	return "off: " + why
}

// way is the way to an address of a pod of a node.
func (p *paths) way(addr netip.Addr, node string) path.Path {
	ways := p.ways
	if p.noPath.Load() != nil {
		ways = nil
	}
	return ways.Of(addr, node != "" && node == p.a.config.nodeName())
}

// cost is what a connection to a pod of a node takes: the round trip that was
// seen lately, of the port that answers first, else what is usual for such a way.
// It is not reachable where the kernel would not send, or no route leads to a pod
// of this node.
func (p *paths) cost(addr netip.Addr, node string) (takes time.Duration, reachable bool) {
	w := p.way(addr, node)
	return price(w, p.observer.Load().At(addr), time.Now())
}

func price(w path.Path, seen []observe.Stat, now time.Time) (takes time.Duration, reachable bool) {
	if w.Class == path.Unreachable || w.Class == path.Local && !w.Wired {
		return path.Unreachable.Cost(), false
	}
	takes = w.Class.Cost()
	least := time.Duration(0)
	for _, s := range seen {
		if s.RTT.Average > 0 && now.Sub(s.Last) < seenLately && (least == 0 || s.RTT.Average < least) {
			least = s.RTT.Average
		}
	}
	return cmp.Or(least, takes), true
}

// podCost is the cost of a pod, for who chooses which to ask.
func (p *paths) podCost(pod *nodecache.Pod) (time.Duration, bool) { return p.cost(pod.Addr, pod.Node) }

// explain says what is known of the way to a pod.
func (p *paths) explain(e *Explanation, what string, addr netip.Addr, node string) {
	if !addr.IsValid() {
		return
	}
	if off := why(&p.noPath); off != "" {
		e.fact("path", "%snot known: part path is off: %s", what, off)
	} else {
		cost, reachable := p.cost(addr, node)
		says := p.way(addr, node).String()
		if reachable {
			says += ", takes about " + cost.String()
		}
		e.fact("path", "%s%s", what, says)
	}
	_ = p.observer.Load().Read() // or what was read last is said
	for _, s := range p.observer.Load().At(addr) {
		e.fact("observed", "%s%s", what, saysSeen(&s))
	}
}

// saysSeen is what was seen of one destination, in one line.
func saysSeen(s *observe.Stat) string {
	says := fmt.Sprintf("port %d: %s", s.Destination.Port(), count(int(s.Connects), "connection"))
	for _, e := range ends(&s.Counts) {
		if e.n > 0 {
			says += fmt.Sprintf(", %d %s", e.n, strings.ReplaceAll(e.name, "_", " "))
		}
	}
	if s.RTT.Last > 0 {
		says += fmt.Sprintf("; SYN round trip %s, %s at least, %s on average", s.RTT.Last, s.RTT.Min, s.RTT.Average)
	}
	if s.Retransmits > 0 {
		says += fmt.Sprintf("; %s sent again", count(int(s.Retransmits), "segment"))
	}
	return says + "; last seen " + ago(s.Last)
}

// end is how many connections came to one.
type end struct {
	name string
	n    uint64
}

func ends(c *observe.Counts) []end {
	return []end{{"ok", c.OK}, {"refused", c.Refused}, {"timed_out", c.TimedOut}, {"unreachable", c.Unreachable}, {"given_up", c.GivenUp}}
}

// PathView is one row of the answer to /paths.
type PathView struct {
	// Address is ip:port of an endpoint, or of what somebody on this node has
	// connected to.
	Address string `json:"address"`
	// Pod and Node are empty where it is no pod's that is known.
	Pod  string `json:"pod"`
	Node string `json:"node"`
	// Class is host, local, same-l2, gateway, tunnel, unknown or unreachable.
	Class string `json:"class"`
	// Wired is null where it is of another node.
	Wired *bool `json:"wired"`
	// Link and Via are how it leaves; Via is the next router, empty if there is
	// none.
	Link   string `json:"link"`
	Via    string `json:"via"`
	Reason string `json:"reason"`
	// CostUS is what a connection takes, in microseconds; null: nobody answers.
	CostUS *int64 `json:"cost_us"`
	// Observed is null where nobody has connected, or nothing is observed.
	Observed *ObservedView `json:"observed"`
}

// ObservedView is what was seen of the connections to one address and port.
type ObservedView struct {
	Connects    uint64 `json:"connects"`
	OK          uint64 `json:"ok"`
	Refused     uint64 `json:"refused"`
	TimedOut    uint64 `json:"timed_out"`
	Unreachable uint64 `json:"unreachable"`
	GivenUp     uint64 `json:"given_up"`
	Retransmits uint64 `json:"retransmits"`
	// SYN round trips in microseconds; 0: none was measured.
	RTTLastUS    int64     `json:"rtt_last_us"`
	RTTMinUS     int64     `json:"rtt_min_us"`
	RTTAverageUS int64     `json:"rtt_average_us"`
	Last         time.Time `json:"last"`
}

// view lists the ways to all endpoints, and what was seen of any destination:
// those of pods first.
func (p *paths) view() []PathView {
	_ = p.observer.Load().Read()
	seen := map[netip.AddrPort]observe.Stat{}
	p.observer.Load().All(func(s observe.Stat) { seen[s.Destination] = s })
	// The directory has no pods that are not Ready, which kubelets probe too.
	here := map[netip.Addr]*nodecache.Pod{}
	for _, r := range p.a.store.OnNode(p.a.config.nodeName()) {
		for _, addr := range append([]netip.Addr{r.Addr}, r.More...) {
			if !r.HostNetwork {
				here[addr] = &r.Pod
			}
		}
	}
	rows := map[netip.AddrPort]PathView{}
	add := func(to netip.AddrPort, pod, node string) {
		if _, ok := rows[to]; !ok {
			s, ok := seen[to]
			rows[to] = p.row(to, pod, node, s, ok)
		}
	}
	for _, s := range p.a.services() {
		for _, e := range s.Endpoints {
			if to, err := netip.ParseAddrPort(e.Address); err == nil { // or it is a host's name
				add(to, e.Pod, e.Node)
			}
		}
	}
	for to := range seen {
		pod := cmp.Or(p.a.dir.PodAt(to.Addr()), here[to.Addr()])
		if pod == nil {
			add(to, "", "")
		} else {
			add(to, pod.String(), pod.Node)
		}
	}
	views := make([]PathView, 0, len(rows))
	order := make([]netip.AddrPort, 0, len(rows))
	for to := range rows {
		order = append(order, to)
	}
	slices.SortFunc(order, func(a, b netip.AddrPort) int {
		ra, rb := rows[a], rows[b]
		switch {
		case (ra.Pod == "") != (rb.Pod == ""):
			return cmp.Compare(rb.Pod, ra.Pod) // empty is last
		case ra.Pod != rb.Pod:
			return cmp.Compare(ra.Pod, rb.Pod)
		}
		return a.Compare(b)
	})
	for _, to := range order {
		views = append(views, rows[to])
	}
	return views
}

func (p *paths) row(to netip.AddrPort, pod, node string, s observe.Stat, seen bool) PathView {
	w := p.way(to.Addr(), node)
	v := PathView{Address: to.String(), Pod: pod, Node: node, Class: strings.ToLower(w.Class.String()), Link: w.Link, Reason: w.Reason}
	if w.Class == path.Local || w.Class == path.Host {
		v.Wired = &w.Wired
	}
	if w.Via.IsValid() {
		v.Via = w.Via.String()
	}
	if cost, reachable := p.cost(to.Addr(), node); reachable {
		v.CostUS = new(cost.Microseconds())
	}
	if seen {
		v.Observed = &ObservedView{
			Connects: s.Connects, OK: s.OK, Refused: s.Refused, TimedOut: s.TimedOut, Unreachable: s.Unreachable, GivenUp: s.GivenUp,
			Retransmits: s.Retransmits, RTTLastUS: s.RTT.Last.Microseconds(), RTTMinUS: s.RTT.Min.Microseconds(),
			RTTAverageUS: s.RTT.Average.Microseconds(), Last: s.Last.UTC(),
		}
	}
	return v
}

var (
	descConnects     = prometheus.NewDesc("fingerpost_observed_connects_total", "TCP connections that processes of this node opened to other addresses than loopback, by what became of them.", []string{"outcome"}, nil)
	descRetransmits  = prometheus.NewDesc("fingerpost_observed_retransmits_total", "Segments of such connections that were sent again, SYNs too.", nil, nil)
	descRTT          = prometheus.NewDesc("fingerpost_observed_syn_rtt_seconds", "Round trips of SYNs that were answered at first.", nil, nil)
	descDestinations = prometheus.NewDesc("fingerpost_observed_destinations", "Addresses and ports of which something is remembered.", nil, nil)
	descLocalPods    = prometheus.NewDesc("fingerpost_path_local_pods", "Pods of this node with a network of their own and an address, by whether a route of the host leads to it.", []string{"wired"}, nil)
)

// pathMetrics are read when somebody scrapes. There is nothing of a part that is off.
type pathMetrics struct{ *paths }

func (pathMetrics) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{descConnects, descRetransmits, descRTT, descDestinations, descLocalPods} {
		ch <- d
	}
}

func (m pathMetrics) Collect(ch chan<- prometheus.Metric) {
	if m.noPath.Load() == nil {
		wired := map[bool]int{}
		for _, r := range m.a.store.OnNode(m.a.config.nodeName()) {
			if r.Addr.IsValid() && !r.HostNetwork {
				wired[m.way(r.Addr, r.Node).Wired]++
			}
		}
		ch <- prometheus.MustNewConstMetric(descLocalPods, prometheus.GaugeValue, float64(wired[true]), "true")
		ch <- prometheus.MustNewConstMetric(descLocalPods, prometheus.GaugeValue, float64(wired[false]), "false")
	}
	o := m.observer.Load()
	if o == nil {
		return
	}
	t, err := o.Totals()
	if err != nil {
		return
	}
	for _, e := range ends(&t.Counts) {
		ch <- prometheus.MustNewConstMetric(descConnects, prometheus.CounterValue, float64(e.n), e.name)
	}
	ch <- prometheus.MustNewConstMetric(descRetransmits, prometheus.CounterValue, float64(t.Retransmits))
	buckets := map[float64]uint64{}
	for bound, n := range t.Buckets {
		buckets[bound.Seconds()] = n
	}
	ch <- prometheus.MustNewConstHistogram(descRTT, t.Samples, t.RTT.Seconds(), buckets)
	destinations := 0
	o.All(func(observe.Stat) { destinations++ })
	ch <- prometheus.MustNewConstMetric(descDestinations, prometheus.GaugeValue, float64(destinations))
}
