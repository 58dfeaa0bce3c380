package collect

import "github.com/prometheus/client_golang/prometheus"

type metrics struct {
	collects     *prometheus.CounterVec
	inFlight     prometheus.Gauge
	stale        prometheus.Counter
	staleTargets prometheus.Counter
	connections  prometheus.Counter
}

// newMetrics registers the metrics with reg, unless that is nil.
func newMetrics(reg prometheus.Registerer) *metrics {
	counter := func(name, help string) prometheus.Counter {
		return prometheus.NewCounter(prometheus.CounterOpts{Name: name, Help: help})
	}
	m := &metrics{
		collects: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "fingerpost_collects_total",
			Help: "Attempts to collect an owner, by result.",
		}, []string{"result"}),
		inFlight: prometheus.NewGauge(prometheus.GaugeOpts{
			Name: "fingerpost_collects_in_flight",
			Help: "Attempts to collect an owner that run.",
		}),
		stale:        counter("fingerpost_collect_stale_commits_total", "Collects whose owner ended before they could be recorded."),
		staleTargets: counter("fingerpost_collect_stale_targets_total", "Pods that were not dialled because they ended or moved meanwhile."),
		connections:  counter("fingerpost_collect_connections_total", "Connections made to pods in order to collect."),
	}
	if reg != nil {
		reg.MustRegister(m.collects, m.inFlight, m.stale, m.staleTargets, m.connections)
	}
	return m
}
