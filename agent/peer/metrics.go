package peer

import (
	"github.com/prometheus/client_golang/prometheus"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

type metrics struct {
	rejected *prometheus.CounterVec
	requests *prometheus.CounterVec
	answers  *prometheus.CounterVec
	signed   prometheus.Counter
	taken    prometheus.Counter
}

// newMetrics registers the metrics with reg, unless that is nil.
func newMetrics(reg prometheus.Registerer, x *Exchange) *metrics {
	vec := func(name, help string, labels ...string) *prometheus.CounterVec {
		return prometheus.NewCounterVec(prometheus.CounterOpts{Name: name, Help: help}, labels)
	}
	m := &metrics{
		rejected: vec("fingerpost_peer_rejected_total", "Records, files and messages of other agents that changed nothing, by reason.", "reason"),
		requests: vec("fingerpost_peer_requests_total", "Requests made to other agents that have ended, by method and gRPC status.", "method", "code"),
		answers:  vec("fingerpost_peer_served_total", "Requests of other agents that have ended, by method and gRPC status.", "method", "code"),
		taken:    prometheus.NewCounter(prometheus.CounterOpts{Name: "fingerpost_peer_taken_total", Help: "Records of other agents that were taken."}),
		signed:   prometheus.NewCounter(prometheus.CounterOpts{Name: "fingerpost_peer_signed_total", Help: "Records that this agent signed."}),
	}
	if reg == nil {
		return m
	}
	gauge := func(name, help string, read func() int) prometheus.Collector {
		return prometheus.NewGaugeFunc(prometheus.GaugeOpts{Name: name, Help: help}, func() float64 {
			x.mu.Lock()
			defer x.mu.Unlock()
			return float64(read())
		})
	}
	reg.MustRegister(m.rejected, m.requests, m.answers, m.signed, m.taken,
		gauge("fingerpost_peer_members", "Agents of the cluster that can be reached.", func() int {
			if x.roster == nil {
				return 0
			}
			return len(x.roster.ring)
		}),
		gauge("fingerpost_peer_streams", "Streams by which other agents tell this one what comes.", func() int {
			n := 0
			for _, l := range x.links {
				if l.open {
					n++
				}
			}
			return n
		}),
		gauge("fingerpost_peer_records", "Records of owners that are held.", func() int { return len(x.records) }),
		gauge("fingerpost_peer_awaited", "Owners that another agent collects and of which nothing is known yet.", func() int { return len(x.quests) }),
	)
	return m
}

// asked counts a request that ended.
func (m *metrics) asked(method string, err error) {
	m.requests.WithLabelValues(method, status.Code(err).String()).Inc()
}

// served counts an answer.
func (m *metrics) served(method string, code codes.Code) {
	m.answers.WithLabelValues(method, code.String()).Inc()
}
