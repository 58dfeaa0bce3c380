package agent

import (
	"context"
	"fmt"
	"time"

	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"k8s.io/client-go/rest"

	"github.com/fingerpost/fingerpost/agent/kube"
)

const (
	partTaint = "startup-taint"

	// How often it is looked whether this agent is ready, and how long after a
	// failure it tries again: doubling from the one to the other.
	taintLook  = 500 * time.Millisecond
	taintRetry = time.Minute
)

// liftTaint takes the startup taint off this node once this agent is ready, and
// ends then: what comes later, as an agent that is ill, moves no pod.
func (a *Agent) liftTaint(ctx context.Context) error {
	a.setPart(partTaint, "off: waits until this agent is ready")
	client, err := a.lifter()
	if err != nil {
		a.setPart(partTaint, fmt.Sprintf("off: %v", err))
		return nil
	}
	for wait := taintLook; ; {
		switch err := a.Ready(ctx); {
		case ctx.Err() != nil:
			return nil
		case err == nil:
			attempt, cancel := context.WithTimeout(ctx, 10*time.Second)
			lifted, err := kube.LiftStartupTaint(attempt, client, a.config.nodeName())
			cancel()
			if err == nil {
				if lifted {
					a.log.Info("startup taint lifted", "node", a.config.nodeName())
				}
				a.setPart(partTaint, "on")
				return nil
			}
			if wait == taintLook && ctx.Err() == nil {
				a.log.Warn("startup taint stays; it is tried again", "error", err)
			}
			a.setPart(partTaint, fmt.Sprintf("off: %v", err))
			wait = min(2*wait, taintRetry)
		}
		select {
		case <-time.After(wait):
		case <-ctx.Done():
			return nil
		}
	}
}

func (a *Agent) lifter() (rest.Interface, error) {
	config, err := kube.Config(a.config.Kubeconfig)
	if err != nil {
		return nil, err
	}
	config.UserAgent = "fingerpost/" + a.config.Version
	config.NegotiatedSerializer = serializer.NewCodecFactory(runtime.NewScheme()).WithoutConversion()
	config.WarningHandler = rest.NoWarnings{}
	return rest.UnversionedRESTClientFor(config)
}
