package agent

import (
	"github.com/prometheus/client_golang/prometheus"

	"github.com/fingerpost/fingerpost/nodecache"
)

var (
	descOwners  = prometheus.NewDesc("fingerpost_owners", "Owners that have pods, by what is known of them.", []string{"knowledge"}, nil)
	descPods    = prometheus.NewDesc("fingerpost_pods", "Pods in the directory, by state.", []string{"state"}, nil)
	descStale   = prometheus.NewDesc("fingerpost_source_stale_seconds", "For how long the source has been cut off or broken; 0 while it is well.", nil, nil)
	descSynced  = prometheus.NewDesc("fingerpost_source_synced", "1 once the source's first list was handled.", nil, nil)
	descGateway = prometheus.NewDesc("fingerpost_gateway_objects", "Objects of the Gateway API that the source holds, by kind.", []string{"kind"}, nil)
	descUnread  = prometheus.NewDesc("fingerpost_gateway_objects_unreadable", "Those of them that cannot be read and are left out.", []string{"kind"}, nil)
	descWanted  = prometheus.NewDesc("fingerpost_on_demand_clusters", "Clusters that clients have asked for by the name of a Service or a pod, by whether it leads to somebody.", []string{"found"}, nil)
	descLearned = prometheus.NewDesc("fingerpost_learned_upstreams", "Clusters that workloads were seen to call, and of which their later pods' sidecars are given those that lead to somebody.", nil, nil)
	descBuild   = prometheus.NewDesc("fingerpost_build_info", "1, with the version of the agent.", []string{"version"}, nil)
)

func newInvalid() prometheus.Counter {
	return prometheus.NewCounter(prometheus.CounterOpts{
		Name: "fingerpost_invalid_resources_total", Help: "Resources that were left out, since they break their own rules.",
	})
}

// gauges are read when somebody scrapes.
type gauges struct{ a *Agent }

func (*gauges) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{descOwners, descPods, descStale, descSynced, descGateway, descUnread, descWanted, descLearned, descBuild, descAvailable} {
		ch <- d
	}
}

func (g *gauges) Collect(ch chan<- prometheus.Metric) {
	gauge := func(d *prometheus.Desc, v float64, labels ...string) {
		ch <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, v, labels...)
	}
	counts, src := g.a.dir.Counts(), g.a.source.Status()
	for k := nodecache.Unknown; k <= nodecache.Failed; k++ {
		gauge(descOwners, float64(counts.Owners[k]), k.String())
	}
	for _, s := range []nodecache.PodState{nodecache.Serving, nodecache.Draining} {
		gauge(descPods, float64(counts.Pods[s]), s.String())
	}
	gauge(descStale, src.StaleSeconds)
	synced := 0.0
	if src.Synced {
		synced = 1
	}
	gauge(descSynced, synced)
	held, unread := g.a.store.Routes().Counts()
	for kind, n := range held {
		gauge(descGateway, float64(n), kind)
		gauge(descUnread, float64(unread[kind]), kind)
	}
	found, lost := g.a.compiler.Wanted()
	gauge(descWanted, float64(found), "true")
	gauge(descWanted, float64(lost), "false")
	_, learned := g.a.upstreams.Len()
	gauge(descLearned, float64(learned))
	gauge(descBuild, 1, g.a.config.Version)
	g.a.collectAvailable(ch)
}
