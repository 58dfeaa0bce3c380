package agent

import (
	"context"

	"k8s.io/client-go/rest"
	"k8s.io/client-go/util/flowcontrol"

	"github.com/fingerpost/fingerpost/agent/report"
	"github.com/fingerpost/fingerpost/nodecache"
	"github.com/fingerpost/fingerpost/xds/ads"
	"github.com/fingerpost/fingerpost/xds/resources"
)

const partReports = "reports"

// Who a client is nobody proves: refusals become Events of pods of this node
// alone, rejectedBurst at once and rejectedRate a second.
const (
	rejectedRate  = 0.1
	rejectedBurst = 32
)

// newWriter makes what writes Events, and statuses of routes, into the API
// server of the config.
func (a *Agent) newWriter(config *rest.Config) (err error) {
	config = rest.CopyConfig(config)
	config.UserAgent = "fingerpost/" + a.config.Version
	a.writer, err = report.NewWriter(config, report.WriterOptions{
		Namespace: a.config.LeaseNamespace, Name: a.config.LeaseName, Node: a.config.nodeName(),
		State: func(state string) { a.setPart(partReports, state) }, Logger: a.log, Metrics: a.registry,
	})
	if err != nil {
		return err
	}
	a.statuses, err = report.NewStatuses(config, report.StatusOptions{
		Directory: a.dir, Routes: a.store.Routes(), Writer: a.writer, Metrics: a.registry,
		Current: func() bool { return a.source.Status().RoutesCurrent },
	})
	return err
}

// newFollower makes what compares what owners serve.
func (a *Agent) newFollower() *report.Follower {
	o := report.Options{
		Directory: a.dir, Logger: a.log, Metrics: a.registry,
		Say: func(report.Event) {},
		Claimants: func(namespace, service string) (string, []*nodecache.Owner) {
			a.feed.flush()
			return a.compiler.Claimants(namespace, service)
		},
	}
	if a.writer != nil {
		o.Say = a.writer.Say
	}
	return report.NewFollower(o)
}

// newRejected returns what makes an Event of what a client refuses with words
// that it has not said before. It does nothing where none can be written.
func (a *Agent) newRejected() func(ads.Refusal) {
	if a.writer == nil {
		return func(ads.Refusal) {}
	}
	limit := flowcontrol.NewTokenBucketRateLimiter(rejectedRate, rejectedBurst)
	return func(r ads.Refusal) {
		client, err := resources.ParseClient(r.Node)
		if err != nil || r.Said {
			return
		}
		pod := a.store.Pod(client.Namespace, client.Pod)
		if pod != nil && pod.Node == a.config.nodeName() && limit.TryAccept() {
			a.writer.Say(report.Rejected(&pod.Pod, r.Type.String(), r.Error))
		}
	}
}

// afterGate runs what begins once the gate is open: what is learned until then
// is the world as this agent found it.
func (a *Agent) afterGate(ctx context.Context, run func(context.Context)) error {
	select {
	case <-a.gate.opened:
		run(ctx)
	case <-ctx.Done():
	}
	return nil
}

// differs adds how the owner differs from the revision before it.
func (v *OwnerView) differs(c report.Change) {
	if len(c.Added)+len(c.Dropped) > 0 {
		v.Added, v.Dropped = append(v.Added, c.Added...), append(v.Dropped, c.Dropped...)
		v.Previous = c.Previous.String()
	}
}
