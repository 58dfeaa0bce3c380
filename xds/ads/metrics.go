package ads

import (
	"github.com/prometheus/client_golang/prometheus"

	"github.com/fingerpost/fingerpost/xds"
)

type metrics struct {
	gate      prometheus.Gauge
	streams   *prometheus.GaugeVec
	responses *prometheus.CounterVec
	resources *prometheus.CounterVec
	nacks     *prometheus.CounterVec
	refused   *prometheus.CounterVec
	held      prometheus.Counter
}

func newMetrics(reg prometheus.Registerer) *metrics {
	counter := func(name, help string) *prometheus.CounterVec {
		c := prometheus.NewCounterVec(prometheus.CounterOpts{Name: name, Help: help}, []string{"type"})
		for t := range xds.Type(xds.NumTypes) {
			c.WithLabelValues(t.String())
		}
		return c
	}
	m := &metrics{
		gate: prometheus.NewGauge(prometheus.GaugeOpts{
			Name: "fingerpost_ads_gate_open", Help: "1 once clients are answered."}),
		streams: prometheus.NewGaugeVec(prometheus.GaugeOpts{
			Name: "fingerpost_ads_streams", Help: "Open ADS streams by API (delta or sotw)."}, []string{"api"}),
		responses: counter("fingerpost_ads_responses_total", "Responses sent, by resource type."),
		resources: counter("fingerpost_ads_resources_total", "Resource bodies sent, by resource type."),
		nacks:     counter("fingerpost_ads_nacks_total", "Responses that clients refused, by resource type."),
		refused:   counter("fingerpost_ads_nacked_resources_total", "Resources that refused responses newly carried, by resource type."),
		held: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "fingerpost_ads_held_streams_total", Help: "Streams closed because an answer was withheld for too long."}),
	}
	for _, api := range []string{"delta", "sotw"} {
		m.streams.WithLabelValues(api)
	}
	if reg != nil {
		reg.MustRegister(m.gate, m.streams, m.responses, m.resources, m.nacks, m.refused, m.held)
	}
	return m
}

// registerWithheld adds what is counted when it is asked for.
func (s *Server) registerWithheld(reg prometheus.Registerer) {
	for t := range xds.Type(xds.NumTypes) {
		reg.MustRegister(prometheus.NewGaugeFunc(prometheus.GaugeOpts{
			Name: "fingerpost_ads_withheld_resources", ConstLabels: prometheus.Labels{"type": t.String()},
			Help: "Resources that are withheld from a client that refused them, summed over clients.",
		}, func() float64 { return float64(s.withheldTotal(t)) }))
	}
}
