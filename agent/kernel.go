package agent

import "github.com/prometheus/client_golang/prometheus"

var descAvailable = prometheus.NewDesc("fingerpost_bpf_available",
	"1 if a part that depends on the node's kernel works, else 0, with the reason.", []string{"part", "reason"}, nil)

// kernelParts is why each part that depends on the node's kernel is off; empty:
// it is on.
func (a *Agent) kernelParts() map[string]string {
	return map[string]string{
		"identity":   a.callers.why,
		partPath:     why(&a.paths.noPath),
		partObserve:  why(&a.paths.noObserve),
		partRedirect: a.redirect.reason(),
	}
}

func (a *Agent) collectAvailable(ch chan<- prometheus.Metric) {
	for part, off := range a.kernelParts() {
		on := 0.0
		if off == "" {
			on = 1
		}
		ch <- prometheus.MustNewConstMetric(descAvailable, prometheus.GaugeValue, on, part, off)
	}
}
