package agent

import (
	"context"
	"errors"
	"fmt"
	"net"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"
	"k8s.io/client-go/rest"

	"github.com/fingerpost/fingerpost/agent/collect"
	"github.com/fingerpost/fingerpost/agent/kube"
	"github.com/fingerpost/fingerpost/agent/peer"
	"github.com/fingerpost/fingerpost/nodecache"
)

// partPeers is the part of Status that says whether this agent shares with others,
// and whose pods it asks itself.
const partPeers = "peers"

const (
	// keyPrefix is what the fingerprint of a key begins with on an agent's pod.
	keyPrefix = "sha256:"

	// membersEvery is how often changes of the agents are passed on at most: at a
	// rollout there are many.
	membersEvery = 200 * time.Millisecond

	// aloneGrace is how long an agent waits, after its source has synced, for the
	// others before it asks what would be theirs to ask: agents that start
	// together see one another's pods before their keys.
	aloneGrace = 15 * time.Second
)

// peers is how this agent shares with those of other nodes what it has learned.
// Its fields are set at creation and read-only, but for what says otherwise.
type peers struct {
	a         *Agent
	agents    *kube.Agents
	exchange  *peer.Exchange
	transport *peer.Transport
	certs     *peer.Certificates // nil: keys are known by the agents' pods
	announcer *kube.Announcer    // nil: others know this agent without
	collector *collect.Collector // set before run

	// mu guards what follows.
	mu        sync.Mutex
	listening error // why nobody can reach this agent; nil: they can
	announced error // why nobody knows its key; nil: they do
	others    int   // agents of other nodes
	waited    bool  // for them, long enough
	// alone is set while nobody else can be asked and the last resort is on: then
	// every pod may be asked by this agent. Changed under mu, read without.
	alone atomic.Bool
}

var (
	errNotYet       = errors.New("it has just started")
	errPeersOff     = errors.New("--peer-address is empty")
	errNoPodName    = errors.New("POD_NAME is not set, so that this agent cannot write on its pod which key it has; set it from metadata.name, or give --peer-cert-dir")
	errCertificates = errors.New("certificates of --peer-cert-dir")
	errFileKeys     = errors.New("a file does not say which key this agent has; give --peer-cert-dir")
)

// share makes what shares with other agents, and says what is asked without it.
func (a *Agent) share(config *rest.Config, asks *collect.Options) error {
	p, err := a.newPeers(config)
	if errors.Is(err, errPeersOff) || errors.Is(err, errNoPodName) || errors.Is(err, errFileKeys) || errors.Is(err, errCertificates) {
		if a.peersOff = err; errors.Is(err, errCertificates) {
			a.log.Warn("nothing is shared with agents of other nodes", "error", err)
		}
		if !a.config.lastResort() && a.config.CollectScope != string(collect.ScopeCluster) {
			asks.Scope, a.only = collect.ScopeNode, a.config.nodeName()
		}
		return nil
	}
	if a.peers = p; err == nil && a.config.CollectScope != string(collect.ScopeCluster) {
		asks.Placement = p
	}
	return err
}

// asks says in a few words whose pods this agent asks, where that is not the rule.
func (a *Agent) asks() string {
	switch {
	case a.only != "":
		return "; nothing is learned of pods of other nodes"
	case a.config.CollectScope == string(collect.ScopeCluster):
		return "; this agent asks pods of all nodes, as it was told"
	case a.peers == nil || a.peers.alone.Load():
		return "; this agent asks pods of all nodes"
	}
	return ""
}

// newPeers makes what shares with other agents; nil, and why, if this one does
// not. The config is that of the API server, nil with a file source.
func (a *Agent) newPeers(config *rest.Config) (*peers, error) {
	c := &a.config
	switch {
	case c.PeerAddress == "":
		return nil, errPeersOff
	case config == nil && c.PeerCertDir == "":
		return nil, errFileKeys
	case c.PodName == "" && c.PeerCertDir == "":
		return nil, errNoPodName
	}
	p := &peers{a: a, agents: a.store.FollowAgents(c.LeaseNamespace), listening: errNotYet}
	_, number, _ := net.SplitHostPort(c.PeerAddress) // Check has seen it
	port, _ := strconv.ParseUint(number, 10, 16)
	text := kube.FormatPeer(uint16(port), "")
	var identity *peer.Identity
	var trust peer.Trust
	var err error
	if c.PeerCertDir != "" {
		if p.certs, err = peer.LoadCertificates(c.PeerCertDir, c.nodeName()); err != nil {
			return nil, fmt.Errorf("%w: %w; restart the agent once they are good", errCertificates, err)
		}
		identity, trust = p.certs.Identity(), p.certs.Trust
	} else {
		if identity, err = peer.NewIdentity(c.nodeName()); err != nil {
			return nil, err
		}
		text = kube.FormatPeer(uint16(port), keyPrefix+identity.Fingerprint().String())
	}
	if config != nil && c.PodName != "" {
		p.announced = errNotYet
		config = rest.CopyConfig(config)
		config.UserAgent = "fingerpost/" + c.Version
		p.announcer, err = kube.NewAnnouncer(config, kube.AnnouncerOptions{
			Namespace: c.LeaseNamespace, Pod: c.PodName, Node: c.nodeName(), Text: text, State: p.setAnnounced,
		})
		if err != nil {
			return nil, err
		}
	}
	p.transport = peer.NewTransport(identity, trust)
	p.transport.Register(a.registry)
	p.exchange = peer.New(peer.Options{
		Node: c.nodeName(), Directory: peer.Over(a.dir), Identity: identity, Network: p.transport, Scheduler: a.scheduler, Trust: trust,
		Remote: c.lastResort(), Cost: a.peerCost, Logger: a.log, Metrics: a.registry,
	})
	return p, nil
}

// peerCost is what a connection to an agent of another node takes.
func (a *Agent) peerCost(m peer.Member) time.Duration {
	cost, _ := a.paths.cost(m.Address.Addr(), m.Node)
	return cost
}

// run shares until ctx ends.
func (p *peers) run(ctx context.Context) error {
	g, ctx := errgroup.WithContext(ctx)
	may := make(chan struct{}) // closed once others may know the key
	mayOnce := sync.OnceFunc(func() { close(may) })
	g.Go(func() error { return p.serve(ctx, mayOnce) })
	g.Go(func() error { p.follow(ctx, mayOnce); return nil })
	if p.announcer != nil {
		g.Go(func() error {
			select {
			case <-may:
				p.announcer.Run(ctx)
			case <-ctx.Done():
			}
			return nil
		})
	}
	if p.certs != nil {
		g.Go(func() error { p.certs.Watch(ctx, p.a.log); return nil })
	}
	g.Go(func() error {
		select {
		case <-p.a.source.Synced():
			p.exchange.Run(ctx)
		case <-ctx.Done():
		}
		return nil
	})
	return g.Wait()
}

// serve answers other agents as soon as the address is free: an agent that is
// being replaced has it until it is gone. Bound is called then.
func (p *peers) serve(ctx context.Context, bound func()) error {
	for {
		lis, err := (&net.ListenConfig{}).Listen(ctx, "tcp", p.a.config.PeerAddress)
		if err == nil {
			p.setListening(nil)
			bound()
			if err = p.transport.Serve(ctx, lis, p.exchange); err == nil {
				return nil
			}
			p.a.log.Warn("agents of other nodes cannot reach this one; trying on", "address", p.a.config.PeerAddress, "error", err)
		}
		p.setListening(err) // ADS does not depend on it
		select {
		case <-time.After(httpRetry):
		case <-ctx.Done():
			return nil
		}
	}
}

// follow tells the exchange which agents there are. Where another agent of this
// node has the address still, others find that one, and known is called.
func (p *peers) follow(ctx context.Context, known func()) {
	synced, grace := p.a.source.Synced(), (<-chan time.Time)(nil)
	members := map[string]peer.Member{}
	node := p.a.config.nodeName()
	pace := time.NewTimer(0)
	defer pace.Stop()
	ready := false // synced
	for {
		select {
		case <-synced:
			synced, ready = nil, true
			timer := time.NewTimer(aloneGrace)
			defer timer.Stop()
			grace = timer.C
		case <-grace:
			grace = nil
			p.settle(func() { p.waited = true })
			continue
		case <-p.agents.Changed():
		case <-ctx.Done():
			return
		}
		for n, pods := range p.agents.Take() {
			if m, ok := p.member(pods); ok {
				members[n] = m
			} else {
				delete(members, n)
			}
			if n == node {
				if p.announcer != nil {
					p.announcer.Seen(pods)
				}
				if len(pods) > 0 {
					known()
				}
			}
		}
		if !ready {
			continue
		}
		all, others := make([]peer.Member, 0, len(members)), 0
		for n, m := range members {
			if all = append(all, m); n != node {
				others++
			}
		}
		p.exchange.SetMembers(all)
		p.settle(func() { p.others = others })
		select {
		case <-pace.C:
		case <-ctx.Done():
			return
		}
		pace.Reset(membersEvery)
	}
}

// member is the agent of a node, whose pods are those given.
func (p *peers) member(pods []kube.AgentPod) (peer.Member, bool) {
	var m peer.Member
	for _, pod := range pods {
		if p.certs == nil {
			key, err := peer.ParseFingerprint(strings.TrimPrefix(pod.Key, keyPrefix))
			if err != nil {
				continue // it has certificates, and this agent none
			}
			m.Keys = append(m.Keys, key)
		}
		if m.Node == "" {
			m.Node, m.Zone, m.Address = pod.Node, pod.Zone, pod.At
		}
	}
	return m, m.Node != ""
}

// settle makes a change, under mu, and decides whether this agent is alone with
// it.
func (p *peers) settle(change func()) {
	p.mu.Lock()
	change()
	unknown := p.announced != nil && p.announced != errNotYet
	alone := p.waited && p.a.config.lastResort() && (p.others == 0 || unknown)
	changed := p.alone.Swap(alone) != alone
	p.mu.Unlock()
	if !changed {
		return
	}
	sub := p.a.dir.Subscribe()
	keys := sub.Poll()
	sub.Close()
	p.collector.Consider(keys...)
}

func (p *peers) setListening(err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.listening = err
}

func (p *peers) setAnnounced(err error) {
	var told error
	p.settle(func() { told, p.announced = p.announced, err })
	if err != nil && fmt.Sprint(told) != err.Error() {
		p.a.log.Warn("agents of other nodes do not know this one, and cannot be asked", "error", err)
	}
}

// Place implements [collect.Placement].
func (p *peers) Place(o *nodecache.Owner) collect.Place {
	if p.alone.Load() {
		return collect.AnyNode
	}
	return p.exchange.Place(o)
}

// Want implements [collect.Placement].
func (p *peers) Want(key nodecache.OwnerKey) {
	if !p.alone.Load() {
		p.exchange.Want(key)
	}
}

// Wait implements [collect.Placement].
func (p *peers) Wait(ctx context.Context, key nodecache.OwnerKey) error {
	if p.alone.Load() {
		return ctx.Err()
	}
	return p.exchange.Wait(ctx, key)
}

// Up to these numbers it is right that each agent watches the cluster by itself;
// docs/scale.md says why.
const (
	rightAgents = 1000
	rightPods   = 50000
)

// partScale is the part of Status that says whether the cluster is larger.
const partScale = "scale"

// scale is what status says of the part, where there is an API server.
func (a *Agent) scale(src kube.Status) string {
	agents, of := 1, fmt.Sprintf("up to %d agents and %d pods it is right that each agent watches the cluster", rightAgents, rightPods)
	if a.peers != nil {
		a.peers.mu.Lock()
		agents += a.peers.others
		a.peers.mu.Unlock()
	}
	has := fmt.Sprintf("%s and %s", count(agents, "agent"), count(src.Pods, "pod"))
	if agents > rightAgents || src.Pods > rightPods {
		return fmt.Sprintf("on: beyond what is right: %s; %s, see docs/scale.md", has, of)
	}
	return fmt.Sprintf("on: %s; %s", has, of)
}

// peersState is what status says of the part.
func (a *Agent) peersState() string {
	if a.peers == nil {
		return "off: " + a.peersOff.Error() + a.asks()
	}
	return a.peers.state() + a.asks()
}

// state is what status says of the part: "on", "on: ..." or "off: ...".
func (p *peers) state() string {
	p.mu.Lock()
	listening, announced := p.listening, p.announced
	p.mu.Unlock()
	switch {
	case announced != nil:
		return "off: " + announced.Error()
	case p.certs != nil && p.certs.Err() != nil:
		return "on: with the certificates of before: " + p.certs.Err().Error()
	case listening != nil:
		return fmt.Sprintf("on: others cannot reach this agent yet: %s", listening)
	}
	return "on"
}
